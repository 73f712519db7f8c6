"""Progress: bars on a terminal, a line now and then elsewhere.

``make_reporter`` picks; both kinds are context managers. Units are ``B`` (bytes) or any noun
in the plural (``steps``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Task as RichTask
from rich.text import Text

PLAIN_INTERVAL = 10.0
"""Seconds between two lines of one task when the output is no terminal."""


class Task(Protocol):
    """One thing that advances."""

    def advance(self, amount: int) -> None:
        """Move on by ``amount`` units; negative when something starts over."""

    def message(self, text: str) -> None:
        """Say what is being done now."""

    def done(self, text: str = "") -> None:
        """It is finished; further calls change nothing."""


class Reporter(Protocol):
    """Where progress goes."""

    def task(self, name: str, total: int | None, unit: str) -> Task:
        """Start a task.

        Args:
            name: What it is.
            total: Units until it is done; None when not known.
            unit: ``B``, or a plural noun.
        """

    def line(self, text: str) -> None:
        """Print a line beside the tasks."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make_reporter(stream: TextIO | None = None, *, quiet: bool = False) -> Reporter:
    """A reporter fit for ``stream`` (default: stderr): bars on a terminal, else lines."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return SilentReporter()
    if stream.isatty():
        return RichReporter(Console(file=stream))
    return PlainReporter(stream)


def amount(value: float, unit: str) -> str:
    """A quantity for people: ``12.3 MB`` for bytes (decimal), else ``12 steps``."""
    if unit != "B":
        return f"{value:.0f} {unit}"
    for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= scale:
            return f"{value / scale:.1f} {name}"
    return f"{value:.0f} B"


def span(seconds: float) -> str:
    """A duration for people: ``45 s``, ``3 min 05 s``, ``1 h 02 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class SilentReporter:
    """Says nothing."""

    def task(self, name: str, total: int | None, unit: str) -> Task:
        return _SilentTask()

    def line(self, text: str) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return


class _SilentTask:
    def advance(self, amount: int) -> None:
        return

    def message(self, text: str) -> None:
        return

    def done(self, text: str = "") -> None:
        return


class PlainReporter:
    """Lines for logs: one when a task ends, and at most one every ``interval`` seconds.

    Args:
        stream: Where lines go.
        interval: Seconds.
        clock: Monotonic seconds; tests bring their own.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        interval: float = PLAIN_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._interval = interval
        self._clock = clock

    def task(self, name: str, total: int | None, unit: str) -> Task:
        return _PlainTask(name, total, unit, self.line, self._clock, self._interval)

    def line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return


class _PlainTask:
    def __init__(
        self,
        name: str,
        total: int | None,
        unit: str,
        line: Callable[[str], None],
        clock: Callable[[], float],
        interval: float,
    ) -> None:
        self._name = name
        self._total = total
        self._unit = unit
        self._line = line
        self._clock = clock
        self._interval = interval
        self._start = self._last = clock()
        self._count = 0
        self._text = ""
        self._over = False

    def advance(self, amount: int) -> None:
        self._count += amount
        self._maybe()

    def message(self, text: str) -> None:
        self._text = text
        self._maybe()

    def done(self, text: str = "") -> None:
        if self._over:
            return
        self._over = True
        took = span(self._clock() - self._start)
        what = text or amount(self._count, self._unit)
        self._line(f"{self._name}: done, {what} in {took}")

    def _maybe(self) -> None:
        now = self._clock()
        if self._over or now - self._last < self._interval:
            return
        self._last = now
        elapsed = now - self._start
        parts = [amount(self._count, self._unit)]
        if self._total:
            parts[0] += f" of {amount(self._total, self._unit)}"
            parts[0] += f" ({100 * self._count / self._total:.0f} %)"
        if self._unit == "B" and elapsed > 0:
            parts.append(f"{amount(self._count / elapsed, 'B')}/s")
        # The first few per cent say nothing of the rest: small pieces end before large ones.
        if self._total and self._total * 0.03 <= self._count <= self._total and elapsed > 0:
            parts.append(f"{span(elapsed * (self._total - self._count) / self._count)} left")
        if self._text:
            parts.append(self._text)
        self._line(f"{self._name}: " + ", ".join(parts))


class _CountColumn(ProgressColumn):
    """Done of total, and the rate for bytes."""

    def render(self, task: RichTask) -> Text:
        unit = str(task.fields["unit"])
        text = amount(task.completed, unit)
        if task.total:
            text += f" of {amount(task.total, unit)}"
        if unit == "B" and task.speed:
            text += f", {amount(task.speed, unit)}/s"
        return Text(text)


class RichReporter:
    """Bars on a terminal, with rate and time left.

    Args:
        console: Where they are drawn.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            _CountColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            speed_estimate_period=30,
        )

    def task(self, name: str, total: int | None, unit: str) -> Task:
        # Markup in names and messages is data, not style.
        number = self._progress.add_task(escape(name), total=total, unit=unit, text="")
        return _RichTask(self._progress, number)

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


class _RichTask:
    def __init__(self, progress: Progress, number: TaskID) -> None:
        self._progress = progress
        self._number = number
        self._over = False

    def advance(self, amount: int) -> None:
        if not self._over:
            self._progress.advance(self._number, amount)

    def message(self, text: str) -> None:
        if not self._over:
            self._progress.update(self._number, text=escape(text))

    def done(self, text: str = "") -> None:
        if self._over:
            return
        self._over = True
        task = self._progress.tasks[self._progress.task_ids.index(self._number)]
        self._progress.update(
            self._number, total=task.total or task.completed or 1, text=escape(text)
        )
        self._progress.stop_task(self._number)
