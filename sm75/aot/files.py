"""The files of ``vllm-sm75-kernels``, read as something to distrust."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from sm75.aot.pack import CUBINS, INDEX, PTX, SCHEMA
from sm75.archives import walk
from sm75.errors import ChannelError, UsageError
from sm75.words import counted

MODULE = "vllm_sm75_kernels"
"""As ``vllm.sm75.kernels`` of the overlay looks for it."""
# The package has 2 MB in files, its largest piece of machine code 110 KB, of PTX 250 KB; measured.
_MOST_FILES = 256 << 20
_MOST_PIECE = 32 << 20
_MOST_EXTRA = 64
Kind = Literal["cubin", "ptx"]
_NAMES: Mapping[Kind, str] = {"cubin": CUBINS, "ptx": PTX}


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file of packed code: its name, bytes, and sha256."""

    name: str
    size: int
    sha256: str


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the key of a kernel's variants is made of."""

    constants: list[str]
    tensors: list[str]


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A variant, as the index has it; ``vllm.sm75.kernel_files`` of the overlay reads the same."""

    kernel: str
    key: list[str | int | float | bool | None]
    launch: dict[str, int]
    queries: float
    warps: int
    shared: int
    entry: str
    extra: int
    parameters: list[tuple[str, str]]
    aligned: list[str]
    registers: int
    spills: int
    mma: int
    cubin: tuple[int, int, str]
    ptx: tuple[int, int, str]


_SIZES = {"i1": 1, "i8": 1, "i32": 4, "i64": 8, "fp32": 4}


def passed(fact: Fact) -> tuple[tuple[int, int], ...]:
    """Offset and size of each parameter that the launcher passes, in bytes.

    Raises:
        KeyError: One is of a type that the launcher does not know.
    """
    found: list[tuple[int, int]] = []
    end = 0
    for kind in [kind for _, kind in fact.parameters] + ["*"] * fact.extra:
        size = 8 if kind.startswith("*") else _SIZES[kind]
        start = -(-end // size) * size
        found.append((start, size))
        end = start + size
    return tuple(found)


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """``index.json``."""

    schema: int
    about: dict[str, Any]
    sources: dict[str, str]
    files: dict[Kind, File]
    kernels: dict[str, Known]
    variants: list[Fact]

    def parameters(self, fact: Fact) -> dict[str, Any]:
        """The constants of a variant by name, those that it chose itself among them."""
        names = self.kernels[fact.kernel].constants
        return dict(zip(names, fact.key, strict=False)) | fact.launch


@dataclass(frozen=True, kw_only=True)
class Files:
    """A package's files.

    Attributes:
        source: Name of what they were read from.
        index: The index.
        raw: The index as it is in the file.
        code: Both files of packed code.
    """

    source: str
    index: Index
    raw: bytes
    code: Mapping[Kind, bytes]

    def named(self) -> dict[str, bytes]:
        """The files by the names that they have in the package."""
        return {INDEX: self.raw, **{_NAMES[kind]: code for kind, code in self.code.items()}}

    def whole(self) -> Iterator[str]:
        """How the files of code differ from what the index says of them."""
        for kind, name in _NAMES.items():
            said, data = self.index.files[kind], self.code[kind]
            if said.name != name:
                yield f"the index names {said.name!r} as the file of {kind}, not {name}"
            if len(data) != said.size:
                yield f"{name} has {counted(len(data), 'byte')}, the index says {said.size}"
            elif hashlib.sha256(data).hexdigest() != said.sha256:
                yield f"{name} is not what the index was made with"

    def piece(self, fact: Fact, kind: Kind) -> bytes:
        """A variant's machine code or PTX.

        Raises:
            ChannelError: It is not what the index was made with.
        """
        offset, size, digest = getattr(fact, kind)
        packed = self.code[kind][offset : offset + size] if min(offset, size) >= 0 else b""
        where = f"{_NAMES[kind]} of {self.source}, {size} bytes from byte {offset}"
        if hashlib.sha256(packed).hexdigest() != digest:
            raise ChannelError(f"{where}: not what the index was made with", fix=_AGAIN)
        unpack = zlib.decompressobj()
        try:
            data = unpack.decompress(packed, _MOST_PIECE)
        except zlib.error as error:
            raise ChannelError(f"{where}: cannot be unpacked", why=str(error), fix=_AGAIN) from None
        if not unpack.eof or unpack.unused_data:
            raise ChannelError(f"{where}: cut off, or longer than any kernel", fix=_AGAIN)
        return data


_AGAIN = "build the package again (python3 orchestrator.py kernels build), or get it again"


def load(source: Path) -> Files:
    """Read the files.

    Args:
        source: A ``.conda``; or the directory that has them, or that has the module's directory
            (``kernels build --files``, an environment's site-packages).

    Raises:
        UsageError: There are none.
        ChannelError: They are damaged.
    """
    found = _archive(source) if source.is_file() else _directory(source)
    if INDEX not in found:
        raise UsageError(
            f"there are no kernels in {source}", why=f"it has no {INDEX}",
            fix=f"name the .conda, or the directory that holds {MODULE}: `kernels build --files "
            "DIR` writes one",
        )  # fmt: skip
    return gathered(source.name, found)


def gathered(source: str, found: Mapping[str, bytes]) -> Files:
    """The package of files that were read.

    Args:
        source: What they were read from, for messages.
        found: The files by name, the index among them.

    Raises:
        ChannelError: They are damaged, or one is missing.
    """
    data = found[INDEX]
    try:
        index = msgspec.json.decode(data, type=Index)
        if index.schema != SCHEMA:
            raise ValueError(f"its schema is {index.schema}, this program reads {SCHEMA}")
        for kind in _NAMES:
            if kind not in index.files:
                raise ValueError(f"it names no file of {kind}")
        for fact in index.variants:
            if fact.kernel not in index.kernels:
                raise ValueError(f"a variant is of {fact.kernel!r}, which it does not describe")
            if unknown := {k for _, k in fact.parameters if k not in _SIZES and k[:1] != "*"}:
                raise ValueError(f"a variant has parameters of type {', '.join(sorted(unknown))}")
            if not 0 <= fact.extra <= _MOST_EXTRA:
                raise ValueError(f"a variant has {fact.extra} parameters of Triton's own")
    except (ValueError, RecursionError) as error:
        # msgspec's DecodeError and ValidationError are ValueErrors
        raise ChannelError(f"{INDEX} of {source} is damaged", why=str(error), fix=_AGAIN) from None
    for name in _NAMES.values():
        if name not in found:
            raise ChannelError(f"{source} has no {name}", fix=_AGAIN)
    return Files(
        source=source, index=index, raw=data,
        code={kind: found[name] for kind, name in _NAMES.items()},
    )  # fmt: skip


def file_of(member: str) -> str:
    """Which of the files an archive's member is by its name; empty: none of them."""
    home, _, name = member.rpartition("/")
    known = name in (INDEX, *_NAMES.values()) and home.rpartition("/")[2] == MODULE
    return name if known else ""


def _archive(source: Path) -> dict[str, bytes]:
    return {
        file_of(member.name): member.read()
        for member in walk(source, want=lambda name: bool(file_of(name)), limit=_MOST_FILES)
        if member.size <= _MOST_FILES
    }


def _directory(source: Path) -> dict[str, bytes]:
    home = next((d for d in (source, source / MODULE) if (d / INDEX).is_file()), None)
    if home is None:
        return {}
    found = {}
    for name in (INDEX, *_NAMES.values()):
        try:
            if (home / name).stat().st_size <= _MOST_FILES:
                found[name] = (home / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ChannelError(f"{home / name} cannot be read", why=str(error.strerror)) from None
    return found
