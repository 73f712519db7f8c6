"""Thin wheels: a few members of a big wheel, read by range requests.

The thin wheel is a plain wheel with the same metadata and, below it, only the chosen
members: stored, sorted, with fixed dates and modes, so that the same members always give the
same bytes. Its RECORD is the original one, unchanged, and so lists more files than it holds:
it is what proves each member. Trust runs lock -> RECORD -> members, and lock -> thin wheel.
"""

from __future__ import annotations

import asyncio
import base64
import csv
import hashlib
import io
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from sm75.errors import FetchError
from sm75.store import AlteredError, disk_errors, hash_file
from sm75.transfer import FileLink, Transfer
from sm75.words import counted

GAP = 256 * 1024
"""Bytes worth reading in vain to save a request: about what a round trip costs."""

TAIL = 64 * 1024
"""Bytes of a zip's end read first; they hold its end record, and RECORD's neighbours."""

_DATE = (1980, 1, 1, 0, 0, 0)
_CHUNK = 1 << 20
_SUFFIX = ".segment"


@dataclass(frozen=True, kw_only=True)
class Thin:
    """A thin wheel.

    Attributes:
        record_sha256: sha256 of the wheel's RECORD.
        sha256: Of the thin wheel.
        size: Of the thin wheel, in bytes.
        members: How many members it has, metadata included.
    """

    record_sha256: str
    sha256: str
    size: int
    members: int


class _Missing(Exception):
    """A reader wants bytes that are not here yet."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__(start, end)
        self.start = start
        self.end = end


class Segments(io.RawIOBase):
    """A file of which only some ranges are here, each in a file of its own.

    Args:
        size: Size of the whole, in bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._position = 0
        self._parts: list[tuple[int, int, BinaryIO]] = []

    def put(self, start: int, path: Path) -> None:
        """Add the bytes from ``start``, as they are in ``path``."""
        stream = path.open("rb")
        self._parts.append((start, start + path.stat().st_size, stream))
        self._parts.sort(key=lambda part: part[0])

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges between ``start`` and ``end`` that are not here."""
        gaps = []
        for first, last, _ in self._parts:
            if last <= start or first >= end:
                continue
            if first > start:
                gaps.append((start, first))
            start = max(start, last)
        if start < end:
            gaps.append((start, end))
        return gaps

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._position, self.size)[whence]
        if base + offset < 0:
            raise ValueError("negative position")
        self._position = base + offset
        return self._position

    def read(self, count: int = -1) -> bytes:
        end = self.size if count is None or count < 0 else min(self._position + count, self.size)
        if gaps := self.missing(self._position, end):
            raise _Missing(gaps[0][0], gaps[-1][1])
        pieces = []
        for first, last, stream in self._parts:
            if first <= self._position < min(last, end):
                stream.seek(self._position - first)
                piece = stream.read(min(last, end) - self._position)
                self._position += len(piece)
                pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        for _, _, stream in self._parts:
            stream.close()
        super().close()


def pattern(glob: str) -> re.Pattern[str]:
    """A member glob as a regular expression.

    ``**`` is any number of directories or, at the end, everything below; ``*`` and ``?`` stay
    inside one name.
    """
    out = []
    for piece in re.split(r"(\*\*/|\*\*|\*|\?)", glob):
        out.append(
            {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(piece, re.escape(piece))
        )
    return re.compile("".join(out) + r"\Z")


def select(names: Iterable[str], globs: Sequence[str], wheel: str) -> list[str]:
    """The members that the globs choose, and the wheel's own metadata; sorted.

    Args:
        names: All member names of the wheel.
        globs: See ``pattern``.
        wheel: The wheel's file name, for errors.

    Raises:
        FetchError: A glob chooses nothing, or a member's name is not a plain relative path.
    """
    files = [name for name in names if not name.endswith("/")]
    chosen = {name for name in files if _in_metadata(name)}
    for glob in globs:
        expression = pattern(glob)
        hits = [name for name in files if expression.match(name)]
        if not hits:
            raise FetchError(
                f"{wheel} has no member '{glob}'",
                why=f"{counted(len(files), 'member')}, none matches",
                fix="correct the artifact's members in the lock",
            )
        chosen.update(hits)
    for name in chosen:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise AlteredError(f"{wheel} has a member with an unsafe name: {name!r}")
    return sorted(chosen)


def coalesce(ranges: Iterable[tuple[int, int]], gap: int = GAP) -> list[tuple[int, int]]:
    """Join half-open byte ranges that lie at most ``gap`` bytes apart."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


async def remote_thin(
    transfer: Transfer,
    link: FileLink,
    *,
    size: int,
    members: Sequence[str],
    record_sha256: str | None,
    segments: Path,
    out: Path,
    on_bytes: Callable[[int], None] = lambda amount: None,
) -> Thin:
    """Make a thin wheel from a remote wheel.

    Args:
        transfer: The client.
        link: The wheel.
        size: Its size in bytes.
        members: Globs, see ``pattern``.
        record_sha256: What its RECORD must hash to; None only when a lock is being made.
        segments: Directory for the ranges read; what a former run left there is used.
        out: The thin wheel; overwritten.
        on_bytes: Told of each amount read.

    Raises:
        FetchError: The bytes cannot be had (AlteredError: RECORD or a member is wrong).
        DiskError: Something cannot be written.
        RangeIgnored: The server does not do ranges.
    """
    with disk_errors(segments):
        segments.mkdir(parents=True, exist_ok=True)
    view = Segments(size)

    async def bring(start: int, end: int) -> None:
        for first, last in view.missing(start, end):
            path = segments / f"{first}-{last}{_SUFFIX}"
            await transfer.download(
                link, path, total=size, start=first, length=last - first, on_bytes=on_bytes
            )
            view.put(first, path)

    try:
        await bring(max(0, size - TAIL), size)
        while True:
            view.seek(0)
            try:
                archive = zipfile.ZipFile(view)
                break
            except _Missing as gap:
                await bring(gap.start, gap.end)
            except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
                raise _bad(link.filename, error) from error
        with archive:
            chosen = select(archive.namelist(), members, link.filename)
            for start, end in coalesce(_extents(archive, chosen)):
                await bring(start, end)
            try:
                return await asyncio.to_thread(
                    write_thin, archive, chosen, record_sha256, out, link.filename
                )
            except _Missing as gap:
                raise _bad(link.filename, gap) from gap
    finally:
        view.close()


def local_thin(
    wheel: Path,
    *,
    members: Sequence[str],
    record_sha256: str | None,
    out: Path,
    name: str = "",
) -> Thin:
    """Make the same thin wheel from a whole wheel; see ``remote_thin``.

    Args:
        name: The wheel's name for errors, when ``wheel`` has another.
    """
    name = name or wheel.name
    try:
        archive = zipfile.ZipFile(wheel)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise _bad(name, error) from error
    with archive:
        chosen = select(archive.namelist(), members, name)
        return write_thin(archive, chosen, record_sha256, out, name)


def write_thin(
    archive: zipfile.ZipFile,
    chosen: Sequence[str],
    record_sha256: str | None,
    out: Path,
    wheel: str,
) -> Thin:
    """Write the chosen members, each checked against RECORD, RECORD against the lock.

    Args:
        archive: The wheel.
        chosen: Member names, sorted.
        record_sha256: What RECORD must hash to; None: not checked.
        out: The thin wheel; removed again when anything is wrong.
        wheel: The wheel's file name, for errors.

    Raises:
        AlteredError: RECORD or a member is not what it must be.
        DiskError: ``out`` cannot be written.
    """
    record_name = _record_name(chosen, wheel)
    try:
        infos = _infos(archive, wheel)
        record = archive.read(record_name)
        digest = hashlib.sha256(record).hexdigest()
        if record_sha256 is not None and digest != record_sha256:
            raise AlteredError(
                f"{wheel} has another RECORD than the lock pins",
                why=f"expected sha256 {record_sha256}, got {digest}",
                fix="run fetch again; if it stays so, the package index (or a proxy) serves "
                "another file, or the lock is wrong: do not use it",
            )
        expected = _parse_record(record, wheel)
        with disk_errors(out), zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as thin:
            for name in chosen:
                source = infos[name]
                if stat.S_ISLNK(source.external_attr >> 16):
                    raise AlteredError(f"{wheel} has a symbolic link as a member: {name}")
                if name == record_name:
                    thin.writestr(_info(source), record)
                    continue
                if name not in expected:
                    if _unrecorded(name):
                        continue
                    raise AlteredError(
                        f"{wheel}: {name} is not in its RECORD, so nothing proves it"
                    )
                with archive.open(source) as stream, thin.open(_info(source), "w") as sink:
                    _checked_copy(stream, sink, name, expected[name], wheel)
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, zlib.error) as error:
        out.unlink(missing_ok=True)
        raise _bad(wheel, error) from error
    except BaseException:
        with suppress(OSError):
            out.unlink(missing_ok=True)
        raise
    with zipfile.ZipFile(out) as thin:
        count = len(thin.namelist())
    return Thin(record_sha256=digest, sha256=hash_file(out), size=out.stat().st_size, members=count)


def thin_filename(wheel: str) -> str:
    """Name of a wheel's thin wheel: the same with the build tag ``0thin``."""
    parts = wheel.removesuffix(".whl").split("-")
    return "-".join([*parts[:2], "0thin", *parts[-3:]]) + ".whl"


def _in_metadata(name: str) -> bool:
    return name.partition("/")[0].endswith(".dist-info")


def _unrecorded(name: str) -> bool:
    """Signatures of RECORD, which RECORD itself cannot list (they are left out)."""
    return name.endswith((".dist-info/RECORD.jws", ".dist-info/RECORD.p7s"))


def _record_name(chosen: Sequence[str], wheel: str) -> str:
    names = [name for name in chosen if _in_metadata(name) and name.endswith("/RECORD")]
    names = [name for name in names if name.count("/") == 1]
    if len(names) != 1:
        raise AlteredError(f"{wheel} is not a wheel", why=f"it has {len(names)} RECORD files")
    return names[0]


def _infos(archive: zipfile.ZipFile, wheel: str) -> dict[str, zipfile.ZipInfo]:
    infos: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.filename in infos:
            raise AlteredError(f"{wheel} has two members named {info.filename}")
        infos[info.filename] = info
    return infos


def _extents(archive: zipfile.ZipFile, chosen: Sequence[str]) -> list[tuple[int, int]]:
    """Byte ranges of members, local headers included: each ends where the next one starts."""
    wanted = set(chosen)
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    size = archive.fp.seek(0, io.SEEK_END) if archive.fp else 0
    ends = [*(info.header_offset for info in infos[1:]), size]
    pairs = zip(infos, ends, strict=True)
    return [(info.header_offset, end) for info, end in pairs if info.filename in wanted]


def _parse_record(record: bytes, wheel: str) -> dict[str, tuple[bytes, int]]:
    """Hash and size of each file that RECORD proves by sha256."""
    expected = {}
    for row in csv.reader(io.StringIO(record.decode("utf-8"))):
        if len(row) != 3 or not row[1].startswith("sha256=") or not row[2].isdigit():
            continue
        text = row[1].removeprefix("sha256=")
        expected[row[0]] = (base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), int(row[2]))
    if not expected:
        raise AlteredError(f"{wheel} has a RECORD without sha256 sums")
    return expected


def _checked_copy(
    source: IO[bytes], sink: IO[bytes], name: str, expected: tuple[bytes, int], wheel: str
) -> None:
    digest, size = expected
    hasher = hashlib.sha256()
    count = 0
    while chunk := source.read(_CHUNK):
        count += len(chunk)
        if count > size:
            break
        hasher.update(chunk)
        sink.write(chunk)
    if count != size or hasher.digest() != digest:
        got = "more" if count > size else f"{count} bytes, sha256 {hasher.hexdigest()}"
        raise AlteredError(
            f"{wheel}: {name} is not what its RECORD says",
            why=f"expected {size} bytes, sha256 {digest.hex()}; got {got}",
            fix="run fetch again; if it stays so, the package index (or a proxy) serves "
            "another file: do not use it",
        )


def _info(source: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """A header that depends on the member's name, size and executability alone."""
    info = zipfile.ZipInfo(source.filename, _DATE)
    info.create_system = 3
    mode = 0o755 if (source.external_attr >> 16) & 0o111 else 0o644
    info.external_attr = (stat.S_IFREG | mode) << 16
    info.compress_type = zipfile.ZIP_STORED
    info.file_size = source.file_size
    return info


def _bad(wheel: str, error: Exception) -> AlteredError:
    return AlteredError(
        f"{wheel} is not a sound wheel",
        why=f"{type(error).__name__}: {error}",
        fix="run fetch again; if it stays so, the package index (or a proxy) serves another file",
    )
