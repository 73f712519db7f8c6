"""Find the known failures in a log, as a stream: the log may be of any size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from sm75.explain import arithmetic, lines
from sm75.explain.context import Context
from sm75.explain.knowledge import Area, Entry, Knowledge, Pattern, Severity
from sm75.explain.speech import Speech, said

# Lines that are searched at once for needles, of which most logs have none.
_BATCH = 4096
# Lines after a match in which its ``then`` is looked for: messages are broken in two by their
# writers, and once more by pip and uv.
_FOLLOW = 3
# Different texts of one entry that are kept: names of variables, say.
_VARIANTS = 8
# Characters of the evidence that are shown.
_EVIDENCE = 400
# pytest names tests by their parameters, which may be the very words of a failure.
_TEST_NAME = re.compile(r"\s{0,8}(?:[A-Z]{4,8} )?[\w./-]{1,200}\.py::\w")
_ORDER: tuple[Severity, ...] = ("failure", "warning", "harmless")


@dataclass(kw_only=True)
class Finding:
    """One entry that a log has.

    Attributes:
        entry: The entry.
        number: Line of the first match, from 1.
        evidence: That line.
        count: How many lines match.
        variants: The named groups of different matches, the first ones.
    """

    entry: Entry
    number: int
    evidence: str
    count: int = 1
    variants: list[dict[str, str]] = field(default_factory=list)

    def words(self, text: str) -> str:
        """A text of the entry with the groups filled in."""
        known = _Known()
        for variant in self.variants:
            for name, value in variant.items():
                known.setdefault(name, [])
                if value not in known[name]:
                    known[name].append(value)
        return text.format_map(known.shown())

    @property
    def sum(self) -> str:
        """The arithmetic of the numbers, or nothing."""
        if not self.entry.arithmetic:
            return ""
        # The fullest match has the numbers; a masked one has none.
        groups = max(self.variants, key=len, default={})
        return arithmetic.SUMS[self.entry.arithmetic](groups)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "id": self.entry.id,
            "severity": self.entry.severity,
            "title": self.words(self.entry.title),
            "line": self.number,
            "evidence": self.evidence,
            "count": self.count,
            "cause": self.words(self.entry.cause),
            "numbers": self.sum,
            "fix": list(self.entry.fix),
            "link": self.entry.link,
        }


class _Known(dict[str, list[str]]):
    """Values by group name."""

    def shown(self) -> _Shown:
        return _Shown({name: ", ".join(values) for name, values in self.items()})


class _Shown(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "(not said)"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a log has.

    Attributes:
        lines: How many lines it has.
        findings: Failures first, then warnings, then what is harmless; each in the log's order.
    """

    lines: int
    findings: tuple[Finding, ...]

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """Those of a severity."""
        return tuple(f for f in self.findings if f.entry.severity == severity)


@dataclass
class _Pending:
    """A match whose ``then`` is still looked for."""

    groups: dict[str, str]
    pattern: Pattern
    left: int = _FOLLOW


def scan(stream: BinaryIO, knowledge: Knowledge, areas: Iterable[Area] = ()) -> Report:
    """Search a log.

    Args:
        stream: The log, opened as bytes.
        knowledge: The entries.
        areas: Only entries of these; none given: all.

    Raises:
        OSError: The log cannot be read.
    """
    wanted = set(areas)
    patterns = [
        (entry, pattern)
        for entry in knowledge.entries
        if not wanted or wanted & set(entry.area)
        for pattern in entry.pattern
    ]
    found: dict[str, Finding] = {}
    pending: list[_Pending] = []
    speech, context = Speech(), Context(wanted)
    by_id = {entry.id: entry for entry in knowledge.entries}
    last, head = 0, ""
    for batch in _batches(lines.read(stream)):
        last = batch[-1].number
        whole = "\n".join(line.text for line in batch)
        here = [(entry, pattern) for entry, pattern in patterns if pattern.needle in whole]
        if not here and not pending and not speech.open and not speech.may_begin(whole):
            head = next((line.text for line in reversed(batch) if not line.goes_on), head)
            context.skip((line.text for line in reversed(batch)), whole)
            continue
        for line in batch:
            # The prefixes of a line that was cut stand in its first piece.
            head = head if line.goes_on else line.text
            pending = [waiting for waiting in pending if _follow(waiting, line.text)]
            if speech.within(line.text):
                continue
            context.read(line.text)
            hits = [(entry, pattern) for entry, pattern in here if pattern.needle in line.text]
            if hits and not said(head):
                for entry, pattern in hits:
                    other = entry.instead.get(context.area) if context.area else None
                    _look(by_id[other] if other else entry, pattern, line, found, pending)
    ordered = sorted(found.values(), key=lambda f: (_ORDER.index(f.entry.severity), f.number))
    return Report(lines=last, findings=tuple(ordered))


def _batches(source: Iterator[lines.Line]) -> Iterator[list[lines.Line]]:
    batch: list[lines.Line] = []
    size = 0
    for line in source:
        batch.append(line)
        size += len(line.text)
        if len(batch) >= _BATCH or size >= 16 * lines.PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _look(
    entry: Entry,
    pattern: Pattern,
    line: lines.Line,
    found: dict[str, Finding],
    pending: list[_Pending],
) -> None:
    text = lines.bare(line.text)
    match = pattern.search(text)
    if match is None or _TEST_NAME.match(text):
        return
    groups = {name: value.strip() for name, value in match.groupdict().items() if value}
    finding = found.get(entry.id)
    if finding is None:
        evidence = _around(line.text, match[0])
        finding = found[entry.id] = Finding(
            entry=entry, number=line.number, evidence=evidence, variants=[groups]
        )
    else:
        finding.count += 1
        if groups in finding.variants or len(finding.variants) >= _VARIANTS:
            return
        finding.variants.append(groups)
    if pattern.following:
        waiting = _Pending(groups, pattern)
        if _follow(waiting, line.text):
            pending.append(waiting)


def _follow(waiting: _Pending, text: str) -> bool:
    """Look for the second half; say whether to go on looking."""
    if waiting.pattern.following and (match := waiting.pattern.following.search(text)):
        waiting.groups |= {k: v for k, v in match.groupdict().items() if v}
        return False
    waiting.left -= 1
    return waiting.left >= 0


def _around(text: str, match: str) -> str:
    """The line, or of a long one what is around the match."""
    text = text.strip()
    if len(text) <= _EVIDENCE:
        return text
    start = max(0, text.find(match) - 80)
    cut = text[start : start + _EVIDENCE].strip()
    return ("…" if start else "") + cut + ("…" if start + _EVIDENCE < len(text) else "")
