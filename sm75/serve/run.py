"""The server as a child: its output passed on, signals forwarded, its end explained."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from sm75 import session
from sm75.errors import UsageError
from sm75.explain import logs
from sm75.serve.notify import VARIABLE

# Bytes of output that are kept at each end, to be explained: a traceback of vLLM's processes has
# some 20 KiB, and the first cause may stand long before the last words.
_KEPT = 256 << 10
# Seconds for output that is still under way when the server has ended.
_REST = 5.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # /usr/include/linux/prctl.h


class Tail:
    """The first and the last bytes of an output; what is between is dropped, whole lines of it."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._head = bytearray()
        self._last: deque[bytes] = deque()
        self._size = 0

    def add(self, data: bytes) -> None:
        """Take some output."""
        with self._lock:
            room = self._kept - len(self._head)
            if room > 0:
                self._head += data[:room]
                data = data[room:]
            if data:
                self._last.append(data)
                self._size += len(data)
            while self._size - len(self._last[0] if self._last else b"") >= self._kept:
                self._size -= len(self._last.popleft())

    def bytes(self) -> bytes:
        """What is kept."""
        with self._lock:
            return bytes(self._head) + b"".join(self._last)


def serve(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, Tail, list[int]]:
    """Run a server to its end.

    Its output goes to ours unchanged, INT, TERM and HUP go to it, each once: it has a session of
    its own, so that a terminal's Ctrl-C reaches it through us alone. Processes of its that are
    left when it ends are killed, for they would keep the card's memory. It ends when we are killed.

    Args:
        command: The program and its arguments.
        environment: Its variables.

    Returns:
        Its exit code (128 + n when signal n killed it), its output's ends, the signals that were
        passed on.

    Raises:
        UsageError: It cannot be started.
    """
    tail, passed = Tail(), list[int]()
    # Named before the fork: nothing may be imported or looked up between fork and exec.
    libc, parent = ctypes.CDLL(None), os.getpid()

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    with _forwarding() as forward:
        try:
            process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(
                f"{command[0]} cannot be started", why=error.strerror or str(error),
                fix=f"head -1 {command[0]}: does the interpreter that it names exist?",
            ) from error  # fmt: skip
        forward.to(process, passed)
        if process.stdout is None or process.stderr is None:
            raise RuntimeError("the server has no pipes")
        readers = [
            threading.Thread(target=_pass_on, args=(source, target, tail), daemon=True)
            for source, target in ((process.stdout, 1), (process.stderr, 2))
        ]
        for reader in readers:
            reader.start()
        code = process.wait()
        session.end(process.pid)
        deadline = time.monotonic() + _REST
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
    return (code if code >= 0 else 128 - code), tail, passed


def environment_of(program: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The server's variables: ours, with its environment's programs first on PATH (ninja, say),
    and without systemd's socket, which is for us.
    """
    path = environment.get("PATH", os.defpath)
    own = {name: value for name, value in environment.items() if name != VARIABLE}
    return {**own, "PATH": f"{program.parent}{os.pathsep}{path}"}


def explain(code: int, tail: Tail) -> list[str]:
    """What is known of a server's end.

    Args:
        code: As :func:`serve` returns it.
        tail: Its output's ends.
    """
    text = [f"serve: the server ended with exit code {code}" + (
        f": killed by {_name(code - 128)}" if code > 128 else "")]  # fmt: skip
    if code == 128 + signal.SIGKILL:
        text.append("  most likely by the kernel, for RAM: sudo dmesg | grep -i 'out of memory'")
    known = logs.known(io.BytesIO(tail.bytes()), "serve")
    if known:
        text += ["  what is known of this:", *known]
    else:
        text.append("  nothing in its output is known; docs/troubleshooting.md has what is")
    return text


class _Forward:
    """Signals, kept until there is a process to have them."""

    def __init__(self) -> None:
        self._early: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._passed: list[int] = []

    def to(self, process: subprocess.Popen[bytes], passed: list[int]) -> None:
        self._process, self._passed = process, passed
        for number in self._early:
            self.handle(number, None)

    def handle(self, number: int, _: FrameType | None) -> None:
        if self._process is None:
            self._early.append(number)
            return
        self._passed.append(number)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


@contextlib.contextmanager
def _forwarding() -> Iterator[_Forward]:
    forward = _Forward()
    before = {number: signal.signal(number, forward.handle) for number in _FORWARDED}
    try:
        yield forward
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(source: IO[bytes], target: int, tail: Tail) -> None:
    """Write what comes to a descriptor; read on when nobody takes it, or the server would hang."""
    open_ = True
    while data := os.read(source.fileno(), 1 << 16):
        tail.add(data)
        while data and open_:
            try:
                data = data[os.write(target, data) :]
            except OSError:
                open_ = False


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
