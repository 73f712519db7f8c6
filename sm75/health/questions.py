"""Small questions with known answers, and whether a text has them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

# The sum that is asked, and between what its two numbers are.
SUM = "What is {a} + {b}? Answer with the number only."
LOWEST, HIGHEST = 11, 49
_NUMBER = re.compile(r"\d+")
_SKY = r"scatter|rayleigh|wavelength|light|atmosphere"


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question.

    Attributes:
        text: What is asked.
        expected: What a right answer has, in words.
        right: Whether a text is one.
        max_tokens: Tokens that the answer may have.
        may_be_cut: Whether ``length`` is a good end: of an explanation it is, of one word not.
        stream: Whether the answer is asked for piece by piece, as chat windows do.
    """

    text: str
    expected: str
    right: Callable[[str], bool]
    max_tokens: int
    may_be_cut: bool = False
    stream: bool = False


def choose(seed: int | None = None, *, most_tokens: int = 0) -> list[Question]:
    """Three questions; the sum is another each time, so that no cached or canned answer fits.

    Args:
        seed: The same gives the same questions.
        most_tokens: Another limit for every answer, for models that think aloud; 0: their own.
    """
    r = random.Random(seed)  # noqa: S311
    a, b = r.randint(LOWEST, HIGHEST), r.randint(LOWEST, HIGHEST)
    return [
        Question(
            text=SUM.format(a=a, b=b),
            expected=str(a + b),
            right=lambda text: _NUMBER.findall(text)[-1:] == [str(a + b)],
            max_tokens=most_tokens or 48,
        ),
        Question(
            text="What is the capital of France? Answer with one word.",
            expected="Paris",
            right=lambda text: "paris" in text.lower(),
            max_tokens=most_tokens or 48,
        ),
        Question(
            text="Explain in two sentences why the sky is blue.",
            expected="a word of: scatter, Rayleigh, wavelength, light, atmosphere",
            right=lambda text: bool(re.search(_SKY, text.lower())),
            max_tokens=most_tokens or 96,
            may_be_cut=True,
            stream=True,
        ),
    ]
