"""``verify --smem`` as a whole: trees, audits before and after the patches, table, JSON, chart."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from sm75.lockfile import ReleaseLock
from sm75.progress import make_reporter
from sm75.report import records
from sm75.smem import audit as audits
from sm75.smem import toolenv, trees
from sm75.smem.audit import SHARED_LIMIT, Audit, Problem, Variant
from sm75.smem.models import MODELS
from sm75.store import Store, hash_file
from sm75.words import counted

# Parameters with a column of their own, in this order; others are not shown.
_SIZES = (
    "BLOCK_M", "BLOCK_Q", "TILE_SIZE", "BLOCK_N", "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K",
    "BLOCK_K", "BLOCK_SIZE", "D",
)  # fmt: skip


_LOG_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class Result:
    """Both audits and the verdict on the second.

    Attributes:
        triton: Version that compiled.
        subject: What was audited.
        before: The unpatched sdist's audit; None where the sdist is not in the store.
        after: The audited tree's.
        problems: Findings in ``after``; empty is a pass.
    """

    triton: str
    subject: str
    before: Audit | None
    after: Audit
    problems: list[Problem]


def make(
    root: Path, lock: ReleaseLock, store: Store, package: Path | None, *, quiet: bool = False
) -> Result:
    """Audit a package, or the patched sources, beside the unpatched ones.

    Args:
        root: The project's directory.
        lock: The release.
        store: Where the pinned sdist is; without a package it is needed.
        package: A built ``.conda`` or a directory; None: the sdist with the patches applied.
        quiet: Show no progress.

    Raises:
        FetchError: The sdist is not in the store and no package was given.
        PatchError: A patch does not apply.
        ToolchainError: The audit's environment cannot be made.
        BuildError: The worker broke off.
    """
    python = toolenv.ensure(root)
    cache = root / ".sm75" / "smem" / f"triton-{toolenv.pinned_triton(root)}.json"
    sdist = lock.artifact("vllm-sdist")
    with (
        tempfile.TemporaryDirectory(prefix="sm75-smem-") as scratch,
        make_reporter(quiet=quiet) as reporter,
    ):
        before = None
        if package is None or store.has(sdist):
            pristine = Path(scratch, "unpatched")
            trees.from_sdist(store.get(sdist), pristine, series=None)
            # One model shows the difference; the others have the same shapes.
            before = audits.run(
                python, root, pristine, cache, reporter, groups=("attention",),
                prefix=MODELS[0].name,
            )  # fmt: skip
        patched = Path(scratch, "patched")
        if package is None:
            series = trees.python_series(root / "patches" / lock.vllm)
            trees.from_sdist(store.get(sdist), patched, series=series)
        else:
            trees.from_package(package, patched)
        after = audits.run(python, root, patched, cache, reporter)
    return Result(
        triton=toolenv.pinned_triton(root),
        subject=package.name if package else f"vllm {lock.vllm} with patches/{lock.vllm}",
        before=before,
        after=after,
        problems=audits.problems(after),
    )


def run_and_print(
    root: Path, lock: ReleaseLock, store: Store, package: Path | None, *, as_json: bool
) -> int:
    """Make the audit and print it; the exit code is 1 where there are problems."""
    result = make(root, lock, store, package, quiet=as_json)
    _keep(root, lock, result, package)
    if as_json:
        print(json.dumps(to_json(result), indent=2, sort_keys=True))
    else:
        console = Console()
        if not console.is_terminal:
            # A log or a pipe has no width of its own; eighty columns would break every name.
            console = Console(width=_LOG_WIDTH)
        console.print(table(result))
        for problem in result.problems:
            console.print(
                f"[red]{problem.rule}[/]: {problem.kernel} {problem.what}\n"
                f"  in {problem.cases[0]}"
                + (f" and {len(problem.cases) - 1} more" if len(problem.cases) > 1 else ""),
                highlight=False,
            )
        console.print(summary(result), highlight=False)
    return 1 if result.problems else 0


def _keep(root: Path, lock: ReleaseLock, result: Result, package: Path | None) -> None:
    """Keep the figures for the report."""
    series = root / "patches" / lock.vllm / "series.toml"
    records.keep_smem(
        root,
        records.SmemRecord(
            package=package.name if package else "", series=hash_file(series), vllm=lock.vllm,
            triton=result.triton, summary=summary(result), passed=not result.problems,
            chart=msgspec.convert(chart(result), records.Chart),
        ),
    )  # fmt: skip


def summary(result: Result) -> str:
    """One line: how many variants, the largest, the verdict."""
    variants = result.after.variants.values()
    largest = max((v.shared for v in variants), default=0)
    problems = len(result.problems)
    verdict = counted(problems, "problem") if problems else "all within the limits"
    before = ""
    if result.before is not None:
        most = max((v.shared for v in result.before.variants.values()), default=0)
        before = f", {most} unpatched"
    return (
        f"smem: {counted(len(variants), 'kernel variant')} for sm_75 with Triton {result.triton}: "
        f"at most {largest} of {SHARED_LIMIT} bytes{before}; {verdict}"
    )


def to_json(result: Result) -> dict[str, Any]:
    """Everything, for machines."""
    after = result.after
    return {
        "schema": 1,
        "subject": result.subject,
        "target": "sm_75",
        "triton": result.triton,
        "limit": SHARED_LIMIT,
        "passed": not result.problems,
        "summary": summary(result),
        "problems": [
            {"rule": p.rule, "kernel": p.kernel, "what": p.what, "cases": list(p.cases)}
            for p in result.problems
        ],
        "launches": [
            {
                "case": use.case,
                "group": use.group,
                "kernel": use.kernel,
                **_figures(after.variants.get(use.key)),
            }
            for use in after.uses
        ],
        "chart": chart(result),
        "models": [
            {"name": m.name, "layers": [layer.name for layer in m.layers], "source": m.source}
            for m in MODELS
        ],
    }


def _figures(variant: Variant | None) -> dict[str, Any]:
    if variant is None:
        return {}
    explained = audits.explanation(variant) if variant.spill_stores > 0 else None
    return {
        "parameters": variant.parameters,
        "shared": variant.shared,
        "registers": variant.registers,
        "spill_stores": variant.spill_stores,
        "spill_loads": variant.spill_loads,
        "mma": variant.mma,
        "fma": variant.fma,
        "explained": explained.why if explained else "",
    }


def chart(result: Result) -> dict[str, Any]:
    """Bars for the report: shared memory of a case before and after, against the limit."""
    before = _most(result.before) if result.before is not None else {}
    bars = [
        {"label": case, "before": before.get(case), "after": shared}
        for case, shared in _most(result.after).items()
        if case in before or shared > SHARED_LIMIT // 2
    ]
    return {"limit": SHARED_LIMIT, "unit": "bytes of shared memory a block", "bars": bars}


def _most(audit: Audit) -> dict[str, int]:
    most: dict[str, int] = {}
    for use in audit.uses:
        if use.key in audit.variants:
            shared = audit.variants[use.key].shared
            most[use.case] = max(most.get(use.case, 0), shared)
    return most


def table(result: Result) -> Table:
    """One row a case and kernel; a case's bytes before the patches stand beside those after."""
    before: dict[tuple[str, str], int] = {}
    if result.before is not None:
        for use in result.before.uses:
            if use.key in result.before.variants:
                before[use.case, use.kernel] = result.before.variants[use.key].shared
    title = f"{result.subject}: Triton {result.triton} for sm_75"
    out = Table(title=title, header_style="bold", box=None, pad_edge=False)
    for name in ("launch", "kernel", "sizes", "warps"):
        out.add_column(name, no_wrap=True)
    for name in ("unpatched", "shared B", "regs", "spill B", "fma", "mma"):
        out.add_column(name, justify="right")
    seen = set()
    for use in result.after.uses:
        variant = result.after.variants.get(use.key)
        if variant is None or (use.case, use.key) in seen:
            continue
        seen.add((use.case, use.key))
        was = before.get((use.case, use.kernel))
        out.add_row(
            use.case,
            use.kernel.removeprefix("_"),
            " ".join(str(variant.parameters[k]) for k in _SIZES if k in variant.parameters),
            str(variant.parameters.get("num_warps", "")),
            "" if was is None else _coloured(was),
            variant.failed[:40] or _coloured(variant.shared),
            str(variant.registers),
            str(variant.spill_stores),
            str(variant.fma),
            str(variant.mma),
        )
    return out


def _coloured(shared: int) -> str:
    return f"[red]{shared}[/]" if shared > SHARED_LIMIT else str(shared)
