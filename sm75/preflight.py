"""What a build looks at first, so that an hour's compile does not end at a closed door."""

from __future__ import annotations

import os
from pathlib import Path

from sm75.channelcheck import (
    LOCK,
    REPODATA,
    SUMS,
    check_listed,
    check_location,
    own_place,
    read_sums,
    relative,
)
from sm75.errors import ChannelError, DiskError, UsageError

# CMake, ninja, nvcc and make-style dependency files each quote other characters, and none of them
# all (seen with a blank: nvcc's host compiler finds no input file).
_PLAIN = frozenset("._+@,~-/")


def check_places(work: Path, store: Path, channel: Path, temporary: str | None) -> None:
    """Refuse places in which a build would fail late.

    Args:
        work: Where the compilers run.
        store: Where the compiler cache is.
        channel: Where the package goes.
        temporary: ``TMPDIR``, where it is set.

    Raises:
        UsageError: The path of a place has characters that a tool of the build does not take.
        ChannelError: conda could not read a channel there.
        DiskError: The channel cannot be written.
    """
    named = {"project": work, "store": store}
    if temporary:
        named["TMPDIR"] = Path(temporary)
        if not Path(temporary).is_absolute() or not os.access(temporary, os.W_OK | os.X_OK):
            raise UsageError(
                f"TMPDIR is no directory to write to: {temporary}",
                why="the compilers put their intermediate files there",
                fix="make it, name another by its absolute path, or unset TMPDIR",
            )
    for name, path in named.items():
        odd = sorted({c for c in str(path.absolute()) if not c.isalnum() and c not in _PLAIN})
        if odd:
            raise UsageError(
                f"the path of {name} has characters that compilers do not take: {path}",
                why="they are: " + " ".join(map(repr, odd)),
                fix="use a path of letters, digits and ._+@,~-",
            )
    check_location(work)
    check_location(channel)
    for place, what, fix in (
        (channel, "the channel", "name another with --channel"),
        # Fetched files may be shared read-only; the compiler cache beside them is written to.
        (store / "ccache", "the compiler cache", "name a store of your own with --store"),
    ):
        there = place.absolute()
        while not there.exists() and there != there.parent:
            there = there.parent
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise DiskError(
                f"{what} {place} cannot be written",
                why=f"{there} is {'not writable' if there.is_dir() else 'not a directory'}",
                fix=fix,
            )


def check_channel(channel: Path, new: str) -> None:
    """Refuse a channel into which no package could be published.

    A whole package that no index names yet is not refused: a publisher was killed, and the next
    one completes its work.

    Args:
        channel: Channel root.
        new: ``subdir/file`` that is to be published.

    Raises:
        ChannelError: A file that is no package, or a link, has a package's name; another package
            is not as it was published; a link or directory is where a file of the channel's goes.
    """
    if not channel.exists():
        return
    subdirs = [channel / "noarch", channel / new.partition("/")[0]]
    for path in (channel / SUMS, channel / LOCK, *(place / REPODATA for place in subdirs)):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise _stray(path, "it is a link or no regular file")
    for path in subdirs:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise _stray(path, "it is a link or no directory")
    listed = read_sums(channel)
    faults = [
        fault
        for fault in check_listed(channel, listed)
        if fault.path != new and not fault.path.startswith(f"{Path(new).name}.")
    ]
    if faults:
        raise ChannelError(
            f"the channel {channel} is damaged; nothing could be published into it",
            why="; ".join(map(str, faults[:5])),
            fix=f"see python3 orchestrator.py channel verify --channel {channel}",
        )
    for path in sorted(channel.glob("*/*.conda")):
        if path.is_symlink() or not path.is_file():
            raise _stray(path, "it is a link or no regular file")
        if relative(channel, path) in listed:
            continue
        try:
            expected = own_place(path)
        except (ChannelError, KeyError, TypeError) as error:
            raise _stray(path, f"not in {SUMS}, and no conda package: {error}") from error
        if relative(channel, path) != expected:
            raise _stray(path, f"not in {SUMS}, and it should be {expected}")


def _stray(path: Path, why: str) -> ChannelError:
    return ChannelError(
        f"{path} does not belong into the channel", why=why, fix=f"move it away: mv {path} /tmp/"
    )
