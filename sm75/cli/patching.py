"""``patches``: how the patches stand to a release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sm75.cli.options import (
    FILE,
    ROOT,
    load_lock,
    open_store,
    print_json,
    refuse,
    shared,
    warn,
)
from sm75.errors import CheckFailed

if TYPE_CHECKING:
    from sm75.patching import Result


@click.group()
def patches() -> None:
    """Look at the patches of a release."""


@patches.command("check")
@shared("release", "store", "json")
@click.option("--against", help="Another pinned release, or a tree or sdist by path.")
def patches_check(
    release: str | None, store: Path | None, as_json: bool, against: str | None
) -> None:
    """Show which patches apply to a release's sdist, and where they do not, why.

    With --against, moved hunks are shown with their old and new line, and a conflict with what the
    patch expects, what its own release has there and what the other has.
    """
    from sm75 import patchcommands

    results = patchcommands.check(ROOT, load_lock(release), open_store(store), against, warn)
    _print_results(results, as_json=as_json)
    if not patchcommands.applies(results):
        raise SystemExit(CheckFailed.exit_code)


def _print_results(results: Sequence[Result], *, as_json: bool) -> None:
    if as_json:
        print_json([asdict(result) for result in results])
        return
    for result in results:
        click.echo(result.describe())


@patches.command("rebase")
@shared("store", "dry", "json")
@click.option("--release", required=True, help="The release that is to have a series.")
@click.option("--from", "source", help="The release it is made from; default: lock/default's.")
@click.option("--tree", type=FILE, help="Its tree or sdist; default: as lock/sdists.toml pins.")
@click.option("--accept", is_flag=True, help="Write moved patches, drop those no longer needed.")
@click.option("--replace", is_flag=True, help="Replace a series that is there.")
def patches_rebase(
    store: Path | None, dry_run: bool, as_json: bool, release: str, source: str | None,
    tree: Path | None, accept: bool, replace: bool,
) -> None:  # fmt: skip
    """Make the patches of one release into those of another: patches/RELEASE, or nothing.

    What moved or is no longer needed is shown, and written with --accept only. What conflicts is
    shown from three sides, and nothing is written.
    """
    from sm75 import patchcommands, rebase

    source = source or load_lock(None).vllm
    proposal, new = patchcommands.propose(ROOT, open_store(store), release, source, tree=tree)
    _print_results(proposal.results, as_json=as_json)
    if dry_run:
        return
    rebase.write(proposal, new, ROOT / "patches", accept=accept, replace=replace)
    if not as_json:
        click.echo(f"rebase: wrote patches/{release}, made of {source}'s")


@patches.command("releases")
@shared("store", "json")
@click.option("--write", is_flag=True, help="Put the table into docs/releases.md.")
@click.option("--check", is_flag=True, help="Only say whether the table there is stale; offline.")
def patches_releases(store: Path | None, as_json: bool, write: bool, check: bool) -> None:
    """Show how the patches stand to every pinned release; fetches the sdists that are missing."""
    from sm75 import releases

    if check:
        refuse(("write", "as_json", "store"), "--check only compares, offline",
               "python3 orchestrator.py patches releases --check")  # fmt: skip
        releases.check(ROOT)
        click.echo(f"releases: {releases.PAGE} is of the series and sdists there are")
        return
    if write:
        refuse(("as_json",), "--write puts the table into the page",
               "python3 orchestrator.py patches releases --json, without --write")  # fmt: skip
    found = releases.survey(ROOT, open_store(store))
    made = releases.markdown(found, releases.stamp(ROOT))
    if write:
        changed = releases.write(ROOT, made)
        click.echo(f"releases: {releases.PAGE} {'is written' if changed else 'is as it was'}")
    elif as_json:
        print_json(found.plain())
    else:
        click.echo(made, nl=False)


@patches.command("seal")
@shared("release")
def patches_seal(release: str | None) -> None:
    """Pin the patches as they are now, in series.toml and in the release lock."""
    from sm75 import patchcommands, proof

    lock = load_lock(release)
    for name in proof.seal(ROOT, lock):
        click.echo(f"pinned {name}")
    for text in patchcommands.left_behind(ROOT, lock.vllm):
        warn(text)


COMMANDS = (patches,)
