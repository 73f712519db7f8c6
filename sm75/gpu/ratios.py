"""Attention compiled ahead of time beside Triton's FMA, in the result of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AHEAD, FIELD = "ahead of time", "4 warps"
# Sides that have the patched parameters, by Triton's JIT.
FMA = ("patched", "4 warps", "8 warps", "largest tiles")


@dataclass(frozen=True)
class Row:
    """Milliseconds of one trial, all of one run.

    Attributes:
        trial: Its name.
        field: With 4 warps, what the field report ran.
        best: The fastest of Triton's JIT with the patches' parameters.
        ahead: The kernel that was compiled ahead of time.
    """

    trial: str
    field: float
    best: float
    ahead: float

    @property
    def over_field(self) -> float:
        """How many times faster than with 4 warps."""
        return self.field / self.ahead

    @property
    def over_best(self) -> float:
        """How many times faster than the best of FMA."""
        return self.best / self.ahead


def rows(report: Mapping[str, Any]) -> list[Row]:
    """The trials that were timed ahead of time and by the JIT.

    A trial whose attention went to the JIT on both sides says nothing, and is left out.

    Args:
        report: The result's JSON.
    """
    times: dict[str, dict[str, float]] = {}
    own = set()
    for one in report["results"]:
        if "ms" in one:
            times.setdefault(one["trial"], {})[one["side"]] = one["ms"]
            if one["side"] == AHEAD and _tensor_cores(one):
                own.add(one["trial"])
    return [
        Row(
            trial,
            sides[FIELD],
            min(sides[name] for name in FMA if name in sides),
            sides[AHEAD],
        )
        for trial, sides in times.items()
        if trial in own and FIELD in sides
    ]


def _tensor_cores(one: Mapping[str, Any]) -> bool:
    return any(launch["parameters"].get("mma", 0) > 0 for launch in one["launches"])
