"""Variants that were compiled before, each in a file that says its own hash.

What was proved is a variant's PTX; the machine code beside it was made of that text. A file that
was cut off, or has other bytes than were written, is compiled again, never packed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm75 import atomic

_SUM = "sha256"


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def save(path: Path, facts: Mapping[str, Any]) -> None:
    """Keep what was compiled.

    Args:
        path: The file.
        facts: As JSON has them.

    Raises:
        DiskError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(path, json.dumps({**facts, _SUM: _digest(facts)}).encode())


def load(path: Path) -> dict[str, Any] | None:
    """What was kept; None where there is none, or other than was written."""
    try:
        facts: dict[str, Any] = json.loads(path.read_bytes())
        digest = facts.pop(_SUM)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return facts if digest == _digest(facts) else None
