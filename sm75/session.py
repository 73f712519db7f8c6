"""End every process of a session (setsid(2)).

ninja gives each compiler a process group of its own, so that killing the build's group leaves the
compilers running; their session is the build's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def members(session: int) -> list[int]:
    """Process ids of a session, without the caller's own and without zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field is the program's name in brackets; it may hold blanks and brackets.
            state, _, _, sid = entry.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it has just ended
            continue
        pid = int(entry.parent.name)
        if int(sid) == session and state not in "ZX" and pid != os.getpid():
            found.append(pid)
    return found


def end(session: int, *, limit: float = 10.0) -> None:
    """Kill a session until nothing is left of it.

    Args:
        session: Its id: the process id of its first process.
        limit: Seconds after which a process that does not die (it waits for a dead disk, say) is
            left alone.
    """
    deadline = time.monotonic() + limit
    while (left := members(session)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
