"""What an ELF file asks of the machine that loads it.

Facts only: machine, needed libraries, run paths, the highest symbol versions, torch symbols, local
leftovers of the build (symbol table, FILE symbols). Judgement is in :mod:`sm75.inspection` and
:mod:`sm75.verify`.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from sm75.errors import ChannelError

_MACHINES = {"EM_AARCH64": "aarch64", "EM_X86_64": "x86_64", "EM_CUDA": "cuda"}
# Families whose numbered versions say which release of the C and C++ libraries is needed.
VERSION_FAMILIES = ("GLIBC", "GLIBCXX", "CXXABI", "GCC")
_VERSION = re.compile(r"([A-Z]+)_(\d+(?:\.\d+)*)")

# A mangled name that mentions torch's C++ namespaces. Itanium C++ ABI, 5.1: a nested name is N,
# qualifiers, then length-prefixed parts; only an undefined symbol that names at::, c10::, torch::
# or caffe2:: ties a library to one torch build.
_TORCH_CXX = re.compile(r"^_Z.*?N[rVKRO]*(?:2at|3c10|5torch|6caffe2)(?=[0-9A-Za-z_])")
# torch's C shim: torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h.
_TORCH_C = re.compile(r"^(?:aoti_torch_|torch_)\w+$")
_DECLARATION = re.compile(r"\b((?:aoti_torch_|torch_)\w+)\s*\(")


class ElfFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one ELF file says about itself.

    Attributes:
        machine: ``aarch64``, ``x86_64``, ``cuda``, else elftools' name.
        soname: DT_SONAME or empty.
        needed: DT_NEEDED in order.
        rpath: DT_RPATH, split at colons.
        runpath: DT_RUNPATH, split at colons.
        versions: Highest version required, by family (``{"GLIBC": "2.17"}``).
        torch_cxx: Undefined symbols of torch's C++ namespaces.
        torch_c: Undefined symbols of torch's C shim.
        symbol_table: It has ``.symtab`` or debug sections, that is, it is not stripped.
        file_symbols: Names of FILE symbols (source names left by the compiler).
    """

    machine: str
    soname: str = ""
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    torch_cxx: tuple[str, ...] = ()
    torch_c: tuple[str, ...] = ()
    symbol_table: bool = False
    file_symbols: tuple[str, ...] = ()


class Abi3Facts(msgspec.Struct, frozen=True, kw_only=True):
    """How a Python extension keeps to the stable ABI.

    Attributes:
        baseline: The Python minor it claims (``3.8``).
        computed: The lowest Python minor that has everything it uses, not below the baseline.
        outside: Python symbols that are not in the stable ABI at all.
    """

    baseline: str
    computed: str
    outside: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether it keeps its claim."""
        return not self.outside and version_key(self.computed) <= version_key(self.baseline)


def version_key(version: str) -> tuple[int, ...]:
    """Sort key of a dotted version (``2.34`` > ``2.4``)."""
    return tuple(int(part) for part in version.split("."))


def is_elf(head: bytes) -> bool:
    """Whether the first bytes of a file are those of an ELF file."""
    return head[:4] == b"\x7fELF"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[ELFFile]:
    try:
        with path.open("rb") as file:
            yield ELFFile(file)
    # The parser's own faults on cut or altered files reach down to these.
    except (ELFError, ConstructError, ValueError, LookupError, AttributeError, struct.error) as err:
        raise ChannelError(
            f"{path.name} is no readable ELF file",
            why=str(err) or type(err).__name__,
            fix="get or build the file again",
        ) from err


def read_elf(path: Path) -> ElfFacts:
    """Read the facts of one ELF file.

    Args:
        path: The file.

    Raises:
        ChannelError: It is no ELF file, or a damaged one.
    """
    with _opened(path) as elf:
        dynamic = _dynamic(elf)
        undefined = _symbols(elf, ".dynsym").select(_undefined)
        return ElfFacts(
            machine=_MACHINES.get(elf["e_machine"], str(elf["e_machine"])),
            soname="".join(dynamic.get("DT_SONAME", ())),
            needed=tuple(dynamic.get("DT_NEEDED", ())),
            rpath=_split(dynamic.get("DT_RPATH", ())),
            runpath=_split(dynamic.get("DT_RUNPATH", ())),
            versions=_versions(elf),
            torch_cxx=tuple(name for name in undefined if _TORCH_CXX.match(name)),
            torch_c=tuple(name for name in undefined if _TORCH_C.match(name)),
            symbol_table=any(
                s.name == ".symtab" or s.name.startswith((".debug_", ".zdebug_"))
                for s in elf.iter_sections()
            ),
            file_symbols=tuple(_symbols(elf, ".symtab").select(_is_file)),
        )


def exported_symbols(path: Path) -> frozenset[str]:
    """Names a shared library defines for others, e.g. to know which shim functions a torch has.

    Args:
        path: A shared library.

    Raises:
        ChannelError: It is no ELF file, or a damaged one.
    """
    with _opened(path) as elf:
        return frozenset(_symbols(elf, ".dynsym").select(_exported))


def declared_shim(headers: Iterable[Path]) -> frozenset[str]:
    """Names of torch's C shim that headers mention as functions.

    Args:
        headers: Header files (``torch/csrc/stable/c/shim.h`` and those of aoti_torch).
    """
    return frozenset(
        name
        for header in headers
        for name in _DECLARATION.findall(header.read_text(encoding="utf-8", errors="replace"))
    )


def audit_abi3(path: Path, *, baseline: str) -> Abi3Facts:
    """Check a Python extension against the stable ABI with abi3audit.

    Args:
        path: The extension.
        baseline: The Python minor it claims (``3.8``).

    Raises:
        ChannelError: It is no ELF file, or a damaged one.
    """
    # abi3audit has no documented Python interface: these names are checked by the unit tests.
    from abi3audit._audit import AuditError, audit
    from abi3audit._extract import SharedObjectExtractor, SharedObjectSpec
    from abi3audit._object import _So
    from abi3info.models import PyVersion

    with _opened(path):
        shared = _So(SharedObjectExtractor(SharedObjectSpec(str(path))))
    try:
        result = audit(shared, assume_minimum_abi3=PyVersion(*version_key(baseline)))
    except AuditError as err:
        raise ChannelError(f"abi3audit cannot read {path.name}", why=str(err)) from err
    return Abi3Facts(
        baseline=baseline,
        computed=str(result.computed),
        outside=tuple(sorted({symbol.name for symbol in result.non_abi3_symbols})),
    )


def _dynamic(elf: ELFFile) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    section = elf.get_section_by_name(".dynamic")
    if isinstance(section, DynamicSection):
        for tag in section.iter_tags():
            for kind, attribute in (
                ("DT_NEEDED", "needed"),
                ("DT_SONAME", "soname"),
                ("DT_RPATH", "rpath"),
                ("DT_RUNPATH", "runpath"),
            ):
                if tag.entry.d_tag == kind:
                    found.setdefault(kind, []).append(getattr(tag, attribute))
    return found


def _split(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(part for path in paths for part in path.split(":") if part)


def _versions(elf: ELFFile) -> dict[str, str]:
    highest: dict[str, str] = {}
    for section in elf.iter_sections():
        if not isinstance(section, GNUVerNeedSection):
            continue
        for _, needs in section.iter_versions():
            for need in needs:
                match = _VERSION.fullmatch(need.name)
                if match and match[1] in VERSION_FAMILIES:
                    known = highest.get(match[1], "0")
                    highest[match[1]] = max(known, match[2], key=version_key)
    return dict(sorted(highest.items()))


@dataclass(frozen=True, kw_only=True)
class _Symbols:
    """A symbol table read in one go: pyelftools takes 15 s for the Rust binary's, this 0.2 s."""

    rows: list[tuple[int, int, int]]  # offset of the name, st_info, st_shndx
    strings: bytes

    def name(self, offset: int) -> str:
        return self.strings[offset : self.strings.index(b"\0", offset)].decode("utf-8", "replace")

    def select(self, wanted: Callable[[int, int], bool]) -> list[str]:
        """Sorted, non-empty names whose (st_info, st_shndx) are wanted."""
        return sorted(
            {self.name(at) for at, info, where in self.rows if at and wanted(info, where)}
        )


def _symbols(elf: ELFFile, name: str) -> _Symbols:
    section = elf.get_section_by_name(name)
    if not isinstance(section, SymbolTableSection):
        return _Symbols(rows=[], strings=b"")
    order = "<" if elf.little_endian else ">"
    if elf.elfclass == 64:  # Elf64_Sym and Elf32_Sym, System V ABI
        rows = [(r[0], r[1], r[3]) for r in struct.iter_unpack(f"{order}IBBHQQ", section.data())]
    else:
        rows = [(r[0], r[3], r[5]) for r in struct.iter_unpack(f"{order}IIIBBH", section.data())]
    return _Symbols(rows=rows, strings=section.stringtable.data())


def _undefined(_info: int, where: int) -> bool:
    return where == 0  # SHN_UNDEF


def _exported(info: int, where: int) -> bool:
    return where != 0 and info >> 4 != 0  # STB_LOCAL


def _is_file(info: int, _where: int) -> bool:
    return info & 0xF == 4  # STT_FILE
