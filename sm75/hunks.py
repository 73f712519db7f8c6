"""Unified diffs, read strictly and applied byte for byte.

``unidiff`` does the parsing, but it forgives much: text after a hunk is dropped, a stripped blank
line counts as context, renames and mode changes are carried along. A patch of ours may contain
nothing of the kind, so everything it forgives is refused here before anything is applied.

All text is handled as latin-1, which maps every byte to one character and back, so that no
encoding can make two different lines look equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as RawHunk
from unidiff.patch import PatchedFile, PatchSet

from sm75.errors import PatchError

# What may stand between the hunks of a patch, besides the hunks themselves.
_BETWEEN_HUNKS = re.compile(
    r"diff --git a/\S+ b/\S+\n|index [0-9a-f]+\.\.[0-9a-f]+( 100(644|755))?\n"
    r"|new file mode 100644\n|--- \S.*\n|\+\+\+ \S.*\n|@@ -.*\n|\\ No newline at end of file\n"
)
_PREAMBLE_END = ("diff --git ", "--- ", "+++ ", "@@ ")
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")
_Refuse = Callable[[str], PatchError]


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """One hunk: ``old`` lines at line ``old_start`` become ``new`` lines at ``new_start``.

    Line numbers count from 1. Every line keeps its line end; only the last line of a file may
    have none.
    """

    number: int
    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]

    def reversed(self) -> Hunk:
        """The hunk that takes this one back."""
        return Hunk(
            number=self.number,
            old_start=self.new_start,
            new_start=self.old_start,
            old=self.new,
            new=self.old,
        )


@dataclass(frozen=True, kw_only=True)
class FileDiff:
    """What one patch does to one file. ``creates`` is true when the file must not exist before."""

    path: str
    creates: bool
    hunks: tuple[Hunk, ...]


class Mismatch(Exception):
    """A hunk's old lines are not at the line its header names (caught inside the package)."""

    def __init__(self, hunk: Hunk, found: Sequence[bytes], reason: str) -> None:
        super().__init__(reason)
        self.hunk = hunk
        self.found = tuple(found)
        self.reason = reason


def split_lines(data: bytes) -> list[bytes]:
    """Split at line feeds only, keeping them: a carriage return or form feed is line content."""
    return _LINES.findall(data)


def safe_path(text: str, *, where: str) -> str:
    """Check that ``text`` is a plain relative POSIX path that cannot leave the tree.

    Args:
        text: The path as written in a patch or in ``series.toml``.
        where: What holds the path, for the message.

    Raises:
        PatchError: It is absolute, or has ``..``, ``.``, an empty part, a backslash, a quote, a
            colon or a control character.
    """
    path = PurePosixPath(text)
    plain = text == path.as_posix() and text.isprintable() and not set('\\":') & set(text)
    if not text or text == "." or not plain or path.is_absolute() or ".." in path.parts:
        raise PatchError(
            f"{where} names the path {text!r}, which is not a plain path inside the tree",
            why="a patch or overlay file may only touch files below the unpacked vLLM tree",
            fix="correct the path; never apply a series you have not read",
        )
    return text


def parse_patch(data: bytes, *, name: str) -> tuple[FileDiff, ...]:
    """Read a patch file.

    Args:
        data: The patch's bytes.
        name: Its file name, for messages.

    Returns:
        One ``FileDiff`` per file, in the order of the patch.

    Raises:
        PatchError: It is not a strict unified diff of additions and changes to text files.
    """

    def refuse(reason: str) -> PatchError:
        return PatchError(
            f"{name} is not a patch that can be applied strictly",
            why=reason,
            fix="write it again as a plain unified diff (diff -u, git diff --no-renames)",
        )

    text = data.decode("latin-1")
    if text and not text.endswith("\n"):
        raise refuse("its last line has no line end: the file may be truncated")
    try:
        parsed = PatchSet.from_string(text)
    except (UnidiffParseError, ValueError) as error:
        raise refuse(str(error).strip()) from error
    _refuse_loose_lines(text, parsed, refuse)
    diffs: list[FileDiff] = []
    for part in parsed:
        diff = _file_diff(part, name, refuse)
        if diff.path in {earlier.path for earlier in diffs}:
            raise refuse(f"it holds {diff.path} twice")
        diffs.append(diff)
    if not diffs:
        raise refuse("it changes no file")
    return tuple(diffs)


def _refuse_loose_lines(text: str, parsed: PatchSet, refuse: _Refuse) -> None:
    """Refuse every line that ``unidiff`` skips or repairs."""
    lines = [line.decode("latin-1") for line in split_lines(text.encode("latin-1"))]
    in_hunk = {line.diff_line_no for part in parsed for hunk in part for line in hunk}
    started = False
    for number, line in enumerate(lines, 1):
        started = started or line.startswith(_PREAMBLE_END)
        if not started:
            continue
        if number in in_hunk:
            if line[0] not in " +-\\":
                raise refuse(f"line {number} is empty inside a hunk: its leading blank is lost")
        elif not _BETWEEN_HUNKS.fullmatch(line):
            raise refuse(f"line {number} belongs to no hunk: {line.rstrip()!r}")


def _file_diff(part: PatchedFile, name: str, refuse: _Refuse) -> FileDiff:
    creates = part.source_file == "/dev/null"
    if not part.target_file.startswith("b/"):
        raise refuse(f"target {part.target_file!r} lacks the b/ prefix, or the file is deleted")
    path = safe_path(part.target_file[2:], where=name)
    if not creates and part.source_file != f"a/{path}":
        raise refuse(f"source {part.source_file!r} and target {part.target_file!r} differ")
    if part.is_binary_file or not part:
        raise refuse(f"{path} has no text hunks")
    hunks = tuple(_hunks(part, refuse))
    if creates and (len(hunks) != 1 or hunks[0].old or hunks[0].new_start != 1):
        raise refuse(f"{path} is new, so it needs exactly one hunk from @@ -0,0 +1,N @@")
    return FileDiff(path=path, creates=creates, hunks=hunks)


def _hunks(part: PatchedFile, refuse: _Refuse) -> Iterator[Hunk]:
    creates = part.source_file == "/dev/null"
    shift, end = 0, 0
    for number, raw in enumerate(part, 1):
        where = f"hunk {number} of {part.target_file[2:]}"
        hunk = _hunk(number, raw, where, refuse)
        if len(hunk.old) != raw.source_length or len(hunk.new) != raw.target_length:
            raise refuse(f"{where}: its header's line counts are not those of its body")
        if hunk.old == hunk.new:
            raise refuse(f"{where} changes nothing")
        if not creates:
            if not hunk.old or not hunk.new:
                raise refuse(f"{where} has no context line to check its place by")
            if hunk.old_start <= end:
                raise refuse(f"{where} overlaps the hunk before it or comes before it")
            if hunk.new_start != hunk.old_start + shift:
                must = hunk.old_start + shift
                raise refuse(f"{where}: its header says +{hunk.new_start}, must be +{must}")
        end = hunk.old_start + len(hunk.old) - 1
        shift += len(hunk.new) - len(hunk.old)
        yield hunk


def _hunk(number: int, raw: RawHunk, where: str, refuse: _Refuse) -> Hunk:
    old: list[bytes] = []
    new: list[bytes] = []
    last: tuple[list[bytes], ...] = ()
    for line in raw:
        if line.line_type == "\\":
            for side in last:
                side[-1] = side[-1].removesuffix(b"\n")
            continue
        last = (old, new) if line.is_context else (new,) if line.is_added else (old,)
        for side in last:
            side.append(line.value.encode("latin-1"))
    if any(not line.endswith(b"\n") for side in (old, new) for line in side[:-1]):
        raise refuse(f"{where}: only the last line of a file may lack its line end")
    return Hunk(
        number=number,
        old_start=raw.source_start,
        new_start=raw.target_start,
        old=tuple(old),
        new=tuple(new),
    )


def apply_hunks(lines: Sequence[bytes], hunks: Sequence[Hunk]) -> list[bytes]:
    """Apply all hunks of one patch to one file, each exactly at its line.

    Args:
        lines: The file, as ``split_lines`` gives it.
        hunks: The hunks in order; their ``old_start`` counts in ``lines`` as given.

    Returns:
        The new lines.

    Raises:
        Mismatch: A hunk's old lines differ from the file's, or its last line lacks the line end
            in the middle of the file.
    """
    result: list[bytes] = []
    done = 0
    for hunk in hunks:
        start = max(hunk.old_start - 1, 0)
        stop = start + len(hunk.old)
        found = tuple(lines[start:stop])
        if start < done or found != hunk.old:
            raise Mismatch(hunk, found, "the lines differ")
        if hunk.new and not hunk.new[-1].endswith(b"\n") and stop != len(lines):
            raise Mismatch(hunk, found, "it removes a line end in the middle of the file")
        result += lines[done:start]
        result += hunk.new
        done = stop
    result += lines[done:]
    return result


def find_lines(lines: Sequence[bytes], wanted: Sequence[bytes]) -> list[int]:
    """All line numbers (from 1) at which ``wanted`` stands in ``lines``."""
    size = len(wanted)
    if not size:
        return []
    return [
        index + 1
        for index in range(len(lines) - size + 1)
        if lines[index] == wanted[0] and tuple(lines[index : index + size]) == tuple(wanted)
    ]
