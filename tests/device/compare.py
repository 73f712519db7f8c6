"""Tokens of an engine against a reference in float32, with a tolerance on near-ties.

Each generated token is looked at with the very tokens before it that the engine had, so that one
difference does not hide what follows. A token is sound when its logit in the reference is the best
one, or less than a tolerance below it: float16 cannot tell such tokens apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# By checkpoint. Logits of these models reach 30 (soft cap) and the engine computes in float16, with
# a relative error of 2**-11 at each rounding. Marlin for 7.5 also adds up in float16, and with
# experts float16 weighs near-equal ones otherwise: there log probabilities were off by up to 0.10
# and 0.18 in a first run, so that two tokens of twice that distance can change places.
TOLERANCE = {"plain": 0.05, "vision": 0.05, "experts": 0.25, "w4a16-unpacked": 0.25}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One run against the reference.

    Attributes:
        tokens: Generated in all.
        best: Those that are the reference's own choice.
        deficit: The largest distance of a token's logit below the best one.
        unsound: Tokens further below than the tolerance.
        tolerance: It.
        logprob: Largest difference of a token's log probability from the reference's; None where
            the run gave none.
    """

    tokens: int
    best: int
    deficit: float
    unsound: int
    tolerance: float
    logprob: float | None = None

    @property
    def sound(self) -> bool:
        """Whether there are tokens, and all of them are sound."""
        return self.tokens > 0 and self.unsound == 0

    def facts(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {**asdict(self), "sound": self.sound}


def judge(
    deficits: Sequence[Sequence[float]],
    tolerance: float,
    logprobs: Sequence[Sequence[float]] = (),
    reference: Sequence[Sequence[float]] = (),
) -> Verdict:
    """Judge a run.

    Args:
        deficits: By prompt and token: the reference's best logit minus that of the token.
        tolerance: How large one may be.
        logprobs: The engine's log probability of each token, in the same shape; or nothing.
        reference: The reference's, likewise.

    Raises:
        ValueError: The shapes differ.
    """
    flat = [value for row in deficits for value in row]
    difference = None
    if logprobs:
        pairs = [
            (a, b)
            for mine, theirs in zip(logprobs, reference, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        ]
        difference = max((abs(a - b) for a, b in pairs), default=None)
    return Verdict(
        tokens=len(flat),
        best=sum(value <= 0 for value in flat),
        deficit=max(flat, default=0.0),
        # A NaN is no token that could be explained.
        unsound=sum(not value < tolerance for value in flat),
        tolerance=tolerance,
        logprob=difference,
    )
