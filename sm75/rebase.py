"""The series of one release made into the series of another.

Nothing is written unless every patch applies, or its change is accepted, and the series that comes
of it applies strictly to the new release. What conflicts is for a person.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sm75 import atomic
from sm75.drift import compare
from sm75.errors import PatchError, UsageError
from sm75.hunks import split_lines
from sm75.patching import Result, State, Workspace
from sm75.series import BLOCK, FILE, FROM, SHA256, Series, load_series, seal
from sm75.trees import Tree

_HUNK = re.compile(rb"@@ -(\d+)(,\d+)? \+\d+(,\d+)? @@(.*\n)")
_INDEX = re.compile(rb"index [0-9a-f]+\.\.[0-9a-f]+( \d+)?\n")
_FROM_LINE = re.compile(f"{FROM.pattern}\n?")
_GIT = re.compile(rb"diff --git a/\S+ b/(\S+)\n")
_HEADER = """\
# What this project changes in vLLM {release}. The format is described in sm75/series.py.
# Made of {old}'s by `patches rebase`: that a patch applies does not say that it is right.
# After editing a patch or an overlay file: python -m sm75.patching seal --series patches/{release}
schema = 1
release = "{release}"

"""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What a series would become.

    Attributes:
        series: The old release's.
        release: The new one.
        results: How each overlay file and patch stands to it.
    """

    series: Series
    release: str
    results: tuple[Result, ...]

    def of(self, *states: State) -> list[Result]:
        """The results that have one of the states."""
        return [result for result in self.results if result.state in states]

    @property
    def conflicts(self) -> list[Result]:
        """What a person has to write anew."""
        return self.of(State.CONFLICTS, State.APPLIED)

    @property
    def to_accept(self) -> list[Result]:
        """What is written only when it is accepted: moved patches, and dropped ones."""
        return self.of(State.ELSEWHERE, State.UNNEEDED)


def is_name(release: str) -> bool:
    """Whether a text can name a release, and with it a directory."""
    return re.fullmatch(r"[0-9][0-9A-Za-z.]*", release) is not None


def propose(series: Series, old: Tree, new: Tree, release: str) -> Proposal:
    """Compare a series with another release.

    Args:
        series: The old release's.
        old: Its sources.
        new: The other release's sources.
        release: The other release.

    Raises:
        PatchError: The series does not apply to its own sources, or a tree is unreadable.
    """
    return Proposal(series=series, release=release, results=tuple(compare(series, old, new)))


def require(proposal: Proposal, *, accept: bool) -> None:
    """Refuse a proposal that cannot be written, or not without being accepted.

    Raises:
        PatchError: Something conflicts, or is not accepted.
    """
    if bad := proposal.conflicts:
        patched = " (applied: give unpatched sources)" if proposal.of(State.APPLIED) else ""
        raise PatchError(
            f"the series of {proposal.series.release} cannot be made into one of "
            f"{proposal.release}: {_count(bad, 'conflict')}{patched}",
            why=", ".join(result.name for result in bad),
            fix=f"write patches/{proposal.release} by hand, starting from what applies",
        )
    if not accept and (changed := proposal.to_accept):
        raise PatchError(
            f"nothing is written: {_count(changed, 'change')} to be reviewed",
            why=", ".join(f"{result.name} ({result.state})" for result in changed),
            fix="look at each new place; then the same command with --accept",
        )


def _count(of: list[Result], what: str) -> str:
    return f"{len(of)} {what}{'' if len(of) == 1 else 's'}"


def write(
    proposal: Proposal, new: Tree, patches: Path, *, accept: bool = False, replace: bool = False
) -> Path:
    """Write ``patches/<release>``, whole or not at all.

    Args:
        proposal: From ``propose``.
        new: The new release's sources; what is written is checked against them.
        patches: The directory of all series.
        accept: Write moved patches at their new places, and leave out those no longer needed.
        replace: Replace a series that is there.

    Returns:
        The directory.

    Raises:
        PatchError: See ``require``; or the new series does not apply, or another series takes a
            file from the one that would be replaced.
        UsageError: There is a series already.
        DiskError: It cannot be written.
    """
    require(proposal, accept=accept)
    final = patches / proposal.release
    if final.exists() and not replace:
        raise UsageError(
            f"patches/{proposal.release} is there already",
            why="a series is not overwritten unless that is asked for",
            fix="look at it first; then the same command with --replace",
        )
    with atomic.disk_errors(final), _scratch(patches) as made, _scratch(patches) as aside:
        for name, content in _files(proposal):
            atomic.write_bytes(made / name, content)
        seal(made)
        _check(proposal, new, load_series(made), patches)
        made.chmod(0o755)
        if final.exists():
            final.rename(aside / "before")
        try:
            made.rename(final)
        except OSError:
            if (aside / "before").exists():
                (aside / "before").rename(final)
            raise
        atomic.fsync_dir(patches)
    return final


@contextlib.contextmanager
def _scratch(patches: Path) -> Iterator[Path]:
    """A directory beside the series, so that it sees the files of other releases as they do."""
    place = Path(tempfile.mkdtemp(prefix=atomic.TMP_PREFIX, dir=patches))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _files(proposal: Proposal) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the new directory, ``series.toml`` last."""
    series, states = proposal.series, {(r.kind, r.name): r for r in proposal.results}
    for overlay in series.overlays:
        if _home(series, overlay.home) == proposal.release:
            yield f"overlay/{overlay.file}", overlay.content
    moved: dict[str, dict[str, str]] = {}
    dropped = set()
    for patch in series.patches:
        result = states["patch", patch.file]
        if result.state is State.UNNEEDED:
            dropped.add(patch.file)
            continue
        places = {(f.file, f.hunk): f.elsewhere[0] for f in result.faults}
        moved[patch.file] = {old: new for (old, _), (new, _) in places.items() if new != old}
        yield patch.file, relocate((series.root / patch.file).read_bytes(), places)
    yield "series.toml", _series_text(proposal, moved, dropped).encode()


def _home(series: Series, home: str) -> str:
    return home or series.root.name


def _series_text(
    proposal: Proposal, moved: Mapping[str, Mapping[str, str]], dropped: set[str]
) -> str:
    """The old ``series.toml`` with its texts and comments, for the new release."""
    series = proposal.series
    homes = {overlay.file: _home(series, overlay.home) for overlay in series.overlays}
    text = (series.root / "series.toml").read_text(encoding="utf-8")
    blocks = BLOCK.split(text)
    out = [_HEADER.format(release=proposal.release, old=series.release)]
    for kind, body in zip(blocks[1::2], blocks[2::2], strict=True):
        match = FILE.search(body)
        file = match[1] if match else ""
        if file in dropped:
            continue
        for old, new in moved.get(file, {}).items():
            body = body.replace(f'file = "{old}"', f'file = "{new}"')
        if kind == "[[overlay]]":
            body = _FROM_LINE.sub("", body)
            if homes[file] != proposal.release:
                body = SHA256.sub(rf'\g<0>\nfrom = "{homes[file]}"', body, count=1)
        out.append(f"{kind}{body.rstrip()}\n\n")
    return "".join(out).rstrip() + "\n"


def _check(proposal: Proposal, new: Tree, series: Series, patches: Path) -> None:
    """The new series applies strictly, and no other one loses a file that it takes from it."""
    bad = [result for result in Workspace(series, new).run() if result.state is not State.APPLIES]
    if bad:
        raise PatchError(
            f"the new series does not apply to {new.label}; nothing was written",
            why="\n".join(result.describe() for result in bad),
            fix="write it by hand, starting from what applies",
        )
    there = {overlay.file: overlay.content for overlay in series.overlays if not overlay.home}
    for path in sorted(patches.glob("[!.]*/series.toml")):
        other = path.parent.name
        # The series to be replaced may be a broken one.
        for overlay in load_series(path.parent).overlays if other != proposal.release else ():
            if overlay.home == proposal.release and there.get(overlay.file) != overlay.content:
                raise PatchError(
                    f"patches/{proposal.release} cannot be replaced: patches/{other} takes "
                    f"{overlay.file} from it",
                    fix=f"copy the file to patches/{other}/overlay first, without 'from'",
                )


def relocate(patch: bytes, places: Mapping[tuple[str, int], tuple[str, int]]) -> bytes:
    """A patch with other line numbers, and other paths where files were renamed.

    Args:
        patch: The patch; text before it and between its lines stays.
        places: For hunks that moved, by path and number in its file: the new path and line.
    """
    renamed = {old: new for (old, _), (new, _) in places.items()}
    out: list[bytes] = []
    path, number, shift = "", 0, 0
    left = [0, 0]  # lines of the present hunk that are still to come, old and new
    for line in split_lines(patch):
        if max(left) > 0 or line.startswith(b"\\"):
            left[0] -= line[:1] in b" -"
            left[1] -= line[:1] in b" +"
            out.append(line)
        elif line.startswith((b"--- a/", b"+++ b/")):
            path, number, shift = line[6:].strip().decode(), 0, 0
            out.append(line[:6] + renamed.get(path, path).encode() + b"\n")
        elif match := _GIT.fullmatch(line):
            name = renamed.get(match[1].decode(), match[1].decode())
            out.append(f"diff --git a/{name} b/{name}\n".encode())
        elif match := _HUNK.fullmatch(line):
            number += 1
            left = [int(count[1:]) if count else 1 for count in match.group(2, 3)]
            start = places.get((path, number), (path, int(match[1])))[1]
            first = start + shift if left[0] else 1
            out.append(b"@@ -%d%s +%d%s @@%s" % (
                start, match[2] or b"", first, match[3] or b"", match[4]))  # fmt: skip
            shift += left[1] - left[0]
        elif not _INDEX.fullmatch(line):  # of contents that are no longer these
            out.append(line)
    return b"".join(out)
