"""Counts in words for people."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun, as ``1 line`` or ``1,204 lines``.

    Args:
        number: How many.
        one: The noun of one, with what belongs to it: ``file to fetch`` takes ``many``.
        many: The noun of several; default: ``one`` with an s.
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"
