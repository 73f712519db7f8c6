"""Check a channel: every file against ``SHA256SUMS``, every record against its package."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from sm75.atomic import TMP_PREFIX
from sm75.condapkg import read_info
from sm75.errors import ChannelError

SUMS = "SHA256SUMS"
LOCK = ".lock"
REPODATA = "repodata.json"

# What solvers read. A record must have it as the package's own index.json has it, or lack it too.
_SOLVED_BY = frozenset(
    {
        "name",
        "version",
        "build",
        "build_number",
        "depends",
        "constrains",
        "track_features",
        "noarch",
    }
)


@dataclass(frozen=True, kw_only=True, order=True)
class Problem:
    """One fault of a channel.

    Args:
        path: File, relative to the channel.
        kind: ``missing`` (listed, not there), ``extra`` (there, not listed), ``altered`` (bytes are
            not the listed ones), ``index`` (repodata.json is unreadable or disagrees).
        detail: What was expected and found.
    """

    path: str
    kind: Literal["missing", "extra", "altered", "index"]
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}" + (f" ({self.detail})" if self.detail else "")


class _Index(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a repodata.json, as far as a check needs it."""

    info: dict[str, Any]
    packages: dict[str, dict[str, Any]]
    conda: dict[str, dict[str, Any]] = msgspec.field(name="packages.conda")


def _read_index(subdir: Path) -> _Index:
    return msgspec.json.decode((subdir / REPODATA).read_bytes(), type=_Index)


def sha256_file(path: Path) -> str:
    """Give the sha256 (hex) of a file."""
    with path.open("rb") as raw:
        return hashlib.file_digest(raw, "sha256").hexdigest()


def is_inside(name: str) -> bool:
    """Whether a name that a channel's own documents give is that of a file inside it."""
    parts = name.split("/")
    return (
        0 < len(parts) <= 2
        and all(part not in ("", ".", "..") for part in parts)
        and "\\" not in name
        and name.isprintable()
    )


def read_sums(channel: Path) -> dict[str, str]:
    """Read ``SHA256SUMS``.

    Args:
        channel: Channel root.

    Returns:
        Hash (hex) by path relative to the channel; empty when there is no such file.

    Raises:
        ChannelError: A line is malformed, or names a file that is not the channel's.
    """
    path = channel / SUMS
    if not path.exists():
        return {}
    sums = {}
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
        found = re.fullmatch(r"([0-9a-f]{64})  (\S.*)", line)
        if not found:
            raise ChannelError(f"{path}:{number}: not a line of sha256sum", why=line[:100])
        if not is_inside(found[2]):
            raise ChannelError(f"{path}:{number}: names no file of the channel", why=line[:200])
        sums[found[2]] = found[1]
    return sums


def relative(root: Path, path: Path) -> str:
    """Give ``path`` below ``root``, ``/`` separated."""
    return path.relative_to(root).as_posix()


def check_location(channel: Path) -> None:
    """Refuse a place that conda misreads.

    Raises:
        ChannelError: The path has a directory called ``t``.
    """
    if "/t/" in f"{channel.absolute()}/":
        raise ChannelError(
            f"no channel can live in {channel}",
            why="conda takes /t/NAME in a channel's path for an access token and cuts it out",
            fix="choose a path without a directory called t",
        )


def own_place(package: Path) -> str:
    """Give ``subdir/file`` of a package as its own index.json has it, whatever its name is.

    Raises:
        ChannelError: It is no conda package, or would not lie in the channel.
    """
    index = read_info(package)["index"]
    subdir, *stem = (index.get(key) for key in ("subdir", "name", "version", "build"))
    if not all(isinstance(part, str) and part for part in (subdir, *stem)):
        raise ChannelError(
            f"{package.name} has no sound index.json",
            why="it lacks one of subdir, name, version and build",
        )
    place = f"{subdir}/{'-'.join(map(str, stem))}.conda"
    if place.count("/") != 1 or not is_inside(place):
        raise ChannelError(f"{package.name} would lie outside the channel", why=place)
    return place


def check_listed(channel: Path, sums: Mapping[str, str]) -> Iterator[Problem]:
    """Compare the files that ``SHA256SUMS`` lists with their hashes.

    Args:
        channel: Channel root.
        sums: Hash (hex) by relative path.
    """
    for name, expected in sums.items():
        path = channel / name
        if not path.is_file():
            yield Problem(path=name, kind="missing", detail=f"listed in {SUMS}")
        elif (got := sha256_file(path)) != expected:
            yield Problem(
                path=name, kind="altered", detail=f"sha256 expected {expected}, got {got}"
            )


def _check_unlisted(channel: Path, sums: Mapping[str, str]) -> Iterator[Problem]:
    for path in sorted(channel.rglob("*")):
        rel = relative(channel, path)
        own = rel in (SUMS, LOCK) or path.name == REPODATA or rel.startswith(TMP_PREFIX)
        if path.is_file() and not own and rel not in sums:
            yield Problem(path=rel, kind="extra", detail=f"not listed in {SUMS}")


def _check_record(channel: Path, rel: str, record: Mapping[str, Any]) -> Iterator[Problem]:
    if not is_inside(rel):
        yield Problem(path=rel, kind="index", detail="names no file of the channel")
        return
    path = channel / rel
    if not path.is_file():
        yield Problem(path=rel, kind="missing", detail=f"listed in {REPODATA}")
        return
    size = path.stat().st_size
    if record.get("size") != size:
        yield Problem(path=rel, kind="altered", detail=f"size: index {record.get('size')}, {size}")
    digest = sha256_file(path)
    if record.get("sha256") != digest:
        yield Problem(
            path=rel, kind="altered", detail=f"sha256: index {record.get('sha256')}, got {digest}"
        )
        return
    with path.open("rb") as handle:
        md5 = hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if record.get("md5", md5) != md5:
        yield Problem(path=rel, kind="index", detail=f"md5: index {record.get('md5')}, {md5}")
    described = read_info(path)["index"]
    for key in sorted(_SOLVED_BY | described.keys()):
        if (record.get(key) or []) != (described.get(key) or []):
            yield Problem(
                path=rel,
                kind="index",
                detail=f"{key}: index {record.get(key)!r}, package {described.get(key)!r}",
            )


def _check_index(channel: Path, subdir: Path) -> Iterator[Problem]:
    rel = f"{subdir.name}/{REPODATA}"
    try:
        index = _read_index(subdir)
    except FileNotFoundError:
        yield Problem(path=rel, kind="missing")
        return
    except ValueError as err:  # msgspec's errors are such
        yield Problem(path=rel, kind="index", detail=f"unreadable: {err}")
        return
    if index.info.get("subdir") != subdir.name:
        yield Problem(path=rel, kind="index", detail=f"is for {index.info.get('subdir')}")
    records = {**index.packages, **index.conda}
    for name, record in records.items():
        yield from _check_record(channel, f"{subdir.name}/{name}", record)
    for package in sorted(subdir.glob("*.conda")):
        if package.name not in records:
            yield Problem(
                path=f"{subdir.name}/{package.name}", kind="extra", detail=f"not in {REPODATA}"
            )


def verify_channel(channel: Path) -> list[Problem]:
    """Check every file of a channel against ``SHA256SUMS`` and the index.

    Args:
        channel: Channel root.

    Returns:
        The faults, sorted; empty when all is well.
    """
    if not channel.is_dir():
        return [Problem(path=".", kind="missing", detail="there is no such channel")]
    found: set[Problem] = set()
    if not (channel / SUMS).exists():
        found.add(Problem(path=SUMS, kind="missing"))
    try:
        sums = read_sums(channel)
        found |= {*check_listed(channel, sums), *_check_unlisted(channel, sums)}
    except ChannelError as err:
        found.add(Problem(path=SUMS, kind="altered", detail=err.why))
    subdirs = {p for p in channel.iterdir() if p.is_dir() and not p.name.startswith(TMP_PREFIX)}
    for subdir in sorted(subdirs | {channel / "noarch"}):
        try:
            found |= set(_check_index(channel, subdir))
        except ChannelError as err:
            found.add(Problem(path=subdir.name, kind="altered", detail=err.what))
    return sorted(found)


def holds(channel: Path, rel: str) -> bool:
    """Whether a channel has one package, listed, indexed and undamaged.

    Args:
        channel: Channel root.
        rel: ``subdir/file``.

    Raises:
        ChannelError: It is there, but it, or what is written of it, is not as published.
    """
    subdir, _, name = rel.partition("/")
    if not (channel / rel).is_file():
        return False
    faults: list[Problem] = []
    try:
        record = _read_index(channel / subdir).conda.get(name)
    except FileNotFoundError:
        return False
    except ValueError as err:
        faults.append(Problem(path=f"{subdir}/{REPODATA}", kind="index", detail=str(err)))
    else:
        if record is None:
            return False
        faults += _check_record(channel, rel, record)
    # Its provenance lies at the top of the channel, under its name.
    own = {k: v for k, v in read_sums(channel).items() if k == rel or k.startswith(f"{name}.")}
    if rel not in own:
        faults.append(Problem(path=SUMS, kind="missing", detail=f"the line of {rel}"))
    faults += check_listed(channel, own)
    if faults:
        raise ChannelError(
            f"{channel / rel} is damaged, or what the channel says of it",
            why="; ".join(sorted({str(fault) for fault in faults})),
            fix=f"remove {channel / rel} and run the same command again",
        )
    return True
