"""A conda channel on disk: reproducible index, publishing as a whole or not at all, checking.

``<channel>/<subdir>/*.conda`` with ``repodata.json`` in each subdirectory, and ``SHA256SUMS`` at
the top in the format of sha256sum(1).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rattler.index import index_fs

from sm75 import rattler_rt
from sm75.atomic import TMP_PREFIX, disk_errors, fsync_dir, write_bytes
from sm75.channelcheck import (
    LOCK,
    REPODATA,
    SUMS,
    check_listed,
    check_location,
    is_inside,
    own_place,
    read_sums,
    relative,
)
from sm75.channelcheck import Problem as Problem
from sm75.channelcheck import verify_channel as verify_channel
from sm75.condapkg import canonical_json, verify_payload
from sm75.errors import ChannelError
from sm75.store import hash_file
from sm75.turns import one_at_a_time

# Indexes that clients prefer to repodata.json when they lie beside it; we write none, so any that
# is found is stale.
_OTHER_INDEXES = ("repodata.json.zst", "repodata.json.bz2", "repodata_shards.msgpack.zst")


def locked(
    channel: Path, wait: float, say: Callable[[str], None] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Hold the channel's lock.

    Args:
        channel: Channel root; made when it does not exist.
        wait: Seconds to wait for another holder.
        say: Told that there is a wait.

    Raises:
        BusyError: The lock is still held after ``wait`` seconds.
        DiskError: The channel cannot be written.
    """
    return one_at_a_time(
        channel / LOCK, f"another run is publishing to {channel}", wait=wait, say=say
    )


def packages_in(channel: Path) -> list[Path]:
    """List the ``.conda`` files of a channel, sorted."""
    return sorted(channel.glob("*/*.conda"))


def publish(
    packages: Iterable[Path],
    channel: Path,
    *,
    documents: Mapping[str, bytes] | None = None,
    record: Mapping[str, bytes] | None = None,
    derived: Mapping[str, Callable[[Path], bytes]] | None = None,
    remove: Iterable[str] | Callable[[], Iterable[str]] = (),
    replace: bool = False,
    subdirs: Iterable[str] = (),
    wait: float = 3600.0,
    say: Callable[[str], None] | None = None,
) -> list[Path]:
    """Add packages to a channel so that a reader sees the old channel or the new one.

    Everything is prepared and checked in a directory beside the packages; then the packages get
    their names, then the documents, then ``SHA256SUMS``, and last the ``repodata.json`` files. Any
    fault puts back what was there. A run killed in between leaves at most packages that the index
    does not name yet, and the next run completes them.

    Args:
        packages: Finished ``.conda`` files; copied.
        channel: Channel root; made when it does not exist.
        documents: Files for the top of the channel (SBOM, report), listed in ``SHA256SUMS`` too.
        record: Such files that say what a caller has published and may withdraw. They get their
            names last of all, so that after a kill the next run still knows what it is to withdraw.
        derived: Such files that are made of the new state: each is given a directory with the
            packages and indexes as they will be.
        remove: Packages to withdraw, as ``subdir/file``, and their documents; deleted after the new
            index is in place. What can be called is asked once the lock is held.
        replace: Allow a package of the same file name with other content.
        subdirs: Subdirectories that get an index even when empty (``noarch`` always does).
        wait: Seconds to wait for another publisher.
        say: Told that there is a wait.

    Returns:
        The published files.

    Raises:
        ChannelError: A package is damaged or misnamed, a published file has been altered, or a
            file of the same name with other content is there and ``replace`` is not given.
        BusyError: Another publisher holds the lock.
        DiskError: The disk is full or not writable.
    """
    check_location(channel)
    with locked(channel, wait, say):
        new = {_destination(p): p for p in packages}
        withdrawn = set(remove() if callable(remove) else remove)
        if outside := sorted(name for name in withdrawn if not is_inside(name)):
            raise ChannelError(
                f"refusing to remove {outside[0]!r}", why=f"it is no file of {channel}"
            )
        # what this run writes anew or withdraws may be in any state, all else must be sound
        healed = (
            withdrawn
            | {*(documents or {}), *(record or {}), *(derived or {})}
            | (set(new) if replace else set())
        )
        problems = [
            p
            for p in check_listed(channel, read_sums(channel))
            if p.path not in healed
            if not (p.kind == "missing" and p.path in new)
        ]
        if problems:
            raise ChannelError(
                f"the channel {channel} is damaged; nothing was published",
                why="; ".join(map(str, problems[:5])),
                fix="run `verify` on the channel, then restore or remove the named files",
            )
        return _rebuild(
            channel,
            new=new,
            documents=documents or {},
            record=record or {},
            derived=derived or {},
            withdrawn=withdrawn,
            replace=replace,
            subdirs=subdirs,
        )


def add_document(channel: Path, name: str, data: bytes, *, wait: float = 60.0) -> None:
    """Put one file at the top of a channel, listed in ``SHA256SUMS``; packages stay as they are.

    A run killed in between leaves a file that is not the listed one: ``verify_channel`` says so,
    and the next run mends it.

    Args:
        channel: Channel root.
        name: The file's name.
        data: Its content.
        wait: Seconds to wait for a publisher.

    Raises:
        ChannelError: ``SHA256SUMS`` cannot be read.
        BusyError: A publisher holds the lock.
        DiskError: The disk is full or not writable.
    """
    with locked(channel, wait):
        if (channel / name).is_dir():
            raise ChannelError(f"{channel / name} is a directory", fix="move it away")
        sums = read_sums(channel) | {name: hashlib.sha256(data).hexdigest()}
        write_bytes(channel / name, data)
        text = "".join(f"{digest}  {listed}\n" for listed, digest in sorted(sums.items()))
        write_bytes(channel / SUMS, text.encode())


def index(channel: Path, *, subdirs: Iterable[str] = (), wait: float = 60.0) -> None:
    """Index the packages that lie in a local channel, taking them as they are.

    Args:
        channel: Channel root.
        subdirs: Subdirectories that get an index even when empty (``noarch`` always does).
        wait: Seconds to wait for another publisher.

    Raises:
        ChannelError: A package is damaged or misnamed.
        BusyError: Another publisher holds the lock.
        DiskError: The disk is full or not writable.
    """
    with locked(channel, wait):
        for package in packages_in(channel):
            if _destination(package) != f"{package.parent.name}/{package.name}":
                raise ChannelError(f"{package} lies in the wrong subdirectory")
        _rebuild(
            channel, new={}, documents={}, record={}, derived={}, withdrawn=set(), replace=True,
            subdirs=subdirs,
        )  # fmt: skip


def _destination(package: Path) -> str:
    """Give ``subdir/file`` of a package, checking that its name is its own."""
    place = own_place(package)
    expected = place.partition("/")[2]
    if package.name != expected:
        raise ChannelError(
            f"{package.name} is misnamed", why=f"its index.json makes it {expected}",
            fix=f"give it that name: mv {shlex.quote(str(package))} "
            f"{shlex.quote(str(package.with_name(expected)))}",
        )  # fmt: skip
    return place


def _rebuild(
    channel: Path,
    *,
    new: Mapping[str, Path],
    documents: Mapping[str, bytes],
    record: Mapping[str, bytes],
    derived: Mapping[str, Callable[[Path], bytes]],
    withdrawn: set[str],
    replace: bool,
    subdirs: Iterable[str],
) -> list[Path]:
    """Prepare the next state in a staging directory and move it into place. The lock is held."""
    for stale in channel.glob(f"{TMP_PREFIX}*"):  # of a killed run: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with (
        disk_errors(channel),
        tempfile.TemporaryDirectory(dir=channel, prefix=TMP_PREFIX) as staging_name,
    ):
        staging = Path(staging_name)
        tree = staging / "tree"
        kept = [p for p in packages_in(channel) if relative(channel, p) not in withdrawn]
        indexed = (p.parent.name for p in (*kept, *channel.glob(f"*/{REPODATA}")))
        for subdir in {"noarch", *subdirs, *indexed}:
            (tree / subdir).mkdir(parents=True, exist_ok=True)
        for package in kept:
            _link(package, tree / relative(channel, package))
        moved = _stage_new(channel, tree, new, replace)
        _index_tree(tree)
        documents = {**documents, **{name: of(tree) for name, of in derived.items()}}

        sums = {relative(tree, p): hash_file(p) for p in packages_in(tree)}
        previous = read_sums(channel) if not _unreadable_sums(channel) else {}
        for name in previous:
            if "/" not in name and name not in withdrawn and (channel / name).exists():
                sums[name] = hash_file(channel / name)
        for name, data in (*documents.items(), *record.items()):
            write_bytes(staging / "documents" / name, data)
            sums[name] = hashlib.sha256(data).hexdigest()
        text = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
        write_bytes(staging / SUMS, text.encode())

        moves = [(tree / rel, channel / rel) for rel in moved]
        moves += [(staging / "documents" / name, channel / name) for name in documents]
        moves.append((staging / SUMS, channel / SUMS))
        moves += [
            (path, channel / relative(tree, path)) for path in sorted(tree.glob(f"*/{REPODATA}"))
        ]
        _commit(moves, staging / "backup")
        for name in withdrawn:
            (channel / name).unlink(missing_ok=True)
        _commit([(staging / "documents" / n, channel / n) for n in record], staging / "recorded")
        for directory in channel.iterdir():
            for other in _OTHER_INDEXES:
                if directory.is_dir():
                    (directory / other).unlink(missing_ok=True)
    return [channel / rel for rel in new]


def _unreadable_sums(channel: Path) -> bool:
    try:
        read_sums(channel)
    except ChannelError:
        return True
    return False


def _link(source: Path, target: Path) -> None:
    """Give the staging directory a file of the channel without copying it where links work."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _stage_new(channel: Path, tree: Path, new: Mapping[str, Path], replace: bool) -> list[str]:
    """Copy the new packages into the staging tree; return those that must be moved."""
    moved = []
    for rel, source in new.items():
        target, published = tree / rel, channel / rel
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            if hash_file(source) == hash_file(published):
                continue
            if not replace:
                raise ChannelError(
                    f"{rel} is already published with other content",
                    why="a client that has cached the old one would never see the new one",
                    fix="raise the build number, or publish with replace",
                )
            target.unlink()
        shutil.copyfile(source, target)
        target.chmod(0o644)
        _fsync(target)
        # what was copied is what will be published: a source that fails here is damaged
        if problems := verify_payload(target):
            raise ChannelError(f"{source.name} is damaged", why="; ".join(problems[:5]))
        moved.append(rel)
    return moved


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _index_tree(tree: Path) -> None:
    """Write repodata.json files that depend on the packages' bytes only.

    Raises:
        ChannelError: A package cannot be indexed.
        OSError: The disk is full.
    """
    try:
        rattler_rt.run(
            index_fs(tree, write_zst=False, write_shards=False, force=True, max_parallel=2)
        )
    except Exception as err:  # the binding raises plain Exception subclasses of its own
        # Rust's words for ENOSPC and EDQUOT; the error's number does not come through.
        if re.search(r"\(os error (28|122)\)", str(err)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tree)) from err
        raise ChannelError(f"the packages in {tree} cannot be indexed", why=str(err)) from err
    for path in tree.glob(f"*/{REPODATA}"):
        data = json.loads(path.read_bytes())
        for key in ("packages", "packages.conda"):
            for record in data.get(key, {}).values():
                record.pop("indexed_timestamp", None)  # the wall clock
        write_bytes(path, canonical_json(data))


def _commit(moves: list[tuple[Path, Path]], backup: Path) -> None:
    """Move files into place in order; on any fault put back what was there."""
    done: list[tuple[Path, Path | None]] = []
    backup.mkdir()
    try:
        for number, (source, target) in enumerate(moves):
            target.parent.mkdir(exist_ok=True)
            saved = None
            if target.exists():
                saved = backup / str(number)
                _link(target, saved)
            done.append((target, saved))  # first: an interrupt may fall between the two
            source.replace(target)
            fsync_dir(target.parent)
    except BaseException:
        for target, saved in reversed(done):
            if saved is None:
                target.unlink(missing_ok=True)
            else:
                saved.replace(target)
        raise
