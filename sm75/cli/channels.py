"""``channel``: the closure, what is in the channel, and where it goes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sm75.cli.options import (
    FILE,
    ROOT,
    TARGET,
    load_lock,
    open_store,
    print_json,
    shared,
    warn,
)
from sm75.cli.reporting import refresh
from sm75.words import counted

if TYPE_CHECKING:
    pass


@click.group("channel")
def channel_group() -> None:
    """Look at the channel."""


def _option(channel: Path) -> str:
    """What names a channel in a command; nothing for the project's own."""
    if channel.absolute() == ROOT / "channel":
        return ""
    return f" --channel {shlex.quote(str(channel))}"


@channel_group.command("verify")
@shared("channel", "json")
def channel_verify(channel: Path, as_json: bool) -> None:
    """Check every file against SHA256SUMS and the index (conda does not, for file channels).

    Warns of a version of which the channel has several builds: clients take any of them.
    """
    from sm75 import onebuild
    from sm75.channelcheck import advice, count, require, verify_channel
    from sm75.errors import ChannelError

    require(channel)
    problems = verify_channel(channel)
    if as_json:
        print_json([{"path": p.path, "kind": p.kind, "detail": p.detail} for p in problems])
    if problems:
        raise ChannelError(
            f"{channel} has {count(problems)}",
            why="; ".join(str(problem) for problem in problems[:10]),
            fix=advice(problems),
        )
    if not as_json:
        click.echo(f"channel: every file in {channel} is as SHA256SUMS and the index say")
    for choice in onebuild.choices(channel):
        warn(str(choice))


@channel_group.command("lock")
@shared("release", "store", "json")
@click.option("--upgrade", is_flag=True, help="Take the newest versions.")
@click.option("--check", is_flag=True, help="Write nothing; fail when anything would change.")
def channel_lock(
    release: str | None, store: Path | None, as_json: bool, upgrade: bool, check: bool
) -> None:
    """Resolve the closure, pin it in runtime.lock and list it in the recipe (uses the network)."""
    from sm75 import channelcommands
    from sm75.progress import amount, make_reporter

    with make_reporter() as reporter:
        made = channelcommands.lock(
            ROOT, load_lock(release), open_store(store), reporter, upgrade=upgrade, check=check
        )
    if as_json:
        print_json(made)
        return
    click.echo(
        f"runtime.lock: {counted(made['wheels'], 'wheel')} ({amount(made['bytes'], 'B')}) "
        f"for Python {', '.join(made['python'])}; "
        f"{counted(made['run_dependencies'], 'run dependency', 'run dependencies')} in the recipe"
        + (", which has changed" if made["recipe_changed"] else "")
    )


@channel_group.command("build")
@shared("release", "store", "channel", "dry", "json")
@TARGET
@click.option("--offline", is_flag=True, help="Use the store as it is; fetch nothing.")
def channel_build(
    release: str | None, store: Path | None, channel: Path, dry_run: bool, as_json: bool,
    target: str, offline: bool,
) -> None:  # fmt: skip
    """Bring the whole closure and the adapter to the image's torch into the channel."""
    from sm75 import channelcommands
    from sm75.progress import amount, make_reporter

    with make_reporter() as reporter:
        done = channelcommands.build(
            ROOT, load_lock(release), open_store(store), channel.absolute(), reporter,
            target=target, offline=offline, dry_run=dry_run,
        )  # fmt: skip
    if not dry_run:
        refresh(load_lock(release), channel.absolute())
    if as_json:
        print_json(done)
    elif dry_run:
        click.echo(
            f"channel: {counted(done['wheels'], 'wheel')}, {len(done['files'])} of them to fetch "
            f"({amount(done['download_bytes'], 'B')}; {amount(done['cached_bytes'], 'B')} are "
            "in the store)"
        )
    else:
        click.echo(
            f"channel: {counted(done['packages'], 'package')} of the closure, "
            f"{len(done['published'])} of them new, {len(done['withdrawn'])} withdrawn"
        )


@channel_group.command("sizes")
@shared("channel", "json")
def channel_sizes(channel: Path, as_json: bool) -> None:
    """List the channel's packages by size."""
    from sm75 import channelcommands, channeltools

    if as_json:
        print_json(channelcommands.sizes(channel))
        return
    from rich.console import Console

    Console().print(channeltools.size_table(channeltools.sizes(channel)))


@channel_group.command("missing")
@shared("release", "channel", "json")
@TARGET
def channel_missing(release: str | None, channel: Path, as_json: bool, target: str) -> None:
    """Say what the channel lacks to be installed from alone; exit code 1 when it lacks anything."""
    from sm75 import channelcommands

    found = channelcommands.missing(ROOT, load_lock(release), channel.absolute(), target=target)
    if as_json:
        print_json(found)
    else:
        for python, texts in found.items():
            for text in texts:
                click.echo(f"python {python}: {text}")
    if any(found.values()):
        # Beside the answer, not in it: a script reads that.
        click.echo(
            f"next: where conda-forge is reachable: {channelcommands.BUILD}{_option(channel)}; "
            "where it is not: docs/airgapped.md",
            err=True,
        )
        raise SystemExit(1)


@channel_group.command("export")
@shared("channel", "dry", "json")
@click.argument("out", type=FILE)
def channel_export(channel: Path, dry_run: bool, as_json: bool, out: Path) -> None:
    """Write the channel as one tar, to carry to a machine without network."""
    from sm75 import channelcommands
    from sm75.progress import amount

    done = channelcommands.export(channel, out, dry_run=dry_run)
    if as_json:
        print_json(done)
    elif dry_run:
        files = counted(done["files"], "file")
        click.echo(f"export: {files}, {amount(done['bytes'], 'B')}, to {out}")
    else:
        click.echo(f"{done['sha256']}  {out}")


@channel_group.command("publish")
@shared("channel", "dry", "json")
@click.option("--replace", is_flag=True, help="Overwrite packages that have other content there.")
@click.option("--delete", is_flag=True, help="Remove packages there that the channel lacks.")
@click.option("--reread", is_flag=True, help="Read all that is there and compare it.")
@click.argument("target")
def channel_publish(
    channel: Path, dry_run: bool, as_json: bool, replace: bool, delete: bool, reread: bool,
    target: str,
) -> None:  # fmt: skip
    """Put the channel where others read it: a directory, an object store or a registry.

    TARGET: DIR, s3://BUCKET/PREFIX, gs://, az://, or oci://HOST/NAMESPACE.
    """
    from sm75 import channelcommands
    from sm75.progress import amount, make_reporter

    with make_reporter(sys.stderr if as_json else None) as reporter:
        done = channelcommands.publish(
            ROOT, channel.absolute(), target, reporter,
            replace=replace, delete=delete, reread=reread, dry_run=dry_run,
        )  # fmt: skip
    if as_json:
        print_json(done)
        return
    click.echo(
        f"publish: {counted(len(done['sent']), 'file')} ({amount(done['sent_bytes'], 'B')}) "
        f"{'would be' if dry_run else 'were'} sent, {len(done['same'])} are there already, "
        f"{len(done['removed'])} removed"
    )
    for name in (*done["sent"], *(f"remove {name}" for name in done["removed"])) if dry_run else ():
        click.echo(f"  {name}")


COMMANDS = (channel_group,)
