"""Words for people: counts, and texts that others wrote."""

from __future__ import annotations

import re

# What moves the cursor, colours or turns text round: C0 and C1 but tab and line feed, and Unicode's
# bidirectional controls (UAX #9).
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun, as ``1 line`` or ``1,204 lines``.

    Args:
        number: How many.
        one: The noun of one, with what belongs to it: ``file to fetch`` takes ``many``.
        many: The noun of several; default: ``one`` with an s.
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def visible(text: str) -> str:
    r"""A text of others (a server's, a file's) for a terminal: control characters as ``\x1b``.

    Args:
        text: One line or several.
    """
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)
