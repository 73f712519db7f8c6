"""What a piece of machine code takes of a multiprocessor, read out of the code itself."""

from __future__ import annotations

import contextlib
import io
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from sm75 import cubin
from sm75.atomic import disk_errors
from sm75.errors import ChannelError, ToolchainError

# Turing's product of 16 x 8 by 8 x 8 float16 matrices.
HMMA = re.compile(r"\bHMMA\.1688\b")
# A store of registers to local memory. ptxas counts the same as "bytes spill stores": the figures
# are equal for all 89 pieces of machine code of 0.33.0 (a test has the package's).
_STORE = re.compile(r"\bSTL((?:\.\w+)*) ")
_WIDTHS = {"8": 1, "16": 2, "64": 8, "128": 16}
_SHARED = re.compile(r"\b(?:LDS|STS|LDSM|ATOMS)(?:\.\w+)* [^;\n]*?\[(?P<at>[^\]\n]*)\]")
_OFFSET = re.compile(r"(?<![-0-9a-fx])(?:0x)(?P<hex>[0-9a-f]+)$")
_TARGET = re.compile(rb"^\s*\.target\s+(sm_\d{2,3}[af]?)\b", re.MULTILINE)
_SIZED, _PARAMETER = 0x04, 0x17
_TIMEOUT = 120.0
"""Seconds; the largest kernel takes one."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """A cubin's own headers.

    Attributes:
        arch: What it runs on.
        registers: A thread's, by entry.
        static: Bytes of shared memory that are in the code, by entry; what a launch asks for is
            added.
        parameters: Offset and size of each parameter in bytes, by entry. The driver reads as many
            as the code has, whatever a launcher passes.
    """

    arch: str
    registers: dict[str, int]
    static: dict[str, int]
    parameters: dict[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Instructions of a cubin.

    Attributes:
        hmma: Products on tensor cores.
        spills: Bytes of registers that its instructions store to local memory, a thread.
        reach: The highest fixed offset into shared memory; the block needs more than that.
    """

    hmma: int
    spills: int
    reach: int


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        with disk_errors(Path(tempfile.gettempdir())):
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="sm75-cubin-"))
            path = Path(scratch, "it.cubin")
            path.write_bytes(data)
        yield path


def read(data: bytes) -> Code:
    """Read a cubin's headers.

    Raises:
        ChannelError: It is none, or damaged.
        DiskError: There is no room for it in the temporary directory.
    """
    with _file(data) as path:
        codes = cubin.read_device_code(path) if data[:4] == b"\x7fELF" else ()
    if [code.kind for code in codes] != ["sass"]:
        raise ChannelError("it is no machine code of a GPU", why="no cubin begins where one must")
    try:
        elf = ELFFile(io.BytesIO(data))
        sections = {section.name: section for section in elf.iter_sections()}
        # The upper byte of sh_info of a kernel's code: registers a thread. NVIDIA documents it
        # nowhere; equal to what ptxas -v prints for all pieces of machine code of 0.33.0.
        registers = {
            name.removeprefix(".text."): int(section["sh_info"]) >> 24
            for name, section in sections.items()
            if name.startswith(".text.")
        }
        static = {
            name.removeprefix(".nv.shared."): int(section["sh_size"])
            for name, section in sections.items()
            if name.startswith(".nv.shared.")
        }
        parameters = {
            name.removeprefix(".nv.info."): _parameters(section.data())
            for name, section in sections.items()
            if name.startswith(".nv.info.")
        }
    except (ELFError, ConstructError, ValueError, KeyError, AttributeError, TypeError, OSError,
            AssertionError, RecursionError, MemoryError, struct.error) as error:  # fmt: skip
        raise ChannelError(
            "its machine code is damaged", why=f"{type(error).__name__}: {error}"
        ) from None
    return Code(arch=codes[0].arch, registers=registers, static=static, parameters=parameters)


def _parameters(data: bytes) -> tuple[tuple[int, int], ...]:
    """Read ``.nv.info`` of an entry: a list of attributes, each of a format, a number and a value.

    NVIDIA documents it nowhere. EIATTR_KPARAM_INFO as cuobjdump -elf names it: index, ordinal,
    offset, and the size in the upper 14 bits. Equal to the index for all variants of 0.33.0.
    """
    found: dict[int, tuple[int, int]] = {}
    at = 0
    while at < len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind != _SIZED:
            continue
        if attribute == _PARAMETER:
            _, ordinal, offset, flags = struct.unpack_from("<IHHI", data, at)
            found[ordinal] = (offset, flags >> 18)
        at += size
    return tuple(found[ordinal] for ordinal in sorted(found))


def target(ptx: bytes) -> str:
    """What a text of PTX is for.

    Raises:
        ChannelError: It does not say.
    """
    found = _TARGET.search(ptx)
    if found is None:
        raise ChannelError("a kernel's PTX names no target", why="it has no .target line")
    return found[1].decode()


def count(text: str) -> Counts:
    """Count in what nvdisasm prints.

    Args:
        text: Its output.
    """
    return Counts(
        hmma=len(HMMA.findall(text)),
        spills=sum(_width(found[1]) for found in _STORE.finditer(text)),
        reach=max((_offset(found["at"]) for found in _SHARED.finditer(text)), default=-1),
    )


def _width(modifiers: str) -> int:
    # .64, .128, .U8, .S16 and the like; a store without one is of a register
    for part in modifiers.split("."):
        if (bits := part.lstrip("US")) in _WIDTHS:
            return _WIDTHS[bits]
    return 4


def _offset(place: str) -> int:
    # [R12+0x2000], [0x10], [R3.X8+UR4+0x400]; one below its register tells nothing
    found = _OFFSET.search(place.strip())
    return int(found["hex"], 16) if found else 0


def disassemble(tool: Sequence[str], data: bytes) -> Counts:
    """Have NVIDIA's nvdisasm print a cubin, and count.

    Args:
        tool: The command; it is given a file's name last.
        data: The cubin.

    Raises:
        ToolchainError: It cannot be run, or says no code.
        DiskError: There is no room for it in the temporary directory.
    """
    with _file(data) as path:
        try:
            done = subprocess.run(
                [*tool, str(path)], check=False, capture_output=True, text=True,
                errors="replace", timeout=_TIMEOUT,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolchainError(
                f"cannot run {tool[0]}", why=str(error),
                fix="remove .sm75/kernel-venv; `kernels build` makes it anew",
            ) from None  # fmt: skip
    if done.returncode or "EXIT" not in done.stdout:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ToolchainError(
            f"nvdisasm does not print a cubin (exit code {done.returncode})",
            why=said[-1].replace(str(path), "it")[:200] if said else "it prints nothing",
        )
    return count(done.stdout)
