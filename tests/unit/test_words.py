"""Counts in words."""

from __future__ import annotations

import re

import pytest

from sm75.words import counted, visible
from tests.unit.projectkit import ROOT


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0 files"), (1, "1 file"), (2, "2 files"), (12345, "12,345 files")],
)
def test_files(number: int, said: str) -> None:
    assert counted(number, "file") == said


def test_a_plural_of_its_own() -> None:
    assert counted(1, "library", "libraries") == "1 library"
    assert counted(3, "library", "libraries") == "3 libraries"


# Counts of one that cannot be, or nouns that a number does not belong to.
KNOWN = {
    "constraints.py", "lockcheck.py", "lockgen.py", "lockpolicy.py", "cmakepins.py", "worker.py",
    "channelcheck.py",  # "a fault", or more than one
    "fetch.py", "text.py", "newprefix.py", "bundles.py",  # two and more
    "pkgdiff.py",  # not the same number twice
    "patching.py",  # runs in the recipe's tree, without sm75.words
}  # fmt: skip


def test_no_message_counts_without_it() -> None:
    """``{len(x)} files`` says "1 files" one day."""
    bare = re.compile(r"(?<! of )\{len\([^{}]*\)\} [a-z]+s\b(?! (?:of|and) \{)")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "sm75").rglob("*.py"))
        if path.name not in KNOWN
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if bare.search(line)
    ]
    assert found == []


def test_control_characters_show() -> None:
    assert visible("a\tb\nc \x1b[31m\x9b\x7f\u202e ü 日本 😀") == (
        "a\tb\nc \\x1b[31m\\x9b\\x7f\\u202e ü 日本 😀"
    )
