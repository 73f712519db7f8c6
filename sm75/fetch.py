"""Fetch: the only step with network. From a lock to a store that holds all of it.

Everything is checked against the lock's size and sha256 before it gets a name in the store.
Unfinished bytes lie below ``<store>/partial``; the next run goes on from there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from sm75.errors import DiskError, FetchError, Sm75Error
from sm75.index import PackageIndex
from sm75.lockfile import G5G, Artifact, ReleaseLock, artifacts_for
from sm75.progress import Reporter, Task, amount
from sm75.remotezip import local_thin, remote_thin
from sm75.store import AlteredError, Store, check, disk_errors
from sm75.transfer import FileLink, RangeIgnored, Transfer, TransferOptions
from sm75.words import counted

_LOCK_POLL = 0.2
# Room left on the disk beyond what is written, so that a fetch does not fill it to the brim.
_SPARE = 32 << 20


class Interrupted(Sm75Error):
    """Ctrl-C during a fetch; nothing half-done has a name in the store."""

    exit_code = 130


@dataclass(frozen=True, kw_only=True)
class FetchPlan:
    """What a fetch would do.

    Attributes:
        todo: Artifacts that are not in the store.
        cached: Artifacts that are.
        bytes_download: Bytes to read from the network; what a former run left is deducted.
        bytes_cached: Bytes of ``cached``.
        bytes_write: Bytes to write, at most.
    """

    todo: tuple[Artifact, ...]
    cached: tuple[Artifact, ...]
    bytes_download: int
    bytes_cached: int
    bytes_write: int

    def describe(self) -> str:
        """The figures, in one line."""
        files = counted(len(self.cached), "file")
        have = f"{files} ({amount(self.bytes_cached, 'B')}) in the store"
        if not self.todo:
            return f"nothing to download: {have}"
        return (
            f"{counted(len(self.todo), 'file')} to fetch, "
            f"{amount(self.bytes_download, 'B')} to download; {have}"
        )


@dataclass(frozen=True, kw_only=True)
class FetchResult:
    """What a fetch did.

    Attributes:
        fetched: Artifacts taken into the store by this run.
        bytes_received: Bytes read from the network; index pages are not counted.
        requests: HTTP requests made.
    """

    fetched: tuple[Artifact, ...]
    bytes_received: int
    requests: int


def plan(
    lock: ReleaseLock, store: Store, build_platform: str, rust: str, target: str = G5G
) -> FetchPlan:
    """Compare what a build needs with what the store has.

    Args:
        lock: The release lock.
        store: The store.
        build_platform: See ``lockfile.artifacts_for``.
        rust: See ``lockfile.artifacts_for``.
        target: See ``lockfile.artifacts_for``.

    Raises:
        UsageError: Unknown platform or mode.
    """
    return plan_artifacts(artifacts_for(lock, build_platform, rust, target), store)


def plan_artifacts(artifacts: Sequence[Artifact], store: Store) -> FetchPlan:
    """The same for any artifacts."""
    todo: dict[str, Artifact] = {}
    cached: dict[str, Artifact] = {}
    for artifact in artifacts:
        (cached if store.has(artifact) else todo)[artifact.stored_sha256] = artifact
    download = sum(_to_download(artifact, store) for artifact in todo.values())
    return FetchPlan(
        todo=tuple(todo.values()),
        cached=tuple(cached.values()),
        bytes_download=download,
        bytes_cached=sum(artifact.stored_size for artifact in cached.values()),
        bytes_write=download + sum(a.stored_size for a in todo.values() if a.partial),
    )


def require(wanted: FetchPlan) -> None:
    """Refuse to go on when something is missing; for steps without network.

    Raises:
        FetchError: It names what is missing.
    """
    if wanted.todo:
        raise FetchError(
            f"{counted(len(wanted.todo), 'input is', 'inputs are')} not in the store",
            why=", ".join(artifact.stored_filename for artifact in wanted.todo),
            fix="run fetch first",
        )


def obtain(artifact: Artifact, store: Store, reporter: Reporter) -> Path:
    """Give one artifact's file, fetching it first when the store lacks it.

    Args:
        artifact: The artifact.
        store: The store.
        reporter: Shows progress.

    Raises:
        FetchError: It cannot be had, or is not what the lock pins.
    """
    if not store.has(artifact):
        fetch(plan_artifacts([artifact], store), store, reporter)
    return store.get(artifact)


def fetch(
    wanted: FetchPlan,
    store: Store,
    reporter: Reporter,
    *,
    index: PackageIndex | None = None,
    options: TransferOptions | None = None,
) -> FetchResult:
    """Bring everything of a plan into the store.

    Args:
        wanted: What ``plan`` returned.
        store: The store.
        reporter: Shows progress.
        index: Where to look; None: as the user has configured.
        options: How patient to be.

    Raises:
        FetchError: Something cannot be had, or is not what the lock pins.
        DiskError: The disk is full or not writable.
        Interrupted: Ctrl-C.
    """
    if not wanted.todo:
        return FetchResult(fetched=(), bytes_received=0, requests=0)
    _check_room(wanted, store)
    index = index or PackageIndex(options=options)
    run = _Run(store, reporter, index, options or TransferOptions(), wanted)
    try:
        return asyncio.run(run.all())
    except KeyboardInterrupt:
        raise Interrupted(
            "fetch was interrupted",
            why=f"{len(run.fetched)} of {len(wanted.todo)} files are in the store; "
            f"unfinished bytes are kept in {store.root / 'partial'}",
            fix="run the same command again: it resumes",
        ) from None


def _to_download(artifact: Artifact, store: Store) -> int:
    if artifact.partial is None:
        part = store.root / "partial" / f"{artifact.sha256}.part"
        return max(0, artifact.size - (part.stat().st_size if part.exists() else 0))
    if store.has_whole(artifact):
        return 0
    folder = store.root / "partial" / f"{artifact.stored_sha256}.segments"
    have = sum(path.stat().st_size for path in folder.glob("*")) if folder.is_dir() else 0
    return max(0, artifact.partial.download - have)


def _check_room(wanted: FetchPlan, store: Store) -> None:
    with disk_errors(store.root):
        store.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(store.root).free
    if free < wanted.bytes_write + _SPARE:
        raise DiskError(
            f"not enough room in {store.root}",
            why=f"{amount(wanted.bytes_write, 'B')} are to be written, "
            f"{amount(free, 'B')} are free",
            fix="free some space, or put the store elsewhere (--store or SM75_STORE)",
        )


class _Run:
    """One fetch."""

    def __init__(
        self,
        store: Store,
        reporter: Reporter,
        index: PackageIndex,
        options: TransferOptions,
        wanted: FetchPlan,
    ) -> None:
        self._store = store
        self._reporter = reporter
        self._index = index
        self._options = options
        self._wanted = wanted
        self.fetched: list[Artifact] = []
        """Artifacts taken into the store so far."""

    async def all(self) -> FetchResult:
        async with Transfer(self._options) as transfer:
            found = await self._find(transfer)
            # Bytes that a former run left count as done at once, so the total has them too.
            total = sum(a.download_size for a in self._wanted.todo if found[a.stored_sha256])
            bar = self._reporter.task("fetch", total, "B")
            slots = asyncio.Semaphore(self._options.parallel)
            try:
                async with asyncio.TaskGroup() as group:
                    for artifact in self._wanted.todo:
                        links = found[artifact.stored_sha256]
                        group.create_task(self._one(transfer, artifact, links, bar, slots))
            except BaseExceptionGroup as errors:
                raise first_error(errors) from None
            bar.done()
            return FetchResult(
                fetched=tuple(self.fetched),
                bytes_received=transfer.received,
                requests=transfer.requests,
            )

    async def _find(self, transfer: Transfer) -> dict[str, list[FileLink]]:
        """Find all files first: a wrong pin is told before anything is downloaded."""
        found: dict[str, list[FileLink]] = {}
        faults: list[FetchError] = []

        async def find(artifact: Artifact) -> None:
            if artifact.partial is not None and self._store.has_whole(artifact):
                found[artifact.stored_sha256] = []
                return
            try:
                found[artifact.stored_sha256] = await self._index.links(
                    transfer, artifact.project, artifact.filename, artifact.sha256
                )
            except FetchError as error:
                faults.append(error)

        await asyncio.gather(*(find(artifact) for artifact in self._wanted.todo))
        if len(faults) > 1:
            raise FetchError(
                f"{len(faults)} files cannot be had",
                why="\n        ".join(f"{e.what}: {e.why}" for e in faults),
                fix=faults[0].fix,
            )
        if faults:
            raise faults[0]
        return found

    async def _one(
        self,
        transfer: Transfer,
        artifact: Artifact,
        links: list[FileLink],
        bar: Task,
        slots: asyncio.Semaphore,
    ) -> None:
        store = self._store
        name = artifact.stored_filename
        async with slots, self._locked(artifact.stored_sha256, name):
            size = artifact.download_size if links else 0
            if store.has(artifact):
                bar.advance(size)
                return
            task = self._reporter.task(name, size, "B")
            progress = _Progress(task, bar)
            if artifact.partial is None:
                await self._whole(transfer, artifact, links, progress)
            else:
                for left in store.partial.glob(f"{artifact.stored_sha256}.*.thin"):
                    await asyncio.to_thread(_remove, left)  # of a killed run: we hold the lock
                await self._thin(transfer, artifact, links, progress)
            task.done()
            self.fetched.append(artifact)

    @asynccontextmanager
    async def _locked(self, sha256: str, name: str) -> AsyncIterator[None]:
        """Two fetches at once: the second waits, then finds the file there."""
        path = self._store.lock_path(sha256)
        lock = FileLock(path)
        told = False
        while True:
            with disk_errors(path):
                try:
                    lock.acquire(timeout=0)
                    break
                except Timeout:  # an OSError too, but no fault of the disk
                    pass
            if not told:
                self._reporter.line(f"{name}: another fetch has it, waiting")
            told = True
            await asyncio.sleep(_LOCK_POLL)
        try:
            yield
        finally:
            lock.release()

    async def _whole(
        self,
        transfer: Transfer,
        artifact: Artifact,
        links: list[FileLink],
        progress: _Progress,
    ) -> None:
        part = self._store.part(artifact.sha256)

        async def get(link: FileLink) -> None:
            await transfer.download(link, part, total=artifact.size, on_bytes=progress.add)
            progress.say("checking")
            await asyncio.to_thread(
                self._store.add,
                part,
                sha256=artifact.sha256,
                size=artifact.size,
                filename=artifact.filename,
                move=True,
            )

        await _try_links(links, get, [part], progress)

    async def _thin(
        self,
        transfer: Transfer,
        artifact: Artifact,
        links: list[FileLink],
        progress: _Progress,
    ) -> None:
        if not links:
            await self._thin_of(self._store.path(artifact.sha256, artifact.filename), artifact)
            return
        segments = self._store.part(artifact.stored_sha256, ".segments")
        out = self._store.part(artifact.stored_sha256, f".{os.getpid()}.thin")

        async def get(link: FileLink) -> None:
            await remote_thin(
                transfer,
                link,
                size=artifact.size,
                members=artifact.members,
                record_sha256=artifact.record_sha256,
                segments=segments,
                out=out,
                on_bytes=progress.add,
            )
            self._adopt_thin(artifact, out)

        try:
            await _try_links(links, get, [segments], progress)
        except RangeIgnored:
            progress.reset()
            self._reporter.line(
                f"{artifact.filename}: the server does not do range requests; "
                f"reading the whole file, {amount(artifact.size, 'B')}"
            )
            await self._thin_by_whole(transfer, artifact, links)
            progress.add(artifact.download_size)
        await asyncio.to_thread(_remove, segments)

    async def _thin_by_whole(
        self, transfer: Transfer, artifact: Artifact, links: list[FileLink]
    ) -> None:
        part = self._store.part(artifact.sha256)
        # The bars' totals count the ranges only, so this has one of its own.
        task = self._reporter.task(artifact.filename, artifact.size, "B")
        progress = _Progress(task)

        async def get(link: FileLink) -> None:
            await transfer.download(link, part, total=artifact.size, on_bytes=progress.add)
            progress.say("checking")
            await asyncio.to_thread(check, part, artifact.filename, artifact.sha256, artifact.size)

        # Another thin wheel of the same file, or the file itself, may be under way.
        async with self._locked(artifact.sha256, artifact.filename):
            if self._store.has_whole(artifact):
                whole = self._store.path(artifact.sha256, artifact.filename)
                await self._thin_of(whole, artifact)
            else:
                await _try_links(links, get, [part], progress)
                await self._thin_of(part, artifact)
                await asyncio.to_thread(_remove, part)
        task.done()

    async def _thin_of(self, whole: Path, artifact: Artifact) -> None:
        out = self._store.part(artifact.stored_sha256, f".{os.getpid()}.thin")

        def make() -> None:
            local_thin(
                whole,
                members=artifact.members,
                record_sha256=artifact.record_sha256,
                out=out,
                name=artifact.filename,
            )
            self._adopt_thin(artifact, out)

        await asyncio.to_thread(make)

    def _adopt_thin(self, artifact: Artifact, out: Path) -> None:
        try:
            self._store.add(
                out,
                sha256=artifact.stored_sha256,
                size=artifact.stored_size,
                filename=artifact.stored_filename,
                move=True,
            )
        finally:
            out.unlink(missing_ok=True)


class _Progress:
    """Advances a file's bar and the total together, and can take it back."""

    def __init__(self, *tasks: Task) -> None:
        self._tasks = tasks
        self._count = 0

    def add(self, count: int) -> None:
        self._count += count
        for task in self._tasks:
            task.advance(count)

    def say(self, text: str) -> None:
        self._tasks[0].message(text)

    def reset(self) -> None:
        self.add(-self._count)


async def _try_links(
    links: Sequence[FileLink],
    get: Callable[[FileLink], Awaitable[None]],
    leftovers: Sequence[Path],
    progress: _Progress,
) -> None:
    """Try each place in turn.

    Bytes that turn out to be wrong are removed. When a former run left some of them, that run
    may be to blame, so the same place gets a second chance, from nothing.
    """
    last: FetchError | None = None
    for link in links:
        resumed = any(path.exists() for path in leftovers)
        for again in (False, True) if resumed else (False,):
            try:
                await get(link)
                return
            except AlteredError as error:
                last = error
                for path in leftovers:
                    await asyncio.to_thread(_remove, path)
                progress.reset()
                progress.say("starting over" if not again else "")
            except FetchError as error:
                last = error
                progress.reset()
                break
    raise last or FetchError("no place to fetch from")


def _remove(path: Path) -> None:
    with disk_errors(path):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: a full disk explains the others, and any fault of ours tops a bug."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [errors]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    for kind in (DiskError, Sm75Error):
        for error in leaves:
            if isinstance(error, kind):
                return error
    return leaves[0]
