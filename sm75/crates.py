"""The sources of the Rust frontend in the store: every crate of Cargo.lock, by its checksum.

The release lock pins the sdist and Cargo.lock's hash, Cargo.lock each crate's sha256, and the
release lock again the archive of each git dependency. What nothing pins is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sm75 import atomic, cargolock, gitarchive
from sm75.cargolock import CRATES_IO, Crate, Git
from sm75.crateindex import CrateIndex
from sm75.errors import FetchError, LockError
from sm75.fetch import Interrupted, first_error
from sm75.lockfile import ReleaseLock, dump_release
from sm75.progress import Reporter, Task
from sm75.store import Store, check, hash_file
from sm75.transfer import Transfer, TransferOptions
from sm75.treefiles import read_sdist

_PIN = "pin them where the repositories can be reached: python3 orchestrator.py lock --rust"


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a program's Cargo.lock asks for.

    Attributes:
        crates: Every crate that is not part of the tree.
        git_sha256: sha256 of each git dependency's archive, by ``Git.key``.
    """

    crates: tuple[Crate, ...]
    git_sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def registry(self) -> list[Crate]:
        """The crates that come as archives of crates.io."""
        return [crate for crate in self.crates if crate.git is None]

    @property
    def git(self) -> list[Git]:
        """The repositories."""
        return cargolock.git_places(self.crates)

    def archive(self, place: Git) -> tuple[str, str]:
        """sha256 and file name of a git dependency's archive.

        Raises:
            LockError: The lock does not pin it.
        """
        sha256 = self.git_sha256.get(place.key, "")
        if not sha256:
            raise _unpinned([place.key])
        return sha256, gitarchive.filename(place)


def sources(lock: ReleaseLock, sdist: Path) -> Sources:
    """Read what a release's Rust frontend is made of.

    Args:
        lock: The release lock.
        sdist: The release's sdist, from the store.

    Raises:
        LockError: Cargo.lock is not the one that the lock pins, is malformed, or has a crate
            without checksum or from another registry than crates.io.
    """
    text = read_sdist(sdist, lambda path: path == cargolock.FILE).text(cargolock.FILE)
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != lock.rust.cargo_lock_sha256:
        raise LockError(
            f"{cargolock.FILE} of vLLM {lock.vllm} is not the one that the lock pins",
            why=f"expected sha256 {lock.rust.cargo_lock_sha256}, got {found}",
            fix="python3 orchestrator.py lock --check says what else differs",
        )
    crates = cargolock.parse(text)
    wrong = [
        f"{crate.directory}: " + ("no checksum" if not crate.checksum else crate.registry)
        for crate in crates
        if crate.git is None and (not crate.checksum or crate.registry != CRATES_IO)
    ]
    if wrong:
        raise LockError(
            f"{cargolock.FILE} of vLLM {lock.vllm} has crates that cannot be checked",
            why="; ".join(wrong[:5]),
            fix="use --rust prebuilt or --rust none",
        )
    return Sources(crates=crates, git_sha256=lock.rust.git_sha256)


def check_pinned(keys: Iterable[str], pinned: Mapping[str, str]) -> None:
    """Refuse sources of which the lock pins only a part.

    Args:
        keys: The git dependencies, as ``rust.git`` of the lock has them.
        pinned: ``rust.git_sha256`` of the lock.

    Raises:
        LockError: It names the git dependencies without a hash.
    """
    if unpinned := [key for key in keys if key not in pinned]:
        raise _unpinned(unpinned)


def _unpinned(keys: Sequence[str]) -> LockError:
    return LockError(
        "the lock has no hash of git dependencies of the Rust frontend",
        why=", ".join(keys),
        fix=f"{_PIN}; or use --rust prebuilt or --rust none",
    )


def missing(wanted: Sources, store: Store) -> tuple[list[Crate], list[Git]]:
    """What the store lacks: archives of crates.io, and git dependencies.

    Args:
        wanted: From :func:`sources`; what the lock does not pin counts as lacking.
        store: The store.
    """
    crates = [c for c in wanted.registry if not store.sound(c.checksum, c.filename)]
    places = [
        place
        for place in wanted.git
        if not (sha256 := wanted.git_sha256.get(place.key))
        or not store.sound(sha256, gitarchive.filename(place))
    ]
    return crates, places


def require(wanted: Sources, store: Store) -> None:
    """Refuse to go on when something is missing; for steps without network.

    Raises:
        LockError: A git dependency is not pinned.
        FetchError: It names what is missing.
    """
    check_pinned((place.key for place in wanted.git), wanted.git_sha256)
    crates, places = missing(wanted, store)
    names = [*(crate.filename for crate in crates), *(place.key for place in places)]
    if names:
        raise FetchError(
            f"{len(names)} of {len(wanted.registry) + len(wanted.git)} sources of the Rust "
            f"frontend {'is' if len(names) == 1 else 'are'} not in the store",
            why=", ".join(names[:8]) + (", …" if len(names) > 8 else ""),
            fix="run fetch --rust source first",
        )


def fetch(
    wanted: Sources,
    store: Store,
    reporter: Reporter,
    *,
    index: CrateIndex | None = None,
    options: TransferOptions | None = None,
) -> int:
    """Bring every source into the store, each under its sha256 and no other way.

    Args:
        wanted: From :func:`sources`.
        store: The store.
        reporter: Shows progress.
        index: Where crates are; None: as cargo is set up.
        options: How patient to be.

    Returns:
        How many were fetched.

    Raises:
        LockError: A git dependency is not pinned; nothing is fetched.
        FetchError: Something cannot be had, or is not what is pinned.
        ToolchainError: git is needed and missing.
        DiskError: The disk is full or not writable.
        Interrupted: Ctrl-C.
    """
    check_pinned((place.key for place in wanted.git), wanted.git_sha256)
    crates, places = missing(wanted, store)
    if not crates and not places:
        return 0
    try:
        if crates:
            place = index or CrateIndex.discover()
            asyncio.run(_crates(crates, store, reporter, place, options or TransferOptions()))
        for git in places:
            sha256, name = wanted.archive(git)
            reporter.line(f"fetch: {git.url} at {git.revision[:12]}")
            archive_git(git, store, name, sha256)
    except KeyboardInterrupt:
        raise Interrupted(
            "fetch was interrupted",
            why="the crates that came are in the store",
            fix="run the same command again: it resumes",
        ) from None
    return len(crates) + len(places)


async def _crates(
    crates: Sequence[Crate],
    store: Store,
    reporter: Reporter,
    index: CrateIndex,
    options: TransferOptions,
) -> None:
    async with Transfer(options) as transfer:
        template = await index.template(transfer)
        bar = reporter.task("crates", len(crates), "")
        slots = asyncio.Semaphore(options.parallel)
        try:
            async with asyncio.TaskGroup() as group:
                for crate in crates:
                    group.create_task(_one(crate, transfer, index, template, store, slots, bar))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        bar.done()


async def _one(
    crate: Crate,
    transfer: Transfer,
    index: CrateIndex,
    template: str,
    store: Store,
    slots: asyncio.Semaphore,
    bar: Task,
) -> None:
    link = index.link(crate, template)
    async with slots:
        if link.local is not None:
            await asyncio.to_thread(store.add, link.local, sha256=crate.checksum)
        else:
            # Its size is stated nowhere; crates.io takes 10 MB at most.
            _, _, body = await transfer.page(link.url, "*/*")
            await asyncio.to_thread(_adopt, crate, body, store)
        bar.advance(1)


def _adopt(crate: Crate, body: bytes, store: Store) -> None:
    part = store.part(crate.checksum, f".{os.getpid()}.crate")
    try:
        atomic.write_bytes(part, body)
        store.add(part, sha256=crate.checksum, filename=crate.filename, move=True)
    finally:
        part.unlink(missing_ok=True)


def archive_git(place: Git, store: Store, name: str, sha256: str = "") -> str:
    """Archive a commit and take it into the store.

    Args:
        place: The repository and the commit.
        store: The store.
        name: The archive's file name there.
        sha256: What it must hash to; empty: whatever it does, for who makes a lock.

    Returns:
        Its sha256.

    Raises:
        FetchError: It cannot be had, or is not what is pinned.
        ToolchainError: git is missing.
        DiskError: The disk is full or not writable.
    """
    part = store.part(place.revision, f".{os.getpid()}.tar")
    try:
        with atomic.replacing(part) as out:
            gitarchive.make(place, out)
        found = hash_file(part)
        if sha256:
            check(part, name, sha256, None)
        store.add(part, sha256=found, filename=name, move=True)
        return found
    finally:
        part.unlink(missing_ok=True)


def pin(
    root: Path, lock: ReleaseLock, wanted: Sources, store: Store, reporter: Reporter
) -> list[str]:
    """Archive the git dependencies that the lock has no hash of, and write their hashes into it.

    Args:
        root: The project's directory.
        lock: The release lock.
        wanted: From :func:`sources`.
        store: Gets the archives.
        reporter: Is told of each repository.

    Returns:
        The names of those that were pinned.

    Raises:
        FetchError: A repository or commit cannot be had; the lock stays as it is.
        ToolchainError: git is missing.
        DiskError: Something cannot be written.
    """
    pinned = dict(lock.rust.git_sha256)
    fresh = [place for place in wanted.git if place.key not in pinned]
    for place in fresh:
        reporter.line(f"lock: {place.url} at {place.revision[:12]}")
        pinned[place.key] = archive_git(place, store, gitarchive.filename(place))
    if fresh:
        rust = msgspec.structs.replace(lock.rust, git_sha256=dict(sorted(pinned.items())))
        text = dump_release(msgspec.structs.replace(lock, rust=rust))
        atomic.write_bytes(root / "lock" / lock.vllm / "release.toml", text.encode())
    return [place.key for place in fresh]
