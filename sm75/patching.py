"""Apply a patch series to a source tree exactly, or say precisely why not.

A hunk applies when its context and removed lines stand, byte for byte, at the very line its header
names (after the earlier patches of the series). There is no fuzz, no offset and no whitespace
tolerance. A series applies as a whole or not at all: everything is computed in memory first.

Runs alone inside the build recipe (standard library and ``unidiff`` only)::

    python -m sm75.patching apply --series patches/0.33.0 --tree DIR
    python -m sm75.patching check --series patches/0.33.0 --tree DIR_OR_SDIST [--json]
    python -m sm75.patching seal --series patches/0.33.0      # new hashes into series.toml
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from sm75.errors import CheckFailed, DiskError, PatchError, Sm75Error
from sm75.hunks import FileDiff, Hunk, Mismatch, apply_hunks, find_lines, split_lines
from sm75.series import Patch, Series, load_series, seal
from sm75.trees import DirectoryTree, Tree, open_tree

# So many places are named when a hunk's text stands elsewhere; a hunk of one common line has many.
MAX_PLACES = 5


class State(StrEnum):
    """How a patch or overlay file stands to a tree."""

    APPLIES = "applies"
    APPLIED = "already applied"
    ELSEWHERE = "applies elsewhere"
    CONFLICTS = "conflicts"
    UNNEEDED = "no longer needed"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why one hunk does not apply. Lines count from 1; ``elsewhere`` holds (path, line).

    ``found`` begins at ``found_line``, by default that of the hunk. ``old`` is what the release the
    patch was written for has there and around, where it was looked at (``sm75.drift``).
    """

    file: str
    hunk: int
    line: int
    reason: str
    expected: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    found_line: int = 0
    old: tuple[str, ...] = ()
    old_line: int = 0
    elsewhere: tuple[tuple[str, int], ...] = ()
    places: int = 0

    def describe(self) -> str:
        """Several lines for a person: where, expected, found, and where else the text stands."""
        where = f", hunk {self.hunk}, line {self.line}" if self.hunk else ""
        out = [f"{self.file}{where}: {self.reason}"]
        out += [f"    expected | {line}" for line in self.expected]
        if self.old:
            out.append(f"    old from line {self.old_line}, new from line {self.found_line}:")
            out += [f"    old      | {line}" for line in self.old]
        label = "new  " if self.old else "found"
        out += [f"    {label}    | {line}" for line in self.found]
        if self.elsewhere:
            named = ", ".join(f"{path}:{line}" for path, line in self.elsewhere)
            more = self.places - len(self.elsewhere)
            out.append(
                f"    the same text stands at {named}" + (f" and {more} more" if more else "")
            )
        return "\n".join(out)

    def move(self) -> str:
        """One line for a hunk that only moved: from where to where."""
        path, line = self.elsewhere[0]
        where = str(line) if path == self.file else f"{path}:{line}"
        return f"{self.file}, hunk {self.hunk}: line {self.line} -> {where}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The state of one patch (``kind`` "patch") or overlay file (``kind`` "overlay")."""

    kind: str
    name: str
    state: State
    purpose: str
    faults: tuple[Fault, ...] = ()

    def describe(self) -> str:
        """For a person: the state and the name, and below what is to be said of each hunk."""
        lines = [f"{self.state:17} {self.name}"]
        for fault in self.faults:
            # Of a conflict, hunks that only moved are worth a line, where the old tree says so.
            moved = fault.places == 1 and (self.state is State.ELSEWHERE or fault.old)
            lines += (fault.move() if moved else fault.describe()).splitlines()
        return "\n  ".join(lines)


class Workspace:
    """The tree as it would be after each patch, in memory.

    Args:
        series: From ``load_series``.
        tree: The tree.
    """

    def __init__(self, series: Series, tree: Tree) -> None:
        self.series = series
        self.tree = tree
        self.original = tree.load(sorted(series.paths()))
        self.now = dict(self.original)
        self.results: list[Result] = []
        self._unclear: set[str] = set()
        self._walked: dict[str, list[tuple[str, bytes]]] = {}
        self._applied = {path: self._applied_count(path) for path in sorted(series.paths())}

    def run(self) -> list[Result]:
        """The state of each overlay file and patch."""
        for overlay in self.series.overlays:
            before = self.original[overlay.dest]
            faults: tuple[Fault, ...] = ()
            if before == overlay.content:
                state = State.APPLIED
            elif unmet := [
                rule for rule in overlay.needs if not rule.holds(self.original[rule.file])
            ]:
                state = State.CONFLICTS
                faults = tuple(
                    Fault(
                        file=rule.file, hunk=0, line=0, reason=f"needed, and not so: {rule.words}"
                    )
                    for rule in unmet
                )
            elif before is None:
                state = State.APPLIES
                self.now[overlay.dest] = overlay.content
            else:
                state = State.CONFLICTS
                reason = "the tree has a file of its own here; an overlay never replaces one"
                faults = (Fault(file=overlay.dest, hunk=0, line=0, reason=reason),)
            self._add("overlay", overlay.dest, state, overlay.purpose, faults)
        for patch in self.series.patches:
            state, faults = self._patch(patch)
            self._add("patch", patch.file, state, patch.purpose, faults)
        return self.results

    def _add(
        self, kind: str, name: str, state: State, purpose: str, faults: tuple[Fault, ...]
    ) -> None:
        self.results.append(
            Result(kind=kind, name=name, state=state, purpose=purpose, faults=faults)
        )

    def _diffs(self, path: str) -> list[tuple[str, FileDiff]]:
        return [
            (patch.file, diff)
            for patch in self.series.patches
            for diff in patch.diffs
            if diff.path == path
        ]

    def _applied_count(self, path: str) -> int:
        """How many of the series' changes to this file, from the first on, it already has.

        Seen by taking them back: a count stands when every one of them, last first, comes off
        exactly. That is how a run that was killed between two files is resumed.
        """
        diffs = [diff for _, diff in self._diffs(path)]
        original = self.original[path]
        for count in range(len(diffs), 0, -1):
            content = original
            try:
                for diff in reversed(diffs[:count]):
                    content = _take_back(content, diff)
            except Mismatch:
                continue
            if diffs[0].creates or not _fits(original, diffs[0]):
                return count
            self._unclear.add(path)
            return 0
        return 0

    def _patch(self, patch: Patch) -> tuple[State, tuple[Fault, ...]]:
        faults: list[Fault] = []
        moved, pending = True, 0
        before = dict(self.now)
        for diff in patch.diffs:
            order = [name for name, _ in self._diffs(diff.path)].index(patch.file)
            if order < self._applied[diff.path]:
                continue
            pending += 1
            found, located = self._diff(diff)
            faults += found
            moved = moved and (located or not found)
        if not pending:
            return State.APPLIED, ()
        # Half applied, the patch itself may have made the condition true.
        untouched = pending == len(patch.diffs)
        if untouched and all(rule.holds(self.original[rule.file]) for rule in patch.drop_when):
            self.now = before  # later patches are judged without it
            return State.UNNEEDED, ()
        if not faults:
            return State.APPLIES, ()
        return (State.ELSEWHERE if moved else State.CONFLICTS), tuple(faults)

    def _diff(self, diff: FileDiff) -> tuple[list[Fault], bool]:
        """Apply one file's hunks. Returns the faults and whether all only moved."""
        content = self.now[diff.path]
        if diff.creates:
            if content is not None:
                reason = "the patch creates this file, but the tree has one already"
                return [Fault(file=diff.path, hunk=1, line=1, reason=reason)], False
            self.now[diff.path] = b"".join(apply_hunks([], diff.hunks))
            return [], False
        if content is None:
            return self._missing(diff)
        lines = split_lines(content)
        try:
            for hunk in diff.hunks:
                by_chance = self.aligned(diff, hunk) not in (None, hunk.old_start)
                if by_chance and hunk.old_start in find_lines(lines, hunk.old):
                    raise Mismatch(hunk, hunk.old, "the same lines stand here by chance")
            after = apply_hunks(lines, diff.hunks)
        except Mismatch as first:
            return self._misplaced(diff, lines, first)
        # A hunk that would apply again to its own result cannot be told from one not yet applied.
        result = b"".join(after)
        if diff.path not in self._unclear and not _fits(result, diff):
            self.now[diff.path] = result
            return [], False
        reason = "applied once or not at all looks the same; give its hunks more context"
        hunk = diff.hunks[0]
        return [Fault(file=diff.path, hunk=1, line=hunk.old_start, reason=reason)], False

    def _misplaced(
        self, diff: FileDiff, lines: list[bytes], first: Mismatch
    ) -> tuple[list[Fault], bool]:
        faults, moved = [], []
        for hunk in diff.hunks:
            line = self.aligned(diff, hunk)
            places = find_lines(lines, hunk.old) if line is None else [line]
            if hunk.old_start in places and hunk is not first.hunk:
                moved.append(hunk)
                continue
            start = hunk.old_start - 1
            found = lines[start : start + len(hunk.old)]
            elsewhere = [(diff.path, line) for line in places if line != hunk.old_start]
            if not elsewhere and hunk.old_start not in places:
                elsewhere = list(self._search(hunk, besides=diff.path))
            elif len(elsewhere) == 1:
                moved.append(_at(hunk, elsewhere[0][1]))
            reason = first.reason if hunk is first.hunk else "the lines differ"
            fault = _fault(diff.path, hunk, found, elsewhere, reason)
            faults.append(self.explained(diff, hunk, fault))
        if len(moved) == len(diff.hunks):
            try:
                # Later patches are judged against the file as it would be after the move.
                self.now[diff.path] = b"".join(apply_hunks(lines, moved))
            except Mismatch:
                return faults, False
            return faults, True
        return faults, False

    def _missing(self, diff: FileDiff) -> tuple[list[Fault], bool]:
        suffix = Path(diff.path).suffix
        homes = [
            path
            for path, content in self._walk(suffix)
            if all(len(find_lines(split_lines(content), h.old)) == 1 for h in diff.hunks)
        ]
        faults = []
        for hunk in diff.hunks:
            elsewhere = [
                (path, line)
                for path, line in self._search(hunk, besides=diff.path)
                if path in homes or len(homes) != 1
            ]
            fault = _fault(diff.path, hunk, (), elsewhere, "the tree has no such file")
            faults.append(self.explained(diff, hunk, fault))
        return faults, len(homes) == 1

    def aligned(self, diff: FileDiff, hunk: Hunk) -> int | None:
        """The line at which a hunk's old lines stand, where more is known than their text.

        ``sm75.drift`` knows more. Here: nothing is.
        """
        return None

    def explained(self, diff: FileDiff, hunk: Hunk, fault: Fault) -> Fault:
        """The fault with what more is known of it."""
        return fault

    def _walk(self, suffix: str) -> list[tuple[str, bytes]]:
        """All files of a kind, read once: an sdist costs a pass over the whole archive."""
        if suffix not in self._walked:
            self._walked[suffix] = list(self.tree.walk(suffix))
        return self._walked[suffix]

    def _search(self, hunk: Hunk, besides: str) -> Iterator[tuple[str, int]]:
        needle = b"".join(hunk.old)
        for path, content in self._walk(Path(besides).suffix):
            if path != besides and needle in content:
                yield from ((path, line) for line in find_lines(split_lines(content), hunk.old))


def _fits(content: bytes | None, diff: FileDiff) -> bool:
    """Whether the hunks of a change (not of a new file) stand at their exact places."""
    try:
        apply_hunks(split_lines(content or b""), diff.hunks)
    except Mismatch:
        return False
    return True


def _take_back(content: bytes | None, diff: FileDiff) -> bytes | None:
    hunks = [hunk.reversed() for hunk in diff.hunks]
    if content is None:
        raise Mismatch(hunks[0], (), "no such file")
    before = apply_hunks(split_lines(content), hunks)
    if not diff.creates:
        return b"".join(before)
    if before:
        raise Mismatch(hunks[0], before, "the file holds more than the patch put there")
    return None


def _at(hunk: Hunk, line: int) -> Hunk:
    return Hunk(number=hunk.number, old_start=line, new_start=line, old=hunk.old, new=hunk.new)


def _fault(
    path: str,
    hunk: Hunk,
    found: Sequence[bytes],
    elsewhere: Sequence[tuple[str, int]],
    reason: str,
) -> Fault:
    return Fault(
        file=path,
        hunk=hunk.number,
        line=hunk.old_start,
        reason=reason,
        expected=readable(hunk.old),
        found=readable(found) or ("(nothing: the file is shorter or missing)",),
        elsewhere=tuple(elsewhere[:MAX_PLACES]),
        places=len(elsewhere),
    )


def readable(lines: Sequence[bytes]) -> tuple[str, ...]:
    """Lines for a message, with blanks, tabs and line ends made visible where they matter."""
    out = []
    for line in lines:
        text = line.removesuffix(b"\n").decode("utf-8", errors="backslashreplace")
        plain = text.isprintable() and text == text.rstrip() and line.endswith(b"\n")
        out.append(text if plain else ascii(line)[1:])
    return tuple(out)


def check(series: Series, tree: Path) -> list[Result]:
    """Say how every overlay file and patch stands to a tree. Changes nothing.

    Args:
        series: From ``load_series``.
        tree: An unpacked tree, or an sdist (``.tar.gz``), which is read where it lies.

    Returns:
        Overlay files first, then patches, in the order of the series. Each patch is judged after
        the ones before it (moved ones at their new place, conflicting ones left out).

    Raises:
        PatchError: The tree or archive is unreadable or unsafe (links, devices, double members).
    """
    return Workspace(series, open_tree(tree)).run()


def apply(series: Series, tree: Path) -> None:
    """Apply a series to an unpacked tree: all of it or nothing.

    What is applied already is left alone (so a killed run is resumed, and nothing is touched
    twice). New contents go to temporary files first, and take their names only when all of them
    are on the disk.

    Args:
        series: From ``load_series``.
        tree: The unpacked tree.

    Raises:
        PatchError: Any patch does not apply at its exact place or is no longer needed. The
            message names patch, file, hunk, the lines expected and found, and where else they
            stand. Nothing was written.
        DiskError: The new files cannot be written. No file has changed.
    """
    work = Workspace(series, DirectoryTree(tree))
    bad = [r for r in work.run() if r.state not in (State.APPLIES, State.APPLIED)]
    if bad:
        raise _refusal(bad, series)
    changed = {
        path: content
        for path, content in work.now.items()
        if content is not None and content != work.original[path]
    }
    # New files first: at no moment does a patched file call a module that is not there.
    order = sorted(changed, key=lambda path: (work.original[path] is not None, path))
    _write_all(tree, {path: changed[path] for path in order})


def _refusal(bad: Sequence[Result], series: Series) -> PatchError:
    first = bad[0]
    if first.state is State.UNNEEDED:
        fix = f"drop {first.name} from {series.root.name}/series.toml"
    elif first.state is State.ELSEWHERE:
        fix = "review the new place, then correct the line numbers of the patch (patches rebase)"
    elif first.kind == "overlay":
        fix = "give our file another name, or drop it if upstream's does the same"
    else:
        fix = "write the patch again for this tree; nothing was changed"
    why = [fault.describe() for fault in first.faults]
    if first.state is State.UNNEEDED:
        why = ["its drop_when holds: upstream has what it does"]
    if len(bad) > 1:
        why.append("likewise: " + ", ".join(f"{r.name} ({r.state})" for r in bad[1:]))
    return PatchError(f"{first.name} does not apply: {first.state}", why="\n".join(why), fix=fix)


def _write_all(root: Path, files: dict[str, bytes]) -> None:
    temporary: list[tuple[Path, Path]] = []
    try:
        for path, content in files.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=".sm75-")
            temporary.append((Path(name), target))
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            mode = target.stat().st_mode & 0o7777 if target.exists() else 0o644
            Path(name).chmod(mode)
        for source, target in temporary:
            source.replace(target)
    except OSError as error:
        raise DiskError(
            f"the patched files cannot be written below {root}",
            why=str(error),
            fix="free space or correct the rights, then run the same command again",
        ) from error
    finally:
        for source, _ in temporary:
            source.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m sm75.patching``. Returns the exit code of ``sm75.errors``."""
    parser = argparse.ArgumentParser(prog="python -m sm75.patching", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=["apply", "check", "seal"])
    parser.add_argument("--series", type=Path, required=True, help="patches/<release>")
    parser.add_argument("--tree", type=Path, help="unpacked tree (check: or sdist)")
    parser.add_argument("--json", action="store_true", help="check: print the results as JSON")
    options = parser.parse_args(arguments)
    if options.tree is None and options.command != "seal":
        parser.error("--tree is needed")
    try:
        if options.command == "seal":
            print("\n".join(seal(options.series)) or "nothing changed")
            return 0
        series = load_series(options.series)
        if options.command == "apply":
            apply(series, options.tree)
            print(f"{len(series.patches)} patches and {len(series.overlays)} overlay files applied")
            return 0
        results = check(series, options.tree)
        if options.json:
            print(json.dumps([asdict(result) for result in results], indent=2))
        else:
            for result in results:
                print(result.describe())
        ok = all(result.state in (State.APPLIES, State.APPLIED) for result in results)
        return 0 if ok else CheckFailed.exit_code
    except Sm75Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
