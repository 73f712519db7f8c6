"""Put a channel where others read it: packages first, the index last, nothing twice.

The channel is checked before anything is sent. A package of the same name with other content is
refused, for clients keep packages by name. Nothing is removed unless that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sm75 import channel as channels
from sm75.channelcheck import REPODATA, SUMS, count, read_sums, verify_channel
from sm75.channeltools import exported
from sm75.errors import ChannelError
from sm75.progress import Reporter
from sm75.publishtargets import Target
from sm75.store import hash_file

# Clients take these before repodata.json; we write none, so one that is there is somebody else's.
_OTHER_INDEXES = ("repodata.json.zst", "repodata.json.bz2", "repodata_shards.msgpack.zst")


@dataclass(frozen=True, kw_only=True)
class Published:
    """What was done, or would be.

    Attributes:
        sent: Files that were sent, in that order.
        same: Files that were there already.
        removed: Files that were removed.
        sent_bytes: Size of ``sent``, in bytes.
    """

    sent: tuple[str, ...]
    same: tuple[str, ...]
    removed: tuple[str, ...]
    sent_bytes: int


def publish(
    channel: Path,
    target: Target,
    reporter: Reporter,
    *,
    replace: bool = False,
    delete: bool = False,
    reread: bool = False,
    dry_run: bool = False,
) -> Published:
    """Publish a channel.

    Args:
        channel: The channel; locked meanwhile.
        target: Where to.
        reporter: Shows progress.
        replace: Overwrite packages of the same name that have other content.
        delete: Remove packages and indexes that this channel does not have, at the end.
        reread: Read everything that is there and compare, instead of believing its SHA256SUMS.
        dry_run: Change nothing.

    Raises:
        ChannelError: The channel is damaged, or the target has what does not go with it.
        FetchError: The target does not answer, or refuses.
        BusyError: The channel is being published to.
        DiskError: A directory cannot be written.
    """
    with channels.locked(channel, 60.0):
        if problems := verify_channel(channel):
            raise ChannelError(
                f"{channel} has {count(problems)}; nothing was published",
                why="; ".join(map(str, problems[:5])),
                fix="python3 orchestrator.py channel verify lists them all",
            )
        ours = _hashes(channel)
        there = target.sizes(ours)
        differing = _differing(channel, ours, there, target, reread=reread)
        send = sorted((name for name in ours if name not in there or name in differing), key=_turn)
        _refuse_packages(
            [name for name in differing if name.endswith(".conda")], target, replace=replace
        )
        removed = _superfluous(ours, there, target, delete=delete)
        sent_bytes = sum((channel / name).stat().st_size for name in send)
        if not dry_run:
            _send(channel, target, reporter, send, removed,
                  forget=any(name.endswith(".conda") and not target.digest(name)
                             for name in differing))  # fmt: skip
    return Published(
        sent=tuple(send), same=tuple(sorted(ours.keys() - set(send))), removed=tuple(removed),
        sent_bytes=sent_bytes,
    )  # fmt: skip


def _hashes(channel: Path) -> dict[str, str]:
    listed = read_sums(channel)
    names = [path.relative_to(channel).as_posix() for path in exported(channel)]
    return {name: listed.get(name) or hash_file(channel / name) for name in names}


def _turn(name: str) -> tuple[int, str]:
    """When a file's turn comes: what an index names is there before the index."""
    if name.endswith(f"/{REPODATA}"):
        return 3, name
    return (0 if name.endswith(".conda") else 2 if name == SUMS else 1), name


def _differing(
    channel: Path, ours: dict[str, str], there: dict[str, int], target: Target, *, reread: bool
) -> set[str]:
    """Files that are there with other content.

    A place's own digest is believed. SHA256SUMS is written last but for the indexes, so that a
    package it lists is whole; documents may be newer than it.
    """
    theirs = {} if reread else _sums(target.read(SUMS) if SUMS in there else b"")
    found = set()
    for name in ours.keys() & there.keys():
        if (channel / name).stat().st_size != there[name]:
            found.add(name)
        elif not reread and (kept := target.digest(name)):
            if kept != ours[name]:
                found.add(name)
        elif name.endswith(".conda") and theirs.get(name) == ours[name]:
            continue
        elif target.sha256(name) != ours[name]:
            found.add(name)
    return found


def _sums(text: bytes) -> dict[str, str]:
    lines = (line.partition("  ") for line in text.decode("utf-8", "replace").splitlines())
    return {name: digest for digest, _, name in lines if name}


def _refuse_packages(differing: Iterable[str], target: Target, *, replace: bool) -> None:
    names = sorted(differing)
    if names and not replace:
        raise ChannelError(
            f"{target} has packages of the same name with other content; nothing was published",
            why=", ".join(names[:5]) + (", …" if len(names) > 5 else ""),
            fix="clients may have them in their caches: publish elsewhere, or say --replace",
        )


def _superfluous(
    ours: dict[str, str], there: dict[str, int], target: Target, *, delete: bool
) -> list[str]:
    names = sorted(
        name for name in there.keys() - ours.keys()
        if name.endswith(".conda") or name.rpartition("/")[2] in (REPODATA, *_OTHER_INDEXES)
    )  # fmt: skip
    if delete:
        return names
    subdirs = {name.partition("/")[0] for name in ours if "/" in name}
    stale = [
        name for name in names
        if name.rpartition("/")[2] in _OTHER_INDEXES and name.partition("/")[0] in subdirs
    ]  # fmt: skip
    if stale:
        raise ChannelError(
            f"{target} has another index, which clients would take before ours",
            why=", ".join(stale),
            fix="remove it, or say --delete",
        )
    return []


def _send(
    channel: Path,
    target: Target,
    reporter: Reporter,
    send: list[str],
    removed: list[str],
    *,
    forget: bool,
) -> None:
    if forget:
        # Should this run be interrupted, the next must not believe the old list.
        target.delete(SUMS)
        send = sorted({*send, SUMS}, key=_turn)
    total = sum((channel / name).stat().st_size for name in send)
    task = reporter.task("publish", total, "B")
    for name in send:
        task.message(name)
        target.put(name, channel / name)
        task.advance((channel / name).stat().st_size)
    for name in removed:
        target.delete(name)
    task.done()
