"""Geometry of the charts; the templates draw it. Units are those of the SVG's own viewBox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sm75.gpu.ratios import Row as Times
from sm75.report.records import Chart
from sm75.report.timeline import Step, Timeline

WIDTH = 1000.0
"""Of all charts."""
LANE, GAP = 22.0, 4.0
"""Height of a lane of the timeline, and what is between two."""
_LETTER = 6.6
"""Width of a letter at 11 units of font size, monospaced: 0.6 em, as DejaVu Sans Mono has it."""
_AXIS = 28.0


@dataclass(frozen=True, kw_only=True)
class Box:
    """One step of the timeline.

    Attributes:
        step: The step.
        x: Left edge.
        y: Upper edge.
        width: Its width; never less than what can be seen.
        label: What fits into it; may be empty.
    """

    step: Step
    x: float
    y: float
    width: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A mark on the axis of the timeline."""

    x: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Gantt:
    """The timeline as lanes: what ran at the same time lies in different ones."""

    boxes: tuple[Box, ...]
    ticks: tuple[Tick, ...]
    lanes: int
    height: float


def gantt(line: Timeline) -> Gantt:
    """Lay out a timeline; each step goes into the first lane that is free."""
    wall = max(line.wall, 1)
    free: list[int] = []
    boxes = []
    for step in line.steps:
        lane = next((i for i, end in enumerate(free) if end <= step.start), len(free))
        if lane == len(free):
            free.append(0)
        free[lane] = step.end
        width = max(step.took * WIDTH / wall, 0.8)
        letters = int((width - 6) / _LETTER)
        base = step.name.rpartition("/")[2]
        boxes.append(
            Box(
                step=step, x=_round(step.start * WIDTH / wall), y=_AXIS + lane * (LANE + GAP),
                width=_round(width), label=base if len(base) <= letters else "",
            )
        )  # fmt: skip
    return Gantt(
        boxes=tuple(boxes), ticks=_ticks(wall), lanes=len(free),
        height=_AXIS + len(free) * (LANE + GAP),
    )  # fmt: skip


def _ticks(wall: int) -> tuple[Tick, ...]:
    """At most eight marks, a round number of seconds or minutes apart."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400)
    apart = next((s for s in steps if wall / (s * 1000) <= 8), steps[-1])
    marks = range(0, wall // 1000 + 1, apart)[:32]
    return tuple(
        Tick(x=_round(at * 1000 * WIDTH / wall),
             label=f"{at} s" if apart < 60 else f"{at // 60} min")
        for at in marks
    )  # fmt: skip


ROW = 34.0
"""Height of one launch in the chart of shared memory: its label, then its bars."""
LABEL = 14.0
BAR = 7.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One launch: where it lies, and how long its bars are.

    Attributes:
        label: The launch.
        y: Upper edge.
        after: Width with the patches.
        before: Width without; None: not known.
        bytes_after: What ``after`` stands for.
        bytes_before: What ``before`` stands for.
        over: Without the patches it is over the limit.
    """

    label: str
    y: float
    after: float
    before: float | None
    bytes_after: int
    bytes_before: int | None
    over: bool


@dataclass(frozen=True, kw_only=True)
class Bars:
    """The chart of shared memory."""

    rows: tuple[Row, ...]
    limit: float
    height: float


def bars(chart: Chart, most: int = 40) -> Bars:
    """Lay out the chart: what the patches change first, then by bytes.

    Args:
        chart: The audit's.
        most: Rows to draw; the table beside the chart has all.
    """
    ordered = sorted(
        chart.bars,
        key=lambda b: (-(b.before or 0) if (b.before or 0) > chart.limit else 0, -b.after, b.label),
    )[:most]
    longest = max([chart.limit, *(max(b.after, b.before or 0) for b in ordered)])
    scale = (WIDTH - 10) / max(longest, 1)
    rows = [
        Row(
            label=b.label, y=_AXIS + i * ROW, after=_round(b.after * scale),
            before=None if b.before is None else _round(b.before * scale),
            bytes_after=b.after, bytes_before=b.before, over=(b.before or 0) > chart.limit,
        )
        for i, b in enumerate(ordered)
    ]  # fmt: skip
    return Bars(rows=tuple(rows), limit=_round(chart.limit * scale), height=_AXIS + len(rows) * ROW)


TIMES_ROW = 48.0
"""Height of one trial in the chart of times: its label, then three bars."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial: where it lies, and how long its bars are.

    Attributes:
        times: What it took.
        y: Upper edge.
        field: Width of FMA with 4 warps.
        best: Width of FMA at its best.
        ahead: Width ahead of time; what can be seen, at least.
    """

    times: Times
    y: float
    field: float
    best: float
    ahead: float


@dataclass(frozen=True, kw_only=True)
class Race:
    """The chart of FMA against tensor cores."""

    trials: tuple[Trial, ...]
    height: float


def race(rows: Sequence[Times]) -> Race:
    """Lay out times, each trial on a scale of its own: they differ by a thousand.

    Args:
        rows: The trials; times are above 0.
    """
    made = []
    for i, row in enumerate(rows):
        scale = WIDTH / max(row.field, row.best, row.ahead)
        made.append(
            Trial(
                times=row, y=_AXIS + i * TIMES_ROW, field=_round(row.field * scale),
                best=_round(row.best * scale), ahead=_round(max(row.ahead * scale, 0.8)),
            )
        )  # fmt: skip
    return Race(trials=tuple(made), height=_AXIS + len(made) * TIMES_ROW)


def _round(value: float) -> float:
    return round(value, 2)
