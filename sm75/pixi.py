"""``pixi.toml`` and ``pixi.lock``: what they list, and whether they and ``lock/`` agree.

pixi itself is not needed for that. What it would do with them is for pixi to say.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rattler
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from rattler import exceptions

from sm75.errors import LockError
from sm75.lockfile import BUILD_PLATFORMS
from sm75.wheelmeta import marker_environment

MANIFEST, LOCK = "pixi.toml", "pixi.lock"
# pip's lists that say the same, by environment.
LISTS = {"default": ("tools.in", "tools.txt"), "dev": ("dev-tools.in", "dev-tools.txt")}
_FIX = "python3 orchestrator.py lock --tools"
_PIN = re.compile(r"(?m)^([\w.-]+)==([^\s;]+)")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What one environment of the manifest asks for.

    Attributes:
        name: Its name.
        conda: Bounds of conda packages by name, as the manifest writes them.
        pypi: Bounds of packages of the package index by name.
    """

    name: str
    conda: Mapping[str, str]
    pypi: Mapping[str, str]

    def specs(self) -> list[str]:
        """The conda specs."""
        return [f"{name} {bound}" for name, bound in sorted(self.conda.items())]

    def requirements(self) -> list[str]:
        """The requirements on the package index."""
        return [f"{name}{bound}" for name, bound in sorted(self.pypi.items())]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The parts of ``pixi.toml`` that decide what is installed.

    Attributes:
        channel: The one channel.
        platforms: Conda subdirs.
        environments: By name.
    """

    channel: str
    platforms: tuple[str, ...]
    environments: Mapping[str, Environment]


def load(root: Path) -> Manifest:
    """Read ``pixi.toml``.

    Args:
        root: The project's directory.

    Raises:
        LockError: It is missing, malformed, or has what is not understood here: more than one
            channel, bounds that are no text, platform-specific or other tables of dependencies.
    """
    path = root / MANIFEST
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        workspace = raw["workspace"]
        (channel,) = workspace["channels"]
        features = raw.get("feature", {})
        environments = {}
        for name, value in raw["environments"].items():
            chosen = value if isinstance(value, list) else value.get("features", [])
            tables = [raw, *(features[feature] for feature in chosen)]
            if isinstance(value, dict) and set(value) - {"features"}:
                raise ValueError(f"environment {name} has {', '.join(value)}")
            environments[name] = Environment(
                name=name,
                conda=_merged(tables, "dependencies"),
                pypi=_merged(tables, "pypi-dependencies"),
            )
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise LockError(
            f"{path} cannot be read",
            why=f"{type(error).__name__}: {error}",
            fix="restore it from version control, or teach sm75/pixi.py what is new in it",
        ) from error
    return Manifest(
        channel=channel, platforms=tuple(workspace["platforms"]), environments=environments
    )


def _merged(tables: list[dict[str, Any]], key: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for table in tables:
        if odd := {"target", "build-dependencies", "host-dependencies"} & set(table):
            raise ValueError(f"it has {', '.join(sorted(odd))}")
        for name, bound in table.get(key, {}).items():
            if not isinstance(bound, str):
                raise TypeError(f"the bound of {name} is no text")
            found[name] = bound
    return found


def check(root: Path) -> None:
    """Compare ``pixi.toml``, ``pixi.lock`` and ``lock/``.

    Args:
        root: The project's directory.

    Raises:
        LockError: They disagree; every disagreement is listed.
    """
    if found := list(problems(root)):
        raise LockError(
            f"{MANIFEST}, {LOCK} and lock/ disagree in {len(found)} "
            + ("place" if len(found) == 1 else "places"),
            why="\n        ".join(found),
            fix=f"correct what was changed by hand, or solve {LOCK} anew: {_FIX}",
        )


def problems(root: Path) -> Iterator[str]:
    """Where ``pixi.toml``, ``pixi.lock`` and ``lock/`` disagree, one sentence each.

    Args:
        root: The project's directory.

    Raises:
        LockError: ``pixi.toml`` is not understood.
    """
    manifest = load(root)
    if set(manifest.platforms) != set(BUILD_PLATFORMS):
        yield f"{MANIFEST}: its platforms are not those that build"
    yield from _list_problems(root, manifest)
    yield from lock_problems(root / LOCK, manifest)


def _list_problems(root: Path, manifest: Manifest) -> Iterator[str]:
    """Each tool stands in pip's list too, and the version pinned there is within the bound."""
    base: set[str] = set()
    for name, environment in manifest.environments.items():
        if name not in LISTS:
            yield f"{MANIFEST}: nothing here knows the environment {name}"
            continue
        listed, pinned = ((root / "lock" / file).read_text() for file in LISTS[name])
        ours = {
            canonicalize_name(n): b for n, b in {**environment.conda, **environment.pypi}.items()
        }
        theirs = {canonicalize_name(x) for x in listed.splitlines() if x and x[0] not in "#-"}
        # Its own: pip's list for development stands beside the other one.
        for tool in sorted((set(ours) - base - {"python"}) ^ theirs):
            where = MANIFEST if tool in theirs else f"lock/{LISTS[name][0]}"
            yield f"{where}: it does not list {tool}"
        versions = {canonicalize_name(n): v for n, v in _PIN.findall(pinned)}
        for tool in sorted(theirs & set(ours)):
            if tool in versions and versions[tool] not in SpecifierSet(ours[tool]):
                yield (
                    f"{MANIFEST}: {tool} {ours[tool]}, but lock/{LISTS[name][1]} has "
                    f"{versions[tool]}"
                )
        base |= theirs


def lock_problems(path: Path, manifest: Manifest) -> Iterator[str]:
    """Where a ``pixi.lock`` does not answer a manifest, or is not closed or not pinned."""
    if not path.is_file():
        yield f"{LOCK}: there is none; run: {_FIX}"
        return
    try:
        lock = rattler.LockFile.from_path(path)
    except (exceptions.ParseCondaLockError, OSError) as error:
        yield f"{LOCK}: {error}"
        return
    names = {name for name, _ in lock.environments()}
    for name in sorted(names ^ set(manifest.environments)):
        where = LOCK if name not in names else MANIFEST
        yield f"{where}: it has no environment {name}; run: {_FIX}"
    for name in sorted(names & set(manifest.environments)):
        locked = lock.environment(name)
        if locked is None:
            continue
        platforms = {str(platform.subdir): platform for platform in locked.platforms()}
        for subdir in sorted(set(platforms) ^ set(manifest.platforms)):
            yield f"{LOCK}: environment {name} and {subdir}: only one of the files has it"
        for subdir in sorted(set(platforms) & set(manifest.platforms)):
            records = locked.conda_repodata_records_for_platform(platforms[subdir]) or []
            wheels = locked.pypi_packages_for_platform(platforms[subdir]) or []
            where = f"{LOCK}: environment {name} on {subdir}"
            asked = manifest.environments[name]
            yield from (
                f"{where}: {problem}"
                for problem in (
                    *_conda_problems(asked, records, manifest.channel),
                    *_pypi_problems(asked, records, wheels, subdir),
                )
            )


def _conda_problems(
    asked: Environment, records: list[rattler.RepoDataRecord], channel: str
) -> Iterator[str]:
    base = rattler.Channel(channel).base_url.rstrip("/")
    wanted = [(spec, "pixi.toml asks for it") for spec in asked.specs()]
    for record in records:
        wanted += [(spec, f"{record.name.normalized} needs it") for spec in record.depends]
        if record.sha256 is None or record.size is None:
            yield f"{record.file_name} has no sha256 or size"
        if record.url != f"{base}/{record.subdir}/{record.file_name}":
            yield f"{record.url} is no file of {channel}"
    for spec, who in sorted(set(wanted)):
        if spec.startswith("__"):
            continue
        match = rattler.MatchSpec(spec)
        if not any(match.matches(record) for record in records):
            yield f"nothing is {spec}; {who}"


def _pypi_problems(
    asked: Environment,
    records: list[rattler.RepoDataRecord],
    wheels: list[rattler.PypiLockedPackage],
    subdir: str,
) -> Iterator[str]:
    versions = {canonicalize_name(wheel.name): str(wheel.version) for wheel in wheels}
    conda: dict[str, str] = {
        canonicalize_name(record.name.normalized): str(record.version) for record in records
    }
    python = ".".join(conda.get("python", "0.0").split(".")[:2])
    environment = marker_environment(subdir, python)
    wanted = [(line, "pixi.toml asks for it") for line in asked.requirements()]
    for wheel in wheels:
        wanted += [(line, f"{wheel.name} needs it") for line in wheel.requires_dist]
        if not _hashed(wheel):
            yield f"{wheel.name} has no sha256"
        if not re.fullmatch(r"https://files\.pythonhosted\.org/packages/.+\.whl", wheel.location):
            yield f"{wheel.location} is no wheel of the public package index"
        if not SpecifierSet(wheel.requires_python or "").contains(python):
            yield f"{wheel.name} needs Python {wheel.requires_python}, python is {python}"
    for line, who in sorted(set(wanted)):
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        version = versions.get(name) or conda.get(name)
        if version is None or not requirement.specifier.contains(
            Version(version), prereleases=True
        ):
            yield f"nothing is {line}; {who}"


def _hashed(wheel: rattler.PypiLockedPackage) -> bool:
    try:
        return wheel.hashes is not None and wheel.hashes.sha256 is not None
    except AttributeError:  # py-rattler 0.28 wraps the lack of hashes as if there were some
        return False
