"""One way to walk what software ships in: ``.conda``, wheel, tar archive, directory, single file.

Members come one by one, in stored order for archives and by name for directories. A member's bytes
are copied to disk only when somebody asks for them, into a temporary directory that is gone when
the walk ends, so that looking at one library of a large package costs that library.

A member whose name would lead out of the directory it is unpacked to makes the whole archive
suspect: it is refused, never cleaned up. Links are passed over: what they point at is met under its
own name or is not part of the archive.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import zstandard

from sm75.atomic import disk_errors
from sm75.budget import Budget
from sm75.condapkg import iter_payload
from sm75.errors import ChannelError, UsageError

_CHUNK = 1 << 20  # bytes a copy step
_TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".crate")
_ZIP_ENDINGS = (".whl", ".zip")
_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zstandard.ZstdError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
)


@dataclass(kw_only=True)
class Member:
    """One file of an archive; valid until the walk's next step.

    Attributes:
        name: Its path inside the archive, ``/`` separated.
        size: Bytes, unpacked.
        executable: Whether a tar archive says that its owner may run it.
    """

    name: str
    size: int
    executable: bool = False
    _archive: str = field(repr=False)
    _open: Callable[[], IO[bytes]] = field(repr=False)
    _scratch: Path = field(repr=False)
    _disk: Path | None = field(default=None, repr=False)
    _bytes: bytes | None = field(default=None, repr=False)

    def read(self) -> bytes:
        """Return all its bytes (meant for small text members).

        Raises:
            ChannelError: The archive is damaged there.
        """
        if self._disk is not None:
            return self._disk.read_bytes()
        if self._bytes is None:  # a streamed member can be read only once
            with _readable(self._archive), self._open() as source:
                self._bytes = source.read()
        return self._bytes

    def path(self) -> Path:
        """Return a file on disk with its bytes and its base name; do not write to it.

        Raises:
            ChannelError: The archive is damaged there.
            DiskError: The temporary directory is full.
        """
        if self._disk is None:
            # A name of ours, plus the base name: nothing an archive says can lead elsewhere.
            target = self._scratch / self.name.rpartition("/")[2]
            with (
                disk_errors(target),
                _readable(self._archive),
                target.open("wb") as out,
                io.BytesIO(self._bytes) if self._bytes is not None else self._open() as source,
            ):
                shutil.copyfileobj(source, out, _CHUNK)
            self._disk = target
        return self._disk


def check_name(name: str, archive: str) -> None:
    """Refuse a member name that leads out of the directory it would be unpacked to.

    Args:
        name: The member's name as stored.
        archive: The archive's name, for the message.

    Raises:
        ChannelError: Absolute, with ``..``, a backslash, a drive letter or control characters.
    """
    parts = name.rstrip("/").split("/")
    if (
        name.startswith("/")
        or ".." in parts
        or "\\" in name
        or parts[0].endswith(":")
        or any(ord(char) < 32 for char in name)
    ):
        raise ChannelError(
            f"refusing {archive}: its member {name!r} would be unpacked outside its directory",
            why="no sound package holds such a name",
            fix="get the archive again from where it was published",
        )


def walk(
    source: Path, *, want: Callable[[str], bool] | None = None, limit: int | None = None
) -> Iterator[Member]:
    """Yield the regular files of ``source``.

    Args:
        source: A ``.conda``, a wheel or zip, a tar archive (plain, gz, bz2, xz, zst), a directory,
            or any other single file (which is then its only member).
        want: Which names to yield; None: all. Names are checked before it is asked.
        limit: Bytes that the members may have together, and a tar archive as a whole; None: any.

    Yields:
        Members, each valid until the next step.

    Raises:
        UsageError: There is nothing at ``source``.
        ChannelError: The archive is damaged, larger than allowed or a bomb, or a name leads out of
            it.
    """
    unpacked = 0
    if not source.exists():
        raise UsageError(
            f"there is no {source}", fix="give a .conda, a wheel, a tar archive or a directory"
        )
    with tempfile.TemporaryDirectory(prefix="sm75-") as scratch, _readable(source.name):
        budget = None if source.is_dir() else Budget(source.name, source.stat().st_size)
        for number, (name, size, opener, disk, runs) in enumerate(_entries(source, limit)):
            if budget:
                budget.take(size)
            check_name(name, source.name)
            unpacked += size
            if limit is not None and unpacked > limit:
                raise _too_large(source.name, limit)
            if want is not None and not want(name):
                continue
            place = Path(scratch) / str(number)
            place.mkdir()
            yield Member(
                name=name,
                size=size,
                executable=runs,
                _archive=source.name,
                _open=opener,
                _scratch=place,
                _disk=disk,
            )
            shutil.rmtree(place)


_Entry = tuple[str, int, Callable[[], IO[bytes]], Path | None, bool]


def _entries(source: Path, limit: int | None = None) -> Iterator[_Entry]:
    name = source.name.lower()
    if source.is_dir():
        yield from _directory(source)
    elif name.endswith(".conda"):
        for info, stream in iter_payload(source):
            if info.isreg():
                yield info.name, info.size, _once(stream), None, False
    elif name.endswith(_ZIP_ENDINGS):
        yield from zip_entries(source)
    elif name.endswith(_TAR_ENDINGS):
        yield from _tar(source, limit)
    else:
        yield source.name, source.stat().st_size, _opener(source), source, False


def zip_entries(source: Path | IO[bytes]) -> Iterator[_Entry]:
    """Entries of a zip file or of an open file-like one (a wheel read by ranges, for one)."""
    with zipfile.ZipFile(source) as archive:
        for info in archive.infolist():
            if not info.is_dir() and not _zip_link(info):
                yield info.filename, info.file_size, _zip_opener(archive, info), None, False


def _zip_link(info: zipfile.ZipInfo) -> bool:
    return (info.external_attr >> 28) == 0o12  # S_IFLNK's nibble of st_mode, stat(2)


def _zip_opener(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Callable[[], IO[bytes]]:
    return lambda: archive.open(info)


def _opener(path: Path) -> Callable[[], IO[bytes]]:
    return lambda: path.open("rb")


def _once(stream: IO[bytes]) -> Callable[[], IO[bytes]]:
    return lambda: stream


def _directory(root: Path) -> Iterator[_Entry]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(root).as_posix(), path.stat().st_size, _opener(path), path, False


class _Bounded(io.RawIOBase):
    """The unpacked stream of an archive, which ends in an error beyond so many bytes."""

    def __init__(self, stream: IO[bytes], archive: str, limit: int) -> None:
        self._stream = stream
        self._archive = archive
        self._limit = limit
        self._count = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        # Also what tarfile reads for itself, long names and the like, in one go.
        if size < 0 or size > self._limit - self._count + _CHUNK:
            raise _too_large(self._archive, self._limit)
        data = self._stream.read(size)
        self._count += len(data)
        return data


def _too_large(archive: str, limit: int) -> ChannelError:
    return ChannelError(
        f"refusing {archive}: unpacked it is larger than {limit} bytes",
        why="no sound archive of its kind is",
        fix="get the archive again from where it was published",
    )


def _tar(source: Path, limit: int | None) -> Iterator[_Entry]:
    with contextlib.ExitStack() as stack:
        plain: IO[bytes] | None = None
        if source.name.endswith(".zst"):
            raw = stack.enter_context(source.open("rb"))
            stream_reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            plain = cast(IO[bytes], stack.enter_context(stream_reader))
        elif limit is not None:
            raw = stack.enter_context(source.open("rb"))
            if source.name.endswith(".tar"):
                plain = raw
            else:
                plain = cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=raw)))
        if plain is None:
            tar = stack.enter_context(tarfile.open(source, "r|*"))
        else:
            if limit is not None:
                plain = cast(IO[bytes], _Bounded(plain, source.name, limit))
            tar = stack.enter_context(tarfile.open(fileobj=plain, mode="r|"))
        for info in tar:
            stream = tar.extractfile(info) if info.isreg() else None
            if stream is None:
                check_name(info.name, source.name)
                continue
            runs = bool(info.mode & 0o100)
            yield info.name.removeprefix("./"), info.size, _once(stream), None, runs


@contextlib.contextmanager
def _readable(archive: str) -> Iterator[None]:
    """Say which archive is damaged instead of how the library failed."""
    try:
        yield
    except (*_DAMAGE, OSError) as err:
        if isinstance(err, OSError) and err.errno is not None:
            raise  # the disk's fault; bz2 and gzip report bad data as an OSError without number
        raise ChannelError(
            f"{archive} is damaged or not what its name says",
            why=str(err) or type(err).__name__,
            fix="get the file again and compare its sha256",
        ) from err
