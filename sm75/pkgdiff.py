"""Where two ``.conda`` packages differ, down to the section of a library or one kernel's code.

For packages that should be the same, byte for byte: the answer is a place to look at, not a patch.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from sm75 import cubin
from sm75.condapkg import iter_payload, read_info_files
from sm75.elf import is_elf
from sm75.store import hash_file
from sm75.words import counted

# So many places are named in one file; the rest are counted.
MAX_PLACES = 8
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One place where two packages differ.

    Attributes:
        file: Path in the package; the package's own name when it is about the archive.
        where: Section, kernel, line, JSON key or byte; empty: the file as a whole.
        detail: What is there in the one and in the other.
    """

    file: str
    where: str
    detail: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.file, self.where, self.detail)))


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A payload file as the archive has it."""

    kind: str
    mode: int
    mtime: float
    owner: tuple[int, int, str, str]
    link: str
    size: int
    sha256: str


def compare(one: Path, other: Path) -> tuple[Difference, ...]:
    """Say where two packages differ.

    Args:
        one: A ``.conda`` file.
        other: Another one.

    Returns:
        Nothing when they are the same byte for byte.

    Raises:
        ChannelError: A package is damaged.
    """
    if hash_file(one) == hash_file(other):
        return ()
    found = [*_info(one, other), *_payload(one, other)]
    return tuple(found or _archive(one, other))


def _info(one: Path, other: Path) -> Iterator[Difference]:
    mine, theirs = read_info_files(one), read_info_files(other)
    yield from _missing(mine, theirs)
    for name in sorted(mine.keys() & theirs.keys()):
        if mine[name] != theirs[name]:
            yield from _contents(name, mine[name], theirs[name])


def _payload(one: Path, other: Path) -> Iterator[Difference]:
    mine, theirs = _entries(one), _entries(other)
    yield from _missing(mine, theirs)
    both = sorted(mine.keys() & theirs.keys())
    for name in both:
        for field in ("kind", "mode", "mtime", "owner", "link"):
            a, b = getattr(mine[name], field), getattr(theirs[name], field)
            if a != b:
                yield Difference(file=name, where=field, detail=f"{a!r} and {b!r}")
    changed = {name for name in both if mine[name].sha256 != theirs[name].sha256}
    with tempfile.TemporaryDirectory(prefix="vllm-sm75-diff-") as scratch:
        places = (Path(scratch) / "one", Path(scratch) / "other")
        for package, place in zip((one, other), places, strict=True):
            _extract(package, changed, place)
        for name in sorted(changed):
            yield from _files(name, places[0] / name, places[1] / name)


def _missing(mine: Mapping[str, object], theirs: Mapping[str, object]) -> Iterator[Difference]:
    for name in sorted(mine.keys() ^ theirs.keys()):
        side = "first" if name in mine else "second"
        yield Difference(file=name, where="", detail=f"only the {side} package has it")


def _entries(package: Path) -> dict[str, _Entry]:
    found = {}
    for member, content in iter_payload(package):
        digest = hashlib.sha256()
        while block := content.read(_CHUNK):
            digest.update(block)
        found[member.name] = _Entry(
            kind="directory" if member.isdir() else "link" if member.issym() else "file",
            mode=member.mode,
            mtime=member.mtime,
            owner=(member.uid, member.gid, member.uname, member.gname),
            link=member.linkname,
            size=member.size,
            sha256=digest.hexdigest(),
        )
    return found


def _extract(package: Path, names: set[str], place: Path) -> None:
    for member, content in iter_payload(package):
        if member.name in names:
            target = place / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(content, file, _CHUNK)


def _files(name: str, one: Path, other: Path) -> Iterator[Difference]:
    with one.open("rb") as first, other.open("rb") as second:
        both_elf = is_elf(first.read(4)) and is_elf(second.read(4))
    if not both_elf:
        yield from _contents(name, one.read_bytes(), other.read_bytes())
        return
    places = list(_elf(one, other))
    yield from (
        Difference(file=name, where=where, detail=detail) for where, detail in places[:MAX_PLACES]
    )
    if len(places) > MAX_PLACES:
        more = counted(len(places) - MAX_PLACES, "place")
        yield Difference(file=name, where="", detail=f"and {more} more")


def _elf(one: Path, other: Path) -> Iterator[tuple[str, str]]:
    """Sections that differ; a section of device code: which piece, and what in it."""
    try:
        found = list(_sections(one.read_bytes(), other.read_bytes()))
    except (ELFError, ConstructError, ValueError) as err:
        yield "", f"no ELF file that can be read: {err}"
        return
    for where, detail in found:
        inner = list(_device_code(one, other)) if where in cubin.SECTIONS else []
        yield from inner or [(where, detail)]
    if not found:
        yield "", "the headers differ, all sections are the same"


def _sections(one: bytes, other: bytes) -> Iterator[tuple[str, str]]:
    mine, theirs = (
        {
            f"{section.name}#{number}" if section.name in ("", None) else section.name: (
                b"" if section["sh_type"] == "SHT_NOBITS" else section.data()
            )
            for number, section in enumerate(ELFFile(io.BytesIO(data)).iter_sections())
        }
        for data in (one, other)
    )
    for name in sorted(mine.keys() ^ theirs.keys()):
        yield name, f"only the {'first' if name in mine else 'second'} has it"
    for name in mine:
        if name in theirs and mine[name] != theirs[name]:
            yield name, _first_byte(mine[name], theirs[name])


def _device_code(one: Path, other: Path) -> Iterator[tuple[str, str]]:
    codes = cubin.read_device_code(one), cubin.read_device_code(other)
    if codes[0] != codes[1]:
        pieces = counted(len(codes[0]), "piece")
        yield "device code", f"{pieces} and {len(codes[1])}, or of other kinds"
        return
    pairs = zip(codes[0], cubin.payloads(one), cubin.payloads(other), strict=True)
    for code, mine, theirs in pairs:
        if mine == theirs:
            continue
        piece = f"{code.arch} {code.kind} of source {code.container}"
        if not (is_elf(mine[:4]) and is_elf(theirs[:4])):
            yield piece, _first_byte(mine, theirs)
            continue
        for section, detail in _sections(mine, theirs):
            yield f"{piece}, {section}", detail


def _contents(name: str, one: bytes, other: bytes) -> Iterator[Difference]:
    """Where two contents differ: JSON by key, text by line, all else by byte."""
    if name.endswith(".json"):
        try:
            places = list(_json_places("", json.loads(one), json.loads(other)))
        except ValueError:
            places = []
        for where, detail in places[:MAX_PLACES]:
            yield Difference(file=name, where=where, detail=detail)
        if places:
            return
    try:
        lines = one.decode().splitlines(), other.decode().splitlines()
    except UnicodeDecodeError:
        yield Difference(file=name, where="", detail=_first_byte(one, other))
        return
    for number, (a, b) in enumerate(itertools.zip_longest(*lines), start=1):
        if a != b:
            detail = f"{_short(a)} and {_short(b)}"
            yield Difference(file=name, where=f"line {number}", detail=detail)
            return
    yield Difference(file=name, where="", detail=_first_byte(one, other))


def _json_places(where: str, one: object, other: object) -> Iterator[tuple[str, str]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from _json_places(f"{where}.{key}".lstrip("."), one.get(key), other.get(key))
    elif one != other:
        yield where, f"{_short(one)} and {_short(other)}"


def _first_byte(one: bytes, other: bytes) -> str:
    sizes = f"{len(one)} bytes and {len(other)}" if len(one) != len(other) else f"{len(one)} bytes"
    at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None:
        return f"{sizes}, the one begins with the other"
    return (
        f"{sizes}, first at {at}: {one[at : at + 16].hex(' ')} and {other[at : at + 16].hex(' ')}"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _archive(one: Path, other: Path) -> Iterator[Difference]:
    """What is left when every file is the same: names, order and compression."""
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        names = first.namelist(), second.namelist()
        if names[0] != names[1]:
            yield Difference(file=one.name, where="members", detail=f"{names[0]} and {names[1]}")
            return
        for mine, theirs in zip(first.infolist(), second.infolist(), strict=True):
            if (mine.CRC, mine.file_size) != (theirs.CRC, theirs.file_size):
                yield Difference(
                    file=one.name,
                    where=mine.filename,
                    detail="the files in it are the same; their order, or how it is compressed, "
                    "is not",
                )
                return
    yield Difference(file=one.name, where="", detail="the zip's own headers differ")
