"""Progress out of the build's log: steps, compiled sources, what failed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Seconds of a source that the list of slow ones does not name: the mean of the others, measured
# by benchmarks/build_time.py.
DEFAULT_SECONDS = 15.0

_STATUS = re.compile(
    r"^sm75: \[(\d+)/(\d+)\] (?:Building \w+ object (\S+)\.o|Linking \w+ (?:\w+ )+(\S+))"
)
_OBJECT = re.compile(r"^CMakeFiles/[^/]+\.dir/(?P<source>.+)$")
_STEP = re.compile(r"^sm75: step (\w+)$")
_FAILED = re.compile(r"^FAILED: (?:\[code=(\d+)\] )?(\S+)")
# What the recipe says when a compiler was killed: it is tried once more, alone.
_ALONE = re.compile(r"^sm75: alone: (\S+)$")
_KILLED = re.compile(r"^sm75: killed again, with nothing beside it: (\S+); (.+)$")


def read_weights(path: Path) -> dict[str, float]:
    """Read the list of slow sources: lines ``<seconds> <source>``; ``#`` begins a comment."""
    weights = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            seconds, source = line.split(maxsplit=1)
            weights[source] = float(seconds)
    return weights


def source_of(target: str) -> str:
    """The source that a target of ninja's is made from; of a library, its own name."""
    found = _OBJECT.match(target)
    return found["source"].removesuffix(".o") if found else target


@dataclass(kw_only=True)
class CompileLog:
    """Follows the lines of one build.

    Attributes:
        weights: Seconds by source, for the ETA.
        step: The step under way.
        done: Finished edges of ninja's.
        total: All of them.
        compiled: Sources compiled, in the order in which they ended.
        failed: The object that failed first.
        exit_code: Its compiler's exit code.
        alone: Sources whose compiler was killed and that were compiled once more with nothing
            beside them.
        memory: What a compiler that was killed then too needs, and what there is; in words.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    step: str = ""
    done: int = 0
    total: int = 0
    compiled: list[str] = field(default_factory=list)
    failed: str = ""
    exit_code: int | None = None
    alone: list[str] = field(default_factory=list)
    memory: str = ""

    def feed(self, line: str) -> tuple[str, float] | None:
        """Take a line in.

        Returns:
            What ended and its weight in seconds, when the line reports the end of a compilation.
        """
        if step := _STEP.match(line):
            self.step = step[1]
            return None
        if failure := _FAILED.match(line):
            if not self.failed:
                self.failed = failure[2]
                self.exit_code = int(failure[1]) if failure[1] else None
            # ninja announces the end of a failed one as it does any other's.
            if (source := source_of(failure[2])) in self.compiled:
                self.compiled.remove(source)
            return None
        if retried := _ALONE.match(line):
            self.alone.append(source_of(retried[1]))
            self.failed, self.exit_code = "", None
            return None
        if killed := _KILLED.match(line):
            self.failed, self.memory = killed[1], killed[2]
            return None
        status = _STATUS.match(line)
        if not status:
            return None
        self.done, self.total = int(status[1]), int(status[2])
        if not status[3]:
            return status[4], 1.0
        source = source_of(status[3])
        self.compiled.append(source)
        return source, self.weights.get(source, DEFAULT_SECONDS)

    def estimate(self) -> float:
        """Seconds of all work that ninja has announced, as far as the weights know."""
        known = sum(self.weights.values())
        if self.total < len(self.weights):  # resumed: which of them are left is not announced
            return known * self.total / len(self.weights)
        return known + max(0, self.total - len(self.weights)) * DEFAULT_SECONDS
