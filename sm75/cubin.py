"""Device code inside files: which GPU architectures a library carries, and as what.

Two independent readings that must agree:

* :func:`read_device_code` reads the fat binaries' headers itself. Their kind and architecture
  fields are never compressed, so no tool is needed, for any host architecture.
* :func:`list_with_cuobjdump` asks NVIDIA's own ``cuobjdump`` (one file, of the
  ``nvidia-cuda-cuobjdump`` wheel; listing needs neither nvdisasm nor a library beside it).

Layout of a fat binary, as the 12.x and 13.x toolkits write it (established by compiling known
architectures and comparing; NVIDIA does not document it). All little-endian:

header, 16 bytes: u32 magic, u16 version (1), u16 header size, u64 bytes that follow.
entry: u16 kind, u16, u32 header size, u64 payload size, u32 compressed size, u32,
u16 minor, u16 major, u32 architecture, u32, u32, u64 flags, u64, u64 unpacked size.
"""

from __future__ import annotations

import mmap
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import zstandard
from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from sm75.errors import ChannelError, ToolchainError

Kind = Literal["sass", "ptx", "ltoir", "unknown"]

# First word of a fat binary. fatbinary_section.h of the CUDA toolkit.
MAGIC = struct.pack("<I", 0xBA55ED50)
# Sections nvcc puts fat binaries in: whole-program code and relocatable device code.
SECTIONS = (".nv_fatbin", "__nv_relfatbin")
# Path of the tool inside its wheel (nvidia-cuda-cuobjdump 13.2.78).
CUOBJDUMP_MEMBER = "nvidia/cu13/bin/cuobjdump"

_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_KINDS: dict[int, Kind] = {1: "ptx", 2: "sass", 8: "ltoir"}
_FLAG_A = 1 << 20  # built for sm_NNa: runs on that one architecture
_FLAG_F = 1 << 21  # built for sm_NNf: runs on that family
_EM_CUDA = 190  # e_machine of a cubin; elf-em.h of Linux
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ELF_MAGIC = b"\x7fELF"
_LISTED = re.compile(r"(?:ELF|PTX) file +\d+: (?P<name>.+)\.(?P<arch>sm_\d+[af]?)\.(?P<end>\w+)")
_LIST_TIMEOUT = 600.0  # seconds; the largest library known (307 MB) takes about one


@dataclass(frozen=True, kw_only=True)
class DeviceCode:
    """One piece of device code.

    Attributes:
        kind: ``sass`` (machine code), ``ptx``, ``ltoir`` or ``unknown``.
        arch: ``sm_75``, ``sm_90a``, ``sm_100f``, …, for PTX the architecture it targets.
        container: Ordinal of the fat binary it is in (one for each compiled source); a GPU needs
            one fitting piece in each. -1 where the reader does not tell.
    """

    kind: Kind
    arch: str
    container: int = -1


def capability(arch: str) -> tuple[int, int]:
    """``sm_75`` -> (7, 5), ``sm_100a`` -> (10, 0).

    Raises:
        ValueError: ``arch`` is no architecture.
    """
    match = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[af]?", arch)
    if match is None:
        raise ValueError(f"{arch!r} is no GPU architecture")
    return int(match[1]), int(match[2])


def arch_key(arch: str) -> tuple[int, int, str]:
    """Sort key of ``sm_90a`` and the like, by capability."""
    return (*capability(arch), arch)


def runs_on(code: DeviceCode, gpu: str = "sm_75") -> bool:
    """Whether the driver can run ``code`` on a GPU of architecture ``gpu``.

    SASS runs on the same major architecture at the same or a higher minor; PTX is compiled by the
    driver for any later architecture; code of an ``a`` target runs on that architecture alone and
    of an ``f`` target on that major alone. CUDA C++ Programming Guide, 'Compute compatibility'.
    """
    if code.kind not in ("sass", "ptx"):
        return False
    built, have = capability(code.arch), capability(gpu)
    if code.arch.endswith("a"):
        return built == have
    if code.kind == "sass" or code.arch.endswith("f"):
        return built[0] == have[0] and built[1] <= have[1]
    return built <= have


def is_cubin(path: Path) -> bool:
    """Whether ``path`` is a bare cubin (an ELF file for the GPU itself)."""
    with path.open("rb") as file:
        head = file.read(20)
    return head[:4] == _ELF_MAGIC and int.from_bytes(head[18:20], "little") == _EM_CUDA


def read_device_code(path: Path) -> tuple[DeviceCode, ...]:
    """List the device code of a library, object, bare fat binary or bare cubin.

    Args:
        path: The file; anything that is none of these has no device code.

    Raises:
        ChannelError: A fat binary in it is damaged.
    """
    return tuple(piece.code for piece in _pieces(path))


def payloads(path: Path) -> Iterator[bytes]:
    """Yield the device code itself, unpacked (as stored where the packing is not zstd).

    Args:
        path: As for :func:`read_device_code`.

    Raises:
        ChannelError: A fat binary in it is damaged.
    """
    pieces = _pieces(path)
    with path.open("rb") as file:
        for piece in pieces:
            file.seek(piece.offset)
            raw = file.read(piece.size)
            if raw[:4] != _ZSTD_MAGIC:
                yield raw
                continue
            try:
                yield zstandard.ZstdDecompressor().decompressobj().decompress(raw)
            except zstandard.ZstdError as err:
                raise ChannelError(
                    f"{path.name} holds damaged device code at byte {piece.offset}", why=str(err)
                ) from err


def list_with_cuobjdump(cuobjdump: Path, path: Path) -> tuple[DeviceCode, ...]:
    """List SASS and PTX of ``path`` with NVIDIA's tool.

    Args:
        cuobjdump: The executable.
        path: A library, object, fat binary or cubin.

    Raises:
        ToolchainError: The tool cannot be started, hangs, or says what we cannot read.
    """
    with tempfile.TemporaryDirectory(prefix="sm75-") as scratch:
        # The tool splits names at spaces and names its results after the file: give it a plain one.
        plain = Path(scratch) / f"lib{path.suffix if path.suffix.isascii() else ''}"
        plain.symlink_to(path.resolve())
        command = [str(cuobjdump), "--list-elf", "--list-ptx", str(plain)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIST_TIMEOUT, cwd=scratch
            )
        except (OSError, subprocess.TimeoutExpired) as err:
            raise ToolchainError(
                f"cannot run {cuobjdump}",
                why=str(err),
                fix="fetch the pinned nvidia-cuda-cuobjdump wheel for this machine",
            ) from err
    if done.returncode != 0:
        if "does not contain device code" in done.stdout + done.stderr:
            return ()
        raise ToolchainError(
            f"cuobjdump failed on {path.name} (exit code {done.returncode})",
            why=(done.stderr or done.stdout).strip()[-500:],
        )
    return tuple(_parse_listing(done.stdout))


def _parse_listing(text: str) -> Iterator[DeviceCode]:
    for line in text.splitlines():
        if not line.strip():
            continue
        match = _LISTED.fullmatch(line.strip())
        if match is None or match["end"] not in ("cubin", "ptx"):
            raise ToolchainError(
                "cuobjdump prints a line this program does not know", why=repr(line)
            )
        yield DeviceCode(kind="sass" if match["end"] == "cubin" else "ptx", arch=match["arch"])


def disagreement(ours: tuple[DeviceCode, ...], theirs: tuple[DeviceCode, ...]) -> str:
    """Say how the two readings differ; empty when they agree.

    cuobjdump lists neither LTO-IR nor the ``f`` of family-specific SASS: both are left out of the
    comparison.
    """

    def key(code: DeviceCode) -> str:
        arch = code.arch.removesuffix("f") if code.kind == "sass" else code.arch
        return f"{code.kind} {arch}"

    mine = Counter(key(code) for code in ours if code.kind in ("sass", "ptx"))
    other = Counter(key(code) for code in theirs)
    return ", ".join(
        f"{name}: {mine[name]} in the headers, {other[name]} in cuobjdump's list"
        for name in sorted(mine.keys() | other.keys())
        if mine[name] != other[name]
    )


@dataclass(frozen=True, kw_only=True)
class _Piece:
    code: DeviceCode
    offset: int  # bytes from the start of the file
    size: int  # bytes as stored


def _pieces(path: Path) -> list[_Piece]:
    if path.stat().st_size < _HEADER.size:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] == MAGIC:
            return list(_containers(data, path.name, 0, len(data), 0))
        if data[:4] != _ELF_MAGIC:
            return []
        if int.from_bytes(data[18:20], "little") == _EM_CUDA:
            code = DeviceCode(kind="sass", arch=_cubin_arch(data), container=0)
            return [_Piece(code=code, offset=0, size=len(data))]
        found: list[_Piece] = []
        for offset, size in _sections(path):
            first = found[-1].code.container + 1 if found else 0
            found += _containers(data, path.name, offset, offset + size, first)
        return found


def _sections(path: Path) -> list[tuple[int, int]]:
    try:
        with path.open("rb") as file:
            return [
                (section["sh_offset"], section["sh_size"])
                for section in ELFFile(file).iter_sections()
                if section.name in SECTIONS and section["sh_type"] != "SHT_NOBITS"
            ]
    except (ELFError, ConstructError, ValueError) as err:
        raise ChannelError(f"{path.name} is a damaged ELF file", why=str(err)) from err


def _cubin_arch(data: mmap.mmap) -> str:
    # e_flags is at 48 (64-bit ELF). The architecture is its second byte from ABI version 8 on, its
    # first byte before: EF_CUDA_SM of LLVM's BinaryFormat/ELF.h.
    flags = int.from_bytes(data[48:52], "little")
    return f"sm_{(flags >> 8) & 0xFF if data[8] >= 8 else flags & 0xFF}"


def _containers(data: mmap.mmap, name: str, at: int, limit: int, first: int) -> Iterator[_Piece]:
    def damaged(where: int, why: str) -> ChannelError:
        return ChannelError(
            f"{name} holds a damaged fat binary at byte {where}",
            why=why,
            fix="get or build the file again",
        )

    limit, ordinal = min(limit, len(data)), first
    while at < limit:
        if data[at] == 0:  # alignment between containers
            at += 1
            continue
        if data[at : at + 4] != MAGIC or at + _HEADER.size > limit:
            raise damaged(at, "no fat binary begins where one must")
        _, version, header, size = _HEADER.unpack_from(data, at)
        entry, end = at + header, at + header + size
        if version != 1 or header < _HEADER.size or end > limit:
            raise damaged(at, f"version {version}, {size} bytes long, {limit - at} are left")
        while entry < end:
            if entry + _ENTRY.size > end:
                raise damaged(entry, "an entry is cut off")
            kind, _, head, stored, packed, _, _, _, arch, _, _, flags, _, _ = _ENTRY.unpack_from(
                data, entry
            )
            if head < _ENTRY.size or entry + head + stored > end or packed > stored:
                raise damaged(entry, "an entry is longer than its container")
            suffix = "a" if flags & _FLAG_A else "f" if flags & _FLAG_F else ""
            code = DeviceCode(
                kind=_KINDS.get(kind, "unknown"), arch=f"sm_{arch}{suffix}", container=ordinal
            )
            yield _Piece(code=code, offset=entry + head, size=packed or stored)
            entry += head + stored
        at, ordinal = end, ordinal + 1
