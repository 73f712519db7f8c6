"""``explain LOG``: the known failures of a log, for people and for programs."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from sm75.errors import CheckFailed, UsageError
from sm75.explain import knowledge, scan
from sm75.explain.knowledge import Area, Severity
from sm75.explain.subject import Explanation
from sm75.words import counted

_STDIN = "-"
_WORDS: dict[Severity, str] = {
    "failure": "known failure",
    "warning": "warning",
    "harmless": "harmless note",
}


@dataclass(frozen=True, kw_only=True)
class LogExplanation(Explanation):
    """What a log has.

    Attributes:
        report: The findings.
        exit_code: 0: something known was found; 1: nothing was.
    """

    parts: tuple[tuple[str, str], ...] = ()
    report: scan.Report = field(default_factory=lambda: scan.Report(lines=0, findings=()))

    @property
    def exit_code(self) -> int:
        return 0 if self.report.findings else CheckFailed.exit_code

    def lines(self) -> list[str]:
        """A block an entry."""
        found = self.report.findings
        if not found:
            return [
                f"{self.subject}: nothing known in {counted(self.report.lines, 'line')}",
                "  docs/troubleshooting.md lists what is known. The log of the program that failed",
                "  (the server's own, the compiler's) says more than that of what started it.",
            ]
        counts = [
            counted(len(of), word)
            for severity, word in _WORDS.items()
            if (of := self.report.of(severity))
        ]
        if not self.report.of("failure"):
            counts.insert(0, "no known failure")
        text = [f"{self.subject}: {', '.join(counts)} in {counted(self.report.lines, 'line')}"]
        for finding in found:
            times = f", {finding.count} times" if finding.count > 1 else ""
            title = finding.words(finding.entry.title)
            text += ["", f"{title}  [{finding.entry.severity}{times}]"]
            text.append(f"  line {finding.number}: {finding.evidence}")
            text.append(f"  cause: {finding.words(finding.entry.cause)}")
            if finding.sum:
                text.append(f"  numbers: {finding.sum}")
            text += [f"  fix: {step}" for step in finding.entry.fix]
            text.append(f"  link: {finding.entry.link}")
        return text

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "subject": self.subject,
            "lines": self.report.lines,
            "findings": [finding.to_json() for finding in self.report.findings],
        }


def of_log(root: Path, subject: str) -> Explanation | None:
    """Explain a log.

    Args:
        root: The project's directory.
        subject: Perhaps a file, or ``-`` for standard input.

    Raises:
        UsageError: It is a directory, or there is no such file, or it cannot be read.
        LockError: The knowledge base is malformed.
    """
    base = knowledge.load()
    if subject == _STDIN:
        return LogExplanation(subject="log", report=scan.scan(sys.stdin.buffer, base))
    path = Path(subject)
    try:
        if path.is_dir():
            newest = max(path.glob("*.log"), key=lambda p: p.stat().st_mtime, default=None)
            raise UsageError(
                f"{subject} is a directory",
                fix=f"name a log: python3 orchestrator.py explain {newest or subject + '/NAME'}",
            )
        # Not is_file(): a pipe, as of `explain <(journalctl -u vllm)`, will do.
        if not path.exists():
            if "/" in subject or path.suffix in (".log", ".txt", ".out", ".err"):
                raise UsageError(f"there is no file {subject}", fix="name a log, or - for stdin")
            return None
        with path.open("rb") as stream:
            return LogExplanation(subject=subject, report=scan.scan(stream, base))
    except OSError as error:
        raise UsageError(
            f"{subject} cannot be read", why=str(error.strerror), fix="name another, or - for stdin"
        ) from error


def brief(log: Path, tail: Sequence[str]) -> str:
    """What is known of a failed build's log, as lines for its error message.

    Args:
        log: The log; what of it can be read is searched as a whole.
        tail: Its last lines, for when it cannot.

    Returns:
        Failures only, with cause and fix; empty when none is known.
    """
    try:
        with log.open("rb") as stream:
            return "\n".join(known(stream, "build"))
    except OSError:
        return "\n".join(known(io.BytesIO("\n".join(tail).encode()), "build"))


def known(stream: BinaryIO, area: Area) -> list[str]:
    """What is known of a failed program's output, as indented lines: failures, cause and fix.

    Args:
        stream: The output, opened as bytes.
        area: Whose it is.

    Raises:
        OSError: It cannot be read.
    """
    text = []
    for finding in scan.scan(stream, knowledge.load(), (area,)).of("failure"):
        place = f"line {finding.number}" if finding.number else "the log"
        text.append(f"    {finding.words(finding.entry.title)} ({place}): "
                    f"{finding.words(finding.entry.cause)}")  # fmt: skip
        if area == "serve" and finding.sum:
            text.append(f"      numbers: {finding.sum}")
        text += [f"      {step}" for step in finding.entry.fix]
    return text
