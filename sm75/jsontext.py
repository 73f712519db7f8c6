"""JSON that others wrote: models, servers, images."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """Read JSON.

    Raises:
        ValueError: It is none, or is nested deeper than Python reads (a thousand levels).
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
