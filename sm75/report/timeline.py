"""The compile as it went: ninja's log, and the chain of steps that no number of jobs shortens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import msgspec

from sm75.buildgraph import Edge, edges
from sm75.compilelog import source_of

LOG = ".ninja_log"
# Versions whose lines are start, end, mtime, output, hash (ninja's src/build_log.cc; 1.5 to 1.13).
_VERSIONS = range(5, 8)
# A later start of ninja by the log's own clocks, ms: what they disagree by within one run is less.
_APART = 1000


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One command that ninja ran.

    Attributes:
        name: The source compiled, or the library linked; relative to the tree.
        kind: ``CUDA``, ``C++``, ``link`` or ``other``.
        start: Milliseconds since the compile began; between two runs of ninja nothing is counted.
        end: Likewise.
        critical: It is on the critical path.
    """

    name: str
    kind: str
    start: int
    end: int
    critical: bool = False

    @property
    def took(self) -> int:
        """Milliseconds."""
        return self.end - self.start


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """A compile.

    Attributes:
        steps: By start.
        runs: How often ninja was started; more than once where a build was resumed.
        path: Whether the critical path is known (the build graph was there).
    """

    steps: tuple[Step, ...]
    runs: int
    path: bool

    @property
    def wall(self) -> int:
        """Milliseconds from the first start to the last end."""
        return max((step.end for step in self.steps), default=0)

    @property
    def work(self) -> int:
        """Milliseconds of all steps together."""
        return sum(step.took for step in self.steps)

    @property
    def critical(self) -> int:
        """Milliseconds of the critical path."""
        return sum(step.took for step in self.steps if step.critical)


class _Line(msgspec.Struct, frozen=True):
    start: int
    end: int
    began: int  # when ninja was started, ms since 1970, by this line; 0: not told
    output: str
    command: str


def read(build: Path) -> Timeline | None:
    """Read the log of a build directory.

    Args:
        build: The directory that ninja ran in.

    Returns:
        None when there is no log, or none that is understood.
    """
    try:
        log = (build / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    try:
        graph = tuple(edges((build / "build.ninja").read_text("utf-8", "replace")))
    except OSError:
        graph = ()
    return parse(log, graph)


def parse(log: str, graph: Sequence[Edge]) -> Timeline | None:
    """Make a timeline of the text of ``.ninja_log`` and the statements of ``build.ninja``.

    Args:
        log: The text.
        graph: The statements; empty: there is no critical path.
    """
    head, _, body = log.partition("\n")
    version = re.fullmatch(r"# ninja log v(\d+)", head)
    if not version or int(version[1]) not in _VERSIONS:
        return None
    lines = [line for line in map(_line, body.splitlines()) if line]
    steps: dict[tuple[str, int, int], tuple[int, _Line]] = {}
    latest: dict[str, tuple[str, int, int]] = {}
    runs = _runs(lines)
    made_now = {output for edge in graph for output in edge.outputs}
    for run, line in runs:
        if made_now and line.output not in made_now:
            continue  # of a target that is no longer built
        # a command with several outputs has a line for each
        key = (line.command, line.start, line.end)
        latest[line.output] = key
        steps.setdefault(key, (run, line))
    kept = {key: steps[key] for key in latest.values()}
    if not kept:
        return None
    shift, at = {}, 0
    for number in sorted({run for run, _ in kept.values()}):
        own = [line for run, line in kept.values() if run == number]
        begin = min(line.start for line in own)
        shift[number] = at - begin
        at += max(line.end for line in own) - begin
    took = {name: kept[key][1].end - kept[key][1].start for name, key in latest.items()}
    on_path = {latest[name] for name in _critical(took, graph)}
    made = [
        Step(
            name=_name(line.output), kind=_kind(line.output), start=line.start + shift[run],
            end=line.end + shift[run], critical=key in on_path,
        )
        for key, (run, line) in kept.items()
    ]  # fmt: skip
    return Timeline(
        steps=tuple(sorted(made, key=lambda step: (step.start, step.end, step.name))),
        runs=len(shift),
        path=bool(on_path),
    )


def _line(text: str) -> _Line | None:
    parts = text.split("\t")
    if len(parts) != 5 or not all(re.fullmatch(r"\d{1,19}", part) for part in parts[:3]):
        return None
    start, end, mtime = map(int, parts[:3])
    if end < start:
        return None
    # Since ninja 1.11 the third field of a compiled file is when its command began, in ns.
    began = mtime // 1_000_000 - start if mtime > 10**17 else 0
    return _Line(start, end, began, parts[3], parts[4])


def _runs(lines: Sequence[_Line]) -> list[tuple[int, _Line]]:
    """Number the starts of ninja: lines are written as commands end, so that ends only grow."""
    out: list[tuple[int, _Line]] = []
    run, end, began = 0, 0, 0
    for line in lines:
        if line.end < end or (began and line.began > began + _APART):
            run += 1
            began = 0
        end = line.end
        began = began or line.began
        out.append((run, line))
    return out


def _critical(took: dict[str, int], graph: Sequence[Edge]) -> list[str]:
    """The outputs of the longest chain in which each needs the one before."""
    needs = {output: edge.inputs for edge in graph for output in edge.outputs}
    try:
        order = tuple(TopologicalSorter(needs).static_order())
    except CycleError:
        return []
    length: dict[str, int] = {}
    before: dict[str, str] = {}
    for name in order:
        longest = max(needs.get(name, ()), key=lambda n: (length[n], n), default="")
        length[name] = length.get(longest, 0) + took.get(name, 0)
        before[name] = longest
    built = [name for name in length if name in took]
    at = max(built, key=lambda n: (length[n], n), default="")
    chain = []
    while at:
        chain += [at] if at in took else []
        at = before[at]
    return chain[::-1]


def _name(output: str) -> str:
    # an absolute path would name a directory of the machine that built
    return output.rpartition("/")[2] if output.startswith("/") else source_of(output)


def _kind(output: str) -> str:
    if output.endswith(".cu.o"):
        return "CUDA"
    if output.endswith(".o"):
        return "C++"
    return "link" if ".so" in output else "other"
