"""Check a channel: every file against ``SHA256SUMS``, every record against its package."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from sm75.atomic import TMP_PREFIX
from sm75.condapkg import canonical_json, read_info
from sm75.errors import ChannelError
from sm75.store import hash_file

SUMS = "SHA256SUMS"
LOCK = ".lock"
# Written beside the packages and not listed: it holds times, and the sums of two builds of the same
# inputs are the same.
REPORT = "report.html"
REPODATA = "repodata.json"

# What a record says of the file; all else of it is the package's own index.json.
_OF_THE_FILE = frozenset({"md5", "sha256", "size"})

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
    """A repodata.json, of the shape that our indexing writes but for ``other``."""

    info: dict[str, Any]
    packages: dict[str, dict[str, Any]]
    conda: dict[str, dict[str, Any]] = msgspec.field(name="packages.conda")
    version: Any = msgspec.field(name="repodata_version", default=1)
    v3: Any = msgspec.field(default_factory=dict)
    # Keys that are none of these, and whether the text has more than its values.
    other: tuple[str, ...] = ()
    plain: bool = True


_KEYS = frozenset({"info", "packages", "packages.conda", "repodata_version", "v3"})


def _read_index(subdir: Path) -> _Index:
    path = subdir / REPODATA
    if path.exists() and not path.is_file():  # to read a pipe is to wait
        raise ValueError("no regular file")
    raw = path.read_bytes()
    data = msgspec.json.decode(raw, type=dict[str, Any])
    known = {key: value for key, value in data.items() if key in _KEYS}
    return msgspec.structs.replace(
        msgspec.convert(known, _Index),
        other=tuple(sorted(data.keys() - _KEYS)),
        plain=raw == canonical_json(data),
    )


def _check_shape(index: _Index, subdir: str) -> Iterator[Problem]:
    """Compare all but the records with what our indexing writes.

    Clients know more than it writes: places elsewhere (``info.base_url``, CEP 15), records under
    other keys. Where it says what ours never does, it is not ours.
    """
    wrong = [f"has {key!r}, which our indexes never have" for key in index.other]
    if index.info != {"subdir": subdir}:
        wrong.append(f"info: expected only subdir {subdir}, got {str(index.info)[:200]}")
    if index.packages:
        wrong.append(f"lists under packages, where ours lists nothing: {_few(index.packages)}")
    if index.v3 != {}:
        wrong.append("lists under v3, where ours lists nothing")
    if index.version != 1:
        wrong.append(f"repodata_version: expected 1, got {str(index.version)[:20]}")
    if not (wrong or index.plain):
        wrong.append("is not as our indexing writes it: edited, or it has a key twice")
    for detail in wrong:
        yield Problem(path=f"{subdir}/{REPODATA}", kind="index", detail=detail)


def _few(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")


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
    if not path.is_file():
        raise ChannelError(f"{path} cannot be read", why="it is no regular file")
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
        elif (got := hash_file(path)) != expected:
            yield Problem(
                path=name, kind="altered", detail=f"sha256 expected {expected}, got {got}"
            )


def entries(channel: Path) -> Iterator[Path]:
    """Give what lies in a channel and in its directories, sorted; links are followed.

    Leftovers of killed runs are left out. A directory in a directory comes as it is: no channel has
    one, and it may lead anywhere.
    """
    for path in sorted(channel.iterdir()):
        if path.name.startswith(TMP_PREFIX):
            continue
        if path.is_dir():
            yield from sorted(path.iterdir())
        else:
            yield path


def _check_unlisted(channel: Path, sums: Mapping[str, str]) -> Iterator[Problem]:
    for path in entries(channel):
        rel = relative(channel, path)
        if path.is_dir():
            yield Problem(path=rel, kind="extra", detail="a directory that no channel has")
        elif not path.is_file():
            yield Problem(path=rel, kind="extra", detail="no regular file")
        elif rel not in (SUMS, LOCK, REPORT) and not _is_index(rel) and rel not in sums:
            yield Problem(path=rel, kind="extra", detail=f"not listed in {SUMS}")


def _is_index(rel: str) -> bool:
    return rel.count("/") == 1 and rel.endswith(f"/{REPODATA}")


def _check_record(channel: Path, rel: str, record: Mapping[str, Any]) -> Iterator[Problem]:
    if not is_inside(rel) or not rel.endswith(".conda"):
        yield Problem(path=rel, kind="index", detail="names no file of the channel")
        return
    path = channel / rel
    if not path.is_file():
        yield Problem(path=rel, kind="missing", detail=f"listed in {REPODATA}")
        return
    size = path.stat().st_size
    if record.get("size") != size:
        yield Problem(path=rel, kind="altered", detail=f"size: index {record.get('size')}, {size}")
    digest = hash_file(path)
    if record.get("sha256") != digest:
        yield Problem(
            path=rel, kind="altered", detail=f"sha256: index {record.get('sha256')}, got {digest}"
        )
        return
    with path.open("rb") as handle:
        md5 = hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if record.get("md5") != md5:
        yield Problem(path=rel, kind="index", detail=f"md5: index {record.get('md5')}, {md5}")
    described = read_info(path)["index"]
    for key in sorted((_SOLVED_BY | described.keys() | record.keys()) - _OF_THE_FILE):
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
    yield from _check_shape(index, subdir.name)
    for name, record in index.conda.items():
        yield from _check_record(channel, f"{subdir.name}/{name}", record)
    for package in sorted(subdir.glob("*.conda")):
        if package.name not in index.conda:
            yield Problem(
                path=f"{subdir.name}/{package.name}", kind="extra", detail=f"not in {REPODATA}"
            )


def count(problems: Sequence[Problem]) -> str:
    """Say how many faults these are."""
    return "a fault" if len(problems) == 1 else f"{len(problems)} faults"


def advice(problems: Sequence[Problem]) -> str:
    """Say what mends these faults."""
    if all(problem.kind == "extra" for problem in problems):
        return "move the named files away, or build again: a killed run may have left them"
    if any(problem.kind == "missing" for problem in problems):
        return "copy the channel anew, or build it into a new directory"
    return "remove the named files and build again, or copy the channel anew"


def require(channel: Path) -> None:
    """Refuse a channel that is none, in the same words and with the same exit code everywhere.

    Args:
        channel: What was named as one.

    Raises:
        ChannelError: It is no directory, or has neither sums nor an index.
    """
    if is_channel(channel):
        return
    raise ChannelError(
        f"there is no channel {channel}",
        why=f"it has no {SUMS}, and no directory in it has a {REPODATA}"
        if channel.is_dir()
        else "it is no directory" if channel.exists() else "there is no such directory",
        fix="name one (--channel DIR), or make it: python3 orchestrator.py build, then "
        "python3 orchestrator.py channel build",
    )  # fmt: skip


def is_channel(directory: Path) -> bool:
    """Whether a directory is a conda channel of ours: it has sums or an index."""
    return (directory / SUMS).exists() or any(directory.glob(f"*/{REPODATA}"))


def verify_channel(channel: Path) -> list[Problem]:
    """Check every file of a channel against ``SHA256SUMS`` and the index.

    Args:
        channel: Channel root.

    Returns:
        The faults, sorted; empty when all is well.

    Raises:
        ChannelError: A file or directory cannot be read.
    """
    if not channel.is_dir():
        return [Problem(path=".", kind="missing", detail="there is no such channel")]
    try:
        return _faults(channel)
    except OSError as err:  # of a file that vanishes or may not be read
        raise ChannelError(
            f"{channel} cannot be read", why=f"{err.filename}: {os.strerror(err.errno or 0)}"
        ) from err


def _faults(channel: Path) -> list[Problem]:
    if not is_channel(channel):
        return [Problem(path=".", kind="missing", detail=f"no {SUMS}, no {REPODATA}: no channel")]
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


def indexed(channel: Path) -> dict[str, dict[str, Any]]:
    """The records of a channel's indexes by ``subdir/file``.

    Raises:
        ChannelError: An index cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(channel.glob(f"*/{REPODATA}")):
        subdir = path.parent
        try:
            records = _read_index(subdir).conda
        except (OSError, ValueError) as err:
            raise ChannelError(f"{path} cannot be read", why=str(err)) from err
        found |= {f"{subdir.name}/{name}": record for name, record in records.items()}
    return found


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
        index = _read_index(channel / subdir)
    except FileNotFoundError:
        return False
    except ValueError as err:
        faults.append(Problem(path=f"{subdir}/{REPODATA}", kind="index", detail=str(err)))
    else:
        record = index.conda.get(name)
        if record is None:
            return False
        faults += _check_shape(index, subdir)
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
