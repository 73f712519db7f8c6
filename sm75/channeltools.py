"""What a person asks of a finished channel: how large it is, what it lacks, one file to carry."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sm75 import channel as channels
from sm75 import install as installer
from sm75.atomic import TMP_PREFIX, disk_errors, replacing
from sm75.basepython import BasePython
from sm75.channelcheck import LOCK, REPODATA, entries, relative, require
from sm75.condapkg import EPOCH, tar_info, write_conda
from sm75.errors import ChannelError, UsageError
from sm75.install import Box
from sm75.lockfile import G5G
from sm75.store import hash_file

# Sizes that the channel is to stay under, bytes.
LIMITS = {"whole closure": 1 << 30, installer.NAME: 60 << 20}


@dataclass(frozen=True, kw_only=True)
class PackageSize:
    """One package of a channel.

    Attributes:
        file: ``subdir/file``.
        name: Conda name.
        version: Its version.
        size: Of the file, bytes.
        python: The Python minor it is tied to; empty: it serves all.
    """

    file: str
    name: str
    version: str
    size: int
    python: str


def sizes(channel: Path) -> list[PackageSize]:
    """List the packages of a channel by size, largest first.

    Raises:
        ChannelError: There is no index, or it cannot be read.
    """
    found = []
    require(channel)
    for index in sorted(channel.glob(f"*/{REPODATA}")):
        if not index.is_file():  # to read a pipe is to wait
            raise ChannelError(f"{index} cannot be read", why="it is no regular file")
        try:
            records: dict[str, Any] = json.loads(index.read_bytes())["packages.conda"]
        except (ValueError, KeyError) as err:
            raise ChannelError(f"{index} cannot be read", why=str(err)) from err
        for name, record in records.items():
            tied = [d.split()[1].removesuffix(".*") for d in record["depends"]
                    if d.startswith("python ") and d.endswith(".*")]  # fmt: skip
            found.append(
                PackageSize(
                    file=f"{index.parent.name}/{name}",
                    name=record["name"],
                    version=record["version"],
                    size=record["size"],
                    python="".join(tied),
                )
            )
    return sorted(found, key=lambda p: (-p.size, p.file))


def totals(found: Sequence[PackageSize]) -> dict[str, int]:
    """Sum the sizes (bytes): of everything, of vllm-sm75, and of what one Python installs."""
    minors = sorted({p.python for p in found if p.python})
    out = {"whole closure": sum(p.size for p in found)}
    ours = [p.size for p in found if p.name == installer.NAME]
    out[installer.NAME] = max(ours, default=0)
    for minor in minors:
        newest: dict[str, int] = {}
        for p in found:
            if p.python in ("", minor):
                newest[p.name] = max(p.size, newest.get(p.name, 0))
        out[f"one installation, Python {minor}"] = sum(newest.values())
    return out


def size_table(found: Sequence[PackageSize], *, rows: int = 20) -> Table:
    """Show the largest packages and the totals.

    Args:
        found: What :func:`sizes` gave.
        rows: Packages to show.
    """
    table = Table("package", "version", "Python", "MiB")
    for p in found[:rows]:
        table.add_row(p.name, p.version, p.python or "any", f"{p.size / 2**20:.1f}")
    if len(found) > rows:
        rest = sum(p.size for p in found[rows:])
        table.add_row(f"{len(found) - rows} more", "", "", f"{rest / 2**20:.1f}")
    table.add_section()
    for name, size in totals(found).items():
        limit = LIMITS.get(name)
        table.add_row(name, "", "", f"{size / 2**20:.1f}" + (f" of {limit >> 20}" if limit else ""))
    return table


def export(channel: Path, out: Path) -> str:
    """Put the channel into one tar, after checking every file.

    The same channel always gives the same bytes; of a link, those of the file that it leads to. On
    the other machine::

        sha256sum FILE && tar -xf FILE && python3 orchestrator.py channel verify --channel channel

    Args:
        channel: The channel.
        out: The tar to write.

    Returns:
        Its sha256 (hex).

    Raises:
        ChannelError: The channel is damaged.
        UsageError: ``out`` is there, cannot be a file, or would lie in the channel.
        DiskError: The tar cannot be written.
    """
    check_out(channel, out)
    installer.check_channel(channel, "nothing was written")
    with (
        replacing(out) as raw,
        # of a link, the file that it leads to: that is what SHA256SUMS lists
        tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT, dereference=True) as tar,
    ):
        for path in exported(channel):
            tar.add(path, f"channel/{relative(channel, path)}", filter=_plain)
    return hash_file(out)


def check_out(channel: Path, out: Path) -> None:
    """Refuse a place for the tar where something is, nothing can be, or the channel is.

    Raises:
        UsageError: It is one.
        DiskError: It cannot be looked at.
    """
    fix = "name another file: python3 orchestrator.py channel export vllm-sm75.tar"
    try:
        with disk_errors(out):
            out.lstat()
    except FileNotFoundError:
        pass
    except OSError as err:
        raise _no_place(out, err, fix) from err
    else:
        if not out.is_file():
            raise UsageError(
                f"{out} is no file to write to",
                why="it is a directory, a device or a link to nothing",
                fix=fix,
            )
        raise UsageError(f"{out} is there already", fix="name another file, or remove it")
    try:  # the longest name that is made on the way
        out.with_name(f"{TMP_PREFIX}{out.name}.{'x' * 8}").lstat()
    except FileNotFoundError:
        pass
    except OSError as err:
        raise _no_place(out, err, fix) from err
    place = out.resolve()
    inside = [channel, *(path for path in channel.glob("*") if path.is_dir())]
    if any(place.is_relative_to(path.resolve()) for path in inside):
        raise UsageError(
            f"{out} would lie in the channel",
            why=f"{channel} is what is exported, and has nothing but its own files",
            fix=fix,
        )


def _no_place(out: Path, err: OSError, fix: str) -> UsageError:
    text = str(out) if len(str(out)) < 100 else f"{str(out)[:100]}…"
    return UsageError(f"{text} is no file to write to", why=os.strerror(err.errno or 0), fix=fix)


def exported(channel: Path) -> list[Path]:
    """The files that :func:`export` takes, in order: no leftovers."""
    return [path for path in entries(channel) if path.is_file() and relative(channel, path) != LOCK]


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Forget owner, date and mode."""
    return tar_info(info.name, EPOCH, size=info.size)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Whether one Python minor can be installed from the channel alone.

    Attributes:
        python: The minor.
        missing: What the channel lacks, one sentence each; empty: nothing.
    """

    python: str
    missing: tuple[str, ...]


def gaps(channel: Path, box: Box, scratch: Path, python: BasePython) -> list[Gap]:
    """Say what the channel lacks to be installed from alone, for each Python it serves.

    Args:
        channel: The channel.
        box: The machine it is for.
        scratch: An empty directory for stand-ins.
        python: What the release's locks say of python.

    Raises:
        ChannelError: The index cannot be read.
    """
    out = []
    for minor in installer.pythons(channel):
        try:
            installer.solve([channel], [installer.NAME, f"python {minor}.*"], box)
        except ChannelError as err:
            missing = [python.describe(minor)]
            standin = _standin(scratch / minor, minor)
            try:
                installer.solve([channel, standin], [installer.NAME, f"python {minor}.*"], box)
            except ChannelError as deeper:
                missing.append(deeper.why or deeper.what)
            if "python" in {p.name for p in sizes(channel) if p.version.startswith(f"{minor}.")}:
                missing = [err.why or err.what]
            out.append(Gap(python=minor, missing=tuple(missing)))
        else:
            out.append(Gap(python=minor, missing=()))
    return out


def _standin(channel: Path, minor: str) -> Path:
    """A channel with an empty python, to see whether all else is there."""
    package = write_conda(
        channel / "made", name="python", version=f"{minor}.99", subdir=G5G,
        build=f"0_cp{minor.replace('.', '')}", files={}, license="",
    )  # fmt: skip
    channels.publish([package], channel / "channel")
    return channel / "channel"
