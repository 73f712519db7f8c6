"""What changes from one release lock to another, so that a person can read it in a minute."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sm75.closurelock import RuntimeLock
from sm75.closureresolve import MINORS, applies
from sm75.lockfile import G5G, Artifact, ReleaseLock

# Declarations by the beginning of their names, and what a heading calls them.
_KINDS = {
    "external": "External projects",
    "extension": "Extensions",
    "target": "CMake targets",
    "docker": "Architectures",
    "CUDA_SUPPORTED_ARCHS": "Architectures",
    # vLLM's requirements have a heading of their own.
    "requirement": "",
}
_ORDER = (
    "Sources", "Declared pins", "Architectures", "External projects", "Extensions",
    "CMake targets", "Rust", "Requirements of vLLM", "Departures", "Constraints", "Patches",
    "Closure",
)  # fmt: skip
_REVISION = re.compile(r"\b([0-9a-f]{10})[0-9a-f]{30}\b")
# Of a closure's changes so many are shown to a person; JSON has all.
_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two locks.

    Attributes:
        lock: The release lock.
        requirements: vLLM's own, PEP 508; None: not known.
        runtime: The closure; None: not known.
    """

    lock: ReleaseLock
    requirements: tuple[str, ...] | None = ()
    runtime: RuntimeLock | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference.

    Attributes:
        name: What differs.
        old: What it was; empty: it is new.
        new: What it is; empty: it is gone.
        note: What has to be known of it; may be empty.
    """

    name: str
    old: str
    new: str
    note: str = ""

    @property
    def sign(self) -> str:
        """``+`` new, ``-`` gone, ``~`` changed."""
        return "~" if self.old and self.new else "+" if self.new else "-"


@dataclass(frozen=True, kw_only=True)
class Diff:
    """All differences.

    Attributes:
        old: The release of the one lock; empty: there was none.
        new: The release of the other.
        sections: Differences by heading; headings without any are left out.
    """

    old: str
    new: str
    sections: dict[str, tuple[Change, ...]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether nothing differs."""
        return not self.sections

    def lines(self) -> Iterator[str]:
        """The differences for a person, a line each, git revisions shortened."""
        for heading, changes in self.sections.items():
            signs = [change.sign for change in changes]
            told = ", ".join(
                f"{signs.count(sign)} {word}"
                for sign, word in (("+", "new"), ("-", "gone"), ("~", "changed"))
                if sign in signs
            )
            yield f"{heading}: {told}"
            shown = changes[:_SHOWN] if heading == "Closure" else changes
            for change in shown:
                text = " -> ".join(filter(None, (change.old, change.new)))
                note = f" ({change.note})" if change.note else ""
                yield _REVISION.sub(r"\1", f"  {change.sign} {change.name}  {text}{note}")
            if len(shown) < len(changes):
                yield f"  … and {len(changes) - len(shown)} more (--json lists them)"

    def to_json(self) -> dict[str, Any]:
        """The differences as JSON-ready data."""
        return {
            "from": self.old,
            "to": self.new,
            "sections": {
                heading: [
                    {"name": c.name, "old": c.old, "new": c.new, "note": c.note} for c in changes
                ]
                for heading, changes in self.sections.items()
            },
        }


def compare(old: Side | None, new: Side) -> Diff:
    """Say what differs.

    Args:
        old: The former lock; None: there is none, and everything is new.
        new: The lock that is made.
    """
    found: dict[str, list[Change]] = {}
    for heading, changes in _changes(old, new):
        found.setdefault(heading, []).extend(changes)
    return Diff(
        old=old.lock.vllm if old else "",
        new=new.lock.vllm,
        sections={heading: tuple(found[heading]) for heading in _ORDER if found.get(heading)},
    )


def _changes(old: Side | None, new: Side) -> Iterator[tuple[str, list[Change]]]:
    before = old.lock if old else None
    yield "Sources", _sources(before.artifacts if before else (), new.lock.artifacts)
    notes = {s.name: f"{s.used}: {s.reason}" for s in new.lock.substitutions}
    theirs = {d.name: d.value for d in before.declared} if before else {}
    for change in _between(theirs, {d.name: d.value for d in new.lock.declared}, notes):
        heading = _KINDS.get(change.name.partition(":")[0], "Declared pins")
        if heading:
            yield heading, [change]
    yield "Rust", _between(_rust(before), _rust(new.lock))
    yield "Requirements of vLLM", _requirements(old, new)
    yield (
        "Departures",
        _between(
            {s.name: s.used for s in before.substitutions} if before else {},
            {s.name: s.used for s in new.lock.substitutions},
        ),
    )
    yield (
        "Constraints",
        _between(
            {c.name: c.spec for c in before.constraints} if before else {},
            {c.name: c.spec for c in new.lock.constraints},
        ),
    )
    yield (
        "Patches",
        _between(
            {p.file: p.sha256[:10] for p in before.patches} if before else {},
            {p.file: p.sha256[:10] for p in new.lock.patches},
        ),
    )
    if new.runtime:
        former = old.runtime if old else None
        yield "Closure", _between(_closure(former), _closure(new.runtime))


def _between(
    old: Mapping[str, str], new: Mapping[str, str], notes: Mapping[str, str] | None = None
) -> list[Change]:
    found = []
    for name in sorted(old.keys() | new.keys()):
        one, two = old.get(name, ""), new.get(name, "")
        if one != two:
            # Why something is departed from has to be read when it is new, not each time.
            note = (notes or {}).get(name, "") if not one else ""
            found.append(Change(name=name, old=one, new=two, note=note))
    return sorted(found, key=lambda change: "+-~".index(change.sign))


def _sources(old: Iterable[Artifact], new: Iterable[Artifact]) -> list[Change]:
    before = {artifact.id: artifact for artifact in old}
    after = {artifact.id: artifact for artifact in new}
    found = []
    for name in dict.fromkeys((*before, *after)):
        one, two = before.get(name), after.get(name)
        if one and two and (one.sha256, one.stored_sha256) == (two.sha256, two.stored_sha256):
            continue
        note = ""
        if one and two and one.filename == two.filename and one.sha256 != two.sha256:
            note = "the same name with other content: look at this before anything else"
        found.append(Change(name=name, old=_source(one), new=_source(two), note=note))
    return found


def _source(artifact: Artifact | None) -> str:
    if artifact is None:
        return ""
    return f"{artifact.project} {artifact.version}, {artifact.download_size / 1e6:.1f} MB"


def _rust(lock: ReleaseLock | None) -> dict[str, str]:
    if lock is None:
        return {}
    crates = dict(entry.rsplit("@", 1) for entry in lock.rust.git)
    return {
        "channel": lock.rust.channel,
        "Cargo.lock": lock.rust.cargo_lock_sha256[:10],
        **{f"git {name}": revision for name, revision in crates.items()},
    }


def _requirements(old: Side | None, new: Side) -> list[Change]:
    one, two = old.requirements if old else (), new.requirements
    if one is None or two is None:
        why = "the former release's sdist cannot be had"
        return [Change(name="all of them", old="unknown", new="not compared", note=why)]
    return _between(_required(one), _required(two))


def _required(requirements: Iterable[str]) -> dict[str, str]:
    """Bounds by project, of what applies on the target; a marker is shown where it decides."""
    found: dict[str, list[str]] = {}
    for line in requirements:
        requirement = Requirement(line)
        minors = [minor for minor in MINORS if applies(requirement, G5G, minor)]
        if not minors:
            continue
        marker = f"; {requirement.marker}" if len(minors) < len(MINORS) else ""
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        text = f"{extras}{requirement.specifier or 'any'}{marker}"
        found.setdefault(canonicalize_name(requirement.name), []).append(text)
    return {name: " | ".join(sorted(texts)) for name, texts in found.items()}


def _closure(runtime: RuntimeLock | None) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for package in runtime.packages if runtime else ():
        found.setdefault(package.project, set()).add(package.version)
    return {name: ", ".join(sorted(versions)) for name, versions in found.items()}
