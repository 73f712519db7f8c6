"""The table of docs/releases.md: how our patches stand to each release of vLLM."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from sm75 import atomic, sdists
from sm75.drift import KeptTree, compare
from sm75.errors import CheckFailed
from sm75.patching import Result, State
from sm75.series import Condition, Series, all_series
from sm75.store import Store
from sm75.trees import open_tree

PAGE = Path("docs") / "releases.md"
BEGIN = "<!-- Made by `python3 orchestrator.py patches releases --write`; not written by hand."
END = "<!-- The end of what is made. -->"
# What stands in the summary for each state.
_SHORT = {
    State.APPLIES: "apply",
    State.ELSEWHERE: "elsewhere",
    State.CONFLICTS: "conflict",
    State.UNNEEDED: "not needed",
    State.APPLIED: "applied",
}


@dataclass(frozen=True, kw_only=True)
class Survey:
    """How each series stands to each release.

    Attributes:
        releases: All that were looked at, oldest first.
        results: By the release of the series, then by the release looked at.
    """

    releases: tuple[str, ...]
    results: Mapping[str, Mapping[str, Sequence[Result]]]

    def plain(self) -> dict[str, dict[str, dict[str, str]]]:
        """States as JSON-ready data: by series, release, and name of the patch or file."""
        return {
            start: {
                release: {one.name: str(one.state) for one in results}
                for release, results in by_release.items()
            }
            for start, by_release in self.results.items()
        }


def survey(root: Path, store: Store) -> Survey:
    """Compare every series with the sdist of every pinned release (fetches what is missing).

    Args:
        root: The project's directory.
        store: The store.

    Raises:
        FetchError: An sdist cannot be had.
        PatchError: A series is not valid, or does not apply to its own release.
        LockError: The pins cannot be read.
    """
    every = all_series(root / "patches")
    releases = sorted(sdists.pinned(root), key=Version)
    paths = {path for series in every for path in series.paths()}
    trees = {
        release: KeptTree(open_tree(sdists.obtain(root, store, release)), paths)
        for release in releases
    }
    results = {
        series.release: {
            release: compare(series, trees[series.release], trees[release]) for release in releases
        }
        for series in every
    }
    return Survey(releases=tuple(releases), results=results)


def stamp(root: Path) -> str:
    """What the table is made of, as a line for it: hashes of the series and of the pinned sdists.

    Raises:
        PatchError: A series is not valid.
        LockError: The pins cannot be read.
    """
    series = ", ".join(f"{s.release} {_digest(_facts(s))}" for s in all_series(root / "patches"))
    pins = _digest(sorted((pin.release, pin.sha256) for pin in sdists.pinned(root).values()))
    return f"     Series: {series}; sdists: {pins} -->"


def _facts(series: Series) -> object:
    """All that decides how a series stands to a tree; texts for people are no part of it."""

    def rules(conditions: Sequence[Condition]) -> list[str]:
        return [f"{rule.file}: {rule.words}" for rule in conditions]

    return [
        [[patch.file, patch.sha256, rules(patch.drop_when)] for patch in series.patches],
        [[overlay.dest, overlay.sha256, rules(overlay.needs)] for overlay in series.overlays],
    ]


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def markdown(found: Survey, made_of: str) -> str:
    """The generated part of the page, with its marks.

    Args:
        found: From ``survey``.
        made_of: From ``stamp``.
    """
    parts = [f"{BEGIN}\n{made_of}", _summary(found)]
    for start, by_release in found.results.items():
        parts += [f"### {start}'s series on other releases", _states(found, by_release)]
        if conflicts := _conflicts(by_release):
            head = f"What conflicts, with its line in {start}, and with which release:"
            parts.append("\n".join([head, "", *conflicts]))
    return "\n\n".join([*parts, END]) + "\n"


def _summary(found: Survey) -> str:
    starts = list(found.results)
    rows = [["release", *(f"from {start}'s" for start in starts), "series of its own"]]
    for release in found.releases:
        states = {start: found.results[start][release] for start in starts}
        best = min(starts, key=lambda start: _cost(states[start]))
        cells = []
        for start in starts:
            counted = Counter(result.state for result in states[start] if result.kind == "patch")
            text = ", ".join(f"{n} {_SHORT[s]}" for s in State if (n := counted[s]))
            unmet = [r for r in states[start] if r.kind == "overlay" and r.state != State.APPLIES]
            text += f"; {len(unmet)} of our files not" if unmet else ""
            cells.append(f"**{text}**" if start == best else text)
        rows.append([release, *cells, "yes" if release in starts else "no"])
    return _table(rows)


def _cost(results: Sequence[Result]) -> tuple[int, int]:
    """Fewer conflicts first, then fewer moves."""
    counted = Counter(result.state for result in results)
    return counted[State.CONFLICTS], counted[State.ELSEWHERE]


def _states(found: Survey, by_release: Mapping[str, Sequence[Result]]) -> str:
    rows = [["", *found.releases]]
    for number, one in enumerate(by_release[found.releases[0]]):
        states = [by_release[release][number].state for release in found.releases]
        # Files of our own are worth a row where one does not fit; most always do.
        if one.kind == "patch" or any(state is not State.APPLIES for state in states):
            rows.append([f"`{one.name}`", *map(str, states)])
    return _table(rows)


def _conflicts(by_release: Mapping[str, Sequence[Result]]) -> list[str]:
    """One line for each conflict, with the releases that have it."""
    where: dict[str, list[str]] = {}
    for release, results in by_release.items():
        for result in results:
            if result.state is State.CONFLICTS:
                # Of a conflicting patch, hunks that stand in one other place only moved.
                places = [
                    f"`{fault.file}`" + (f" {fault.line}" if fault.line else "")
                    for fault in result.faults
                    if fault.places != 1
                ]
                what = f"`{result.name}` ({', '.join(dict.fromkeys(places))})"
                where.setdefault(what, []).append(release)
    return [f"- {what}: {', '.join(releases)}" for what, releases in where.items()]


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def write(root: Path, made: str) -> bool:
    """Put the generated part into the page; what is written by hand around it stays.

    Args:
        root: The project's directory.
        made: From ``markdown``.

    Returns:
        Whether the page changed.

    Raises:
        CheckFailed: The page lacks the marks.
        DiskError: It cannot be written.
    """
    text = _page(root)
    before, _, after = _split(text)
    whole = before + made + after
    if whole != text:
        atomic.write_bytes(root / PAGE, whole.encode())
    return whole != text


def check(root: Path) -> None:
    """Say whether the committed table is that of the committed series. Reads no sdist.

    Args:
        root: The project's directory.

    Raises:
        CheckFailed: It is not.
    """
    _, made, _ = _split(_page(root))
    if stamp(root) not in made.splitlines():
        raise CheckFailed(
            f"the table in {PAGE} is stale",
            why="a patch, an overlay file, a condition or a pinned sdist changed since it was made",
            fix="make it again: python3 orchestrator.py patches releases --write",
        )


def _page(root: Path) -> str:
    path = root / PAGE
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _split(text: str) -> tuple[str, str, str]:
    """Before the generated part, that part, after it."""
    start, end = text.find(BEGIN), text.find(f"{END}\n")
    if start < 0 or end < start:
        raise CheckFailed(
            f"{PAGE} has no place for the table",
            why="the two comments between which it stands are missing",
            fix=f"restore the page: git checkout -- {PAGE}",
        )
    end += len(END) + 1
    return text[:start], text[start:end], text[end:]
