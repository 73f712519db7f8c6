"""How the patches of one release stand to another release's sources.

A patch alone knows its two lines of context; the tree it was written for knows the whole file. So
the old file is compared with the new one, and a hunk is looked for where the lines around it went.
That finds it where its own text stands several times, it refuses a line where the text stands by
chance, and it shows a conflict from three sides: what the patch expects, what the old release has
there, and what the new one has.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from sm75.errors import PatchError
from sm75.hunks import FileDiff, Hunk, Mismatch, apply_hunks, find_lines, split_lines
from sm75.patching import Fault, Result, Workspace, readable
from sm75.series import Series
from sm75.trees import Tree

# Unchanged lines around a hunk that must have come along for its new place to be believed, when
# its own text stands more than once in the new file.
SURE = 3
# Lines before and after a hunk in the view of a conflict, and the most lines shown of a side.
AROUND = 3
MOST_LINES = 30


def compare(series: Series, old: Tree, new: Tree) -> list[Result]:
    """Say how each overlay file and patch stands to another release. Changes nothing.

    Args:
        series: The old release's series.
        old: The old release's tree, unpatched; the series applies to it.
        new: The new release's tree.

    Returns:
        As ``sm75.patching.check`` does.

    Raises:
        PatchError: The series does not apply to the old tree, or a tree is unreadable.
    """
    return _Drift(series, old, new).run()


class KeptTree:
    """A tree that reads everything once: an sdist costs a pass over the archive each time.

    Args:
        tree: The tree to read.
        paths: What will be asked for, as far as known.
    """

    def __init__(self, tree: Tree, paths: Iterable[str] = ()) -> None:
        self._tree = tree
        self._loaded = tree.load(sorted(set(paths)))
        self._walked: dict[str, list[tuple[str, bytes]]] = {}
        self.label = tree.label

    def load(self, paths: Iterable[str]) -> dict[str, bytes | None]:
        """Contents of the paths; ``None`` for one that does not exist."""
        wanted = list(paths)
        if new := [path for path in wanted if path not in self._loaded]:
            self._loaded |= self._tree.load(new)
        return {path: self._loaded[path] for path in wanted}

    def walk(self, suffix: str) -> Iterator[tuple[str, bytes]]:
        """All regular files whose name ends in ``suffix``."""
        if suffix not in self._walked:
            self._walked[suffix] = list(self._tree.walk(suffix))
        yield from self._walked[suffix]


class _Drift(Workspace):
    def __init__(self, series: Series, old: Tree, new: Tree) -> None:
        super().__init__(series, new)
        self._before = _before_each(series, old)
        self._maps: dict[FileDiff, _LineMap] = {}

    def _map(self, diff: FileDiff) -> _LineMap | None:
        """From the old file to the new one, each as the patches before this one leave it."""
        if diff not in self._maps:
            old, new = self._before[diff], self.now[diff.path]
            if old is None or new is None:
                return None
            self._maps[diff] = _LineMap(split_lines(old), split_lines(new))
        return self._maps[diff]

    def aligned(self, diff: FileDiff, hunk: Hunk) -> int | None:
        """Where the lines around the hunk went, if its old lines stand there unchanged."""
        lines = self._map(diff)
        if lines is None:
            return None
        line = lines.whole(hunk.old_start, len(hunk.old), SURE)
        if line is None:
            places = find_lines(lines.new, hunk.old)
            line = places[0] if len(places) == 1 else None
        return line

    def explained(self, diff: FileDiff, hunk: Hunk, fault: Fault) -> Fault:
        """The fault with the old release's lines and those in their place in the new one."""
        old = self._before[diff]
        if old is None:
            return fault
        first = max(hunk.old_start - AROUND, 1)
        there = split_lines(old)[first - 1 : hunk.old_start - 1 + len(hunk.old) + AROUND]
        fault = replace(fault, old=_shown(there), old_line=first)
        lines = self._map(diff)
        if lines is None:
            return fault
        start, stop = lines.region(first, len(there))
        found = _shown(lines.new[start - 1 : stop - 1])
        return replace(fault, found=found or ("(nothing: the lines are gone)",), found_line=start)


class _LineMap:
    """Which lines of the old file are which of the new one. Lines count from 1."""

    def __init__(self, old: list[bytes], new: list[bytes]) -> None:
        self.old = old
        self.new = new
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        self._blocks = matcher.get_opcodes()

    def whole(self, line: int, count: int, more: int) -> int | None:
        """Where ``count`` lines stand that came along together with ``more`` lines around them."""
        first, last = line - 1, line - 1 + count
        for kind, i1, i2, j1, _ in self._blocks:
            if kind == "equal" and i1 <= first and last <= i2:
                return j1 + first - i1 + 1 if i2 - i1 >= count + more else None
        return None

    def region(self, line: int, count: int) -> tuple[int, int]:
        """The lines of the new file, [start, stop), that are in the place of ``count`` old ones."""
        first, last = line - 1, line - 1 + count
        start, stop = len(self.new), len(self.new)
        for kind, i1, i2, j1, j2 in self._blocks:
            if i1 <= first < i2:
                start = j1 + (first - i1 if kind == "equal" else 0)
            if i1 < last <= i2:
                stop = j1 + last - i1 if kind == "equal" else j2
        return start + 1, max(stop, start) + 1


def _before_each(series: Series, old: Tree) -> dict[FileDiff, bytes | None]:
    """The old release's files as each patch of the series finds them."""
    now = old.load(sorted(series.paths()))
    before: dict[FileDiff, bytes | None] = {}
    for patch in series.patches:
        for diff in patch.diffs:
            before[diff] = content = now[diff.path]
            try:
                if diff.creates is not (content is None):
                    raise Mismatch(diff.hunks[0], (), "the file is there already, or it is not")
                lines = split_lines(content or b"")
                now[diff.path] = b"".join(apply_hunks(lines, diff.hunks))
            except Mismatch as error:
                raise PatchError(
                    f"{patch.file} does not apply to {old.label}, for which it is written",
                    why=f"{diff.path}, line {error.hunk.old_start}: {error.reason}",
                    fix=f"give the sources of {series.release}, or correct its series first",
                ) from error
    return before


def _shown(lines: Sequence[bytes]) -> tuple[str, ...]:
    shown = readable(lines[:MOST_LINES])
    more = len(lines) - MOST_LINES
    return (*shown, f"(and {more} more lines)") if more > 0 else shown
