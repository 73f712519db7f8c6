"""The stand-in for libcuda that remembers launches, from Python. Not a test."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("device", ctypes.c_int), ("size", ctypes.c_int), ("stream", ctypes.c_uint64),
        ("entry", ctypes.c_char * 64), ("bytes", ctypes.c_ubyte * 512),
    )  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """One launch; ``values`` are the parameters' bytes, one behind another, without padding."""

    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    device: int
    stream: int
    values: bytes


class StandIn:
    """The library.

    Args:
        home: Where to compile it.
    """

    def __init__(self, home: Path) -> None:
        self.path = home / "libcuda.so.1"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-pthread", "-o", str(self.path), str(SOURCE)],
            check=True,
        )
        self.library = ctypes.CDLL(str(self.path))

    def forget(self, *, remember: bool = True) -> None:
        """Begin anew, this thread without a context. ``remember`` False: accept anything."""
        self.library.standin_forget(int(remember))

    def fail(self, code: int, times: int) -> None:
        """Let the next launches fail."""
        self.library.standin_fail(code, times)

    @property
    def loads(self) -> int:
        """Modules that were loaded."""
        return int(self.library.standin_loads())

    @property
    def retained(self) -> int:
        """How often a device's context was asked for."""
        return int(self.library.standin_retained())

    @property
    def seen(self) -> list[Seen]:
        """The launches."""
        found = []
        for number in range(self.library.standin_count()):
            one = _Launch()
            self.library.standin_get(number, ctypes.byref(one))
            found.append(
                Seen(
                    one.entry.decode(), tuple(one.grid), tuple(one.block), one.shared, one.device,
                    one.stream, bytes(one.bytes[: one.size]),
                )
            )  # fmt: skip
        return found
