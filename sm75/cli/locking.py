"""``lock``: show, check or make a release lock."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sm75.cli.options import (
    ROOT,
    load_lock,
    open_store,
    print_json,
    refuse,
    shared,
)
from sm75.errors import UsageError

if TYPE_CHECKING:
    from sm75.lockfile import ReleaseLock
    from sm75.store import Store


@click.command("lock")
@shared("release", "store", "dry", "json")
@click.option(
    "--check", is_flag=True, help="Compare the lock with the pinned tree and variants file."
)
@click.option("--tools", is_flag=True, help="Solve pixi.toml anew and write pixi.lock.")
@click.option(
    "--rust", is_flag=True, help="Read the Rust frontend's git dependencies and pin their hashes."
)
@click.option("--vllm", default="", help="Make the lock of this release, or of the latest.")
@click.option("--torch", default="", help="With --vllm: the torch to compile against.")
@click.option("--target", default="", help="With --vllm: contract below lock/targets.")
@click.option("--from", "base", default="", help="With --vllm: the lock to compare with.")
@click.option("--upgrade", is_flag=True, help="With --vllm: take the newest of everything.")
@click.option(
    "--closure/--no-closure", default=True, help="With --vllm: resolve runtime.lock as well."
)
def lock_command(
    release: str | None, store: Path | None, dry_run: bool, as_json: bool, check: bool, tools: bool,
    rust: bool, vllm: str, torch: str, target: str, base: str, upgrade: bool, closure: bool,
) -> None:  # fmt: skip
    """Show, check or make a release lock.

    --vllm X.Y.Z resolves that release and all pins into lock/X.Y.Z and shows what differs from the
    former lock. --vllm latest starts from the newest release; what stops it is said and recorded.
    Nothing is written unless everything resolved. --tools does the same for pixi.lock, from
    conda-forge. --rust reads the Rust frontend's git dependencies from their repositories and adds
    their hashes to the lock. All three use the network.
    """
    if vllm:
        if check or release or tools or rust:
            raise UsageError(
                "--vllm makes a lock; --check, --release, --tools and --rust go without it"
            )
        _make_lock(
            store, as_json=as_json, vllm=vllm, torch=torch, target=target, base=base,
            upgrade=upgrade, with_closure=closure, dry_run=dry_run,
        )  # fmt: skip
        return
    refuse(("torch", "target", "base", "upgrade", "dry_run", "closure"), "they belong to --vllm",
           "python3 orchestrator.py lock --vllm latest --dry-run, or --vllm X.Y.Z")  # fmt: skip
    lone = "python3 orchestrator.py lock --tools, --rust or --check, one at a time"
    if tools:
        refuse(("rust", "check", "release", "as_json"), "--tools writes pixi.lock alone", lone)
        _solve_tools(store)
        return
    if rust:
        refuse(("check", "as_json"), "--rust reads git dependencies and says which it pinned", lone)
        _pin_crates(load_lock(release), open_store(store))
        return
    from sm75 import lockcheck

    if check:
        refuse(("as_json",), "--check has a verdict: the exit code", lone)
    else:
        refuse(("store",), "what the lock says is shown without looking into the store",
               "python3 orchestrator.py lock")  # fmt: skip
    lock = load_lock(release)
    if check:
        from sm75 import pixi
        from sm75.aot import sources

        place = open_store(store)
        lockcheck.check(ROOT, lock, place)
        pixi.check(ROOT)
        click.echo(
            f"lock: {lock.vllm} agrees with the pinned tree, the patches, variants.yaml and the "
            "recipe; pixi.toml, pixi.lock and lock/ agree"
        )
        click.echo(f"lock: {sources.note(ROOT, place.get(lock.artifact('vllm-sdist')))}")
        return
    facts = lockcheck.summary(lock)
    if as_json:
        print_json(facts)
    else:
        for key, value in facts.items():
            click.echo(f"{key}: {value}")


def _make_lock(store: Path | None, *, as_json: bool, **request: Any) -> None:
    from sm75 import lockupdate
    from sm75.progress import make_reporter

    with make_reporter(sys.stderr) as reporter:
        done = lockupdate.update(
            ROOT, lockupdate.Request(**request), open_store(store), reporter, say=reporter.line
        )
    if as_json:
        print_json(done.to_json())
    else:
        for line in done.lines():
            click.echo(line)


def _solve_tools(store: Path | None) -> None:
    from sm75 import pixilock
    from sm75.progress import make_reporter
    from sm75.toolchain import conda_forge

    with make_reporter() as reporter:
        changed = pixilock.update(ROOT, open_store(store), reporter, conda_forge.source())
    click.echo(f"lock: pixi.lock {'is written' if changed else 'is as it was'}")


def _pin_crates(lock: ReleaseLock, store: Store) -> None:
    from sm75 import crates
    from sm75 import fetch as step
    from sm75.progress import make_reporter

    with make_reporter() as reporter:
        wanted = crates.sources(lock, step.obtain(lock.artifact("vllm-sdist"), store, reporter))
        pinned = crates.pin(ROOT, lock, wanted, store, reporter)
    click.echo(
        f"lock: pinned {', '.join(pinned)}" if pinned else "lock: every git dependency is pinned"
    )


COMMANDS = (lock_command,)
