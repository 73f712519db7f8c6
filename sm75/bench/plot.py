"""The report as one SVG file: no script, no font, no network; light and dark as the reader's.

Four panels over the number of streams: tokens/s of a stream and in total, time to the first text,
share of the ceiling. A series is a pair of lengths, told apart by colour, dash and shape. Bars are
confidence intervals. Written by hand: what the lock has draws nothing, and a plotting library would
be a hundred times the size of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from sm75.bench.roofline import field_report
from sm75.words import counted

_WIDTH, _HEIGHT = 960, 720
# Room around a panel: left, top, right, bottom.
_PAD = (64, 34, 16, 40)
_HEAD = 62
_LINE = 18
_TICKS = 5
# Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), made darker or lighter until each has
# 3:1 against its ground, WCAG 2.2's least for graphics.
_LIGHT = ("#0072b2", "#b34a00", "#00704f", "#9c3f77", "#5c4b00", "#30343b")
_DARK = ("#56b4e9", "#f0a04b", "#3fc79a", "#e39bc4", "#e6d04a", "#c9ced6")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 5", "1 4")
_STYLE = """
svg { background: #ffffff; font: 13px system-ui, sans-serif; }
text { fill: #1b1f24; } .dim { fill: #57606a; } .head { font-size: 17px; font-weight: 600; }
.axis { stroke: #57606a; fill: none; } .grid { stroke: #d8dee4; }
.limit { stroke: #57606a; stroke-dasharray: 3 3; fill: none; }
.over { paint-order: stroke; stroke: #ffffff; stroke-width: 3px; }
"""
_DARK_STYLE = """
svg { background: #14171c; } text { fill: #e8ebef; } .dim { fill: #a5adb8; }
.axis { stroke: #a5adb8; } .grid { stroke: #2d333b; } .limit { stroke: #a5adb8; }
.over { stroke: #14171c; }
"""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value at a number of streams, with its interval or range."""

    streams: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart.

    Attributes:
        title: With the unit.
        points: By series.
        limits: (label, points of a dashed line) that are no measurement of ours.
    """

    title: str
    points: Mapping[str, Sequence[Point]]
    limits: Sequence[tuple[str, Sequence[Point]]] = ()


def svg(data: Mapping[str, Any]) -> str:
    """Draw a report (``bench --json``)."""
    names = list(dict.fromkeys(_series(one) for one in data["cases"]))
    panels = _panels(data, names)
    rows = math.ceil(len(names) / 3)
    top = _HEAD + _LINE * (rows + 1)
    report = field_report()
    foot = _wrapped(f"Beside it: {report['tokens_s']} tok/s, {report['conditions']}.", 130)
    foot += _wrapped(f"Bars: {data['confidence_method']}. " + " ".join(data["notes"]), 130)
    height = top + _HEIGHT + _LINE * (len(foot) + 1)
    title = f"{data['model']}: speed over streams"
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="t d" '
            f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">'
        ),
        f'<title id="t">{escape(title)}</title><desc id="d">{escape(_told(data))}</desc>',
        f"<style>{_style(len(names))}</style>",
        f'<text class="head" x="16" y="28">{escape(title)}</text>',
        f'<text class="dim" x="16" y="48">{escape(_where(data))}</text>',
    ]
    for number, name in enumerate(names):
        x, y = 16 + number % 3 * 300, _HEAD + 8 + _LINE * (number // 3)
        parts.append(f'<line class="s{number}" x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}"/>')
        parts.append(_mark(number, x + 13, y))
        parts.append(f'<text x="{x + 34}" y="{y + 4}">{escape(name)}</text>')
    width, tall = _WIDTH / 2, _HEIGHT / 2
    for number, panel in enumerate(panels):
        box = (number % 2 * width, top + number // 2 * tall, width, tall)
        parts += _panel(panel, names, box)
    for number, line in enumerate(foot):
        y = top + _HEIGHT + _LINE * (number + 1)
        parts.append(f'<text class="dim" x="16" y="{y}" font-size="12">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _series(one: Mapping[str, Any]) -> str:
    return f"{one['prompt_tokens']} in, {one['output_tokens']} out"


def _where(data: Mapping[str, Any]) -> str:
    health = "answers were checked first" if data["health"]["asked"] else "ANSWERS NOT CHECKED"
    rounds = counted(data["plan"]["repeats"], "round")
    return f"{data['url']}, {data['date']}, {rounds} a point, {health}"


def _told(data: Mapping[str, Any]) -> str:
    """The figures in words, for who cannot see them."""
    said = []
    for one in data["cases"]:
        rate = one["stream_tokens_s"]
        if rate:
            said.append(
                f"{_series(one)}, {one['concurrency']} at once: {rate['median']:.1f} tokens/s a "
                "stream"
            )
    return "; ".join(said) or "no tokens/s: the server counts no tokens"


def _panels(data: Mapping[str, Any], names: Sequence[str]) -> list[Panel]:
    def points(value: Callable[[Mapping[str, Any]], Point | None]) -> dict[str, list[Point]]:
        found: dict[str, list[Point]] = {name: [] for name in names}
        for one in data["cases"]:
            if point := value(one):
                found[_series(one)].append(point)
        return found

    def of(key: str, scale: float = 1.0) -> Callable[[Mapping[str, Any]], Point | None]:
        def value(one: Mapping[str, Any]) -> Point | None:
            return _point(one, one[key], scale)

        return value

    def share(one: Mapping[str, Any]) -> Point | None:
        ceiling = one["ceiling_stream_tokens_s"]
        return _point(one, one["stream_tokens_s"], 100 / ceiling) if ceiling else None

    lengths = {_series(one): one for one in data["cases"]}
    limits = []
    if lengths:
        # Ceilings of different lengths lie close together; that of the first is drawn.
        name = next(iter(lengths))
        ceilings = [
            Point(streams=one["concurrency"], value=c, low=c, high=c)
            for one in data["cases"]
            if _series(one) == name and (c := one["ceiling_stream_tokens_s"])
        ]
        if ceilings:
            limits.append((f"ceiling ({name})", ceilings))
        first = min(one["concurrency"] for one in data["cases"])
        if first == 1:
            rate = field_report()["tokens_s"]
            limits.append(
                (f"{rate}: not ours, see below",
                 [Point(streams=1, value=rate, low=rate, high=rate)])
            )  # fmt: skip
    return [
        Panel(title="tokens/s of one stream", points=points(of("stream_tokens_s")), limits=limits),
        Panel(title="tokens/s in total", points=points(of("total_tokens_s"))),
        Panel(title="ms to the first text", points=points(of("ttft_s", 1e3))),
        Panel(title="% of the ceiling, one stream", points=points(share)),
    ]


def _point(one: Mapping[str, Any], summary: Mapping[str, Any] | None, scale: float) -> Point | None:
    if summary is None:
        return None
    low, high = summary["low"], summary["high"]
    return Point(
        streams=one["concurrency"], value=summary["median"] * scale,
        low=(summary["least"] if low is None else low) * scale,
        high=(summary["most"] if high is None else high) * scale,
    )  # fmt: skip


def _panel(panel: Panel, names: Sequence[str], box: tuple[float, float, float, float]) -> list[str]:
    left, top = box[0] + _PAD[0], box[1] + _PAD[1]
    right, bottom = box[0] + box[2] - _PAD[2], box[1] + box[3] - _PAD[3]
    parts = [f'<text x="{left:.0f}" y="{top - 12:.0f}" font-weight="600">{panel.title}</text>']
    every = [point for series in panel.points.values() for point in series]
    if not every:
        middle = (left + right) / 2
        parts.append(
            f'<text class="dim" x="{middle:.0f}" y="{(top + bottom) / 2:.0f}" '
            'text-anchor="middle">not known</text>'
        )
        return parts
    every += [point for _, points in panel.limits for point in points]
    streams = sorted({point.streams for point in every})
    step = nice(max(max(point.high for point in every), 1e-9) / _TICKS)
    most = step * math.ceil(max(point.high for point in every) / step * 1.0001)

    def x(count: int) -> float:
        return left + (streams.index(count) + 0.5) * (right - left) / len(streams)

    def y(value: float) -> float:
        return bottom - value / most * (bottom - top)

    for tick in range(round(most / step) + 1):
        at = y(tick * step)
        kind = "grid" if tick else "axis"
        parts.append(
            f'<line class="{kind}" x1="{left:.1f}" y1="{at:.1f}" x2="{right:.1f}" y2="{at:.1f}"/>'
            f'<text class="dim" x="{left - 8:.1f}" y="{at + 4:.1f}" text-anchor="end">'
            f"{tick * step:g}</text>"
        )
    for count in streams:
        parts.append(
            f'<text class="dim" x="{x(count):.1f}" y="{bottom + 18:.1f}" text-anchor="middle">'
            f"{count}</text>"
        )
    parts.append(
        f'<text class="dim" x="{(left + right) / 2:.1f}" y="{bottom + 34:.1f}" '
        'text-anchor="middle">streams at once</text>'
    )
    labels = []
    for label, points in panel.limits:
        half = (right - left) / len(streams) / 2
        path = [(x(one.streams) + side * half, y(one.value)) for one in points for side in (-1, 1)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in path)
        parts.append(f'<polyline class="limit" points="{line}"/>')
        labels.append(
            f'<text class="dim over" x="{path[0][0] + 4:.1f}" y="{path[0][1] + 13:.1f}" '
            f'font-size="11">{escape(label)}</text>'
        )
    for number, name in enumerate(names):
        points = panel.points[name]
        # Beside each other, so that intervals do not hide one another.
        aside = (number - (len(names) - 1) / 2) * 9
        line = " ".join(f"{x(one.streams) + aside:.1f},{y(one.value):.1f}" for one in points)
        parts.append(f'<polyline class="s{number}" points="{line}"/>')
        for one in points:
            at = x(one.streams) + aside
            parts.append(
                f'<line class="s{number} bar" x1="{at:.1f}" y1="{y(one.low):.1f}" x2="{at:.1f}" '
                f'y2="{y(one.high):.1f}"/>'
            )
            parts.append(_mark(number, at, y(one.value)))
    return parts + labels


def _mark(number: int, x: float, y: float) -> str:
    kind = f'class="m{number}"'
    match number % 3:
        case 0:
            return f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        case 1:
            return f'<rect {kind} x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
        case _:
            return (
                f'<polygon {kind} points="{x:.1f},{y - 5:.1f} {x + 5:.1f},{y + 4:.1f} '
                f'{x - 5:.1f},{y + 4:.1f}"/>'
            )


def _style(series: int) -> str:
    def colours(palette: Sequence[str]) -> str:
        return "".join(
            f".s{n} {{ stroke: {palette[n % len(palette)]}; }} "
            f".m{n} {{ fill: {palette[n % len(palette)]}; }}\n"
            for n in range(series)
        )

    shapes = "".join(
        f".s{n} {{ fill: none; stroke-width: 2; stroke-dasharray: {dash or 'none'}; }}\n"
        for n in range(series)
        for dash in [_DASHES[n % len(_DASHES)]]
    )
    return (
        f"{_STYLE}{shapes}.bar {{ stroke-dasharray: none; }}\n{colours(_LIGHT)}"
        f"@media (prefers-color-scheme: dark) {{{_DARK_STYLE}{colours(_DARK)}}}"
    )


def nice(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = math.pow(10, math.floor(math.log10(step)))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= step * 0.9999)


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f"{word} "
    return [line.rstrip() for line in lines]
