"""The build: lock -> inputs -> toolchain channel -> recipe -> normalised package -> channel."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from sm75 import channel as channels
from sm75 import (
    channelcheck,
    condanorm,
    crates,
    fetch,
    inputs,
    onebuild,
    preflight,
    remotecache,
    sbom,
    session,
    vendor,
)
from sm75.atomic import disk_errors
from sm75.channelcheck import require
from sm75.compilelog import CompileLog, read_weights, source_of
from sm75.condapkg import canonical_json
from sm75.errors import (
    BuildError,
    ChannelError,
    DiskError,
    PatchError,
    ToolchainError,
    UsageError,
)
from sm75.explain import logs
from sm75.lockfile import G5G, PROOFS, ReleaseLock
from sm75.progress import Reporter, Task
from sm75.series import load_series
from sm75.store import Store
from sm75.toolchain import Provider
from sm75.toolchain.host import build_environment, lay_out_tools
from sm75.toolchain.host import build_platform as this_platform
from sm75.turns import one_at_a_time
from sm75.words import counted
from sm75.worker import Job

NAME = "vllm-sm75"
# The package for proofs: another name, so that nobody takes it for the g5g's.
PROOF_NAME = "vllm-sm75-ptx"
# Below the work directory: the Rust frontend's sources, for one build.
RUST_SOURCES = "crates"
# A build that fails with less room than this, bytes, has most likely failed for that.
_LEAST = 64 << 20
# Lines of the log that an error shows.
_TAIL = 25
# For what asks before it connects, where the kernel gives no namespace without network. Nothing
# listens on the discard port.
_NOWHERE = "http://127.0.0.1:9"
OFFLINE = {
    **{name: _NOWHERE for kind in ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")
       for name in (kind, kind.upper())},
    "no_proxy": "", "NO_PROXY": "",
    "GIT_ALLOW_PROTOCOL": "file", "PIP_NO_INDEX": "1", "UV_OFFLINE": "1",
    "CARGO_NET_OFFLINE": "true",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One build's settings.

    Attributes:
        root: The project's directory.
        store: Where the inputs are.
        channel: Where the package goes.
        rust: How the Rust frontend is had.
        target_platform: What is built for.
        ptx: Whether PTX goes into the extensions beside the machine code, for proofs.
        jobs: Compile jobs; 0: from cores and memory.
        wait: Seconds to wait for another build in this directory.
        recompile: Build even what the channel has, and compile everything anew.
        remote_cache: URL of a compiler cache that several builders share; empty: none.
    """

    root: Path
    store: Store
    channel: Path
    rust: str
    target_platform: str = G5G
    ptx: bool = False
    jobs: int = 0
    wait: float = 24 * 3600.0
    recompile: bool = False
    remote_cache: str = ""

    @property
    def name(self) -> str:
        """The package's name."""
        return PROOF_NAME if self.ptx else NAME

    @property
    def work(self) -> Path:
        """Directory of everything that can be made again."""
        return self.root / ".sm75"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a build ended.

    Attributes:
        package: The package in the channel.
        inputs: What it was made of.
        built: False: it was there already.
        compiled: Sources that were compiled (or taken from the compiler cache).
        seconds: Wall time.
        withdrawn: Packages of the channel whose place it took, as ``subdir/file``.
    """

    package: Path
    inputs: inputs.Inputs
    built: bool
    compiled: tuple[str, ...]
    seconds: float
    withdrawn: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a build would do.

    Attributes:
        inputs: What the package is made of.
        package: Where it goes.
        needed: Whether the channel lacks it.
        platform: Conda subdir of this machine.
    """

    inputs: inputs.Inputs
    package: Path
    needed: bool
    platform: str


def look(lock: ReleaseLock, provider: Provider, settings: Settings) -> Planned:
    """Say what a build would do; nothing is written.

    Args:
        lock: The release.
        provider: Where the tools come from.
        settings: See there.

    Raises:
        LockError: The lock disagrees with the patches.
        ToolchainError: A tool is missing or unsuitable.
        ChannelError: The channel has the package, but damaged, or something that is no package.
        UsageError: The project's path, or that of temporary files, does not suit the compilers;
            the target does not go with the options or the channel; or the shared cache's URL is
            not understood.
        DiskError: The channel cannot be written.
    """
    preflight.check_places(
        settings.work, settings.store.root, settings.channel, os.environ.get("TMPDIR")
    )
    check_target(settings)
    if settings.remote_cache:
        remotecache.parse(settings.remote_cache)
    platform = this_platform()
    if settings.rust == "source" and (
        reason := provider.rust(lock, platform, settings.target_platform)
    ):
        raise ToolchainError(
            "the Rust frontend cannot be built from source with this toolchain",
            why=reason,
            fix="use --rust prebuilt (the official wheel's binary, by hash) or --rust none",
        )
    made_of = _made_of(lock, provider, settings, platform)
    rel = f"{settings.target_platform}/{settings.name}-{lock.vllm}-{made_of.build_string}.conda"
    needed = settings.recompile or not channelcheck.holds(settings.channel, rel)
    if needed:
        preflight.check_channel(settings.channel, rel)
    return Planned(inputs=made_of, package=settings.channel / rel, needed=needed, platform=platform)


def _made_of(
    lock: ReleaseLock, provider: Provider, settings: Settings, platform: str
) -> inputs.Inputs:
    return inputs.collect(
        settings.root,
        lock,
        load_series(settings.root / "patches" / lock.vllm),
        toolchain=provider.identity(lock, platform, settings.target_platform),
        build_platform=platform,
        target_platform=settings.target_platform,
        rust=settings.rust,
        ptx=settings.ptx,
    )


def check_target(settings: Settings) -> None:
    """Keep the packages for proofs and those for the g5g apart.

    Args:
        settings: Of the build.

    Raises:
        UsageError: The target does not go with the options or the channel.
    """
    proofs = settings.target_platform == PROOFS
    if proofs != settings.ptx:
        raise UsageError(
            f"{settings.target_platform} is built {'with' if proofs else 'without'} --ptx only",
            why="the g5g's package holds machine code for sm_75 and nothing else; the package for "
            f"{PROOFS} serves proofs on other GPUs, which run its PTX alone",
            fix=f"python3 orchestrator.py build --target {PROOFS} --ptx" if proofs
            else "leave --ptx out",
        )  # fmt: skip
    if proofs and settings.rust != "none":
        raise UsageError(
            f"there is no Rust frontend for {PROOFS}",
            why="the lock pins the binary of the aarch64 wheel alone",
            fix="leave --rust out, or say --rust none",
        )
    other = NAME if proofs else PROOF_NAME
    found = next(settings.channel.glob(f"*/{other}-[0-9]*.conda"), None)
    if found or (proofs and settings.channel.resolve() == (settings.root / "channel").resolve()):
        raise UsageError(
            f"{settings.name} does not go into {settings.channel}",
            why=f"it has {found.name}" if found else "that is the channel for the g5g",
            fix="name another --channel, or leave it out",
        )


def newest(channel: Path, version: str) -> Path:
    """The package of a release that the channel has; the last one built, where there are several.

    Raises:
        ChannelError: There is none, or no channel.
    """
    require(channel)
    found = sorted(
        channel.glob(f"*/{NAME}-{version}-*.conda"), key=lambda p: (p.stat().st_mtime, p)
    )
    if not found:
        raise ChannelError(
            f"{channel} has no {NAME} {version}",
            fix="build it: python3 orchestrator.py build",
        )
    return found[-1]


def build(
    lock: ReleaseLock,
    provider: Provider,
    settings: Settings,
    planned: Planned,
    reporter: Reporter,
    check: Callable[[Path], None] = lambda package: None,
) -> Outcome:
    """Build the package and publish it, unless the channel has it.

    Args:
        lock: The release.
        provider: Where the tools come from.
        settings: See there.
        planned: What :func:`look` found.
        reporter: Shows progress.
        check: Looks at the finished package and raises, when it is not fit to publish.

    Raises:
        CheckFailed: From ``check``; nothing is published.
        FetchError: An input is not in the store.
        PatchError: A patch does not apply at its exact place.
        BuildError: A step failed; the message has the end of the log.
        ChannelError: The channel is damaged.
        DiskError: The disk is full.
        BusyError: Another build runs, and ``settings.wait`` is over.
    """
    started = time.monotonic()
    compiled: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    built = False
    if planned.needed:
        fetch.require(
            fetch.plan(
                lock, settings.store, planned.platform, settings.rust, settings.target_platform
            )
        )
        if settings.rust == "source":
            crates.require(_rust_sources(lock, settings), settings.store)
        with only_one(settings, reporter, "build.lock"):
            # The one that was waited for may have built the same, and the inputs may be others.
            planned = look(lock, provider, settings)
            if planned.needed:
                compiled, withdrawn = _build(lock, provider, settings, planned, reporter, check)
                built = True
    if not built:  # a killed run, or an older program, may have left other builds beside it
        withdrawn = _publish(lock, settings, planned.package, {}, reporter)
    return Outcome(
        package=planned.package,
        inputs=planned.inputs,
        built=built,
        compiled=compiled,
        withdrawn=withdrawn,
        seconds=time.monotonic() - started,
    )


def _build(
    lock: ReleaseLock,
    provider: Provider,
    settings: Settings,
    planned: Planned,
    reporter: Reporter,
    check: Callable[[Path], None],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Build and publish it; return what was compiled, and what was withdrawn."""
    if settings.recompile:
        shutil.rmtree(native_directory(settings, planned.inputs), ignore_errors=True)
    # What was unpacked for another build is never used again: nobody checks it.
    for name in ("rattler-cache", "out", RUST_SOURCES):
        shutil.rmtree(settings.work / name, ignore_errors=True)
    urls = provider.channels(lock, settings.store, planned.platform, settings.target_platform)
    lay_out_sources(lock, settings)
    if settings.rust == "source":
        _lay_out_rust(lock, settings, reporter)
    with remotecache.shared(settings.remote_cache, reporter) as cache:
        run = _run_recipe(lock, settings, planned.inputs, urls, planned.platform, reporter, cache)
    now = _made_of(lock, provider, settings, planned.platform)
    if now.input_hash != planned.inputs.input_hash:
        changed = sorted(k for k, v in now.facts.items() if v != planned.inputs.facts.get(k))
        raise BuildError(
            "the inputs were changed while the build ran; nothing was published",
            why=f"what it was made of is not known: {', '.join(changed)}",
            fix="run the same command again",
        )
    built = Path(run.package)
    scratch = settings.work / "normal"
    with disk_errors(scratch):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    facts = planned.inputs.facts
    extra = {"provenance": facts, "native_hash": planned.inputs.native_hash}
    reporter.line("build: pack")
    condanorm.normalize(built, scratch, about_extra=extra)
    reporter.line("build: verify")
    check(scratch / built.name)
    documents = {f"{built.name}{onebuild.PROVENANCE}": canonical_json(facts)}
    withdrawn = _publish(lock, settings, scratch / built.name, documents, reporter)
    shutil.rmtree(scratch, ignore_errors=True)
    return tuple(run.log.compiled), withdrawn


def _publish(
    lock: ReleaseLock,
    settings: Settings,
    package: Path,
    documents: Mapping[str, bytes],
    reporter: Reporter,
) -> tuple[str, ...]:
    """Have the channel offer this build of the version alone; return what was withdrawn.

    Without documents, the package is in the channel already.
    """
    rivals = onebuild.Rivals(settings.channel, [package])
    if documents or rivals():
        channels.publish(
            [package],
            settings.channel,
            documents=documents,
            derived={sbom.SBOM: lambda tree: sbom.make(tree, settings.root, lock)},
            remove=rivals,
            wait=settings.wait,
            say=reporter.line,
        )
    return rivals.found


def native_directory(settings: Settings, made_of: inputs.Inputs) -> Path:
    """Where CMake and ninja keep their state for these inputs."""
    return settings.work / "native" / made_of.native_hash[:16]


def only_one(
    settings: Settings, reporter: Reporter, name: str
) -> contextlib.AbstractContextManager[None]:
    """Keep other runs out of this directory while the block runs.

    Args:
        settings: The directory, and how long to wait.
        reporter: Is told that it waits.
        name: Of the file that is locked, in the work directory.

    Raises:
        BusyError: Another one still runs after ``settings.wait``.
        DiskError: The file cannot be made.
    """
    other = "another build runs in this directory"
    return one_at_a_time(settings.work / name, other, wait=settings.wait, say=reporter.line)


def lay_out_sources(lock: ReleaseLock, settings: Settings) -> None:
    """Put the sdist where the recipe reads it, copied from the store's checked file.

    Args:
        lock: The release.
        settings: The project's directory and the store.

    Raises:
        FetchError: The store lacks it.
        DiskError: It cannot be written.
    """
    source = settings.store.get(lock.artifact("vllm-sdist"))
    place = settings.work / "sources" / source.name
    with disk_errors(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        # A copy: whatever the recipe's builder does to it must not reach the store.
        shutil.copyfile(source, place)


def _rust_sources(lock: ReleaseLock, settings: Settings) -> crates.Sources:
    return crates.sources(lock, settings.store.get(lock.artifact("vllm-sdist")))


def _lay_out_rust(lock: ReleaseLock, settings: Settings, reporter: Reporter) -> None:
    wanted = _rust_sources(lock, settings)
    reporter.line(f"build: unpack {counted(len(wanted.crates), 'crate')}")
    vendor.prepare(wanted, settings.store, settings.work / RUST_SOURCES)


@dataclass(kw_only=True)
class _Run:
    log: CompileLog
    package: str


def _run_recipe(
    lock: ReleaseLock,
    settings: Settings,
    made_of: inputs.Inputs,
    urls: list[str],
    platform: str,
    reporter: Reporter,
    cache: str,
) -> _Run:
    native = native_directory(settings, made_of)
    sdist = lock.artifact("vllm-sdist")
    job = Job(
        recipe=str(settings.root / "recipes" / NAME / "recipe.yaml"),
        variants={
            "vllm_version": lock.vllm,
            "vllm_sdist": sdist.filename,
            "vllm_sdist_sha256": sdist.sha256,
            "rust_frontend": settings.rust,
        },
        build_platform=platform,
        target_platform=settings.target_platform,
        channels=urls,
        output=str(settings.work / "out"),
    )
    home = settings.work / "home"
    logs = settings.work / "logs"
    with disk_errors(settings.work):
        for directory in (home, logs, native):
            directory.mkdir(parents=True, exist_ok=True)
    log_file = logs / f"build-{made_of.input_hash[:12]}.log"
    environment = {
        **build_environment(),
        **OFFLINE,
        "PATH": lay_out_tools(settings.work / "bin"),
        "HOME": str(home),
        "TMPDIR": os.environ.get("TMPDIR") or "/tmp",  # noqa: S108 (what everybody defaults to)
        "PYTHONPATH": str(settings.root),
        "RATTLER_CACHE_DIR": str(settings.work / "rattler-cache"),
        "SM75_NATIVE_DIR": str(native),
        "SM75_CCACHE_DIR": str(settings.store.root / "ccache"),
        "SM75_INPUT_HASH": made_of.input_hash[:12],
        "SM75_PTX": "1" if settings.ptx else "",
        "SM75_JOBS": str(settings.jobs or ""),
        "SM75_RECOMPILE": "1" if settings.recompile else "",
        "SM75_CRATES": str(settings.work / RUST_SOURCES) if settings.rust == "source" else "",
        # The recipe has it as a secret: an empty one would hide every place in the log.
        **({"SM75_CCACHE_REMOTE": cache} if cache else {}),
    }
    series = load_series(settings.root / "patches" / lock.vllm)
    slowest = [o.path for o in series.overlays if o.dest == "cmake/sm75/slowest.txt"]
    following = CompileLog(weights=read_weights(slowest[0]) if slowest else {})
    ends: dict[str, Any] = {}
    tail: deque[str] = deque(maxlen=400)
    with (
        disk_errors(log_file),
        log_file.open("w", buffering=1) as log,
        _worker(job, environment, reporter) as events,
    ):
        task: Task | None = None
        for raw in events:
            try:
                event = json.loads(raw)
            except ValueError:
                event = {"log": raw.rstrip("\n")}
            if "log" not in event:
                ends |= event
                continue
            line = event["log"]
            log.write(line + "\n")
            tail.append(line)
            step, retried = following.step, len(following.alone)
            ended = following.feed(line)
            if following.step != step:
                reporter.line(f"build: {following.step}")
            if len(following.alone) != retried:
                reporter.line(
                    f"build: the compiler of {following.alone[-1]} was killed, most likely for "
                    "memory; compiling that one again with nothing beside it"
                )
            if ended:
                if task is None:
                    task = reporter.task("compile", int(following.estimate()), "s")
                source, seconds = ended
                task.message(f"{following.done}/{following.total} {Path(source).name}")
                task.advance(int(seconds))
        if task:
            task.done()
    if "package" not in ends:
        _explain(ends.get("error", "the build process ended without a word"), tail, following,
                 log_file)  # fmt: skip
    return _Run(log=following, package=ends["package"])


@contextlib.contextmanager
def _worker(job: Job, environment: dict[str, str], reporter: Reporter) -> Iterator[IO[str]]:
    """Start the worker without network where the kernel allows that; end it with this block."""
    # -P: the directory that the user happens to be in has no say.
    command = [sys.executable, "-P", "-m", "sm75.worker"]
    isolate = isolation()
    if not isolate:
        reporter.line(
            "build: this kernel gives no network namespace; proxy variables refuse the network "
            "instead, to whatever heeds them"
        )
    process = subprocess.Popen(
        [*isolate, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        start_new_session=True,
    )
    if process.stdin is None or process.stdout is None:
        raise BuildError("the build process has no pipes")
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(job).decode() + "\n")
            process.stdin.flush()
        yield process.stdout
        process.wait()
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        session.end(process.pid)
        process.wait()


def isolation() -> list[str]:
    """The command prefix that takes the network away, or nothing where that is not allowed."""
    tool = shutil.which("unshare")
    for flags in (["-n"], ["-r", "-n"]):
        if (
            tool
            and not subprocess.run(
                [tool, *flags, "true"], check=False, capture_output=True
            ).returncode
        ):
            return [tool, *flags]
    return []


def _free(directory: Path) -> float:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return float("inf")


def _explain(error: str, tail: deque[str], log: CompileLog, log_file: Path) -> None:
    """Raise the error that the end of the log speaks of."""
    text = "\n".join(tail)
    end = "\n".join(f"    {line}" for line in list(tail)[-_TAIL:])
    if known := logs.brief(log_file, tail):
        end += f"\n  what is known of this:\n{known}"
    if re.search(r"No space left on device|ENOSPC", text + error):
        raise DiskError(
            "the build ran out of disk space",
            why=f"the log is {log_file}",
            fix="free some space and run the same command again; it resumes",
        )
    if log.memory:
        raise BuildError(
            f"the compiler of {source_of(log.failed)} was killed twice, the second time with no "
            "other beside it",
            why=f"most likely for memory: {log.memory}; the whole log is {log_file}, its end:\n"
            f"{end}",
            fix="end other programs, add swap, or build on a machine with more memory; "
            "the same command resumes",
        )
    if log.failed:
        killed = log.exit_code in (137, -9) or re.search(r"\bKilled\b|signal 9\b", text)
        raise BuildError(
            f"compiling {log.failed} failed",
            why=("the compiler was killed, most likely for memory" if killed else "compiler error")
            + f"; the whole log is {log_file}, its end:\n{end}",
            fix="run the same command with --jobs 1; it resumes" if killed
            else "read the log; the same command resumes where it stopped",
        )  # fmt: skip
    refused = [line.removeprefix("error: ") for line in tail if line.startswith("error: ")]
    if log.step == "patch" and refused:
        raise PatchError(
            refused[0],
            why=f"the whole log is {log_file}, its end:\n{end}",
            fix="see where the patches apply: python3 orchestrator.py patches check",
        )
    first = error.splitlines()[0] if error else ""
    # py-rattler-build says what it was doing, and not that the disk was full.
    if (free := _free(log_file.parent)) < _LEAST:
        raise DiskError(
            f"the build ran out of disk space in the step {log.step or 'environment'!r}",
            why=f"{free / 2**20:.0f} MiB are free; it said: {first}; the log is {log_file}",
            fix="free some space and run the same command again; it resumes",
        )
    raise BuildError(
        f"the step {log.step or 'environment'!r} failed: {first}",
        why=f"the whole log is {log_file}, its end:\n{end}",
        fix="read the log; the same command resumes where it stopped",
    )
