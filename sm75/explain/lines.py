"""A log as lines that patterns can be matched against, read as a stream.

What terminals, containers and service managers add (colours, progress bars, prefixes) is taken
away; line numbers stay those of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

# A longer line is cut into pieces of that many bytes: one that never ends must not fill the
# memory. A message that lies across a cut is not found.
PIECE = 64 * 1024
# CSI and OSC sequences (ECMA-48), and the two-byte ones.
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|[@-Z\\-_])")
# vLLM's level and place: ERROR 09-03 11:03:37 [core.py:712]
_LEVEL = re.compile(
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s+(?:\d\d-\d\d \d\d:\d\d:\d\d\s+)?"
    r"\[?[\w./]{1,80}\.py:\d+\]\s?"
)
# vLLM's and Ray's: (EngineCore_DP0 pid=12), (RayWorkerWrapper pid=1, ip=10.0.0.1)
_PROCESS = re.compile(r"\s*\([A-Za-z]\w{0,40} (?:pid|rank)=\d+(?:, ip=[\w.:]{1,45})?\)\s?")
# One prefix each; they stack: `vllm-1  | (EngineCore_0 pid=12) ERROR 09-03 11:03:37 [a.py:1]`.
_PREFIXES = (
    _PROCESS,
    # torchrun: [rank0]:
    re.compile(r"\s*\[rank\d+\]:\s?"),
    # docker compose and Buildkite: name-1  | ; docker build: #11 509.5
    re.compile(r"[\w.-]{0,60}\s{0,20}\|\s"),
    re.compile(r"#\d+ \d+\.\d+\s"),
    # Kubernetes (CRI), behind its time: stdout F
    re.compile(r"(?:stdout|stderr) [FP] "),
    # ISO times, with brackets or without; Buildkite's
    re.compile(r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]{0,12}(?:Z|[+-]\d\d:?\d\d)?\]?\s?"),
    # journald: Nov 30 21:20:13 host vllm[123]:
    re.compile(r"\w{3} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,64} [\w./@-]{1,64}(?:\[\d+\])?: "),
    _LEVEL,
)
# More than these on one line is no log's.
_MOST_PREFIXES = 6


@dataclass(frozen=True, slots=True)
class Line:
    """One line, or one state of a progress line.

    Attributes:
        number: Its line in the file, from 1.
        text: Without colours and line end.
        goes_on: Whether it is a further piece of a line that was too long.
    """

    number: int
    text: str
    goes_on: bool = False


def read(stream: BinaryIO) -> Iterator[Line]:
    """Read a log; bytes that are no UTF-8 are replaced.

    Args:
        stream: The log, opened as bytes.

    Raises:
        OSError: It cannot be read.
    """
    number, cut = 1, False
    while raw := stream.readline(PIECE):
        text = raw.decode("utf-8", errors="replace")
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        # A progress bar writes many states into one line of the file.
        for index, part in enumerate(text.rstrip("\r\n").split("\r")):
            yield Line(number, part, cut and index == 0)
        cut = not raw.endswith(b"\n")
        number += not cut


def bare(text: str) -> str:
    """A line without the prefixes of processes, containers and loggers."""
    found = _prefixes(text)
    return text[found[-1].end() :] if found else text


def level(text: str) -> str:
    """The level that vLLM's logger gave a line; empty where it did not write it.

    Of several the first: what is behind it was said, as a log that a user sent.
    """
    return next((found[1] for found in _prefixes(text) if found.re is _LEVEL), "")


def led(text: str) -> bool:
    """Whether one of vLLM's processes or its logger begins the line."""
    return any(found.re in (_LEVEL, _PROCESS) for found in _prefixes(text))


def _prefixes(text: str) -> list[re.Match[str]]:
    """The prefixes of a line, one after the other."""
    position = 0
    stack: list[re.Match[str]] = []
    while len(stack) < _MOST_PREFIXES:
        found = next((m for p in _PREFIXES if (m := p.match(text, position))), None)
        if found is None or found.end() == position:
            break
        stack.append(found)
        position = found.end()
    return stack
