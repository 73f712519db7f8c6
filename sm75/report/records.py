"""What is kept beside the work so that a report can be made later.

``.sm75/records/<sha256 of the package>.<kind>.json``. They are not in the channel: they hold times
and what one machine could check, and a channel is the same wherever it is built.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from sm75 import atomic
from sm75.inspection import Report as Inspection
from sm75.report.timeline import Timeline
from sm75.store import hash_file
from sm75.verify import Verification

Kept = Verification | Inspection | Timeline
_KINDS: dict[type[Kept], str] = {
    Verification: "verify", Inspection: "inspect", Timeline: "timeline",
}  # fmt: skip
_T = TypeVar("_T", Verification, Inspection, Timeline)


class SmemRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last ``verify --smem``.

    Attributes:
        package: File name of the package audited; empty: the sdist with the patches.
        series: sha256 of the series.toml in force, which pins every patch.
        vllm: The release.
        triton: Version that compiled.
        summary: The verdict in a line.
        passed: No variant is against the limits.
        chart: :func:`sm75.smem.report.chart`'s.
    """

    package: str
    series: str
    vllm: str
    triton: str
    summary: str
    passed: bool
    chart: Chart


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One launch: bytes with the patches, and without them where that is known."""

    label: str
    after: int
    before: int | None = None


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Bars against a limit, in bytes."""

    limit: int
    unit: str
    bars: tuple[Bar, ...]


def _place(root: Path, sha256: str, kind: type[Kept]) -> Path:
    return root / ".sm75" / "records" / f"{sha256}.{_KINDS[kind]}.json"


def keep(root: Path, package: Path, record: Kept) -> None:
    """Keep a record of a package.

    Args:
        root: The project's directory.
        package: The file; the record is found again by its content.
        record: What to keep.

    Raises:
        DiskError: It cannot be written.
    """
    data = msgspec.json.encode(record, order="sorted")
    atomic.write_bytes(_place(root, hash_file(package), type(record)), data)


def find(root: Path, sha256: str, kind: type[_T]) -> _T | None:
    """The record of a package with that content; None when there is none that can be read."""
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):  # an index says it, and it becomes a path
        return None
    return _read(_place(root, sha256, kind), kind)


def _smem(root: Path) -> Path:
    return root / ".sm75" / "records" / "smem.json"


def keep_smem(root: Path, record: SmemRecord) -> None:
    """Keep the result of an audit, in the place of the one before.

    Raises:
        DiskError: It cannot be written.
    """
    atomic.write_bytes(_smem(root), msgspec.json.encode(record, order="sorted"))


def find_smem(root: Path) -> SmemRecord | None:
    """The last audit's; None when there is none that can be read."""
    return _read(_smem(root), SmemRecord)


_Any = TypeVar("_Any")


def _read(path: Path, kind: type[_Any]) -> _Any | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
