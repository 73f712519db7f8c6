#!/usr/bin/env python3
"""The command line of vllm-sm75. Everything it does is in the package ``sm75``.

Any python3 >= 3.11 starts it; it makes ``.venv`` from ``lock/tools.txt`` and goes on there.
Exit codes are those of ``sm75/errors.py``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from sm75 import venv  # noqa: E402

if __name__ == "__main__":
    for number, stream in ((0, sys.stdin), (1, sys.stdout), (2, sys.stderr)):
        if stream is None:  # closed by the shell; any file opened next would take its number
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            name = ("stdin", "stdout", "stderr")[number]
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    # `channel lock` and `lock --vllm` resolve the closure with uv.
    _resolves = sys.argv[1:2] == ["lock"] and any(
        argument.startswith(("--vllm", "--tools")) for argument in sys.argv[2:]
    )
    _dev = (
        sys.argv[1:2] in (["test"], ["lint"])
        or sys.argv[1:3] == ["channel", "lock"]
        or (_resolves and "--no-closure" not in sys.argv)
    )
    venv.ensure(ROOT, dev=_dev)

import json  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from dataclasses import asdict  # noqa: E402
from typing import TYPE_CHECKING, Any, TypeVar  # noqa: E402

import click  # noqa: E402

from sm75 import __version__  # noqa: E402
from sm75.errors import CheckFailed, Sm75Error, UsageError  # noqa: E402

if TYPE_CHECKING:
    from sm75.lockfile import ReleaseLock
    from sm75.patching import Result
    from sm75.progress import Reporter
    from sm75.store import Store
    from sm75.toolchain import Provider

# Imports below are made inside the commands: a start must cost less than 0.3 s.

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path)


def _shared(*names: str) -> Callable[[_Command], _Command]:
    """The options that several commands have."""
    options = {
        "release": click.option(
            "--release", help="vLLM release; default: the one lock/default names."
        ),
        "store": click.option(
            "--store", type=_FILE, envvar="SM75_STORE",
            help="Where fetched files are kept (SM75_STORE); default: the user's cache directory.",
        ),
        "rust": click.option(
            "--rust", type=click.Choice(["prebuilt", "source", "none"]),
            help="How the Rust frontend is had; default: as the lock says.",
        ),
        "channel": click.option(
            "--channel", type=_FILE, default=ROOT / "channel", help="The conda channel to fill."
        ),
        "platform": click.option(
            "--target", "platform", type=click.Choice(["linux-aarch64", "linux-64"]),
            default="linux-aarch64", show_default=True,
            help="What is built for; linux-64 is for proofs only (docs/proofs.md).",
        ),
        "toolchain": click.option(
            "--toolchain", type=click.Choice(["auto", "bootstrap", "conda-forge"]), default="auto",
            help="Where compilers and tools come from.",
        ),
        "json": click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        "dry": click.option("--dry-run", is_flag=True, help="Say what would be done."),
    }  # fmt: skip

    def decorate(command: _Command) -> _Command:
        for name in reversed(names):
            command = options[name](command)
        return command

    return decorate


def _lock(release: str | None) -> ReleaseLock:
    from sm75.lockfile import load_release

    return load_release(ROOT, release)


def _store(path: Path | None) -> Store:
    from sm75.store import Store, default_root

    return Store(path.expanduser().absolute() if path else default_root())


def _provider(
    name: str, lock: ReleaseLock, reporter: Reporter, *, install: bool = True
) -> Provider:
    from sm75.toolchain.choice import choose

    return choose(name, ROOT, lock, reporter, install=install)


def _print_json(data: object) -> None:
    click.echo(json.dumps(data, indent=2, sort_keys=True))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="vllm-sm75")
def cli() -> None:
    """Build vLLM for AWS g5g (Graviton2 + T4G, sm_75) as an offline conda channel."""


@cli.command()
@_shared("release", "store", "rust", "platform", "dry", "json")
def fetch(
    release: str | None, store: Path | None, rust: str | None, platform: str, dry_run: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Download what a build reads. The only step that uses the network."""
    lock = _lock(release)
    mode = rust or _rust_default(lock, platform)
    _fetch(lock, _store(store), mode, platform, dry_run=dry_run, as_json=as_json)


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
        _print_json(
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
            f"fetch: {amount(wanted.bytes_download, 'B')} in {len(wanted.todo)} files to "
            f"{store.root} ({amount(wanted.bytes_cached, 'B')} are there)"
        )
        if dry_run:
            for artifact in wanted.todo:
                click.echo(
                    f"  {amount(artifact.download_size, 'B'):>9}  {artifact.stored_filename}"
                )
    else:
        click.echo(f"fetch: all {len(wanted.cached)} files are in {store.root}")
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


@cli.command()
@_shared("release", "store", "rust", "platform", "toolchain", "dry", "json")
@click.option(
    "--channel", type=_FILE,
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
    "--check",
    "twice",
    is_flag=True,
    help="Build everything a second time, in another directory and with another job count, and "
    "compare the bytes.",
)
def build(
    release: str | None, store: Path | None, rust: str | None, platform: str, toolchain: str,
    dry_run: bool, as_json: bool, channel: Path | None, ptx: bool, jobs: int, offline: bool,
    recompile: bool, remote_cache: str, no_wait: bool, check: bool, twice: bool,
) -> None:  # fmt: skip
    """Build vllm-sm75 and publish it into the channel; fetches first what is missing."""
    from sm75 import build as step
    from sm75.lockfile import G5G
    from sm75.progress import make_reporter, span
    from sm75.toolchain.choice import choose

    lock = _lock(release)
    place = _store(store)
    mode = rust or _rust_default(lock, platform)
    channel = channel or ROOT / ("channel" if platform == G5G else "proofs")
    settings = step.Settings(
        root=ROOT, store=place, channel=channel.absolute(), rust=mode, target_platform=platform,
        ptx=ptx, jobs=jobs, wait=0.0 if no_wait else step.Settings.wait, recompile=recompile,
        remote_cache=remote_cache,
    )  # fmt: skip
    with make_reporter(sys.stderr if as_json else None) as reporter:
        # Installing a compiler takes the network, and is no dry run.
        provider = _provider(toolchain, lock, reporter, install=not (dry_run or offline))
        planned = step.look(lock, provider, settings)
    if dry_run:
        if as_json:
            _print_json({"package": planned.package.name, "build": planned.needed})
        else:
            click.echo(f"build: {planned.package.name} "
                       + ("would be built" if planned.needed else "is in the channel"))  # fmt: skip
        if planned.needed and not as_json:
            _fetch(lock, place, mode, platform, dry_run=True)
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
    if as_json:
        _print_json(
            {
                **({"check": rebuild.to_json(again)} if again else {}),
                "package": str(outcome.package),
                "built": outcome.built,
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
    if again:
        rebuild.require(again)
        click.echo(rebuild.describe(again))


@cli.command("toolchain")
@_shared("release", "store", "toolchain")
def toolchain_command(release: str | None, store: Path | None, toolchain: str) -> None:
    """Make the local channels of tools and lay out the sources, for other recipe builders."""
    from sm75 import build as step
    from sm75.progress import make_reporter
    from sm75.toolchain.host import build_platform

    lock = _lock(release)
    place = _store(store)
    settings = step.Settings(root=ROOT, store=place, channel=ROOT / "channel", rust="prebuilt")
    with make_reporter(sys.stderr) as reporter:
        provider = _provider(toolchain, lock, reporter)
        urls = provider.channels(lock, place, build_platform(), settings.target_platform)
    step.lay_out_sources(lock, settings)
    for url in urls:
        click.echo(url)


@cli.command()
@_shared("release", "store", "channel", "json")
@click.option("--smem", is_flag=True, help="Audit the Triton kernels' shared memory instead.")
@click.option("--gpu", is_flag=True, help="Run the sm_75 attention kernels on this machine's GPU.")
@click.option("--bundle", type=_FILE, help="With --gpu: write what another machine can run.")
@click.option("--result", type=_FILE, help="With --gpu: show and judge what a bundle found there.")
@click.argument("package", type=_FILE, required=False)
def verify(
    release: str | None, store: Path | None, channel: Path, as_json: bool, smem: bool,
    gpu: bool, bundle: Path | None, result: Path | None, package: Path | None,
) -> None:  # fmt: skip
    """Check the built package: architectures, ABI, RUNPATH, metadata.

    With --smem: compile every kernel variant that vLLM can launch for the models of the table, for
    sm_75 and without a GPU, and check its shared memory; without PACKAGE, of the patched sources.

    With --gpu: compile attention for sm_75, let the driver of any NVIDIA GPU (7.5 or newer) run it,
    and compare its results with float32.
    """
    lock = _lock(release)
    if gpu:
        from sm75.gpu import report as trials

        if code := trials.run_and_print(
            ROOT, lock, _store(store), package, bundle=bundle, result=result, as_json=as_json
        ):
            raise SystemExit(code)
        return
    if bundle is not None or result is not None:
        raise UsageError("--bundle and --result belong to --gpu", fix="give --gpu as well")
    if smem:
        from sm75.smem import report as audit

        if code := audit.run_and_print(ROOT, lock, _store(store), package, as_json=as_json):
            raise SystemExit(code)
        return
    if package is None:
        from sm75.build import newest

        package = newest(channel, lock.vllm)
    _verify(lock, _store(store), package, as_json=as_json)


def _verify(
    lock: ReleaseLock, store: Store, package: Path, *, as_json: bool, quiet: bool = False
) -> None:
    from sm75 import proof
    from sm75 import verify as rules

    result = proof.verify_package(ROOT, lock, store, package)
    if as_json and not quiet:
        _print_json(rules.to_json(result))
    elif not quiet:
        from rich.console import Console

        Console().print(rules.table(result))
    rules.require(result)


@cli.command()
@_shared("release", "store", "json")
@click.option("--target", help="Contract below lock/targets; default: the release lock's.")
@click.argument("source", type=_FILE)
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
        data = sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()
        reports = images.read_images(data)
        if as_json:
            _print_json(images.to_json(reports))
        else:
            Console().print(images.table(reports))
        return
    lock = _lock(release)
    contract = load_target(ROOT, target or lock.target)
    report = inspection.inspect(
        source, contract=contract, cuobjdump=proof.cuobjdump(ROOT, lock, _store(store))
    )
    if as_json:
        _print_json(inspection.to_json(report))
    else:
        Console().print(inspection.table(report))
        click.echo(report.summary)
    if not report.usable:
        raise CheckFailed(
            f"{report.source} is unusable on {report.target}",
            why=report.summary,
            fix="build a package for it: python3 orchestrator.py build",
        )


@cli.group()
def patches() -> None:
    """Look at the patches of a release."""


@patches.command("check")
@_shared("release", "store", "json")
@click.option("--against", help="Another pinned release, or a tree or sdist by path.")
def patches_check(
    release: str | None, store: Path | None, as_json: bool, against: str | None
) -> None:
    """Show which patches apply to a release's sdist, and where they do not, why.

    With --against, moved hunks are shown with their old and new line, and a conflict with what the
    patch expects, what its own release has there and what the other has.
    """
    from sm75 import patchcommands

    results = patchcommands.check(ROOT, _lock(release), _store(store), against, _warn)
    _print_results(results, as_json=as_json)
    if not patchcommands.applies(results):
        raise SystemExit(CheckFailed.exit_code)


def _print_results(results: Sequence[Result], *, as_json: bool) -> None:
    if as_json:
        _print_json([asdict(result) for result in results])
        return
    for result in results:
        click.echo(result.describe())


@patches.command("rebase")
@_shared("store", "dry", "json")
@click.option("--release", required=True, help="The release that is to have a series.")
@click.option("--from", "source", help="The release it is made from; default: lock/default's.")
@click.option("--tree", type=_FILE, help="Its tree or sdist; default: as lock/sdists.toml pins.")
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

    source = source or _lock(None).vllm
    proposal, new = patchcommands.propose(ROOT, _store(store), release, source, tree=tree)
    _print_results(proposal.results, as_json=as_json)
    if dry_run:
        return
    rebase.write(proposal, new, ROOT / "patches", accept=accept, replace=replace)
    if not as_json:
        click.echo(f"rebase: wrote patches/{release}, made of {source}'s")


@patches.command("releases")
@_shared("store", "json")
@click.option("--write", is_flag=True, help="Put the table into docs/releases.md.")
@click.option("--check", is_flag=True, help="Only say whether the table there is stale; offline.")
def patches_releases(store: Path | None, as_json: bool, write: bool, check: bool) -> None:
    """Show how the patches stand to every pinned release; fetches the sdists that are missing."""
    from sm75 import releases

    if check:
        releases.check(ROOT)
        click.echo(f"releases: {releases.PAGE} is of the series and sdists there are")
        return
    found = releases.survey(ROOT, _store(store))
    made = releases.markdown(found, releases.stamp(ROOT))
    if write:
        changed = releases.write(ROOT, made)
        click.echo(f"releases: {releases.PAGE} {'is written' if changed else 'is as it was'}")
    elif as_json:
        _print_json(found.plain())
    else:
        click.echo(made, nl=False)


@patches.command("seal")
@_shared("release")
def patches_seal(release: str | None) -> None:
    """Pin the patches as they are now, in series.toml and in the release lock."""
    from sm75 import patchcommands, proof

    lock = _lock(release)
    for name in proof.seal(ROOT, lock):
        click.echo(f"pinned {name}")
    for text in patchcommands.left_behind(ROOT, lock.vllm):
        _warn(text)


@cli.command("lock")
@_shared("release", "store", "dry", "json")
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
    if torch or target or base or upgrade or dry_run or not closure:
        raise UsageError("these options make a lock", fix="give --vllm X.Y.Z or --vllm latest")
    if tools:
        _solve_tools(store)
        return
    if rust:
        _pin_crates(_lock(release), _store(store))
        return
    from sm75 import lockcheck

    lock = _lock(release)
    if check:
        from sm75 import pixi

        lockcheck.check(ROOT, lock, _store(store))
        pixi.check(ROOT)
        click.echo(
            f"lock: {lock.vllm} agrees with the pinned tree, the patches, variants.yaml and the "
            "recipe; pixi.toml, pixi.lock and lock/ agree"
        )
        return
    facts = lockcheck.summary(lock)
    if as_json:
        _print_json(facts)
    else:
        for key, value in facts.items():
            click.echo(f"{key}: {value}")


def _make_lock(store: Path | None, *, as_json: bool, **request: Any) -> None:
    from sm75 import lockupdate
    from sm75.progress import make_reporter

    with make_reporter(sys.stderr) as reporter:
        done = lockupdate.update(
            ROOT, lockupdate.Request(**request), _store(store), reporter, say=reporter.line
        )
    if as_json:
        _print_json(done.to_json())
    else:
        for line in done.lines():
            click.echo(line)


def _solve_tools(store: Path | None) -> None:
    from sm75 import pixilock
    from sm75.progress import make_reporter
    from sm75.toolchain import conda_forge

    with make_reporter() as reporter:
        changed = pixilock.update(ROOT, _store(store), reporter, conda_forge.source())
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


@cli.command("explain")
@_shared("json")
@click.option("--write-page", is_flag=True, help="Make docs/troubleshooting.md anew.")
@click.argument("subject", required=False, default="")
def explain_command(as_json: bool, write_page: bool, subject: str) -> None:
    """Explain a build or serve log (- reads it from stdin), or a version constraint by name.

    Of a log: the known failures in it, with cause, evidence, fix and link. Exit code 1 when nothing
    known is in it. Without SUBJECT: list what can be explained.
    """
    from sm75 import explain

    if write_page:
        from sm75.explain import knowledge, page

        changed = page.write(ROOT, knowledge.load())
        click.echo(f"explain: {page.PAGE} {'is written' if changed else 'is as it was'}")
        return
    if not subject:
        known = explain.names(ROOT)
        if as_json:
            _print_json(known)
        else:
            click.echo("constraints: " + ", ".join(known))
            click.echo("logs: any file, or - for standard input")
        return
    found = explain.explain(ROOT, subject)
    if as_json:
        _print_json(found.to_json())
    else:
        for line in found.lines():
            click.echo(line)
    if found.exit_code:
        raise SystemExit(found.exit_code)


@cli.group("channel")
def channel_group() -> None:
    """Look at the channel."""


@channel_group.command("verify")
@_shared("channel", "json")
def channel_verify(channel: Path, as_json: bool) -> None:
    """Check every file against SHA256SUMS and the index (conda does not, for file channels)."""
    from sm75.channelcheck import advice, count, verify_channel
    from sm75.errors import ChannelError

    if not channel.is_dir():
        raise UsageError(
            f"there is no channel {channel}", fix="build one: python3 orchestrator.py build"
        )
    problems = verify_channel(channel)
    if as_json:
        _print_json([{"path": p.path, "kind": p.kind, "detail": p.detail} for p in problems])
    if problems:
        raise ChannelError(
            f"{channel} has {count(problems)}",
            why="; ".join(str(problem) for problem in problems[:10]),
            fix=advice(problems),
        )
    if not as_json:
        click.echo(f"channel: every file in {channel} is as SHA256SUMS and the index say")


_TARGET = click.option(
    "--target", default="", help="Contract below lock/targets; default: the lock's."
)


def _warn(text: str) -> None:
    if text:
        click.echo(f"warning: {text}", err=True)


@channel_group.command("lock")
@_shared("release", "store", "json")
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
            ROOT, _lock(release), _store(store), reporter, upgrade=upgrade, check=check
        )
    if as_json:
        _print_json(made)
        return
    click.echo(
        f"runtime.lock: {made['wheels']} wheels ({amount(made['bytes'], 'B')}) for Python "
        f"{', '.join(made['python'])}; {made['run_dependencies']} run dependencies in the recipe"
        + (", which has changed" if made["recipe_changed"] else "")
    )


@channel_group.command("build")
@_shared("release", "store", "channel", "dry", "json")
@_TARGET
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
            ROOT, _lock(release), _store(store), channel.absolute(), reporter,
            target=target, offline=offline, dry_run=dry_run,
        )  # fmt: skip
    if as_json:
        _print_json(done)
    elif dry_run:
        click.echo(
            f"channel: {done['wheels']} wheels, {len(done['files'])} of them to fetch "
            f"({amount(done['download_bytes'], 'B')}; {amount(done['cached_bytes'], 'B')} are "
            "in the store)"
        )
    else:
        click.echo(
            f"channel: {done['packages']} packages of the closure, {len(done['published'])} of "
            f"them new, {len(done['withdrawn'])} withdrawn"
        )


@channel_group.command("sizes")
@_shared("channel", "json")
def channel_sizes(channel: Path, as_json: bool) -> None:
    """List the channel's packages by size."""
    from sm75 import channelcommands, channeltools

    if as_json:
        _print_json(channelcommands.sizes(channel))
        return
    from rich.console import Console

    Console().print(channeltools.size_table(channeltools.sizes(channel)))


@channel_group.command("missing")
@_shared("release", "channel", "json")
@_TARGET
def channel_missing(release: str | None, channel: Path, as_json: bool, target: str) -> None:
    """Say what the channel lacks to be installed from alone; exit code 1 when it lacks anything."""
    from sm75 import channelcommands

    found = channelcommands.missing(ROOT, _lock(release), channel.absolute(), target=target)
    if as_json:
        _print_json(found)
    else:
        for python, texts in found.items():
            for text in texts:
                click.echo(f"python {python}: {text}")
    if any(found.values()):
        raise SystemExit(1)


@channel_group.command("export")
@_shared("channel", "dry", "json")
@click.argument("out", type=_FILE)
def channel_export(channel: Path, dry_run: bool, as_json: bool, out: Path) -> None:
    """Write the channel as one tar, to carry to a machine without network."""
    from sm75 import channelcommands
    from sm75.progress import amount

    done = channelcommands.export(channel, out, dry_run=dry_run)
    if as_json:
        _print_json(done)
    elif dry_run:
        click.echo(f"export: {done['files']} files, {amount(done['bytes'], 'B')}, to {out}")
    else:
        click.echo(f"{done['sha256']}  {out}")


@channel_group.command("publish")
@_shared("channel", "dry", "json")
@click.option("--replace", is_flag=True, help="Overwrite packages that have other content there.")
@click.option("--delete", is_flag=True, help="Remove packages there that the channel lacks.")
@click.option("--reread", is_flag=True, help="Read all that is there and compare it.")
@click.argument("target")
def channel_publish(
    channel: Path, dry_run: bool, as_json: bool, replace: bool, delete: bool, reread: bool,
    target: str,
) -> None:  # fmt: skip
    """Put the channel where others read it: a directory, s3://, gs:// or az://BUCKET/PREFIX."""
    from sm75 import channelcommands
    from sm75.progress import amount, make_reporter

    with make_reporter(sys.stderr if as_json else None) as reporter:
        done = channelcommands.publish(
            ROOT, channel.absolute(), target, reporter,
            replace=replace, delete=delete, reread=reread, dry_run=dry_run,
        )  # fmt: skip
    if as_json:
        _print_json(done)
        return
    click.echo(
        f"publish: {len(done['sent'])} files ({amount(done['sent_bytes'], 'B')}) "
        f"{'would be' if dry_run else 'were'} sent, {len(done['same'])} are there already, "
        f"{len(done['removed'])} removed"
    )
    for name in (*done["sent"], *(f"remove {name}" for name in done["removed"])) if dry_run else ():
        click.echo(f"  {name}")


@cli.command("install")
@_shared("release", "channel", "dry", "json")
@_TARGET
@click.option("--prefix", type=_FILE, required=True, help="A new or empty directory.")
@click.option("--python", default="", help="Python minor; default: that of the image's torch.")
@click.option("--extra-channel", type=_FILE, multiple=True, help="A directory with python, say.")
@click.option("--image", type=_FILE, help="The environment that has the image's torch.")
@click.option("--foreign", is_flag=True, help="Install for a g5g from another machine.")
def install_command(
    release: str | None, channel: Path, dry_run: bool, as_json: bool, target: str, prefix: Path,
    python: str, extra_channel: tuple[Path, ...], image: Path | None, foreign: bool,
) -> None:  # fmt: skip
    """Install vllm-sm75 from the channel without a conda client and without network."""
    from sm75 import channelcommands

    done = channelcommands.install(
        ROOT, _lock(release), channel.absolute(), prefix, python=python, target=target,
        extra_channels=tuple(path.absolute() for path in extra_channel), foreign=foreign,
        image=image, dry_run=dry_run, exact=release is not None,
    )  # fmt: skip
    if as_json:
        _print_json(done)
    else:
        would = "would install" if dry_run else "installed"
        click.echo(
            f"install: {would} {len(done['packages'])} packages for Python {done['python']} in "
            f"{done['prefix']}"
        )
        for package in done["packages"] if dry_run else ():
            click.echo(f"  {package}")
    _warn(done["warning"])


@cli.command()
@_shared("dry", "json")
@click.option("--write-contract", is_flag=True, help="Write lock/targets/NAME.toml.")
@click.option("--strict", is_flag=True, help="Warnings and what cannot be seen fail as well.")
@click.option("--imds", is_flag=True, help="Ask EC2's metadata service for the instance type.")
@click.option("--model", type=_FILE, help="A model's directory: do its weights fit?")
@click.option(
    "--path", type=_FILE, default=Path("/opt/pytorch"), help="The environment that has torch."
)
@click.option("--name", default="", help="The contract's name; default: by torch and system.")
@click.option("--replace", is_flag=True, help="Overwrite a contract of that name.")
def doctor(
    dry_run: bool, as_json: bool, write_contract: bool, strict: bool, imds: bool,
    model: Path | None, path: Path, name: str, replace: bool,
) -> None:  # fmt: skip
    """Say whether this machine is right for vllm-sm75, line by line with the fix.

    Exit code 1 when a line fails; with --strict also when one warns or is unknown. With
    --write-contract: describe its image as a target contract instead, to build for it.
    """
    if not write_contract:
        if dry_run or name or replace:
            raise UsageError("--dry-run, --name and --replace belong to --write-contract")
        if model is not None and not model.is_dir():
            raise UsageError(f"there is no directory {model}", fix="name the model's directory")
        _examine(path=path, model=model, imds=imds, strict=strict, as_json=as_json)
        return
    from sm75 import channelcommands

    done = channelcommands.write_contract(
        ROOT, path=path, name=name, replace=replace, dry_run=dry_run
    )
    if as_json:
        _print_json(done)
    elif dry_run:
        click.echo(done["text"], nl=False)
    else:
        click.echo(f"doctor: wrote {done['contract']}")
    _warn(done["warning"])


@cli.command()
@_shared("json")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option("--model", default="", help="Default: the first one that it lists.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=60.0, show_default=True,
              help="Seconds for each answer.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(min=0), default=0,
              help="For each answer; more for models that think aloud.")  # fmt: skip
@click.option("--wait", "patience", type=click.FloatRange(min=0), default=0.0,
              help="Seconds to wait for a server that does not answer yet.")  # fmt: skip
@click.option("--watch", is_flag=True, help="Ask again and again; end when it fails.")
@click.option("--interval", type=click.FloatRange(min=0), default=60.0, show_default=True,
              help="With --watch: seconds between rounds.")  # fmt: skip
@click.option("--failures", type=click.IntRange(min=1), default=3, show_default=True,
              help="With --watch: failures in a row that end it.")  # fmt: skip
def health(
    as_json: bool, url: str, model: str, timeout: float, max_tokens: int, patience: float,
    watch: bool, interval: float, failures: int,
) -> None:  # fmt: skip
    """Ask a server small questions over chat and read what it says.

    Exit code 0: well; 1: it answers nonsense; 11: it does not answer. A key is taken from
    VLLM_API_KEY. See docs/health.md for systemd, Kubernetes and load balancers.
    """
    from sm75.health import check as checks
    from sm75.health.client import Server, base_url
    from sm75.health.questions import choose

    server = Server(base_url(url), api_key=os.environ.get("VLLM_API_KEY", ""), timeout=timeout)

    def ask() -> checks.Health:
        return checks.check(server, model=model, questions=choose(most_tokens=max_tokens))

    def say(found: checks.Health) -> None:
        if as_json:
            click.echo(json.dumps(found.to_json()))
        else:
            for line in found.lines():
                click.echo(line)

    if patience or not watch:
        found = checks.wait(ask, patience)
    if watch:
        found = checks.watch(ask, say, interval=interval, failures=failures)
    else:
        say(found)
    if found.exit_code:
        raise SystemExit(found.exit_code)


def _examine(*, strict: bool, as_json: bool, **what: Any) -> None:
    from sm75.doctor import facts, rules

    lines = rules.judge(facts.collect(ROOT, **what))
    code = rules.exit_code(lines, strict=strict)
    if as_json:
        _print_json({"exit_code": code, "lines": [line.to_json() for line in lines]})
    else:
        for line in lines:
            click.echo(f"{line.status:<7}  {line.name:<17}  {line.says}")
            if line.fix:
                click.echo(f"{'':<28}next: {line.fix}")
    if code:
        raise SystemExit(code)


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def test(arguments: tuple[str, ...]) -> None:
    """Run lint, types and all tests, with the build of the real package among them."""
    steps = [["-m", "pytest", *arguments]] if arguments else [*_LINT, ["-m", "pytest"]]
    _run_steps(steps)


@cli.command()
def lint() -> None:
    """Run ruff and mypy."""
    _run_steps(_LINT)


# The recipes' build scripts have one name, which mypy takes one at a time.
_LINT = [["-m", "ruff", "check"], ["-m", "ruff", "format", "--check"], ["-m", "mypy"],
         ["-m", "mypy", "recipes/dlami-torch/build.py"]]  # fmt: skip


def _run_steps(steps: list[list[str]]) -> None:
    for step in steps:
        done = subprocess.run([sys.executable, *step], cwd=ROOT, check=False)
        if done.returncode:
            raise SystemExit(1)


def main() -> int:
    """Run the command line; turn errors into messages and exit codes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.flags.isolated:  # what was kept from us must not reach what we start either
        for name in ("PYTHONPATH", "PYTHONHOME"):
            os.environ.pop(name, None)
    try:
        result = cli.main(standalone_mode=False)
    except Sm75Error as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except click.exceptions.Abort:
        click.echo("interrupted; the same command resumes", err=True)
        return 130
    except KeyboardInterrupt:
        click.echo("interrupted; the same command resumes", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:  # whoever read our output is gone, as with head(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        from sm75.atomic import is_disk_error

        if not is_disk_error(error):
            raise
        click.echo(f"error: {error.strerror}: {error.filename}", err=True)
        return 9
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    code = main()
    for output in (sys.stdout, sys.stderr):
        try:
            output.flush()
        except BrokenPipeError:
            pass
        except OSError:  # it is a file on a full disk
            code = code or 9
    # See sm75/rattler_rt.py: the interpreter's own exit can crash once rattler has run.
    os._exit(code)
