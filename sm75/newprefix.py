"""The place of a new environment: whether it can be one, and whose turn it is.

While a run fills a prefix it holds a lock beside it, and it works in one directory beside it whose
name follows from that of the prefix. So a second run ends at once, what a killed run has left is
removed by the next run for the prefix, and what a living run writes is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sm75.atomic import TMP_PREFIX, is_disk_error
from sm75.errors import BusyError, DiskError, Sm75Error, UsageError

# Linux's NAME_MAX, in bytes.
_NAME_MAX = 255
# Start scripts name the prefix in `#!` lines and in quotes of sh(1).
_UNQUOTABLE = "'\"`$\\"
_ANOTHER = "name a new directory (--prefix DIR)"
# Seconds. Threads of rattler go on for a while after a fault or an interrupt.
_PATIENCE = 30.0
_QUIET = 0.5
_PAUSE = 0.05


def resolve(prefix: Path, channels: Sequence[Path] = ()) -> Path:
    """Refuse what cannot become an environment; nothing is written.

    Args:
        prefix: As asked for.
        channels: Directories that it must not be in.

    Returns:
        Its real path: absolute, without links.

    Raises:
        UsageError: It cannot be one.
        DiskError: It cannot be looked at.
    """
    try:
        return _resolve(prefix, channels)
    except (OSError, RuntimeError, ValueError) as err:  # also of a loop of links, and of ~nobody
        raise _fault(prefix, err) from err


def _resolve(prefix: Path, channels: Sequence[Path]) -> Path:
    _check_quotable(prefix)
    asked = prefix.expanduser()
    if long := next((p for p in asked.parts if len(os.fsencode(p)) > _NAME_MAX), ""):
        raise UsageError(
            f"{long[:40]}... cannot be the name of a directory",
            why=f"it has {len(os.fsencode(long))} bytes; file systems take {_NAME_MAX}",
            fix=_ANOTHER,
        )
    if asked.is_symlink() and not asked.exists():
        raise UsageError(
            f"{asked} is a link that leads nowhere", why=f"to {asked.readlink()}", fix=_ANOTHER
        )
    real = asked.resolve()
    _check_quotable(real)
    for channel in channels:
        if real.is_relative_to(channel.resolve()):
            raise UsageError(
                f"{asked} is inside the channel {channel}",
                why="what is installed there would damage the channel",
                fix=_ANOTHER,
            )
    above = next(path for path in real.parents if path.exists())
    if not above.is_dir():
        raise UsageError(
            f"there can be no directory {real}", why=f"{above} is a file", fix=_ANOTHER
        )
    if real.exists():
        _check_empty(real)
    return real


def _check_quotable(prefix: Path) -> None:
    shown = str(prefix)
    if not shown.isprintable() or any(char in shown for char in _UNQUOTABLE):
        raise UsageError(
            f"{shown!r} cannot be a prefix",
            why="start scripts cannot name a directory with control characters, or with any of "
            f"{' '.join(_UNQUOTABLE)}",
            fix=_ANOTHER,
        )


def _check_empty(real: Path) -> None:
    """Refuse what is there, but for an empty directory that can be replaced."""
    if not real.is_dir():
        raise UsageError(f"{real} is not a directory", fix=_ANOTHER)
    if any(real.iterdir()):
        raise UsageError(
            f"{real} is not empty", fix="name a new directory, or remove that one first"
        )
    with contextlib.suppress(FileNotFoundError):  # the current directory may be gone
        if real.samefile(Path.cwd()):
            raise UsageError(
                f"{real} is the current directory",
                why="a new directory takes its place, and this shell would stay in the old one",
                fix="run the command from another directory",
            )
    if os.path.ismount(real):
        raise UsageError(
            f"{real} is a mount point",
            why="a new directory is to take its place",
            fix=f"name a directory in it, as {real / 'vllm'}",
        )


def _fault(prefix: Path, err: Exception) -> Sm75Error:
    if isinstance(err, OSError):
        why = os.strerror(err.errno) if err.errno else str(err)
        if is_disk_error(err) or err.errno == errno.ENOENT:
            return DiskError(f"cannot write {prefix}", why=why, fix=_ANOTHER)
        return UsageError(f"{prefix} cannot be a prefix", why=why, fix=_ANOTHER)
    return UsageError(f"{prefix} cannot be a prefix", why=str(err), fix=_ANOTHER)


@contextlib.contextmanager
def claimed(prefix: Path) -> Iterator[Path]:
    """Hold the lock of a prefix while the block runs.

    Args:
        prefix: As :func:`resolve` gave it. The directories above it are made, and are removed
            again when there is no prefix at the end.

    Yields:
        The name of a directory beside it, to work in; it is not there yet, and afterwards it is
        gone.

    Raises:
        BusyError: A living run has it.
        DiskError: The directory above cannot be made or written.
    """
    key = hashlib.sha256(os.fsencode(prefix.name)).hexdigest()[:16]
    scratch = prefix.parent / f"{TMP_PREFIX}install-{key}"
    lock = scratch.with_name(f"{scratch.name}.lock")
    made = [path for path in prefix.parents if not path.exists()]
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        handle = _lock(lock, prefix)
    except (OSError, Sm75Error) as err:
        _remove_empty(made)
        if isinstance(err, OSError):
            raise _fault(prefix, err) from err
        raise
    quiet = _QUIET
    try:
        remove(scratch, quiet=0)
        yield scratch
        quiet = 0  # rattler is done
    finally:
        try:
            remove(scratch, quiet=quiet)
        finally:
            # while it is held: whoever opened it meanwhile sees that the name is another file's
            lock.unlink(missing_ok=True)
            os.close(handle)
            _remove_empty(made)


def _lock(lock: Path, prefix: Path) -> int:
    """Take the lock; returns the file's descriptor. The lock ends with the process."""
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(handle, lock):
                return handle
        except BlockingIOError as err:
            os.close(handle)
            raise BusyError(
                f"another run installs into {prefix}",
                why=f"{lock} is held",
                fix="wait for it, or stop it, or name another directory (--prefix DIR)",
            ) from err
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder has just ended and removed it


def _is_same(handle: int, path: Path) -> bool:
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(handle), there)


def remove(directory: Path, *, quiet: float = _QUIET, patience: float = _PATIENCE) -> bool:
    """Remove a directory into which threads may still write.

    Args:
        directory: It; may be missing.
        quiet: Seconds for which it must stay away.
        patience: Seconds after which it is given up.

    Returns:
        Whether it is gone.
    """
    end = time.monotonic() + patience
    gone = time.monotonic()
    while True:
        if directory.exists():
            shutil.rmtree(directory, ignore_errors=True)
            gone = time.monotonic()
        now = time.monotonic()
        if not directory.exists() and now - gone >= quiet:
            return True
        if now >= end:
            return False
        time.sleep(_PAUSE)


def _remove_empty(directories: Sequence[Path]) -> None:
    for path in directories:
        with contextlib.suppress(OSError):
            path.rmdir()
