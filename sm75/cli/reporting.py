"""``report``, and the report that other commands write beside their own work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sm75.cli.options import FILE, ROOT, load_lock, print_json, shared, warn
from sm75.errors import Sm75Error

if TYPE_CHECKING:
    from sm75.lockfile import ReleaseLock
    from sm75.verify import Verification


@click.command()
@shared("release", "channel", "dry", "json")
@click.option("--out", type=FILE, help="The file to write; default: report.html in the channel.")
def report(
    release: str | None, channel: Path, dry_run: bool, as_json: bool, out: Path | None
) -> None:
    """Write report.html: what was built from what, how it was checked, what to do next.

    One file that loads nothing and runs no script, made of what is there: the channel, the lock,
    and what the last build and verify in this directory have left. A section that has nothing says
    which command fills it. Without --out the channel's bill of materials (CycloneDX 1.6) is renewed
    too.
    """
    from sm75.report import write

    done = write.report(ROOT, load_lock(release), channel.absolute(), out, dry_run=dry_run)
    if as_json:
        print_json(
            {
                "file": str(done.file),
                "sha256": done.sha256,
                "bill_of_materials": "written" if done.bill else "as it was",
                "missing": [{"section": m.section, "command": m.command} for m in done.missing],
            }
        )
        return
    click.echo(f"report: {done.file}{' would be written' if dry_run else ''}")
    for gap in done.missing:
        click.echo(f"  without {gap.what[0].lower()}{gap.what[1:]}: {gap.command}")


def refresh(lock: ReleaseLock, channel: Path, *, built: Path | None = None) -> None:
    """Write a channel's report after a command; what hinders that is said and fails nothing.

    Args:
        lock: The release.
        channel: The channel; without one nothing is written.
        built: The package, where it was just built: the log of its compile is kept.
    """
    from sm75.channelcheck import is_channel
    from sm75.report import write

    if not is_channel(channel):
        return
    try:
        if built is not None:
            write.keep_timeline(ROOT, built)
        write.report(ROOT, lock, channel)
    except Sm75Error as error:
        warn(f"{channel / 'report.html'} was not written: {error.what}: {error.why}")


def withdrew(who: str, names: Iterable[str], *, aside: bool = False) -> None:
    """Say what left the channel for a new package.

    Args:
        who: The command.
        names: Packages; none: nothing is said.
        aside: Standard output is JSON.
    """
    if listed := ", ".join(name.rpartition("/")[2] for name in names):
        said = f"{who}: withdrawn from the channel, which has one build of a version: {listed}"
        click.echo(said, err=aside)


def keep(package: Path, result: Verification) -> None:
    """Keep a verdict for the report; a disk that does not take it fails nothing."""
    from sm75.report import records

    try:
        records.keep(ROOT, package, result)
    except Sm75Error as error:
        warn(f"the verdict was not kept for the report: {error.what}: {error.why}")


COMMANDS = (report,)
