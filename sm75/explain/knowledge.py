"""The known failures: ``knowledge.toml``, one entry each.

    schema = 1

    [[entry]]
    id = "no-kernel-image"             # stable; tests and other programs name it
    title = "no code for this GPU"
    severity = "failure"               # or "warning", "harmless"
    area = ["build", "serve"]          # where it is met
    cause = "what happened, {name} being a named group of the pattern"
    fix = ["what to do; a command stands in `backquotes`"]
    link = "https://…"                 # where it can be read
    arithmetic = "cuda-oom"            # optional: a sum with the numbers (arithmetic.py)
    instead = { build = "other-id" }   # optional: the entry for such a line in a log of that area
    [[entry.pattern]]
    needle = "no kernel image"         # literal text that every match has
    match = 'no kernel image is available'   # a Python regular expression
    unless = 'some other text'         # optional: not on lines that have this
    then = 'PyTorch \\((?P<x>[^)]+)\\)'  # optional: looked for in the next lines, for more groups

A log may be hostile or endless, so that patterns have no unbounded repetition of ``.`` (a test
sees to it).
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from sm75.errors import LockError
from sm75.explain import arithmetic
from sm75.lockfile import Text

SCHEMA = 1
FILE = Path(__file__).with_name("knowledge.toml")
# `.*`, `.+`, `.{3,}` and the like: they make a search quadratic in the length of a line.
_UNBOUNDED = re.compile(r"(?:(?<!\\)\.|~|\\[SDW])(?:[*+]|\{\d+,\})")
_CLASS = re.compile(r"\[(\^?)(?:\\.|[^\]\\])+\]")

Severity = Literal["failure", "warning", "harmless"]
Area = Literal["build", "serve"]


class Pattern(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One shape that a failure has in logs; see the module's text for the fields."""

    needle: Text
    match: Text
    unless: str = ""
    then: str = ""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """``match``, compiled."""
        return re.compile(self.match)

    @cached_property
    def excluded(self) -> re.Pattern[str] | None:
        """``unless``, compiled."""
        return re.compile(self.unless) if self.unless else None

    @cached_property
    def following(self) -> re.Pattern[str] | None:
        """``then``, compiled."""
        return re.compile(self.then) if self.then else None

    def search(self, text: str) -> re.Match[str] | None:
        """Look for it in a line."""
        if self.needle not in text:
            return None
        found = self.regex.search(text)
        if found and self.excluded and self.excluded.search(text):
            return None
        return found


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One known failure; see the module's text for the fields."""

    id: Text
    title: Text
    severity: Severity
    area: tuple[Area, ...]
    cause: Text
    fix: tuple[Text, ...]
    link: Text
    pattern: tuple[Pattern, ...]
    arithmetic: str = ""
    instead: dict[Area, str] = msgspec.field(default_factory=dict)


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    entry: tuple[Entry, ...]


@dataclass(frozen=True)
class Knowledge:
    """All entries, in the file's order."""

    entries: tuple[Entry, ...]


def load(path: Path = FILE) -> Knowledge:
    """Read the knowledge base.

    Args:
        path: The file.

    Raises:
        LockError: It is missing or malformed.
    """
    fix = f"restore it: git checkout -- {path.name}"
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
        if found.schema != SCHEMA:
            raise ValueError(f"schema {found.schema} is not known here")
        _check(found.entry)
    except (OSError, ValueError, re.error, msgspec.ValidationError) as error:
        raise LockError(f"{path} cannot be read", why=str(error), fix=fix) from error
    return Knowledge(found.entry)


def _check(entries: tuple[Entry, ...]) -> None:
    names = [entry.id for entry in entries]
    if len(set(names)) != len(names):
        raise ValueError("two entries have one id")
    for entry in entries:
        if not entry.pattern or not entry.fix or not entry.area:
            raise ValueError(f"{entry.id}: pattern, fix or area is empty")
        if lost := set(entry.instead.values()) - set(names):
            raise ValueError(f"{entry.id}: there is no entry {min(lost)}")
        if entry.arithmetic and entry.arithmetic not in arithmetic.SUMS:
            raise ValueError(f"{entry.id}: there is no arithmetic '{entry.arithmetic}'")
        for pattern in entry.pattern:
            for text in (pattern.match, pattern.unless, pattern.then):
                # Negated classes count as `.`, others as harmless.
                if _UNBOUNDED.search(_CLASS.sub(lambda m: "~" if m[1] else "c", text)):
                    raise ValueError(f"{entry.id}: unbounded repetition in {text}")
                re.compile(text)
