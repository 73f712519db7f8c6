"""The closure's lock and its omissions: what is installed beside vLLM, what is left out and why.

``lock/<release>/runtime.lock`` pins every wheel that an installation needs, for each Python minor;
``lock/<release>/omissions.toml`` says which of vLLM's requirements are not met from there: those
that the target's own image provides and those that cannot matter on compute capability 7.5.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tomlkit
from msgspec import Meta
from packaging.utils import canonicalize_name
from packaging.version import Version

from sm75.errors import LockError
from sm75.lockfile import Artifact, Filename, Sha256, Size, Text, filename_identity

SCHEMA = 1
RUNTIME = "runtime.lock"
OMISSIONS = "omissions.toml"
# How the file for all releases begins; a release's own says which one.
_ALL = "# Requirements of vLLM that"

Minor = Annotated[str, Meta(pattern=r"^3\.\d+\Z")]


class _Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Common settings of everything here."""


class Package(_Record, frozen=True, kw_only=True):
    """One wheel of the closure.

    Attributes:
        project: Normalised project name.
        version: Its version.
        filename: The wheel's name on the index.
        sha256: Of the wheel.
        size: Of the wheel, in bytes.
        python: Minors that install it.
        license: As the wheel says it; SPDX where it does.
    """

    project: Text
    version: Text
    filename: Filename
    sha256: Sha256
    size: Size
    python: tuple[Minor, ...]
    license: str

    @property
    def artifact(self) -> Artifact:
        """The same as the fetch step wants it."""
        return Artifact(
            id=self.filename,
            project=self.project,
            version=self.version,
            filename=self.filename,
            sha256=self.sha256,
            size=self.size,
            role="target",
            platforms=("any",),
            why="run dependency",
        )


class RuntimeLock(_Record, frozen=True, kw_only=True):
    """The closure of one release.

    Attributes:
        schema: Must be ``SCHEMA``.
        vllm: The release.
        platform: Conda subdir.
        glibc: The newest glibc that a wheel may ask for.
        python: Minors it was resolved for.
        requirements: What was resolved: vLLM's requirements less the omissions, and torch's own.
        packages: Every wheel, sorted by project, version and file name.
    """

    schema: int
    vllm: Text
    platform: Text
    glibc: Text
    python: tuple[Minor, ...]
    requirements: tuple[Text, ...]
    packages: tuple[Package, ...]

    def of(self, python: str) -> tuple[Package, ...]:
        """The wheels that one Python minor installs."""
        return tuple(p for p in self.packages if python in p.python)


class Omission(_Record, frozen=True, kw_only=True):
    """One requirement of vLLM that the closure does not meet.

    Attributes:
        project: Its name, as vLLM writes it.
        reason: Why that is sound on compute capability 7.5, or who provides it.
        imports: Its importable names. The import tests run with none of them present, unless
            ``provided`` is set.
        provided: The target's image has it, and ``dlami-torch`` makes it visible.
        optional: With ``provided``: not every image has it, and the package does not ask for it.
        lost: What no longer works without it; empty: nothing that could run there.
    """

    project: Text
    reason: Text
    imports: tuple[Text, ...]
    provided: bool = False
    optional: bool = False
    lost: str = ""


class Omissions(_Record, frozen=True, kw_only=True):
    """The whole file.

    Attributes:
        schema: Must be ``SCHEMA``.
        torch: What the image's torch imports besides the packages that the image provides.
        offered: What the channel has though nothing requires it.
        omit: The omissions.
    """

    schema: int
    torch: tuple[Text, ...]
    offered: tuple[Text, ...] = ()
    omit: tuple[Omission, ...]

    @property
    def projects(self) -> frozenset[str]:
        """Normalised names of all of them."""
        return frozenset(canonicalize_name(o.project) for o in self.omit)

    @property
    def absent_imports(self) -> frozenset[str]:
        """Names that must not be importable where the closure is installed."""
        return frozenset(name for o in self.omit if not o.provided for name in o.imports)


def _load(path: Path, kind: type[Any], fix: str) -> Any:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LockError(f"cannot read {path}", why=str(error), fix=fix) from error
    if raw.get("schema") != SCHEMA:
        raise LockError(
            f"{path} has schema {raw.get('schema')!r}",
            why=f"this program reads schema {SCHEMA}",
            fix=fix,
        )
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise LockError(f"{path} is malformed", why=str(error), fix=fix) from error


def load_runtime(root: Path, release: str) -> RuntimeLock:
    """Read ``lock/<release>/runtime.lock``.

    Args:
        root: The project's directory.
        release: The vLLM release.

    Raises:
        LockError: There is none, or it is malformed or contradicts itself.
    """
    path = root / "lock" / release / RUNTIME
    lock: RuntimeLock = _load(path, RuntimeLock, "make it: channel lock")
    faults = [] if lock.vllm == release else [f"it says vllm = '{lock.vllm}'"]
    for minor in lock.python:
        names = [p.project for p in lock.of(minor)]
        faults += [f"{n} is there twice for Python {minor}" for n in {*names} if names.count(n) > 1]
    for package in lock.packages:
        if filename_identity(package.filename) != (package.project, Version(package.version)):
            faults.append(f"{package.filename} is not {package.project} {package.version}")
        if unknown := set(package.python) - set(lock.python):
            faults.append(f"{package.filename} is for Python {', '.join(sorted(unknown))}")
    if faults:
        raise LockError(f"{path} contradicts itself", why="; ".join(sorted(faults)[:5]))
    return lock


def load_omissions(root: Path, release: str) -> Omissions:
    """Read ``lock/<release>/omissions.toml``.

    Args:
        root: The project's directory.
        release: The vLLM release.

    Raises:
        LockError: There is none, or it is malformed.
    """
    path = root / "lock" / release / OMISSIONS
    found: Omissions = _load(path, Omissions, "restore it from version control")
    return found


def omissions_for(root: Path, release: str, required: Iterable[str]) -> str:
    """Make a release's ``omissions.toml``: of ``lock/omissions.toml`` what the release requires.

    Args:
        root: The project's directory.
        release: The vLLM release.
        required: Projects that it requires, by any spelling.

    Raises:
        LockError: ``lock/omissions.toml`` is missing or malformed.
    """
    path = root / "lock" / OMISSIONS
    _load(path, Omissions, "restore it from version control")
    text = path.read_text(encoding="utf-8")
    if not text.startswith(_ALL):
        raise LockError(f"{path} does not begin with '{_ALL}'", fix="restore that line")
    document = tomlkit.parse(text.replace(_ALL, _ALL.replace("vLLM", f"vLLM {release}", 1), 1))
    # torch requires triton, and nothing else does by name
    names = {canonicalize_name(name) for name in required} | {"triton"}
    entries = document["omit"]
    for place in reversed(range(len(entries))):
        if canonicalize_name(str(entries[place]["project"])) not in names:
            del entries[place]
    return tomlkit.dumps(document).rstrip("\n") + "\n"


def parse_omissions(text: str) -> Omissions:
    """Read omissions from text that :func:`omissions_for` made."""
    return msgspec.convert(tomllib.loads(text), Omissions)


def dump_runtime(lock: RuntimeLock) -> str:
    """Write a runtime lock as TOML; the same lock always gives the same bytes."""
    document = tomlkit.document()
    document.add(tomlkit.comment(f"Run dependencies of vLLM {lock.vllm}, pinned by hash."))
    document.add(tomlkit.comment("Made by `channel lock`; edit omissions.toml, not this."))
    raw: dict[str, Any] = msgspec.to_builtins(lock)
    packages = raw.pop("packages")
    for key, value in raw.items():
        if isinstance(value, list | tuple):
            array = tomlkit.array()
            for entry in value:
                array.add_line(entry)
            array.add_line(indent="")
            document.add(key, array)
        else:
            document.add(key, value)
    entries = tomlkit.aot()
    for package in packages:
        table = tomlkit.table()
        for key, value in package.items():
            table.add(key, value)
        entries.append(table)
    document.add(tomlkit.nl())
    document.add("packages", entries)
    return tomlkit.dumps(document)
