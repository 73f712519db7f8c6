"""Progress: few lines in logs, bars on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sm75.progress import (
    PlainReporter,
    RichReporter,
    SilentReporter,
    amount,
    make_reporter,
    span,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_prints_at_most_every_ten_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    with PlainReporter(out, clock=clock) as reporter:
        task = reporter.task("fetch", 100_000_000, "B")
        for second in range(1, 31):
            clock.now = second
            task.advance(2_000_000)
            task.message(f"file {second}")
        task.done()
        task.done()
        task.advance(1)
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == "fetch: 20.0 MB of 100.0 MB (20 %), 2.0 MB/s, 40 s left, file 9"
    assert lines[3] == "fetch: done, 60.0 MB in 30 s"


def test_plain_steps_have_no_rate_and_unknown_totals_no_time_left() -> None:
    out, clock = io.StringIO(), Clock()
    reporter = PlainReporter(out, clock=clock)
    steps = reporter.task("build", 78, "steps")
    other = reporter.task("other", None, "B")
    clock.now = 60
    steps.advance(13)
    other.advance(6_000)
    steps.done("all compiled")
    assert out.getvalue().splitlines() == [
        "build: 13 steps of 78 steps (17 %), 5 min 00 s left",
        "other: 6.0 kB, 100 B/s",
        "build: done, all compiled in 1 min 00 s",
    ]


def test_starting_over_is_no_fault() -> None:
    out, clock = io.StringIO(), Clock()
    task = PlainReporter(out, clock=clock).task("x", 10, "B")
    clock.now = 11
    task.advance(5)
    clock.now = 22
    task.advance(-5)
    assert out.getvalue().splitlines()[1].startswith("x: 0 B of 10 B (0 %)")


def test_rich_draws_bars_and_keeps_markup_as_text() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    with RichReporter(console) as reporter:
        task = reporter.task("a[bold]b", 2_000_000, "B")
        task.advance(1_000_000)
        task.message("[red]now")
        reporter.line("[a line]")
        open_ended = reporter.task("open", None, "steps")
        open_ended.advance(3)
        open_ended.done()
        task.advance(1_000_000)
        task.done("finished")
        task.done("again")
        task.advance(5)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a[bold]b" in text
    assert "2.0 MB of 2.0 MB" in text
    assert "[a line]" in text
    assert "finished" in text
    assert "again" not in text


def test_choice_of_reporter() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(make_reporter(io.StringIO()), PlainReporter)
    assert isinstance(make_reporter(Terminal()), RichReporter)
    silent = make_reporter(Terminal(), quiet=True)
    assert isinstance(silent, SilentReporter)
    with silent as reporter:
        task = reporter.task("x", 1, "B")
        task.advance(1)
        task.message("")
        task.done()
        reporter.line("x")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (1_500, "B", "1.5 kB"),
        (426_376_751, "B", "426.4 MB"),
        (2.5e9, "B", "2.5 GB"),
        (1_500, "steps", "1500 steps"),
    ],
)
def test_amounts(value: float, unit: str, text: str) -> None:
    assert amount(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3720, "1 h 02 min"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text
