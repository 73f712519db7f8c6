"""``verify``: hold a built vllm-sm75 package to its rules (:mod:`sm75.rules`), with evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from sm75.aot.check import Checked, Kernel
from sm75.buildgraph import BuildGraph
from sm75.errors import CheckFailed
from sm75.packagefacts import gather
from sm75.rules import RULES, Finding, Policy, graph_rules

__all__ = ["Finding", "Policy", "Verification", "require", "table", "to_json", "verify"]


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The findings on one package.

    Attributes:
        package: Its file name.
        ok: No rule is broken (rules that could not be checked do not count).
        findings: One a rule, in a fixed order.
        cubins: Pieces of machine code in all.
        extensions: Pieces of machine code by extension.
        kernels: Variants of attention that were compiled ahead of time, where their package was
            checked too.
    """

    package: str
    ok: bool
    findings: tuple[Finding, ...]
    cubins: int
    extensions: dict[str, int]
    kernels: tuple[Kernel, ...] = ()


def verify(
    package: Path,
    policy: Policy,
    *,
    graph: BuildGraph | None = None,
    cuobjdump: Path | None = None,
    kernels: Checked | None = None,
) -> Verification:
    """Check a built package against the policy.

    Args:
        package: The ``.conda``.
        policy: What to hold it to.
        graph: The build it came from (:func:`sm75.buildgraph.load`); None: those rules are
            reported as not checked.
        cuobjdump: NVIDIA's tool, for a second reading of the device code; None likewise.
        kernels: What was found of the package of kernels beside it; None: there is none.

    Raises:
        UsageError: There is no such package.
        ChannelError: It is damaged.
        ToolchainError: cuobjdump cannot be run.
    """
    facts = gather(
        package,
        python_abi=policy.python,
        build_paths=policy.build_paths,
        cuobjdump=cuobjdump,
    )
    findings = tuple(rule(facts, policy) for rule in RULES) + graph_rules(graph, policy)
    if kernels is not None:
        findings += kernels.findings
    sass = {
        library.name: sum(code.kind == "sass" for code in library.codes)
        for library in facts.libraries
    }
    return Verification(
        package=package.name,
        ok=all(finding.state != "fail" for finding in findings),
        findings=findings,
        cubins=sum(sass.values()),
        extensions=sass,
        kernels=kernels.kernels if kernels is not None else (),
    )


def of_kernels(package: str, kernels: Checked) -> Verification:
    """The findings on a package of kernels alone.

    Args:
        package: Its name.
        kernels: What was found.
    """
    return Verification(
        package=package, ok=all(finding.state != "fail" for finding in kernels.findings),
        findings=kernels.findings, cubins=len(kernels.kernels), extensions={},
        kernels=kernels.kernels,
    )  # fmt: skip


def require(result: Verification) -> None:
    """Turn a broken rule into an error.

    Raises:
        CheckFailed: With every broken rule and its evidence.
    """
    broken = [finding for finding in result.findings if finding.state == "fail"]
    if broken:
        raise CheckFailed(
            f"{result.package} breaks {len(broken)} of {len(result.findings)} rules",
            why="; ".join(f"{finding.rule}: {finding.evidence}" for finding in broken),
            fix="mend the build and verify again; the package is not fit to publish",
        )


def to_json(result: Verification) -> dict[str, Any]:
    """The findings as plain JSON data, in a fixed order."""
    data: dict[str, Any] = msgspec.to_builtins(result)
    return data


def table(result: Verification) -> Table:
    """The findings as a table for people."""
    shown = Table(title=result.package)
    for column in ("rule", "", "evidence"):
        shown.add_column(column, overflow="fold")
    colour = {"ok": "green", "fail": "red", "not checked": "yellow"}
    for finding in result.findings:
        shown.add_row(
            finding.rule, Text(finding.state, style=colour[finding.state]), Text(finding.evidence)
        )
    return shown


def kernel_table(result: Verification) -> Table:
    """A row for each variant of attention that was compiled ahead of time."""
    shown = Table(title="attention compiled ahead of time, counted in its machine code")
    for column in ("kernel", "parameters"):
        shown.add_column(column, overflow="fold")
    for column in ("warps", "HMMA.1688", "spills B", "shared B", "registers"):
        shown.add_column(column, justify="right")
    for one in result.kernels:
        given = ", ".join(f"{name} {value}" for name, value in one.parameters.items())
        figures = (one.warps, one.hmma, one.spills, one.shared, one.registers)
        shown.add_row(
            Text(one.kernel), Text(given), *("?" if n is None else f"{n:,}" for n in figures)
        )
    return shown
