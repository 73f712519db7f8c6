"""``inspect``: would this software run on a g5g, and if not, why, library by library.

Reads a ``.conda``, a wheel, a tar archive, a directory or one file, finds every ELF file and every
cubin in it, those that vllm-sm75-kernels has packed as data among them, and judges each against a
target contract. Nothing of it is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rich.markup import escape
from rich.table import Table

from sm75 import cubin
from sm75.aot import files, pack, sass
from sm75.archives import Member, walk
from sm75.cubin import DeviceCode
from sm75.elf import Abi3Facts, ElfFacts, audit_abi3, is_elf, read_elf, version_key
from sm75.errors import UsageError
from sm75.words import counted

# The machine this project is about: Graviton2 and T4G (AWS, instance family g5g).
MACHINE = "aarch64"
GPU = "sm_75"
# The oldest stable ABI there is: with this baseline abi3audit names the lowest Python that fits.
_OLDEST_ABI3 = "3.2"
# Names by which inspect knows what to look at; the first bytes of the file then decide.
_ENDINGS = (".so", ".o", ".cubin", ".fatbin")


class Target(Protocol):
    """The fields of a target contract that a verdict needs (``sm75.lockfile.TargetContract``)."""

    @property
    def name(self) -> str: ...
    @property
    def glibc(self) -> str: ...
    @property
    def python(self) -> Sequence[str]: ...


class LibraryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Facts and verdict of one file.

    Attributes:
        name: Its path in the package.
        size: Bytes.
        elf: What it asks of the machine; None for a fat binary outside an ELF file, and for kernels
            that were compiled ahead of time.
        sass: Number of pieces of machine code, by architecture.
        ptx: Number of pieces of PTX, by architecture.
        other: Number of pieces that are neither (LTO-IR, unknown), by kind and architecture.
        sources: Number of compiled sources with device code (fat binaries).
        covered: How many of them have code that the GPU can run.
        abi3: Stable-ABI audit, for ``*.abi3.so``.
        usable: The verdict; None when there was no contract to judge against.
        reasons: Why not, each a sentence; or what to know when it is usable.
    """

    name: str
    size: int
    elf: ElfFacts | None
    sass: dict[str, int]
    ptx: dict[str, int]
    other: dict[str, int] = {}
    sources: int = 0
    covered: int = 0
    abi3: Abi3Facts | None = None
    usable: bool | None = None
    reasons: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``inspect`` found.

    Attributes:
        source: Name of the file or directory.
        target: Name of the contract; empty without one.
        libraries: One report a file, by name.
        usable: All libraries are usable; None without a contract.
        summary: The verdict in one sentence.
        cuobjdump: ``agrees``, ``not run``, or how its list differs from the headers.
    """

    source: str
    target: str
    libraries: tuple[LibraryReport, ...]
    usable: bool | None
    summary: str
    cuobjdump: str


def inspect(
    source: Path, *, contract: Target | None = None, cuobjdump: Path | None = None
) -> Report:
    """Look at every library of ``source``.

    Args:
        source: ``.conda``, wheel, tar archive, directory, or one library.
        contract: What to judge against; None: facts only.
        cuobjdump: NVIDIA's tool, for a second reading of the device code; None: headers only.

    Raises:
        UsageError: There is nothing at ``source``, or no library in it.
        ChannelError: The archive or a library in it is damaged.
        ToolchainError: cuobjdump cannot be run.
    """
    return inspect_members(walk(source, want=_wanted), source.name, contract, cuobjdump)


def inspect_members(
    members: Iterable[Member], source: str, contract: Target | None, cuobjdump: Path | None
) -> Report:
    """As :func:`inspect`, over members from anywhere (a wheel read by ranges, for one)."""
    libraries: list[LibraryReport] = []
    packed: dict[str, dict[str, bytes]] = {}
    differences: list[str] = []
    for member in members:
        if not _wanted(member.name):
            continue
        if name := files.file_of(member.name):
            packed.setdefault(member.name.removesuffix(name), {})[name] = member.read()
            continue
        path = member.path()
        with path.open("rb") as file:
            head = file.read(4)
        if not is_elf(head) and head != cubin.MAGIC:
            continue
        codes = cubin.read_device_code(path)
        if cuobjdump is not None:
            difference = cubin.disagreement(codes, cubin.list_with_cuobjdump(cuobjdump, path))
            differences += [f"{member.name}: {difference}"] if difference else []
        libraries.append(_facts(member, path, codes, is_elf(head)))
    libraries += [_kernels(home, found) for home, found in packed.items() if pack.INDEX in found]
    if contract is not None:
        libraries = [judge(library, contract) for library in libraries]
    if not libraries:
        raise UsageError(
            f"{source} has no library to inspect", why="no ELF file and no cubin is in it",
            fix="name a wheel, a .conda, an archive or a directory with libraries, or a library",
        )  # fmt: skip
    libraries.sort(key=lambda library: library.name)
    return Report(
        source=source,
        target="" if contract is None else contract.name,
        libraries=tuple(libraries),
        usable=None if contract is None else all(library.usable for library in libraries),
        summary=summarize(libraries, contract),
        cuobjdump="not run" if cuobjdump is None else "; ".join(differences) or "agrees",
    )


def _wanted(name: str) -> bool:
    base = name.rpartition("/")[2]
    if files.file_of(name):
        return True
    # Executables have no ending; versioned libraries have it in the middle.
    return "." not in base or base.endswith(_ENDINGS) or ".so." in base


def _facts(
    member: Member, path: Path, codes: tuple[DeviceCode, ...], elf_file: bool
) -> LibraryReport:
    others = Counter(f"{c.kind} {c.arch}" for c in codes if c.kind in ("ltoir", "unknown"))
    abi3 = path.name.endswith(".abi3.so")
    return LibraryReport(
        name=member.name,
        size=member.size,
        elf=read_elf(path) if elf_file else None,
        sass=_count(codes, "sass"),
        ptx=_count(codes, "ptx"),
        other=dict(sorted(others.items())),
        sources=len({code.container for code in codes}),
        covered=len({code.container for code in codes if cubin.runs_on(code, GPU)}),
        abi3=audit_abi3(path, baseline=_OLDEST_ABI3) if abi3 else None,
    )


def _kernels(home: str, found: dict[str, bytes]) -> LibraryReport:
    """Of the package of kernels: its machine code and PTX, each piece once."""
    made = files.gathered(home.rstrip("/"), found)
    codes: dict[str, dict[tuple[int, int, str], DeviceCode]] = {"cubin": {}, "ptx": {}}
    for fact in made.index.variants:
        if fact.cubin not in codes["cubin"]:
            arch = sass.read(made.piece(fact, "cubin")).arch
            codes["cubin"][fact.cubin] = DeviceCode(kind="sass", arch=arch)
        if fact.ptx not in codes["ptx"]:
            arch = sass.target(made.piece(fact, "ptx"))
            codes["ptx"][fact.ptx] = DeviceCode(kind="ptx", arch=arch)
    sources = {
        (fact.cubin, fact.ptx): (codes["cubin"][fact.cubin], codes["ptx"][fact.ptx])
        for fact in made.index.variants
    }
    return LibraryReport(
        name=f"{home}{pack.CUBINS}", size=len(found[pack.CUBINS]), elf=None,
        sass=_count(tuple(codes["cubin"].values()), "sass"),
        ptx=_count(tuple(codes["ptx"].values()), "ptx"), sources=len(sources),
        # The launcher loads machine code alone; PTX is for proofs on other GPUs.
        covered=sum(cubin.runs_on(code, GPU) for code, _ in sources.values()),
    )  # fmt: skip


def judge(library: LibraryReport, contract: Target) -> LibraryReport:
    """Add the verdict: usable on the machine the contract describes, or why not."""
    faults = _faults(library, contract)
    return msgspec.structs.replace(
        library, usable=not faults, reasons=tuple(faults or _remarks(library))
    )


def _count(codes: tuple[DeviceCode, ...], kind: str) -> dict[str, int]:
    counts = Counter(code.arch for code in codes if code.kind == kind)
    return {arch: counts[arch] for arch in sorted(counts, key=cubin.arch_key)}


def _faults(report: LibraryReport, contract: Target) -> list[str]:
    faults = []
    elf = report.elf
    if elf is not None and elf.machine not in (MACHINE, "cuda"):
        faults.append(f"it is built for {elf.machine}, the machine is {MACHINE}")
    if report.sources and not report.covered:
        faults.append(f"no {GPU} SASS and no PTX <= 7.5: {_carried(report)}")
    if elf is None:
        return faults
    needed = elf.versions.get("GLIBC", "0")
    if version_key(needed) > version_key(contract.glibc):
        faults.append(f"it needs glibc {needed}, the target has {contract.glibc}")
    if elf.torch_cxx:
        faults.append(
            "it is tied to one build of torch by "
            f"{counted(len(elf.torch_cxx), 'C++ symbol')} ({elf.torch_cxx[0]}"
            f"{', …' * (len(elf.torch_cxx) > 1)})"
        )
    if report.abi3 is not None:
        lowest = min(contract.python, key=version_key, default=report.abi3.computed)
        if report.abi3.outside:
            faults.append(
                "it is named abi3 but uses Python symbols outside the stable ABI:"
                f" {', '.join(report.abi3.outside[:3])}"
            )
        elif version_key(report.abi3.computed) > version_key(lowest):
            faults.append(f"it needs Python {report.abi3.computed}, the target has {lowest}")
    return faults


def _carried(report: LibraryReport) -> str:
    sass, ptx = (
        ", ".join(sorted(counts, key=cubin.arch_key)) for counts in (report.sass, report.ptx)
    )
    parts = [f"SASS for {sass}"] if sass else ["no SASS"]
    parts += [f"PTX for {ptx}"] if ptx else []
    parts += [", ".join(report.other)] if report.other else []
    return "it has " + " and ".join(parts)


def _remarks(report: LibraryReport) -> list[str]:
    if not report.sources:
        return ["no device code"]
    if report.covered < report.sources:
        missing = report.sources - report.covered
        have = "has" if missing == 1 else "have"
        remark = f"{missing} of its {report.sources} compiled sources {have} no code for {GPU}"
        return [f"{remark}: fine only if those kernels are never launched there"]
    exact = GPU in report.sass
    return [] if exact else [f"no {GPU} SASS, but the driver can run: {_carried(report)}"]


def summarize(libraries: Sequence[LibraryReport], contract: Target | None) -> str:
    """The verdict on judged libraries in one sentence."""
    if contract is None:
        return f"{_libraries(len(libraries))}; no target given, so no verdict"
    bad = [library for library in libraries if not library.usable]
    without = "" if _has_device_code(libraries) else f"; no device code: {_plain(libraries)}"
    if not bad:
        return f"usable on g5g ({contract.name}): {_libraries(len(libraries))}, all fit{without}"
    gpu = [library for library in bad if library.sources and not library.covered]
    why = (
        f"no {GPU} SASS and no PTX <= 7.5 in {len(gpu)} of {_libraries(len(libraries))}"
        if gpu
        else f"{len(bad)} of {_libraries(len(libraries))} "
        f"{'does' if len(bad) == 1 else 'do'} not fit{without}"
    )
    return f"unusable on g5g ({contract.name}), because: {why}"


def _libraries(count: int) -> str:
    return counted(count, "library", "libraries")


def _has_device_code(libraries: Sequence[LibraryReport]) -> bool:
    return any(library.sources for library in libraries)


def _plain(libraries: Sequence[LibraryReport]) -> str:
    """What libraries without device code are: programs and libraries of which machines."""
    machines = sorted({library.elf.machine for library in libraries if library.elf is not None})
    return f"code for the processor alone ({', '.join(machines)})"


def advice(report: Report) -> str:
    """What to do about what is unusable.

    Args:
        report: The report, judged.
    """
    names = (report.source, *(library.name for library in report.libraries))
    if not _has_device_code(report.libraries):
        return (
            f"there is nothing to build for the GPU; take it for {MACHINE}, from where it came, "
            "and see above what else does not fit"
        )
    if any("vllm" in name for name in names):
        return "build a package for it: python3 orchestrator.py build"
    return f"take a build of it that has code for {GPU}; this project builds vLLM alone"


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON data, in a fixed order."""
    data: dict[str, Any] = msgspec.to_builtins(report)
    return data


def table(report: Report) -> Table:
    """The report as a table for people; ``summary`` is not in it."""
    shown = Table(title=escape(report.source))
    for column in ("library", "machine", "SASS", "PTX", "glibc", "verdict"):
        shown.add_column(column, overflow="fold")
    verdict = {None: "", True: "[green]usable[/green]", False: "[red]unusable[/red]"}
    for library in report.libraries:
        elf = library.elf
        # What it carries instead is in the columns beside: the reason's first half is enough here.
        reasons = "; ".join(reason.partition(": it has ")[0] for reason in library.reasons)
        shown.add_row(
            escape(library.name),
            elf.machine if elf else "",
            _cell(library.sass),
            _cell(library.ptx),
            elf.versions.get("GLIBC", "") if elf else "",
            ": ".join(part for part in (verdict[library.usable], escape(reasons)) if part),
        )
    return shown


def _cell(counts: dict[str, int]) -> str:
    return " ".join(f"{arch}×{count}" for arch, count in counts.items())
