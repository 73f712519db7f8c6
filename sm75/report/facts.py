"""What a report shows, section by section; what is not there has the command that makes it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markupsafe import Markup

from sm75.inspection import Report as Inspection
from sm75.lockfile import Artifact, Substitution, TargetContract
from sm75.report.attention import Attention
from sm75.report.records import SmemRecord
from sm75.report.timeline import Timeline
from sm75.sbom import Item
from sm75.series import Patch
from sm75.verify import Verification


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A section without content.

    Attributes:
        section: Its id in the page.
        what: What is not there, as a sentence's subject.
        why: In a sentence; may be empty.
        command: What makes it.
    """

    section: str
    what: str
    why: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The package that the report is on.

    Attributes:
        file: ``subdir/file``.
        name: Conda name.
        version: vLLM's.
        build: Build string.
        size: Bytes.
        sha256: Of the file.
        others: Other builds of it in the channel, as ``subdir/file``.
    """

    file: str
    name: str
    version: str
    build: str
    size: int
    sha256: str
    others: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input file, and the lock's entry where that has the same hash."""

    name: str
    sha256: str
    entry: Artifact | None


@dataclass(frozen=True, kw_only=True)
class Change:
    """One patch, and the series' entry where that has the same hash."""

    file: str
    sha256: str
    entry: Patch | None


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What the package was made of.

    Attributes:
        inputs: Files from the package index.
        changes: Patches, in order.
        overlay: Files of ours: where they lie in vLLM's tree, their sha256, what they are for.
        departures: Pins of vLLM's that the lock departs from.
        settings: Facts of the build by name: toolchain, target, options.
        target: The contract it was made for, where it is still the same.
    """

    inputs: tuple[Input, ...]
    changes: tuple[Change, ...]
    overlay: tuple[tuple[str, str, str], ...]
    departures: tuple[Substitution, ...]
    settings: tuple[tuple[str, str], ...]
    target: TargetContract | None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Files of the package under one name: a directory or an ending."""

    name: str
    files: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes, unpacked, of the package; and the channel's packages.

    Attributes:
        directories: Of the package, largest first.
        endings: Likewise.
        totals: Of the channel, by what they sum.
    """

    directories: tuple[Group, ...]
    endings: tuple[Group, ...]
    totals: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The table of claims, rendered, with what stands before and after it."""

    before: Markup
    head: tuple[Markup, ...]
    rows: tuple[tuple[Markup, ...], ...]
    after: Markup


@dataclass(frozen=True, kw_only=True)
class Bill:
    """The channel's packages, and whether its bill of materials says the same.

    Attributes:
        items: The packages.
        file: ``current``, ``old`` or ``absent``.
    """

    items: tuple[Item, ...]
    file: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something for the reader to do."""

    text: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything in a report. What is None has an entry in ``missing``."""

    release: str
    channel_sums: str
    subject: Subject | None
    origin: Origin | None
    inspection: Inspection | None
    verification: Verification | None
    smem: SmemRecord | None
    attention: Attention | None
    timeline: Timeline | None
    sizes: Sizes | None
    bill: Bill | None
    claims: Claims | None
    steps: tuple[Step, ...]
    missing: tuple[Missing, ...]

    @property
    def placed(self) -> bool:
        """Whether a command names the channel by its placeholder."""
        said = [step.command for step in self.steps] + [gap.command for gap in self.missing]
        return any(re.search(r"\bDIR\b", command) for command in said)

    def lacks(self, section: str) -> Missing | None:
        """The entry of a section that has nothing."""
        return next((gap for gap in self.missing if gap.section == section), None)
