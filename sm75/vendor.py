"""The ``vendor`` directory that cargo builds from without network.

It is laid out as ``cargo vendor --versioned-dirs`` does it: a directory for each crate, with
``.cargo-checksum.json``, which has the sha256 of each file and of the archive. cargo checks both,
the archive's against Cargo.lock (cargo's reference, "Source Replacement").
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomlkit

from sm75 import archives, gitarchive
from sm75.atomic import directory, disk_errors
from sm75.cargolock import Crate, Git
from sm75.crates import Sources
from sm75.errors import FetchError, LockError
from sm75.store import Store

CHECKSUMS = ".cargo-checksum.json"
# What cargo itself unpacks at most (MAX_UNPACK_SIZE of its registry sources), in bytes.
LIMIT = 512 << 20
# What `cargo vendor` of 1.95 leaves out.
_LEFT_OUT = (".gitattributes", ".gitignore", CHECKSUMS, ".cargo-ok")
_NAME = "vendored-sources"


def prepare(wanted: Sources, store: Store, place: Path) -> None:
    """Make a directory with ``vendor`` and the ``config.toml`` that makes cargo take nothing else.

    Args:
        wanted: From ``crates.sources``; all of it must be in the store.
        store: The store.
        place: The directory; must not be there yet.

    Raises:
        Sm75Error: As of :func:`lay_out`.
    """
    with directory(place) as scratch:
        (scratch / "vendor").mkdir()
        lay_out(wanted, store, scratch / "vendor")
        (scratch / "config.toml").write_text(config(wanted, place / "vendor"), encoding="utf-8")


def lay_out(wanted: Sources, store: Store, vendor: Path) -> None:
    """Unpack every source.

    Args:
        wanted: From ``crates.sources``; all of it must be in the store.
        store: The store.
        vendor: An empty directory.

    Raises:
        FetchError: A source is not in the store, or is not the crate that it should be.
        ChannelError: An archive is damaged, too large, or has a name that leads out of it.
        LockError: A git dependency is not pinned, or of a form that is not supported.
        DiskError: The disk is full.
    """
    by_place: dict[str, list[Crate]] = {}
    for crate in wanted.crates:
        if crate.git is None:
            _registry_crate(crate, store, vendor / crate.directory)
        else:
            by_place.setdefault(crate.git.key, []).append(crate)
    for place in wanted.git:
        sha256, name = wanted.archive(place)
        _git_crates(place, by_place[place.key], _stored(store, sha256, name), vendor)


def config(wanted: Sources, vendor: Path) -> str:
    """Cargo's configuration that replaces every source by the directory.

    Args:
        wanted: From ``crates.sources``.
        vendor: The directory, absolute.
    """
    document = tomlkit.document()
    source = tomlkit.table(is_super_table=True)
    source.add("crates-io", {"replace-with": _NAME})
    for crate in wanted.crates:
        if (place := crate.git) is not None:
            kind = {place.reference[0]: place.reference[1]} if place.reference else {}
            key = f"git+{place.url}" + "".join(f"?{k}={v}" for k, v in kind.items())
            if key not in source:
                source.add(key, {"git": place.url, **kind, "replace-with": _NAME})
    source.add(_NAME, {"directory": str(vendor)})
    document.add("source", source)
    return tomlkit.dumps(document)


def _stored(store: Store, sha256: str, filename: str) -> Path:
    if not store.sound(sha256, filename):
        raise FetchError(
            f"{filename} is not in the store, or was altered there",
            why=f"expected sha256 {sha256} in {store.directory(sha256)}",
            fix="run fetch --rust source",
        )
    return store.path(sha256, filename)


def _members(archive: Path, top: str) -> Iterator[tuple[str, archives.Member]]:
    """The files of an archive, by their path below its one directory."""
    for member in archives.walk(archive, limit=LIMIT):
        first, _, path = member.name.partition("/")
        if first != top or not path:
            raise FetchError(
                f"{archive.name} is no archive of {top}",
                why=f"it has {member.name!r} outside the directory {top}",
                fix="do not use it; report it to whoever published it",
            )
        yield path, member


def _registry_crate(crate: Crate, store: Store, place: Path) -> None:
    archive = _stored(store, crate.checksum, crate.filename)
    files = {
        path: _write(place, path, member.read(), member.executable)
        for path, member in _members(archive, crate.directory)
        if _taken(path)
    }
    if "Cargo.toml" not in files:
        raise FetchError(f"{crate.filename} has no Cargo.toml")
    _finish(place, files, crate.checksum)


def _git_crates(place: Git, crates: list[Crate], archive: Path, vendor: Path) -> None:
    top = gitarchive.filename(place).removesuffix(".tar")
    manifests = {
        path: member.read()
        for path, member in _members(archive, top)
        if path.rpartition("/")[2] == "Cargo.toml"
    }
    folders = {crate.directory: _folder(crate, place, manifests) for crate in crates}
    # A package ends where another one begins: cargo takes only its own files.
    ends = [f"{path.rpartition('/')[0]}/" for path in manifests if "/" in path]
    files: dict[str, dict[str, str]] = {name: {} for name in folders}
    for path, member in _members(archive, top):
        for name, folder in folders.items():
            own = f"{folder}/" if folder else ""
            inner = any(e.startswith(own) and e != own and path.startswith(e) for e in ends)
            if path.startswith(own) and not inner and _taken(rest := path.removeprefix(own)):
                data = member.read()
                files[name][rest] = _write(vendor / name, rest, data, member.executable)
    for name, listed in files.items():
        _finish(vendor / name, listed, None)


def _folder(crate: Crate, place: Git, manifests: dict[str, bytes]) -> str:
    """Where in the repository a package is."""
    for path in sorted(manifests):
        try:
            raw: dict[str, Any] = tomllib.loads(manifests[path].decode("utf-8"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError):
            continue  # a test's, perhaps; cargo would not take it for a package either
        package = raw.get("package")
        if not isinstance(package, dict) or package.get("name") != crate.name:
            continue
        if inherited := sorted(_inherited(raw)):
            raise LockError(
                f"{crate.name} of {place.url} inherits from its workspace: not supported",
                why=f"{path} leaves to the workspace: {', '.join(inherited[:5])}; the vendored "
                "manifest would have to be written anew",
                fix="use --rust prebuilt or --rust none",
            )
        if package.get("version") == crate.version:
            return path.rpartition("/")[0]
    raise FetchError(
        f"{place.url} at {place.revision[:12]} has no {crate.name} {crate.version}",
        why="packages there: " + (", ".join(sorted(manifests)) or "none"),
    )


def _inherited(raw: dict[str, Any], where: str = "") -> Iterator[str]:
    for key, value in raw.items():
        if key == "workspace" and value is True:
            yield where
        elif isinstance(value, dict) and not (where == "" and key == "workspace"):
            yield from _inherited(value, f"{where}.{key}" if where else key)


def _taken(path: str) -> bool:
    return path.rpartition("/")[2] not in _LEFT_OUT


def _write(place: Path, path: str, data: bytes, executable: bool) -> str:
    target = place / path
    try:
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            # The directory is remade for every build and used by no other: no fsync, no rename.
            target.write_bytes(data)
            target.chmod(0o755 if executable else 0o644)
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        raise FetchError(
            f"the archive of {place.name} has {path!r} both as a file and as a directory"
        ) from error
    return hashlib.sha256(data).hexdigest()


def _finish(place: Path, files: dict[str, str], checksum: str | None) -> None:
    text = json.dumps({"files": dict(sorted(files.items())), "package": checksum},
                      separators=(",", ":"))  # fmt: skip
    with disk_errors(place):
        (place / CHECKSUMS).write_text(text, encoding="utf-8")
