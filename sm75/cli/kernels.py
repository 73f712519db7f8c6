"""``kernels``: attention compiled ahead of time, on x86-64, for any g5g."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sm75.cli.options import FILE, ROOT, load_lock, open_store, print_json, refuse, shared, warn
from sm75.cli.reporting import refresh, withdrew
from sm75.words import counted

if TYPE_CHECKING:
    from sm75.aot.package import Made
    from sm75.lockfile import ReleaseLock
    from sm75.progress import Reporter
    from sm75.store import Store


@click.group("kernels")
def kernels_group() -> None:
    """Compile the attention kernels ahead of time, with Turing's tensor cores."""


@kernels_group.command("build")
@shared("release", "store", "channel", "json")
@click.option("--files", type=FILE, help="Only write the package's files into this directory.")
@click.option("--unproved", is_flag=True, help="With --files: also what is not proved yet.")
def kernels_build(
    release: str | None, store: Path | None, channel: Path, as_json: bool, files: Path | None,
    unproved: bool,
) -> None:  # fmt: skip
    """Compile every variant and publish the proved ones into the channel (x86-64 only)."""
    from sm75.aot import package as step
    from sm75.aot.files import MODULE
    from sm75.errors import UsageError
    from sm75.progress import make_reporter

    if unproved and files is None:
        raise UsageError(
            "--unproved belongs to --files", why="what is not proved is not published",
            fix="write the files, prove them, then build",
        )  # fmt: skip
    if files is not None:
        refuse(("channel",), "--files writes files and no package",
               f"python3 orchestrator.py kernels build --files {files}")  # fmt: skip
    lock, place = load_lock(release), open_store(store)
    with make_reporter(quiet=as_json) as reporter:
        if files is not None:
            home = files / MODULE
            made = step.compile_files(ROOT, lock, place, home, reporter, unproved=unproved)
        else:
            made = _publish(lock, place, channel.absolute(), reporter)
            refresh(lock, channel.absolute())
    withdrew("kernels", made.withdrawn, aside=as_json)
    if as_json:
        print_json(_plain(made))
        return
    click.echo(
        f"kernels: {counted(len(made.packed), 'variant')} in {made.package or files}"
        + (f"; {len(made.unknown)} not proved" if made.unknown and not unproved else "")
        + (f"; {len(made.wrong)} proved wrong, left to the JIT" if made.wrong else "")
    )
    if made.package is not None:
        from sm75.store import hash_file

        click.echo(f"sha256 {hash_file(made.package)}")


def _plain(made: Any) -> dict[str, Any]:
    from sm75.aot import lower

    return {
        "package": str(made.package or ""),
        "variants": [lower.facts(one) for one in made.packed],
        "not_proved": [lower.facts(one) for one in made.unknown],
        "wrong": [lower.facts(one) for one in made.wrong],
    }


@kernels_group.command("add")
@shared("channel")
@click.option("--sha256", required=True, help="As `kernels build` printed it.")
@click.argument("package", type=FILE)
def kernels_add(channel: Path, sha256: str, package: Path) -> None:
    """Take a package that was built on another machine into the channel, by its hash."""
    from sm75.aot import package as step

    lock = load_lock(None)
    added, withdrawn = step.add(ROOT, lock, channel.absolute(), package, sha256, warn)
    click.echo(f"kernels: {added}")
    withdrew("kernels", withdrawn)
    refresh(lock, channel.absolute())


@kernels_group.command("prove")
@shared("store")
@click.argument("results", type=FILE, nargs=-1, required=True)
def kernels_prove(results: tuple[Path, ...], store: Path | None) -> None:
    """Record what results of `verify --gpu` say of each kernel, so that it can be packed.

    What was proved is the release of the last result; its sdist must be in the store.
    """
    from sm75.aot import proofs, sources
    from sm75.gpu import report

    found = [report.read_result(path) for path in results]
    sdist = open_store(store).get(load_lock(found[-1]["vllm"]).artifact("vllm-sdist"))
    count = proofs.merge(ROOT, found)
    sources.save(ROOT, sdist)
    known = Counter(bool(one.wrong) for one in proofs.load(ROOT).values())
    click.echo(f"kernels: {proofs.FILE} knows {count}: {known[False]} right, {known[True]} wrong")


@kernels_group.command("show")
@shared("json")
@click.argument("home", type=FILE, metavar="PACKAGE")
def kernels_show(as_json: bool, home: Path) -> None:
    """List the variants of a package's files, with what each takes.

    PACKAGE is its file, what `kernels build --files` was given, or an environment's site-packages.
    The figures are the index's own; `verify PACKAGE` counts them in the machine code.
    """
    from rich.console import Console

    from sm75.aot import files, table

    index = json.loads(files.load(home).raw)
    if as_json:
        print_json(index)
    else:
        # Wide enough for the numbers, also through a pipe.
        Console(width=max(Console().width, 130)).print(table.variants(index))


def _publish(lock: ReleaseLock, store: Store, channel: Path, reporter: Reporter) -> Made:
    """Build the package, and record what made it, so that ``build`` need not again."""
    from sm75.aot import package as step

    made = step.build(ROOT, lock, store, channel, reporter, warn)
    if made.package is not None:
        step.remember(ROOT, lock, made.package)
    return made


def outlook(*, offline: bool) -> str:
    """What ``build`` would do about the kernels, as a line for ``--dry-run``."""
    from sm75.aot import tools
    from sm75.errors import ToolchainError

    try:
        tools.check_machine()
    except ToolchainError as error:
        return f"build: {error.what}; attention would do without tensor cores"
    if tools.installed(ROOT):
        return "build: attention with tensor cores would be compiled as well (kernels build)"
    if offline:
        return "build: no attention with tensor cores, whose compiler is not here (kernels build)"
    return f"build: so would attention with tensor cores, after {tools.DOWNLOAD} for its compiler"


def after_build(
    lock: ReleaseLock, store: Store, channel: Path, *, required: bool, offline: bool, quiet: bool
) -> Path | None:
    """Build the package of kernels as the end of ``build``.

    Args:
        lock: The release lock.
        store: Where sdist and toolkit are.
        channel: The channel.
        required: The user asked for it: what hinders it is an error.
        offline: Nothing may be fetched, so the compiler must be here.
        quiet: Standard output is JSON.

    Returns:
        The package; None where it cannot be built. Then vLLM works, and its attention goes without
        tensor cores, which is said.
    """
    from sm75.aot import package as step
    from sm75.aot import tools
    from sm75.errors import Sm75Error
    from sm75.progress import make_reporter

    try:
        tools.check_machine()
        if offline and not tools.installed(ROOT):
            raise tools.missing()
        if (known := step.current(ROOT, lock, channel)) is not None:
            return known
        with make_reporter(sys.stderr if quiet else None) as reporter:
            made = _publish(lock, store, channel, reporter)
        withdrew("build", made.withdrawn, aside=quiet)
        refresh(lock, channel)
    except Sm75Error as error:
        if required:
            raise
        warn(f"attention goes without tensor cores: {error}")
        return None
    return made.package


COMMANDS = (kernels_group,)
