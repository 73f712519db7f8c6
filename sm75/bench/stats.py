"""Medians with spread and confidence. Standard library only: ``memory`` runs where nothing is.

The interval is that of order statistics: with n independent values, the k-th smallest and the k-th
largest hold the median with probability 1 - 2 P(X < k), X binomial with n and 1/2. It supposes
nothing of the distribution, is exact, and the same each time, which a bootstrap of ten values is
not. (H. A. David, H. N. Nagaraja, Order Statistics, 3rd ed., section 7.1.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

CONFIDENCE = 0.95
FEWEST = 6
"""With fewer values no interval has 95 %: five have 1 - 2/32 = 93.75 %."""
METHOD = "order statistics of the median (distribution-free, at least 95 %)"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Values in a few numbers, in the values' unit.

    Attributes:
        n: How many.
        median: The median.
        low: Lower end of the median's confidence interval; None with fewer than ``FEWEST`` values.
        high: Upper end.
        confidence: That interval's exact confidence, 0 to 1; None without one.
        quartiles: Of the values (linear between neighbours).
        least: The smallest.
        most: The largest.
    """

    n: int
    median: float
    low: float | None
    high: float | None
    confidence: float | None
    quartiles: tuple[float, float]
    least: float
    most: float

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return asdict(self)

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """For people: the median, and its interval or, without one, the range."""
        median = f"{self.median * scale:.{digits}f}"
        if self.n == 1:
            return f"{median} (one value)"
        if self.low is None or self.high is None:
            return f"{median} ({self.least * scale:.{digits}f} to {self.most * scale:.{digits}f})"
        return f"{median} [{self.low * scale:.{digits}f}, {self.high * scale:.{digits}f}]"


def summarise(values: Sequence[float]) -> Summary | None:
    """Sum values up; nothing for no values."""
    if not values:
        return None
    ordered = sorted(values)
    found = interval(len(ordered))
    rank, confidence = found if found else (0, None)
    return Summary(
        n=len(ordered),
        median=quantile(ordered, 0.5),
        low=ordered[rank - 1] if rank else None,
        high=ordered[-rank] if rank else None,
        confidence=confidence,
        quartiles=(quantile(ordered, 0.25), quantile(ordered, 0.75)),
        least=ordered[0],
        most=ordered[-1],
    )


def interval(n: int, confidence: float = CONFIDENCE) -> tuple[int, float] | None:
    """The rank k of the narrowest interval of such confidence, and its exact confidence.

    Args:
        n: How many values.
        confidence: At least so much, 0 to 1.

    Returns:
        None where even the smallest and the largest value have less.
    """
    best, below = None, 0
    for k in range(1, n // 2 + 1):
        below += math.comb(n, k - 1)
        exact = 1 - 2 * below / 2**n
        if exact < confidence:
            break
        best = (k, exact)
    return best


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of ordered values, linear between neighbours.

    Args:
        ordered: At least one value, smallest first.
        share: 0 to 1.
    """
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
