"""Where reports are written, and when."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from sm75 import atomic, sbom
from sm75 import channel as channels
from sm75.channelcheck import REPORT, SUMS, is_channel, read_sums, require
from sm75.errors import UsageError
from sm75.lockfile import ReleaseLock
from sm75.report import commands, gather, page, records, timeline
from sm75.report.facts import Missing


@dataclass(frozen=True, kw_only=True)
class Written:
    """A report that was written, or would be.

    Attributes:
        file: Where.
        sha256: Of the page.
        missing: Sections that have nothing, and what makes them.
        bill: Whether the channel's bill of materials was written anew.
    """

    file: Path
    sha256: str
    missing: tuple[Missing, ...]
    bill: bool


def report(
    root: Path, lock: ReleaseLock, channel: Path, out: Path | None = None, *, dry_run: bool = False
) -> Written:
    """Write the report of a channel, from what is there.

    Args:
        root: The project's directory.
        lock: The release.
        channel: The channel.
        out: Another file; None: ``report.html`` in the channel, whose bill of materials is renewed
            too where it is not that of the packages.
        dry_run: Write nothing.

    Raises:
        UsageError: ``out`` is no file to write to.
        ChannelError: There is no channel to write into, or an index or the package cannot be read.
        BusyError: A publisher holds the channel.
        DiskError: A file cannot be written.
    """
    if out is None:
        require(channel)
    place = out or channel / REPORT
    _check_out(place, channel)
    bill = False
    if out is None:
        bill = _renew_bill(root, lock, channel, dry_run=dry_run)
    facts = gather.gather(root, lock, channel, keep=not dry_run)
    data = page.render(facts)
    if not dry_run:
        atomic.write_bytes(place, data)
    digest = hashlib.sha256(data).hexdigest()
    missing = tuple(commands.named(gap, channel) for gap in facts.missing)
    return Written(file=place, sha256=digest, missing=missing, bill=bill)


def keep_timeline(root: Path, package: Path) -> None:
    """Keep the log of the compile of a package that was just built, in the place of an older one.

    Args:
        root: The project's directory.
        package: The package.

    Raises:
        ChannelError: The package is damaged.
        DiskError: It cannot be written.
    """
    place = gather.native_build(root, package)
    made = timeline.read(place) if place else None
    if made is not None:
        records.keep(root, package, made)


def _check_out(out: Path, channel: Path) -> None:
    """Refuse a place that is no file, or that would be a foreign file in the channel."""
    fix = "name another file: --out report.html"
    if out.is_dir() or (out.exists() and not out.is_file()):
        raise UsageError(f"{out} is no file to write to", why="it is something else", fix=fix)
    place, inside = out.resolve(), channel.resolve()
    if place != inside / REPORT and place.is_relative_to(inside) and is_channel(channel):
        raise UsageError(
            f"{out} would lie in the channel",
            why=f"a channel has no files but its own, and {REPORT}",
            fix=fix,
        )


def _renew_bill(root: Path, lock: ReleaseLock, channel: Path, *, dry_run: bool) -> bool:
    if not (channel / SUMS).is_file():  # a channel that others made
        return False
    data = sbom.make(channel, root, lock)
    listed = read_sums(channel).get(sbom.SBOM)
    there = channel / sbom.SBOM
    digest = hashlib.sha256(data).hexdigest()
    if listed == digest and there.is_file() and there.read_bytes() == data:
        return False
    if not dry_run:
        channels.add_document(channel, sbom.SBOM, data)
    return True
