"""Tools from conda-forge: locked with py-rattler, mirrored into the store, served from there."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock
import rattler

from sm75 import rattler_rt
from sm75.atomic import directory, disk_errors, write_bytes
from sm75.channelcheck import REPODATA, SUMS
from sm75.condapkg import canonical_json
from sm75.errors import FetchError
from sm75.lockfile import ReleaseLock
from sm75.progress import Reporter, Task
from sm75.store import Store
from sm75.toolchain import ToolSpecs, condalock
from sm75.transfer import FileLink, Transfer, TransferOptions

# Name of conda's community channel; clients know where it is, and users' mirrors apply to it.
CHANNEL = "conda-forge"

# Part of a local channel's name: raise it when the same lock would give another directory.
_LAYOUT = 1

# For --rust source beside Rust itself: how the names begin of what OpenSSL is made with, which the
# frontend brings along; and Rust's own library for the target.
_RUST_TOOLS = ("perl-", "make-")
_RUST_STD = {
    "linux-aarch64": "rust-std-aarch64-unknown-linux-gnu",
    "linux-64": "rust-std-x86_64-unknown-linux-gnu",
}

# Seconds between looks at a lock that another fetch holds.
_LOCK_POLL = 0.2


@dataclass(frozen=True, kw_only=True)
class Payload:
    """One locked package.

    Args:
        filename: Its name.
        url: Where the channel has it.
        sha256: Hash (hex).
        size: Bytes.
        subdir: Conda subdir.
    """

    filename: str
    url: str
    sha256: str
    size: int
    subdir: str


class CondaForge:
    """The provider ``conda-forge``.

    Args:
        lock_file: The toolchain's lock, beside the release lock.
        specs: What the recipe asks for.
        channel: Channel name or URL.
        config: rattler configuration; default: the user's own (rattler's and pixi's files).
        cache_dir: Where channel indexes are cached; default: rattler's own place.
    """

    name = "conda-forge"

    def __init__(
        self,
        lock_file: Path,
        specs: ToolSpecs,
        *,
        channel: str = CHANNEL,
        config: rattler.Config | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        self.lock_file = lock_file
        self.specs = specs
        self.source = source(channel, config=config, cache_dir=cache_dir)

    def describe(self) -> str:
        """Say in one line what it is and what it needs."""
        return f"conda-forge: tools of {self.source.channel}, locked in {self.lock_file.name}"

    def reachable(self, *, seconds: float = 5.0) -> str:
        """Try to read one byte of the channel.

        Args:
            seconds: How long to wait for it.

        Returns:
            Empty when the channel answers, else the reason in one line.
        """
        location = f"{self.source.url}/noarch/{REPODATA}"
        options = TransferOptions(connect_timeout=seconds, read_timeout=seconds, attempts=1)

        async def ask() -> str:
            reason = ""
            async with Transfer(options) as transfer:
                for url in self.source.urls(location):
                    try:
                        await transfer.size(FileLink(filename=REPODATA, url=url))
                    except FetchError as err:
                        reason = reason or err.why or err.what
                    else:
                        return ""
            return reason

        return rattler_rt.run(ask())

    def resolve(self, build_platforms: Iterable[str], target_platform: str) -> None:
        """Solve for every platform and write the lock file.

        Args:
            build_platforms: Subdirs of the machines that may build.
            target_platform: Subdir of the package.

        Raises:
            ToolchainError: The channel cannot be read or lacks something; the lock stays.
            DiskError: The lock cannot be written.
        """
        text = condalock.resolve(self.source, self.specs, build_platforms, target_platform)
        condalock.write(self.lock_file, text)

    def payloads(self, build_platform: str, target_platform: str) -> list[Payload]:
        """List the locked packages of one build.

        Args:
            build_platform: Subdir of the machine that builds.
            target_platform: Subdir of the package.

        Raises:
            LockError: No lock, a malformed one, or one that does not answer the recipe.
        """
        return [_payload(r) for r in self._records(build_platform, target_platform)]

    def missing(self, store: Store, build_platform: str, target_platform: str) -> list[Payload]:
        """List the locked packages that the store does not have.

        Raises:
            LockError: As :meth:`payloads`.
        """
        return [
            p
            for p in self.payloads(build_platform, target_platform)
            if not store.sound(p.sha256, p.filename, p.size)
        ]

    def mirror(
        self,
        store: Store,
        build_platform: str,
        target_platform: str,
        reporter: Reporter,
        *,
        options: TransferOptions | None = None,
    ) -> None:
        """Fetch what is missing into the store; resumes, checks size and sha256.

        Args:
            store: Where to put it.
            build_platform: Subdir of the machine that builds.
            target_platform: Subdir of the package.
            reporter: Shows progress in bytes.
            options: How patient to be.

        Raises:
            FetchError: A package cannot be had or is not the locked one.
            DiskError: The disk is full or not writable.
            LockError: As :meth:`payloads`.
        """
        todo = self.missing(store, build_platform, target_platform)
        if not todo:
            return
        options = options or TransferOptions()
        bar = reporter.task(self.name, sum(p.size for p in todo), "B")

        async def every() -> None:
            slots = asyncio.Semaphore(options.parallel)
            async with Transfer(options) as transfer, asyncio.TaskGroup() as group:
                for payload in todo:
                    group.create_task(self._one(transfer, payload, store, bar, slots))

        try:
            rattler_rt.run(every())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        bar.done()

    async def _one(
        self,
        transfer: Transfer,
        payload: Payload,
        store: Store,
        bar: Task,
        slots: asyncio.Semaphore,
    ) -> None:
        part = store.part(payload.sha256)
        async with slots, _locked(store.lock_path(payload.sha256)):
            if store.sound(payload.sha256, payload.filename, payload.size):
                bar.advance(payload.size)  # another fetch was faster
                return
            urls = self.source.urls(payload.url)
            for number, url in enumerate(urls, 1):
                link = FileLink(filename=payload.filename, url=url)
                try:
                    await transfer.download(link, part, total=payload.size, on_bytes=bar.advance)
                    await asyncio.to_thread(
                        store.add,
                        part,
                        sha256=payload.sha256,
                        size=payload.size,
                        filename=payload.filename,
                        move=True,
                    )
                    return
                except FetchError:
                    have = part.stat().st_size if part.exists() else 0
                    bar.advance(-have)  # the next try counts what it resumes
                    if have >= payload.size:
                        part.unlink()  # wrong bytes must not be resumed
                    if number == len(urls):
                        raise

    def identity(
        self, lock: ReleaseLock, build_platform: str, target_platform: str
    ) -> dict[str, str]:
        """Give everything that decides what is built, for the input hash and the provenance.

        Raises:
            LockError: As :meth:`payloads`.
        """
        payloads = self.payloads(build_platform, target_platform)
        return {
            "provider": self.name,
            "build_platform": build_platform,
            "target_platform": target_platform,
            "packages": str(len(payloads)),
            "packages_digest": hashlib.sha256(
                "".join(sorted(p.sha256 for p in payloads)).encode()
            ).hexdigest(),
        }

    def rust(self, lock: ReleaseLock, build_platform: str, target_platform: str) -> str:
        """Say what the locked tools lack to compile the Rust frontend; empty: nothing.

        Args:
            lock: The release; says which Rust it needs.
            build_platform: Subdir of the machine that builds.
            target_platform: Subdir of the package.

        Raises:
            LockError: As :meth:`payloads`.
        """
        wanted = [f"rust-{lock.rust.channel}.", *_RUST_TOOLS]
        if build_platform != target_platform:
            wanted.append(f"{_RUST_STD[target_platform]}-{lock.rust.channel}.")
        names = [payload.filename for payload in self.payloads(build_platform, target_platform)]
        lacking = [want for want in wanted if not any(name.startswith(want) for name in names)]
        if not lacking:
            return ""
        return f"its lock has no {', '.join(want.rstrip('.-') for want in lacking)}"

    def channels(
        self, lock: ReleaseLock, store: Store, build_platform: str, target_platform: str
    ) -> list[str]:
        """Give the local channel of the locked tools, made of the store's files.

        It lies in the store under a name made of its content, so the next call only checks it. The
        index is the locked one: conda-forge corrects dependencies there after the fact, and the
        packages' own metadata do not show it.

        Args:
            lock: The release; unused, the toolchain has a lock of its own.
            store: Where :meth:`mirror` has put the packages.
            build_platform: Subdir of the machine that builds.
            target_platform: Subdir of the package.

        Raises:
            LockError: As :meth:`payloads`.
            FetchError: A package is not in the store, or was altered there.
            DiskError: The channel cannot be written.
        """
        records = self._records(build_platform, target_platform)
        payloads = [_payload(r) for r in records]
        if missing := [p for p in payloads if not store.sound(p.sha256, p.filename, p.size)]:
            raise FetchError(
                f"{len(missing)} of {len(payloads)} conda-forge packages are not in the store",
                why=", ".join(p.filename for p in missing[:5])
                + (", …" if len(missing) > 5 else ""),
                fix="run fetch first",
            )
        index = _index(records, {build_platform, target_platform, "noarch"})
        digest = hashlib.sha256(canonical_json([_LAYOUT, index])).hexdigest()[:16]
        final = store.root / "channels" / f"conda-forge-{digest}"
        if not _complete(final, payloads, store):
            _make_channel(final, payloads, index, store)
        return [final.absolute().as_uri()]

    def _records(self, build_platform: str, target_platform: str) -> list[rattler.RepoDataRecord]:
        """Read the lock, check it against the specs, and drop what both environments share."""
        locked: dict[condalock.Kind, list[rattler.RepoDataRecord]] = {
            "build": condalock.read(self.lock_file, "build", build_platform)
        }
        if self.specs.host:
            locked["host"] = condalock.read(self.lock_file, "host", target_platform)
        condalock.check_specs(self.lock_file, self.specs, locked)
        unique = {(r.subdir, r.file_name): r for records in locked.values() for r in records}
        return [unique[key] for key in sorted(unique)]


def source(
    channel: str = CHANNEL, *, config: rattler.Config | None = None, cache_dir: Path | None = None
) -> condalock.Source:
    """A channel as the user reaches it.

    Args:
        channel: Channel name or URL.
        config: rattler configuration; default: the user's own (rattler's and pixi's files).
        cache_dir: Where channel indexes are cached; default: rattler's own place.
    """
    return condalock.Source(
        channel=channel,
        config=config or rattler.Config.load_from_default_locations("pixi"),
        cache_dir=cache_dir or _cache_dir(),
    )


def _cache_dir() -> Path:
    configured = os.environ.get("RATTLER_CACHE_DIR")
    base = Path(configured) if configured else Path.home() / ".cache" / "rattler" / "cache"
    return base / "repodata"


@contextlib.asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Two fetches at once: the second waits, then finds the file there."""
    lock = filelock.FileLock(path, thread_local=False)
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except filelock.Timeout:
            await asyncio.sleep(_LOCK_POLL)
    try:
        yield
    finally:
        lock.release()


def _payload(record: rattler.RepoDataRecord) -> Payload:
    return Payload(
        filename=record.file_name,
        url=record.url,
        sha256=(record.sha256 or b"").hex(),
        size=record.size or 0,
        subdir=record.subdir,
    )


# Where a record is from: no index says that of its own.
_OF_THE_PLACE = frozenset({"channel", "fn", "url"})


def _index(
    records: Sequence[rattler.RepoDataRecord], subdirs: Iterable[str]
) -> dict[str, dict[str, object]]:
    """Make the repodata.json of each subdirectory from the locked records."""
    index: dict[str, dict[str, object]] = {}
    for subdir in sorted(subdirs):
        packages: dict[str, dict[str, object]] = {"packages": {}, "packages.conda": {}}
        for record in records:
            if record.subdir == subdir:
                key = "packages.conda" if record.file_name.endswith(".conda") else "packages"
                fields = json.loads(record.to_json())
                packages[key][record.file_name] = {
                    name: value for name, value in fields.items() if name not in _OF_THE_PLACE
                }
        index[subdir] = {"info": {"subdir": subdir}, **packages, "repodata_version": 1}
    return index


def _complete(channel: Path, payloads: Iterable[Payload], store: Store) -> bool:
    """Say whether the channel is there with every file still the store's own."""
    if not (channel / SUMS).exists():
        return False
    for p in payloads:
        placed, stored = channel / p.subdir / p.filename, store.path(p.sha256, p.filename)
        try:
            if placed.samefile(stored):
                continue
            with placed.open("rb") as raw:
                if hashlib.file_digest(raw, "sha256").hexdigest() != p.sha256:
                    return False
        except OSError:
            return False
    return True


def _make_channel(
    final: Path, payloads: Iterable[Payload], index: dict[str, dict[str, object]], store: Store
) -> None:
    """Lay the channel out beside its place and rename it there."""
    with disk_errors(final):
        if final.exists():  # found incomplete or altered
            shutil.rmtree(final)
    with directory(final) as scratch:
        sums = []
        for p in payloads:
            target = scratch / p.subdir / p.filename
            target.parent.mkdir(exist_ok=True)
            stored = store.path(p.sha256, p.filename)
            try:
                os.link(stored, target)
            except OSError:
                shutil.copyfile(stored, target)
            sums.append(f"{p.sha256}  {p.subdir}/{p.filename}\n")
        for subdir, data in index.items():
            write_bytes(scratch / subdir / REPODATA, canonical_json(data))
        write_bytes(scratch / SUMS, "".join(sorted(sums)).encode())
