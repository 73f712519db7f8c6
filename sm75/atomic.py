"""Files that exist completely or not at all.

Every writer of this project goes through :func:`replacing`: the bytes go to a temporary name in the
same directory, are flushed to the disk, and only then get their final name. A killed run, a full
disk or a power cut leaves the old file or none, never a part of one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from sm75.errors import DiskError

# Faults of the disk or of its permissions, as opposed to faults of the data. errno(3).
_DISK_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO}
)

# Prefix of every temporary name, so that a cleaner can tell leftovers of a killed run from data.
TMP_PREFIX = ".sm75-tmp-"


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into a :class:`~sm75.errors.DiskError` naming ``path``.

    Args:
        path: The file or directory being written; only used in the message.

    Raises:
        DiskError: For ENOSPC, EDQUOT, EROFS, EACCES, EPERM, EFBIG and EIO.
    """
    try:
        yield
    except OSError as err:
        if err.errno not in _DISK_ERRNOS:
            raise
        full = err.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DiskError(
            f"cannot write {path}",
            why=os.strerror(err.errno),
            fix="free some space and run the same command again"
            if full
            else "make the directory writable and run the same command again",
        ) from err


def is_disk_error(error: OSError) -> bool:
    """Whether an error is the disk's, or that of its permissions."""
    return error.errno in _DISK_ERRNOS


def fsync_dir(directory: Path) -> None:
    """Make renames inside ``directory`` durable.

    Args:
        directory: An existing directory.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Write ``path`` so that it is replaced as a whole or left alone.

    Args:
        path: Final name. Its directory is made when it does not exist.
        mode: Permission bits of the finished file.

    Yields:
        A writable, seekable binary file. When the block ends normally it is flushed to the disk
        and renamed to ``path``; when it raises, nothing remains.

    Raises:
        DiskError: The disk is full or the file cannot be written.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, tmp_name = tempfile.mkstemp(dir=path.parent, prefix=f"{TMP_PREFIX}{path.name}.")
        tmp = Path(tmp_name)
        try:
            with os.fdopen(fd, "w+b") as raw:
                yield cast(BinaryIO, raw)
                raw.flush()
                os.fchmod(raw.fileno(), mode)
                os.fsync(raw.fileno())
            tmp.replace(path)
        except BaseException:
            tmp.unlink(missing_ok=True)
            raise
        fsync_dir(path.parent)


def sweep(directory: Path) -> None:
    """Remove what killed runs left unfinished in a directory (not below it).

    Only where no other run can be writing: under the lock of whoever writes there.

    Args:
        directory: The directory, present or not.
    """
    for left in directory.glob(f"{TMP_PREFIX}*"):
        if left.is_file() and not left.is_symlink():
            with contextlib.suppress(OSError):
                left.unlink()


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data`` as :func:`replacing` does.

    Args:
        path: Final name.
        data: The whole content.
        mode: Permission bits of the finished file.

    Raises:
        DiskError: The disk is full or the file cannot be written.
    """
    with replacing(path, mode=mode) as out:
        out.write(data)


@contextlib.contextmanager
def directory(final: Path) -> Iterator[Path]:
    """Make a directory whole: its content is written under a temporary name, then renamed.

    Args:
        final: The directory's name. Where it exists already when the block ends, the new one is
            dropped: both were made of the same inputs.

    Yields:
        The temporary directory, beside ``final``.

    Raises:
        DiskError: The disk is full or unwritable.
    """
    with disk_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=TMP_PREFIX, dir=final.parent))
    try:
        with disk_errors(final):
            yield scratch
            scratch.chmod(0o755)
            try:
                scratch.rename(final)
            except OSError as err:
                if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            fsync_dir(final.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
