"""A hard limit on the memory of one command: a control group below our own, v2 or v1.

Only the group made here is written to, and it is removed afterwards.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_PEAK = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}
_KILLS = {1: "memory.oom_control", 2: "memory.events"}
# Lines of memory.stat that say what the page cache did. v1 counts pages, v2 bytes, in some.
_STATS = (
    "cache", "file", "rss", "anon", "mapped_file", "file_mapped", "inactive_file", "active_file",
    "workingset_refault_file", "pgmajfault", "unevictable",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: Its exit status; negative: the signal that ended it.
        out: What it printed.
        err: What it said.
        killed: Processes that the kernel killed for want of memory.
        peak: Most bytes charged to the group: anonymous memory and the page cache it filled.
        stats: Lines of the group's ``memory.stat`` at the end.
    """

    code: int
    out: str
    err: str
    killed: int
    peak: int
    stats: dict[str, int] = field(default_factory=dict)


def home() -> tuple[int, Path] | None:
    """The version of the memory controller and our own group in it; None without one."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        kind = "cgroup" if controllers else "cgroup2"
        for _, point, found, options, *_ in mounts:
            if found != kind or (controllers and "memory" not in options.split(",")):
                continue
            own = Path(point + path)
            if controllers:
                return 1, own
            # In v2 a group with processes gives no controllers to groups below it.
            have = (own.parent / "cgroup.subtree_control") if path != "/" else own
            with suppress(OSError):
                if path != "/" and "memory" in have.read_text().split():
                    return 2, own.parent
                if "memory" in (own / "cgroup.subtree_control").read_text().split():
                    return 2, own
    return None


def usable() -> bool:
    """Whether a group with a limit can be made here."""
    try:
        with Group(1 << 30):
            return True
    except OSError:
        return False


class Group:
    """A control group for the time of a ``with``.

    Args:
        limit: Bytes of memory.
        swap: Whether its pages may go to swap.
    """

    def __init__(self, limit: int, *, swap: bool = False) -> None:
        self.limit = limit
        self.swap = swap

    def __enter__(self) -> Group:
        found = home()
        if found is None:
            raise OSError("no memory controller of control groups is mounted")
        self.version, above = found
        self.path = above / f"sm75-{uuid.uuid4().hex[:12]}"
        self.path.mkdir()
        try:
            self._write(_LIMIT[self.version], self.limit)
            if not self.swap:
                # Without swap in the kernel the files are not there.
                with suppress(FileNotFoundError):
                    if self.version == 2:
                        self._write("memory.swap.max", 0)
                    else:
                        self._write("memory.swappiness", 0)
        except OSError:
            self.path.rmdir()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.version == 1:  # pages of files stay charged to a group that is gone
            with suppress(OSError):
                self._write("memory.force_empty", 0)
        self.path.rmdir()

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    def run(self, command: Sequence[str], *, timeout: float | None = None) -> Outcome:
        """Run a command in the group and wait for it.

        Raises:
            subprocess.TimeoutExpired: It took longer than ``timeout`` seconds; it is killed.
        """
        # A shell moves itself before it becomes the command, so that all of it is counted.
        start = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        done = subprocess.run(
            ["sh", "-c", start, str(self.path), *command],
            check=False, capture_output=True, text=True, timeout=timeout,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        return Outcome(
            code=done.returncode, out=done.stdout, err=done.stderr,
            killed=self._lines(_KILLS[self.version]).get("oom_kill", 0),
            peak=int((self.path / _PEAK[self.version]).read_text()),
            stats={
                name: value for name, value in self._lines("memory.stat").items() if name in _STATS
            },
        )  # fmt: skip

    def _lines(self, name: str) -> dict[str, int]:
        pairs = (line.split() for line in (self.path / name).read_text().splitlines())
        return {key: int(value) for key, value in pairs}
