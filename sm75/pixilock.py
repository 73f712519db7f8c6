"""Make ``pixi.lock``: the tools of ``pixi.toml`` from conda-forge, the rest from the package index.

The format is pixi's, version 7, as py-rattler reads and writes it. conda-forge is solved by
py-rattler; what the manifest takes from the package index by uv, on top of the solved python.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rattler
from packaging.utils import canonicalize_name

from sm75 import closure, closureresolve, fetch
from sm75.atomic import write_bytes
from sm75.errors import LockError, ToolchainError
from sm75.index import DEFAULT_INDEX
from sm75.lockfile import Artifact
from sm75.pixi import LOCK, Environment, Manifest, load
from sm75.progress import Reporter
from sm75.store import Store
from sm75.toolchain import condalock

# Where PyPI keeps a file: by the BLAKE2b-256 digest of its content. So the address can be told
# whatever mirror the file was fetched from.
_FILES = "https://files.pythonhosted.org/packages"


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One package of the package index.

    Attributes:
        name: Its name.
        version: Its version.
        url: Its address on PyPI.
        sha256: Of the file.
        requires_dist: What it requires, as its metadata say.
        requires_python: The Pythons it is for; empty: any.
    """

    name: str
    version: str
    url: str
    sha256: str
    requires_dist: tuple[str, ...]
    requires_python: str


def update(root: Path, store: Store, reporter: Reporter, source: condalock.Source) -> bool:
    """Solve ``pixi.toml`` and write ``pixi.lock``, when everything of it resolved.

    Args:
        root: The project's directory.
        store: Gets the wheels, whose metadata are read.
        reporter: Shows progress.
        source: The channel.

    Returns:
        Whether the lock changed.

    Raises:
        LockError: ``pixi.toml`` is not understood, or the package index lacks something.
        ToolchainError: The channel cannot be read or lacks something; or uv is missing.
        FetchError: A wheel cannot be had.
        DiskError: The lock cannot be written.
    """
    manifest = load(root)
    if rattler.Channel(manifest.channel).base_url.rstrip("/") != source.url:
        raise LockError(f"pixi.toml's channel is {manifest.channel}, not {source.channel}")
    text = resolve(manifest, source, store, reporter)
    path = root / LOCK
    if path.is_file() and path.read_bytes() == text:
        return False
    write_bytes(path, text)
    return True


def resolve(
    manifest: Manifest, source: condalock.Source, store: Store, reporter: Reporter
) -> bytes:
    """Solve every environment on every platform.

    Args:
        manifest: From ``pixi.load``.
        source: The channel.
        store: Gets the wheels, whose metadata are read.
        reporter: Shows progress.

    Returns:
        The text of the lock file.

    Raises:
        ToolchainError: The channel cannot be read or lacks something; or uv is missing.
        LockError: The package index lacks something.
        FetchError: A wheel cannot be had.
    """
    if source.url.startswith("file:"):
        raise ToolchainError(
            f"the channel {source.channel} cannot be locked",
            why="it is a directory of this machine",
            fix="name a channel that other machines can reach",
        )
    platforms = {name: rattler.LockPlatform(name) for name in manifest.platforms}
    lock = rattler.LockFile(list(platforms.values()))
    wheels: dict[str, Wheel] = {}
    with_wheels: set[str] = set()
    for name, environment in manifest.environments.items():
        lock.set_channels(name, [rattler.LockChannel(f"{source.url}/")])
        for subdir, platform in platforms.items():
            reporter.line(f"lock: {name} on {subdir}")
            records = condalock.solve(source, subdir, environment.specs())
            for record in records:
                # the wall clock of whoever indexed the channel; not part of the package
                record.indexed_timestamp = None
                lock.add_conda_package(name, platform, record)
            for wheel in _wheels(environment, subdir, records, store, reporter):
                wheels[wheel.url] = wheel
                with_wheels.add(name)
                lock.add_pypi_package(name, platform, wheel.name, wheel.version, wheel.url)
    return _text(lock, wheels, with_wheels)


def _wheels(
    environment: Environment,
    subdir: str,
    records: Sequence[rattler.RepoDataRecord],
    store: Store,
    reporter: Reporter,
) -> list[Wheel]:
    """What the package index contributes: what is asked for, less what conda-forge gives."""
    if not environment.pypi:
        return []
    given: dict[str, str] = {
        canonicalize_name(record.name.normalized): str(record.version)
        for record in records
        if any(spec.split()[0] in ("python", "python_abi") for spec in record.depends)
    }
    (python,) = (str(r.version) for r in records if r.name.normalized == "python")
    minor = ".".join(python.split(".")[:2])
    found = []
    for artifact in _resolve(environment.requirements(), given, subdir, minor):
        path = fetch.obtain(artifact, store, reporter)
        metadata = closure.metadata(path)
        digest = hashlib.blake2b(path.read_bytes(), digest_size=32).hexdigest()
        found.append(
            Wheel(
                name=artifact.project,
                version=artifact.version,
                url=f"{_FILES}/{digest[:2]}/{digest[2:4]}/{digest[4:]}/{artifact.filename}",
                sha256=artifact.sha256,
                requires_dist=tuple(metadata.get_all("Requires-Dist") or ()),
                requires_python=metadata.get("Requires-Python", ""),
            )
        )
    return found


def _resolve(
    requirements: Iterable[str], given: Mapping[str, str], subdir: str, minor: str
) -> list[Artifact]:
    with tempfile.TemporaryDirectory(prefix="vllm-sm75-tools-") as scratch:
        work = Path(scratch)
        (work / "asked.in").write_text("".join(f"{line}\n" for line in requirements))
        (work / "given.txt").write_text("".join(f"{n}=={v}\n" for n, v in sorted(given.items())))
        closureresolve.compile_lock(
            work, ["asked.in", "-c", "given.txt"], subdir, minor, what="pixi.toml's packages"
        )
        pylock = tomllib.loads((work / "pylock.toml").read_text())
    tags = closureresolve.target_tags(subdir, minor)
    found = []
    for entry in pylock["packages"]:
        name = canonicalize_name(entry["name"])
        if name in given:
            continue
        wheel = closureresolve.choose_wheel(entry.get("wheels", ()), tags)
        filename = wheel.get("name") or wheel["url"].rpartition("/")[2]
        sha256, size = wheel.get("hashes", {}).get("sha256"), wheel.get("size")
        if not sha256 or not size:
            raise LockError(
                f"the package index does not say the hash and size of {filename}",
                fix="make the lock against an index that does (PEP 691 and 700)",
            )
        found.append(
            Artifact(
                id=filename, project=name, version=entry["version"], filename=filename,
                sha256=sha256, size=size, role="tool", platforms=("any",), why="pixi.lock",
            )
        )  # fmt: skip
    return found


def _text(lock: rattler.LockFile, wheels: Mapping[str, Wheel], with_wheels: set[str]) -> bytes:
    """Write the lock with what py-rattler's own calls do not take: hashes, metadata, the index."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "pixi.lock"
        lock.to_path(path)
        text = path.read_text()
        for url, wheel in wheels.items():
            entry = re.compile(rf"(?m)^- pypi: {re.escape(url)}\n  name: .*\n  version: .*\n")
            if len(entry.findall(text)) != 1:
                raise LockError(f"py-rattler writes {url} in another form")
            start = entry.search(text)
            assert start is not None  # noqa: S101
            text = text[: start.end()] + _details(wheel) + text[start.end() :]
        for name in with_wheels:
            text, count = re.subn(
                rf"(?m)^(  {re.escape(name)}:\n    channels:\n(?:    - .*\n)+)",
                rf"\g<1>    indexes:\n    - {DEFAULT_INDEX.rstrip('/')}\n",
                text,
            )
            if count != 1:
                raise LockError(f"py-rattler writes environment {name} in another form")
        path.write_text(text)
        # Read and written once more: what it does not understand it would refuse or drop.
        rattler.LockFile.from_path(path).to_path(path)
        return path.read_bytes()


def _details(wheel: Wheel) -> str:
    lines = [f"  sha256: {wheel.sha256}\n"]
    if wheel.requires_dist:
        lines.append("  requires_dist:\n")
        lines += [f"  - {_quoted(line)}\n" for line in wheel.requires_dist]
    if wheel.requires_python:
        lines.append(f"  requires_python: {_quoted(wheel.requires_python)}\n")
    return "".join(lines)


def _quoted(text: str) -> str:
    """YAML's single-quoted form."""
    return "'" + text.replace("'", "''") + "'"
