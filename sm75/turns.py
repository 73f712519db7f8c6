"""One run at a time: a file lock that ends with its process, and a word to whoever waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from sm75.atomic import disk_errors
from sm75.errors import BusyError


@contextlib.contextmanager
def one_at_a_time(
    path: Path, other: str, *, wait: float, say: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold a lock while the block runs.

    Args:
        path: The lock file; it and its directory are made, and it stays.
        other: What whoever holds it does, as ``another build runs in this directory``.
        wait: Seconds to wait for that one.
        say: Told that there is a wait.

    Raises:
        BusyError: The lock is still held after ``wait`` seconds.
        DiskError: The file cannot be made.
    """
    lock = filelock.FileLock(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        held = _acquire(lock, 0)
    if not held and wait > 0:
        if say:
            say(f"{other}; waiting for it to end")
        held = _acquire(lock, wait)
    if not held:
        raise BusyError(
            other,
            why=f"{path} is held" + (f"; it still was after {wait:g} s" if wait > 0 else ""),
            fix="wait for it, or stop it, and run the same command again",
        )
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: filelock.BaseFileLock, wait: float) -> bool:
    try:
        lock.acquire(timeout=wait)
    except filelock.Timeout:  # an OSError too
        return False
    return True
