"""The rules of ``verify`` for ``vllm-sm75-kernels``, from the machine code itself.

Registers and shared memory of the code are read out of each cubin, tensor-core instructions and
spills are counted in what nvdisasm prints of it, and the package's index is held against both.
What the index alone knows is the shared memory that a launch asks for: Triton's kernels have none
of their own. It is held against the offsets in the code, which must lie below it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sm75.aot import beside as vllm
from sm75.aot import sass
from sm75.aot.files import Fact, Files, load, passed
from sm75.aot.lower import SHARED_LIMIT
from sm75.aot.spills import explanation
from sm75.errors import ChannelError, ToolchainError
from sm75.rules import Finding
from sm75.words import counted

ARCH = "sm_75"


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one variant.

    Attributes:
        kernel: The function.
        parameters: Of its launch: head size, blocks and the like.
        warps: A block's.
        shared: Bytes of shared memory a block: the code's own, and what the launch asks for.
        registers: A thread's, as the code says; -1: its code could not be read.
        spills: Bytes of spill stores a thread, counted; None: no disassembler.
        hmma: Tensor-core instructions, counted; None: no disassembler.
    """

    kernel: str
    parameters: dict[str, int | float | bool | str | None]
    warps: int
    shared: int
    registers: int
    spills: int | None
    hmma: int | None

    def __str__(self) -> str:
        shown = ", ".join(f"{k} {v}" for k, v in self.parameters.items())
        return f"{self.kernel} ({shown}, {self.warps} warps)"


# Of the constants, those that tell variants apart for people, by the kernels' own names.
SHOWN = ("HEAD_SIZE", "Lk", "num_query_heads", "num_queries_per_kv", "kv_group_num", "BLOCK_SIZE",
         "KV_QUANT_MODE", "IS_3D", "BLOCK_M", "BLOCK_N", "TILE_SIZE")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found of a package.

    Attributes:
        findings: One a rule, in a fixed order.
        kernels: One a variant, in the index's order.
    """

    findings: tuple[Finding, ...]
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A variant's code: read, counted, and what is wrong with it."""

    code: sass.Code | None = None
    counts: sass.Counts | None = None
    damaged: str = ""
    unread: str = ""


def check(source: Path, *, disassembler: Sequence[str] = (), beside: Path | None = None) -> Checked:
    """Hold a package of kernels to its rules.

    Args:
        source: The ``.conda``, or a directory (:func:`sm75.aot.files.load`).
        disassembler: NVIDIA's nvdisasm, a command that takes the cubin last; empty: the rules that
            need it say that they were not checked.
        beside: The package, or the site-packages, of the vllm that the kernels belong to; None:
            not at hand.

    Raises:
        UsageError: There are no kernels in ``source``.
        ChannelError: The package or its index cannot be read at all.
    """
    files = load(source)
    facts = files.index.variants
    seen = dict(_look(files, disassembler))
    kernels = tuple(_kernel(files, fact, seen[fact.cubin]) for fact in facts)
    both = list(zip(facts, kernels, (seen[fact.cubin] for fact in facts), strict=True))
    modules = vllm.read(beside, files.index.sources) if beside is not None else {}
    return Checked(
        kernels=kernels,
        findings=(
            _whole(files, both), _sources(files, beside, modules), _arch(both), _index(both),
            _tensor_cores(both, modules, disassembler), _shared(both), _spills(files, both),
        ),
    )  # fmt: skip


_Both = Sequence[tuple[Fact, Kernel, _Seen]]
_NO_TOOL = (
    "no nvdisasm here: `kernels build` brings it (x86-64), and `kernels show` has the index's word"
)


def _look(
    files: Files, disassembler: Sequence[str]
) -> Iterator[tuple[tuple[int, int, str], _Seen]]:
    def one(fact: Fact) -> tuple[tuple[int, int, str], _Seen]:
        try:
            files.piece(fact, "ptx")
            data = files.piece(fact, "cubin")
            code = sass.read(data)
        except ChannelError as error:
            return fact.cubin, _Seen(damaged=f"{error.what}: {error.why}".removesuffix(": "))
        if fact.entry not in code.registers:
            return fact.cubin, _Seen(damaged=f"its code has no entry {fact.entry!r}")
        if not disassembler:
            return fact.cubin, _Seen(code=code)
        try:
            return fact.cubin, _Seen(code=code, counts=sass.disassemble(disassembler, data))
        except ToolchainError as error:
            return fact.cubin, _Seen(code=code, unread=f"{error.what}: {error.why}")

    # Variants share code; a later one's entry may still be another. Each pair once.
    distinct = {(fact.cubin, fact.ptx, fact.entry): fact for fact in files.index.variants}
    pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
    found: dict[tuple[int, int, str], _Seen] = {}
    try:
        for place, seen in pool.map(one, distinct.values()):
            if place not in found or seen.damaged:
                found[place] = seen
    finally:
        pool.shutdown(cancel_futures=True)
    yield from found.items()


def _kernel(files: Files, fact: Fact, seen: _Seen) -> Kernel:
    known = files.index.parameters(fact)
    code, counts = seen.code, seen.counts
    return Kernel(
        kernel=fact.kernel, parameters={n: known[n] for n in SHOWN if n in known},
        warps=fact.warps, shared=fact.shared + (code.static.get(fact.entry, 0) if code else 0),
        registers=code.registers[fact.entry] if code else -1,
        spills=counts.spills if counts else None, hmma=counts.hmma if counts else None,
    )  # fmt: skip


def _finding(rule: str, faults: Iterable[str], good: str) -> Finding:
    listed = list(faults)
    said = "; ".join(listed[:5]) + (f"; and {len(listed) - 5} more" if len(listed) > 5 else "")
    return Finding(rule=f"kernels: {rule}", state="fail" if listed else "ok", evidence=said or good)


def _unchecked(rule: str, why: str) -> Finding:
    return Finding(rule=f"kernels: {rule}", state="not checked", evidence=why)


def _whole(files: Files, both: _Both) -> Finding:
    def faults() -> Iterator[str]:
        yield from files.whole()
        if not both:
            yield "it has no variant"
        yield from (f"{kernel}: {seen.damaged}" for _, kernel, seen in both if seen.damaged)

    pieces = len({fact.cubin for fact, _, _ in both})
    return _finding(
        "files", faults(),
        f"{files.source}: {counted(len(both), 'variant')}, {counted(pieces, 'piece')} of machine "
        "code, each as its hash",
    )  # fmt: skip


def _arch(both: _Both) -> Finding:
    return _finding(
        "architecture",
        (f"{kernel} is for {seen.code.arch}" for _, kernel, seen in both
         if seen.code is not None and seen.code.arch != ARCH),
        f"{ARCH} and nothing else",
    )  # fmt: skip


def _index(both: _Both) -> Finding:
    def faults() -> Iterator[str]:
        for fact, kernel, seen in both:
            if seen.code is not None and passed(fact) != seen.code.parameters.get(fact.entry, ()):
                yield f"{kernel}: the index has other parameters than its code"
            pairs = [("registers", fact.registers, kernel.registers)] if seen.code else []
            if seen.counts is not None:
                pairs += [("bytes spilled", fact.spills, seen.counts.spills),
                          ("HMMA", fact.mma, seen.counts.hmma)]  # fmt: skip
            for name, said, found in pairs:
                if said != found:
                    yield f"{kernel}: the index says {said} {name}, its code has {found}"

    counted = all(seen.counts for _, _, seen in both)
    return _finding(
        "index", faults(),
        "parameters, registers" + (", spills, HMMA" if counted else "") + " are as the index says",
    )  # fmt: skip


def _tensor_cores(
    both: _Both, modules: Mapping[str, bytes], disassembler: Sequence[str]
) -> Finding:
    if not disassembler:
        return _unchecked("tensor cores", _NO_TOOL)
    if not modules:
        return _unchecked("tensor cores", "the kernels' sources are not at hand: which have a dot?")
    dots = vllm.with_dots(modules.values())
    wanted = [(kernel, seen) for fact, kernel, seen in both if fact.kernel in dots]
    counts = [seen.counts.hmma for _, seen in wanted if seen.counts]
    return _finding(
        "tensor cores",
        (f"{kernel} has " + (f"no code to count in: {seen.unread or seen.damaged}"
                             if seen.counts is None else "a dot and no HMMA.1688")
         for kernel, seen in wanted if seen.counts is None or not seen.counts.hmma),
        f"{min(counts, default=0)} to {max(counts, default=0)} HMMA.1688 in each of the "
        f"{counted(len(wanted), 'variant')} whose kernel has a dot",
    )  # fmt: skip


def _shared(both: _Both) -> Finding:
    def faults() -> Iterator[str]:
        for _, kernel, seen in both:
            if not 0 <= kernel.shared <= SHARED_LIMIT:
                yield f"{kernel} takes {kernel.shared} bytes, a block has {SHARED_LIMIT}"
            elif seen.counts is not None and seen.counts.reach >= kernel.shared:
                yield (
                    f"{kernel} asks for {kernel.shared} bytes, its code reaches to byte "
                    f"{seen.counts.reach}"
                )

    most = max((kernel.shared for _, kernel, _ in both), default=0)
    return _finding("shared memory", faults(), f"at most {most} of {SHARED_LIMIT} bytes a block")


def _spills(files: Files, both: _Both) -> Finding:
    if both and all(seen.counts is None and not seen.damaged for _, _, seen in both):
        unread = next((seen.unread for _, _, seen in both if seen.unread), "")
        return _unchecked("spills", unread or _NO_TOOL)
    spilled = [(fact, kernel) for fact, kernel, _ in both if kernel.spills]
    return _finding(
        "spills",
        (f"{kernel} spills {kernel.spills} bytes a thread, unexplained"
         for fact, kernel in spilled
         if not explanation(fact.kernel, files.index.parameters(fact), kernel.spills or 0)),
        f"{len(spilled)} of {len(both)} variants, at most "
        f"{max((kernel.spills or 0 for _, kernel in spilled), default=0)} bytes a thread, each "
        "explained",
    )  # fmt: skip


def _sources(files: Files, beside: Path | None, modules: Mapping[str, bytes]) -> Finding:
    if beside is None:
        return _unchecked("sources", "the vllm that they belong to is not at hand")

    def faults() -> Iterator[str]:
        for name in vllm.differing(files.index.sources, modules):
            if name not in modules:
                yield f"{beside.name} has no {name}"
            else:
                yield (
                    f"they were made of another {name} than {beside.name} has: at run time all "
                    "is left to Triton (python3 orchestrator.py kernels build makes them anew)"
                )
        if not files.index.sources:
            yield "the index names none"

    return _finding(
        "sources", faults(), f"made of the {counted(len(modules), 'module')} that {beside.name} has"
    )
