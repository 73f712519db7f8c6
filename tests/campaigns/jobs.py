"""Four small jobs over the real code: fetch, lock, channel, build. One process runs one of them.

``python -m tests.campaigns.jobs NAME PLACE URL [--die-at N | --full-at N]``: PLACE is what
``tests.campaigns.places`` made, URL its package index. ``--die-at N`` kills the process, with
SIGKILL, before the N-th step that changes the disk; ``--full-at N`` lets the disk be full from that
step on; ``--count`` prints how many such steps there were.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sm75 import build, channel, closure, fetch, lockcheck, lockupdate
from sm75.condapkg import verify_payload
from sm75.errors import ChannelError, Sm75Error
from sm75.index import IndexConfig, PackageIndex
from sm75.lockfile import Artifact, ReleaseLock, load_release, load_target
from sm75.progress import PlainReporter
from sm75.store import Store
from sm75.toolchain import ToolSpecs
from sm75.transfer import TransferOptions
from tests.unit.lockkit import EXTENSIONS

RELEASE = "0.33.0"
OPTIONS = TransferOptions(read_timeout=20, attempts=3, backoff=0.05)
# What Python announces before it changes a directory or opens a file (audit events of CPython).
CHANGES = frozenset({"os.rename", "os.link", "os.remove", "os.mkdir", "os.symlink", "os.chmod"})


def index(url: str) -> PackageIndex:
    """The campaign's own index, whatever the user has configured."""
    return PackageIndex(IndexConfig(indexes=(url,)), OPTIONS)


def run_fetch(place: Path, url: str, reporter: PlainReporter) -> None:
    """Three files, one of them as a thin wheel."""
    store = Store(place / "store")
    wanted = msgspec.json.decode((place / "artifacts.json").read_bytes(), type=list[Artifact])
    plan = fetch.plan_artifacts(wanted, store)
    fetch.fetch(plan, store, reporter, index=index(url), options=OPTIONS)


def run_lock(place: Path, url: str, reporter: PlainReporter) -> None:
    """The lock of a small release."""
    vars(lockcheck)["EXTENSIONS"] = EXTENSIONS
    request = lockupdate.Request(vllm=RELEASE, with_closure=False, upgrade=True)
    lockupdate.update(
        place / "project", request, Store(place / "store"), reporter,
        index=index(url), options=OPTIONS,
    )  # fmt: skip


def run_channel(place: Path, url: str, reporter: PlainReporter) -> None:
    """A closure of a few wheels: converted, published over an older one, indexed."""
    root = place / "project"
    release = load_release(root, RELEASE)
    closure.build(
        root, release, load_target(root, release.target), Store(place / "store"),
        place / "channel", reporter,
    )  # fmt: skip


class Tools:
    """A provider of no tools: the small recipe names this machine's by their path."""

    name = "none"

    def __init__(self, root: Path) -> None:
        self._channel = root / ".sm75" / "toolchain" / "none"

    def describe(self) -> str:
        return "no tools"

    def specs(self) -> ToolSpecs:
        return ToolSpecs(build=())

    def identity(self, *_: object) -> dict[str, str]:
        return {"provider": "none"}

    def rust(self, *_: object) -> str:
        return "it has none"

    def channels(self, *_: object) -> list[str]:
        channel.index(self._channel, subdirs=["linux-64", "linux-aarch64"])
        return [self._channel.as_uri()]


def small_lock(root: Path, sdist: Artifact) -> ReleaseLock:
    """The real lock, with a small sdist as its only artifact."""
    return msgspec.structs.replace(load_release(root, RELEASE), artifacts=(sdist,))


def run_build(place: Path, url: str, reporter: PlainReporter) -> None:
    """The whole build step, over a small recipe: worker, ninja, normalisation, publication."""
    root = place / "project"
    sdist = msgspec.json.decode((place / "sdist.json").read_bytes(), type=Artifact)
    lock = small_lock(root, sdist)
    settings = build.Settings(
        root=root, store=Store(place / "store"), channel=place / "channel", rust="none", jobs=2
    )

    def check(package: Path) -> None:
        if problems := verify_payload(package):
            raise ChannelError("; ".join(problems))

    tools = Tools(root)
    build.build(lock, tools, settings, build.look(lock, tools, settings), reporter, check)


JOBS: dict[str, Callable[[Path, str, PlainReporter], None]] = {
    "fetch": run_fetch, "lock": run_lock, "channel": run_channel, "build": run_build
}  # fmt: skip


class Steps:
    """Counts the steps that change the disk, and acts at one of them."""

    def __init__(self, place: Path, die_at: int, full_at: int) -> None:
        self.count = 0
        self._place = str(place)
        self._die_at, self._full_at = die_at, full_at

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not writes or not str(path).startswith(self._place):
                return
        elif event not in CHANGES or not any(
            str(a).startswith(self._place) for a in arguments if isinstance(a, str | Path)
        ):
            return
        self.count += 1
        if self.count == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        # A full disk still lets one remove and rename.
        if self._full_at and self.count >= self._full_at and event in ("open", "os.mkdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))


def main() -> int:
    """Run the job as the command line would: an error for people, and its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("place", type=Path)
    parser.add_argument("url")
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--full-at", type=int, default=0)
    parser.add_argument("--count", action="store_true")
    parser.add_argument(
        "--unchecked", action="store_true", help="fetch: do not look for room first"
    )
    given = parser.parse_args()
    if given.unchecked:
        vars(fetch)["_check_room"] = lambda *_: None
    print("started", flush=True)  # all modules are there; what follows is the job
    steps = Steps(given.place, given.die_at, given.full_at)
    if given.die_at or given.full_at or given.count:
        sys.addaudithook(steps.hook)
    try:
        JOBS[given.job](given.place, given.url, PlainReporter(sys.stderr))
    except Sm75Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if given.count:
        print(steps.count)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # see sm75.rattler_rt
