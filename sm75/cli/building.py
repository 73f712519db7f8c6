"""From sources to a package: ``fetch``, ``build``, ``toolchain``, ``verify``, ``inspect``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sm75.cli.options import (
    FILE,
    ROOT,
    choose_provider,
    load_lock,
    open_store,
    print_json,
    refuse,
    shared,
)
from sm75.cli.reporting import keep, refresh, withdrew
from sm75.errors import CheckFailed, UsageError
from sm75.words import counted

if TYPE_CHECKING:
    from sm75.lockfile import ReleaseLock
    from sm75.store import Store
    from sm75.verify import Verification


@click.command()
@shared("release", "store", "rust", "platform", "dry", "json")
def fetch(
    release: str | None, store: Path | None, rust: str | None, platform: str, dry_run: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Download what a build reads. The only step that uses the network."""
    lock = load_lock(release)
    mode = rust or _rust_default(lock, platform)
    _fetch(lock, open_store(store), mode, platform, dry_run=dry_run, as_json=as_json)


def _rust_default(lock: ReleaseLock, platform: str) -> str:
    """The lock's default for the g5g; there is no Rust frontend for any other target."""
    from sm75.lockfile import G5G

    return lock.rust.default if platform == G5G else "none"


def _fetch(
    lock: ReleaseLock, store: Store, rust: str, platform: str, *, dry_run: bool = False,
    as_json: bool = False, quiet: bool = False,
) -> None:  # fmt: skip
    from sm75 import fetch as step
    from sm75.progress import amount, make_reporter
    from sm75.toolchain.host import build_platform

    wanted = step.plan(lock, store, build_platform(), rust, platform)
    if rust == "source" and not dry_run:  # before anything is downloaded
        from sm75.crates import check_pinned

        check_pinned(lock.rust.git, lock.rust.git_sha256)
    if as_json:
        print_json(
            {
                "download_bytes": wanted.bytes_download,
                "cached_bytes": wanted.bytes_cached,
                "files": [a.stored_filename for a in wanted.todo],
                "store": str(store.root),
            }
        )
    elif quiet:  # standard output is another command's JSON
        pass
    elif wanted.todo:
        click.echo(
            f"fetch: {amount(wanted.bytes_download, 'B')} in {counted(len(wanted.todo), 'file')} "
            f"to {store.root} ({amount(wanted.bytes_cached, 'B')} are there)"
        )
        if dry_run:
            for artifact in wanted.todo:
                click.echo(
                    f"  {amount(artifact.download_size, 'B'):>9}  {artifact.stored_filename}"
                )
    else:
        click.echo(f"fetch: nothing; {counted(len(wanted.cached), 'file')} in {store.root}")
    if not dry_run and wanted.todo:
        with make_reporter() as reporter:
            step.fetch(wanted, store, reporter)
    if rust == "source":
        _fetch_crates(lock, store, dry_run=dry_run, aside=as_json or quiet)


def _fetch_crates(lock: ReleaseLock, store: Store, *, dry_run: bool, aside: bool) -> None:
    from sm75 import crates
    from sm75.progress import make_reporter

    sdist = lock.artifact("vllm-sdist")
    if dry_run and not store.has(sdist):
        click.echo("fetch: its crates are known once the sdist is in the store", err=aside)
        return
    wanted = crates.sources(lock, store.get(sdist))
    archives, places = crates.missing(wanted, store)
    click.echo(
        f"fetch: of {len(wanted.registry)} crates {len(archives)} are to be fetched, of "
        f"{len(wanted.git)} git dependencies {len(places)}; their sizes are stated nowhere",
        err=aside,
    )
    if not dry_run:
        with make_reporter(sys.stderr if aside else None) as reporter:
            crates.fetch(wanted, store, reporter)


@click.command()
@shared("release", "store", "rust", "platform", "toolchain", "dry", "json")
@click.option(
    "--channel", type=FILE,
    help="The conda channel to fill; default: channel/, for linux-64: proofs/.",
)  # fmt: skip
@click.option("--ptx", is_flag=True, help="Add compute_75 PTX; for linux-64 and proofs only.")
@click.option("--jobs", type=click.IntRange(min=0), default=0, help="0: from cores and memory.")
@click.option("--offline", is_flag=True, help="Use the store as it is; fetch nothing.")
@click.option("--recompile", is_flag=True, help="Compile everything anew, whatever is there.")
@click.option(
    "--remote-cache", default="", envvar="SM75_REMOTE_CACHE", metavar="URL",
    help="A compiler cache that several builders share: redis://HOST or file:///DIRECTORY "
    "(SM75_REMOTE_CACHE).",
)  # fmt: skip
@click.option("--no-wait", is_flag=True, help="Fail at once when another build runs.")
@click.option(
    "--verify/--no-verify", "check", default=True, help="Check the package that was built."
)
@click.option(
    "--kernels/--no-kernels", default=None,
    help="Also compile attention with tensor cores, as `kernels build` does. Default: for the g5g, "
    "on x86-64, where its compiler is there or may be fetched (253 MB).",
)  # fmt: skip
@click.option(
    "--check",
    "twice",
    is_flag=True,
    help="Build everything a second time, in another directory and with another job count, and "
    "compare the bytes.",
)
def build(
    release: str | None, store: Path | None, rust: str | None, platform: str, toolchain: str,
    dry_run: bool, as_json: bool, channel: Path | None, ptx: bool, jobs: int, offline: bool,
    recompile: bool, remote_cache: str, no_wait: bool, check: bool, kernels: bool | None,
    twice: bool,
) -> None:  # fmt: skip
    """Build vllm-sm75 and publish it into the channel; fetches first what is missing."""
    from sm75 import build as step
    from sm75 import onebuild
    from sm75.cli import kernels as ahead
    from sm75.lockfile import G5G
    from sm75.progress import make_reporter, span
    from sm75.toolchain.choice import choose

    if kernels and platform != G5G:
        raise UsageError(
            f"there are no kernels for {platform}", why="they are sm_75 machine code for the g5g",
            fix=f"build without --kernels, or for {G5G}",
        )  # fmt: skip
    lock = load_lock(release)
    place = open_store(store)
    mode = rust or _rust_default(lock, platform)
    channel = channel or ROOT / ("channel" if platform == G5G else "proofs")
    settings = step.Settings(
        root=ROOT, store=place, channel=channel.absolute(), rust=mode, target_platform=platform,
        ptx=ptx, jobs=jobs, wait=0.0 if no_wait else step.Settings.wait, recompile=recompile,
        remote_cache=remote_cache,
    )  # fmt: skip
    with make_reporter(sys.stderr if as_json else None) as reporter:
        # Installing a compiler takes the network, and is no dry run.
        provider = choose_provider(toolchain, lock, reporter, install=not (dry_run or offline))
        planned = step.look(lock, provider, settings)
    if dry_run:
        if as_json:
            print_json({"package": planned.package.name, "build": planned.needed})
        else:
            click.echo(f"build: {planned.package.name} "
                       + ("would be built" if planned.needed else "is in the channel"))  # fmt: skip
            if gone := onebuild.Rivals(settings.channel, [planned.package])():
                click.echo(f"build: would withdraw {', '.join(gone)}")
        if planned.needed and not as_json:
            _fetch(lock, place, mode, platform, dry_run=True)
        if not as_json and platform == G5G and kernels is not False:
            click.echo(ahead.outlook(offline=offline))
        return
    if planned.needed and not offline:
        _fetch(lock, place, mode, platform, quiet=as_json)
    with make_reporter(sys.stderr if as_json else None) as reporter:
        outcome = step.build(
            lock,
            provider,
            settings,
            planned,
            reporter,
            (lambda package: _verify(lock, place, package, as_json=as_json, quiet=as_json))
            if check
            else (lambda package: None),
        )
        if outcome.built or outcome.withdrawn or not (channel / "report.html").is_file():
            refresh(lock, channel, built=outcome.package if outcome.built else None)
        again = None
        if twice:
            from sm75 import rebuild

            again = rebuild.check(
                settings,
                outcome.package,
                lambda root: choose(toolchain, root, lock, reporter, install=False),
                lock.vllm,
                reporter,
            )
    attention = None
    if platform == G5G and kernels is not False:
        attention = ahead.after_build(
            lock, place, channel.absolute(), required=bool(kernels), offline=offline, quiet=as_json
        )
    if as_json:
        print_json(
            {
                **({"check": rebuild.to_json(again)} if again else {}),
                "package": str(outcome.package),
                "kernels": str(attention) if attention else None,
                "built": outcome.built,
                "withdrawn": list(outcome.withdrawn),
                "input_hash": outcome.inputs.input_hash,
                "native_hash": outcome.inputs.native_hash,
                "compiled": len(outcome.compiled),
                "rust_frontend": mode,
                "seconds": round(outcome.seconds, 1),
            }
        )
        if again:
            rebuild.require(again)
        return
    size = outcome.package.stat().st_size / 2**20
    if outcome.built:
        click.echo(
            f"build: {outcome.package} ({size:.1f} MiB, Rust frontend: {mode}) "
            f"in {span(outcome.seconds)}"
        )
    else:
        click.echo(f"build: nothing to do, {outcome.package.name} is in the channel")
    withdrew("build", outcome.withdrawn)
    if attention:
        click.echo(f"build: {attention}")
    if again:
        rebuild.require(again)
        click.echo(rebuild.describe(again))


@click.command("toolchain")
@shared("release", "store", "toolchain")
def toolchain_command(release: str | None, store: Path | None, toolchain: str) -> None:
    """Make the local channels of tools and lay out the sources, for other recipe builders."""
    from sm75 import build as step
    from sm75.progress import make_reporter
    from sm75.toolchain.host import build_platform

    lock = load_lock(release)
    place = open_store(store)
    settings = step.Settings(root=ROOT, store=place, channel=ROOT / "channel", rust="prebuilt")
    with make_reporter(sys.stderr) as reporter:
        provider = choose_provider(toolchain, lock, reporter)
        urls = provider.channels(lock, place, build_platform(), settings.target_platform)
    step.lay_out_sources(lock, settings)
    for url in urls:
        click.echo(url)


@click.command()
@shared("release", "store", "channel", "json")
@click.option("--smem", is_flag=True, help="Audit the Triton kernels' shared memory instead.")
@click.option("--gpu", is_flag=True, help="Run the sm_75 attention kernels on this machine's GPU.")
@click.option("--bundle", type=FILE, help="With --gpu: write what another machine can run.")
@click.option("--result", type=FILE, help="With --gpu: show and judge what a bundle found there.")
@click.option(
    "--kernels", type=FILE,
    help="Kernels compiled ahead of time to check; default: the channel's. With --gpu: try them.",
)  # fmt: skip
@click.argument("package", type=FILE, required=False)
def verify(
    release: str | None, store: Path | None, channel: Path, as_json: bool, smem: bool,
    gpu: bool, bundle: Path | None, result: Path | None, kernels: Path | None,
    package: Path | None,
) -> None:  # fmt: skip
    """Check the built package: architectures, ABI, RUNPATH, metadata.

    Where the channel has vllm-sm75-kernels, its machine code is checked too: tensor cores, shared
    memory, spills. PACKAGE can be that package as well, or an environment's site-packages.

    With --smem: compile every kernel variant that vLLM can launch for the models of the table, for
    sm_75 and without a GPU, and check its shared memory; without PACKAGE, of the patched sources.

    With --gpu: compile attention for sm_75, let the driver of any NVIDIA GPU (7.5 or newer) run it,
    and compare its results with float32.
    """
    if gpu:
        refuse(("smem", "channel"), "--gpu runs kernels; it reads no channel and audits nothing",
               "python3 orchestrator.py verify --gpu, and --smem in a second run")  # fmt: skip
        if bundle is not None:
            refuse(("as_json",), "--bundle writes a file and has no result yet",
                   "python3 orchestrator.py verify --gpu --bundle FILE")  # fmt: skip
        if result is not None:
            refuse(("release", "store", "bundle", "kernels", "package"),
                   "the result says itself what was run",
                   "python3 orchestrator.py verify --gpu --result FILE")  # fmt: skip
    lock = load_lock(release)
    if gpu:
        from sm75.gpu import report as trials

        if code := trials.run_and_print(
            ROOT,
            lock,
            open_store(store),
            package,
            bundle=bundle,
            result=result,
            kernels=kernels,
            as_json=as_json,
        ):
            raise SystemExit(code)
        return
    if bundle is not None or result is not None:
        raise UsageError("--bundle and --result belong to --gpu", fix="give --gpu as well")
    if smem:
        refuse(
            ("kernels",), "--smem audits what Triton compiles on the machine",
            "python3 orchestrator.py verify --kernels DIR, and --smem in a second run",
        )  # fmt: skip
        from sm75.smem import report as audit

        code = audit.run_and_print(ROOT, lock, open_store(store), package, as_json=as_json)
        refresh(lock, channel.absolute())
        if code:
            raise SystemExit(code)
        return
    from sm75 import proof

    if package is not None and (package.is_dir() or package.name.startswith(proof.KERNELS)):
        _say(proof.verify_kernels(ROOT, package), as_json=as_json, rows=True)
        return
    if package is None:
        from sm75.build import newest

        package = newest(channel, lock.vllm)
    inside = package.resolve().is_relative_to(channel.resolve())
    named = kernels is not None
    if kernels is None and inside:
        kernels = proof.kernels_in(channel, lock.vllm)
    _verify(lock, open_store(store), package, as_json=as_json, channel=channel.absolute(),
            kernels=kernels, rows=named)  # fmt: skip


def _verify(
    lock: ReleaseLock, store: Store, package: Path, *, as_json: bool, quiet: bool = False,
    channel: Path | None = None, kernels: Path | None = None, rows: bool = False,
) -> None:  # fmt: skip
    from sm75 import proof

    result = proof.verify_package(ROOT, lock, store, package, kernels)
    keep(package, result)
    if channel is not None and package.resolve().is_relative_to(channel.resolve()):
        refresh(lock, channel)
    _say(result, as_json=as_json, quiet=quiet, rows=rows)
    if kernels is not None and not (rows or as_json or quiet):
        click.echo(f"each variant of attention: python3 orchestrator.py verify {kernels}")


def _say(
    result: Verification, *, as_json: bool, quiet: bool = False, rows: bool = False
) -> None:  # fmt: skip
    """``rows``: also the hundreds of variants of attention, for who asked about them."""
    from sm75 import verify as rules

    if as_json and not quiet:
        print_json(rules.to_json(result))
    elif not quiet:
        from rich.console import Console

        Console().print(rules.table(result))
        if result.kernels and rows:
            # Wide enough for the numbers, also through a pipe.
            Console(width=max(Console().width, 130)).print(rules.kernel_table(result))
    rules.require(result)


@click.command()
@shared("release", "store", "json")
@click.option("--target", help="Contract below lock/targets; default: the release lock's.")
@click.argument("source", type=FILE)
def inspect(
    release: str | None, store: Path | None, as_json: bool, target: str | None, source: Path
) -> None:
    """Say which GPUs a wheel, package, directory, archive or image can serve.

    SOURCE is a file or directory with libraries, or the JSON that
    `docker buildx imagetools inspect --format '{{json .Image}}'` prints (- reads it from stdin).
    """
    from rich.console import Console

    from sm75 import images, inspection, proof
    from sm75.lockfile import load_target

    if str(source) == "-" or source.suffix == ".json":
        if str(source) != "-" and not source.is_file():
            raise UsageError(f"there is no {source}", fix="name a file, or - for standard input")
        refuse(("release", "store", "target"), "what an image says of itself is read, and no more",
               f"python3 orchestrator.py inspect {source}")  # fmt: skip
        data = sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()
        reports = images.read_images(data)
        if as_json:
            print_json(images.to_json(reports))
        else:
            Console().print(images.table(reports))
        return
    lock = load_lock(release)
    contract = load_target(ROOT, target or lock.target)
    report = inspection.inspect(
        source, contract=contract, cuobjdump=proof.cuobjdump(ROOT, lock, open_store(store))
    )
    if as_json:
        print_json(inspection.to_json(report))
    else:
        Console().print(inspection.table(report))
        click.echo(report.summary)
    if not report.usable:
        raise CheckFailed(
            f"{report.source} is unusable on {report.target}",
            # said below the table, library by library in it
            why=report.summary if as_json else "",
            fix=inspection.advice(report),
        )


COMMANDS = (fetch, build, toolchain_command, verify, inspect)
