"""The evidence behind the chart of attention: FMA against tensor cores, out of one run's result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm75.errors import UsageError
from sm75.gpu import judge, ratios, report
from sm75.gpu.ratios import Row

EVIDENCE = Path("docs") / "evidence"
TURING = "7.5"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Times of one run.

    Attributes:
        file: Of the evidence.
        date: When it was run.
        gpu: Where.
        standing: What the times are, and are not.
        triton: Version of the JIT.
        rows: The trials, in the order of the run.
    """

    file: str
    date: str
    gpu: str
    standing: str
    triton: str
    rows: tuple[Row, ...]


def find(root: Path, release: str) -> Attention | None:
    """The newest committed evidence of a release that has both; None where there is none.

    A trial whose numbers were wrong, or whose times are no times, is left out: results are judged
    anew when they are read.

    Args:
        root: The project's directory.
        release: Of vLLM.
    """
    found = []
    for path in sorted((root / EVIDENCE).glob("attention-*.json")):
        try:
            result = report.read_result(path)
        except UsageError:
            continue  # evidence of something else
        if result["vllm"] != release or result.get("target") != judge.TARGET:
            continue
        try:
            rows = tuple(row for row in ratios.rows(_right(result)) if _sound(row))
        except (KeyError, TypeError, AttributeError):
            continue
        if rows:
            found.append((result["date"], path.name, result, rows))
    if not found:
        return None
    date, name, result, rows = max(found, key=lambda one: one[:2])
    return Attention(
        file=f"{EVIDENCE}/{name}", date=date[:10], gpu=result["gpu"], triton=result["triton"],
        standing=standing(result["gpu"], str(result.get("capability"))), rows=rows,
    )  # fmt: skip


def standing(gpu: str, capability: str) -> str:
    """What times are worth: on which GPU, and that it was no T4G where it was none."""
    name = gpu.removeprefix("NVIDIA ")
    article = "an" if name[:1].upper() in tuple("AEFHILMNORSX") else "a"
    said = f"sm_75 PTX on {article} {name}"
    return said if capability == TURING else f"{said}; no T4G has been timed"


def _right(result: dict[str, Any]) -> dict[str, Any]:
    return result | {"results": [one for one in result["results"] if one["passed"]]}


def _sound(row: Row) -> bool:
    return all(
        isinstance(value, int | float) and math.isfinite(value) and value > 0
        for value in (row.field, row.best, row.ahead)
    )
