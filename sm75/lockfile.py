"""The release lock and the target contracts: schema, reading, writing.

``lock/<release>/release.toml`` names every input of a build by project, version, file name,
sha256 and size. It carries no host name: ``sm75.index`` finds the files on whatever package
index the user has configured, and the hash decides whether a file is the one meant.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import tomlkit
import tomlkit.items
from msgspec import Meta
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from sm75.errors import LockError, UsageError

SCHEMA = 1
"""Version of the lock's schema; a lock of another version is refused, never guessed at."""

Role = Literal["source", "target", "toolchain", "tool", "prebuilt"]
BuildPlatform = Literal["linux-64", "linux-aarch64"]
RustMode = Literal["source", "prebuilt", "none"]

BUILD_PLATFORMS: tuple[str, ...] = get_args(BuildPlatform)
# What is built for: the g5g; and x86-64, for proofs on other GPUs only (docs/proofs.md).
G5G = "linux-aarch64"
PROOFS = "linux-64"
TARGET_PLATFORMS = (G5G, PROOFS)
RUST_MODES: tuple[str, ...] = get_args(RustMode)

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
OptionalSha256 = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
Text = Annotated[str, Meta(min_length=1)]
# Bounded: a number without end breaks whatever prints it.
Size = Annotated[int, Meta(gt=0, le=1 << 62)]
# A plain file name: it becomes part of a path in the store.
Filename = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+!-]*\Z", max_length=240)]


_Kind = TypeVar("_Kind")


class _Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Common settings of everything in a lock."""


class Partial(_Record, frozen=True, kw_only=True):
    """The thin wheel made of an artifact's chosen members (see ``sm75.remotezip``).

    Attributes:
        filename: Its file name, a valid wheel name.
        sha256: Of the thin wheel, which is deterministic.
        size: Of the thin wheel, in bytes.
        download: Bytes read from the network to make it, range requests only.
    """

    filename: Filename
    sha256: Sha256
    size: Size
    download: Size


class Artifact(_Record, frozen=True, kw_only=True):
    """One input file.

    Attributes:
        id: Unique name inside the lock; recipes and tools refer to it.
        project: Project name on the package index.
        version: Its version.
        filename: The file's name on the index.
        sha256: Of the whole file.
        size: Of the whole file, in bytes.
        role: What it is for. ``prebuilt`` is only used with ``--rust prebuilt``.
        platforms: Build platforms that need it, or ``any``.
        targets: Target platforms that need it; empty: all. One that has a counterpart for another
            target is named as that one is, with ``-for-<target>``.
        why: Why it is needed, in a few words.
        provides: Revision of what it carries, where that is not its own version (CUTLASS: v4.8.0).
        members: Glob patterns of the wheel members to take; empty: the whole file.
        record_sha256: sha256 of the wheel's RECORD; needed with ``members``.
        partial: The thin wheel; needed with ``members``.
    """

    id: Text
    project: Text
    version: Text
    filename: Filename
    sha256: Sha256
    size: Size
    role: Role
    platforms: tuple[Literal["any", "linux-64", "linux-aarch64"], ...]
    targets: tuple[Literal["linux-aarch64", "linux-64"], ...] = ()
    why: str = ""
    provides: str = ""
    members: tuple[Text, ...] = ()
    record_sha256: OptionalSha256 = ""
    partial: Partial | None = None

    def needed(self, build_platform: str, target: str, rust: str) -> bool:
        """Whether a build there, for that target and with that Rust mode, reads it."""
        return (
            bool({"any", build_platform} & set(self.platforms))
            and (not self.targets or target in self.targets)
            and (self.role != "prebuilt" or rust == "prebuilt")
        )

    @property
    def stored_filename(self) -> str:
        """Name of the file that the store keeps: the thin wheel's, or the whole file's."""
        return self.partial.filename if self.partial else self.filename

    @property
    def stored_sha256(self) -> str:
        """sha256 of the file that the store keeps."""
        return self.partial.sha256 if self.partial else self.sha256

    @property
    def stored_size(self) -> int:
        """Size in bytes of the file that the store keeps."""
        return self.partial.size if self.partial else self.size

    @property
    def download_size(self) -> int:
        """Bytes that fetching it from nothing reads from the network."""
        return self.partial.download if self.partial else self.size


class PatchRef(_Record, frozen=True, kw_only=True):
    """One file below ``patches/<release>``, pinned."""

    file: Text
    sha256: Sha256


class Declared(_Record, frozen=True, kw_only=True):
    """A pin that the source tree itself declares.

    Attributes:
        name: What is pinned, for instance ``CUTLASS_REVISION``.
        file: The file of the tree that says so.
        value: The value read there.
    """

    name: Text
    file: Text
    value: Text


class Substitution(_Record, frozen=True, kw_only=True):
    """A reasoned departure from a declared pin.

    Attributes:
        name: Of the declaration departed from.
        declared: Its value.
        used: What is used instead, or that it is left out.
        reason: Why that is sound.
        covers: Other declarations that fall with it.
        patch: The patch that carries it out, a file of the release's series; empty: none is needed.
    """

    name: Text
    declared: Text
    used: Text
    reason: Text
    covers: tuple[Text, ...] = ()
    patch: str = ""


class Rust(_Record, frozen=True, kw_only=True):
    """How the Rust frontend is had.

    Attributes:
        modes: What ``--rust`` may be for this release.
        default: What it is when nothing is said.
        channel: The toolchain channel that the tree declares.
        cargo_lock_sha256: sha256 of the tree's Cargo.lock.
        git: Its git dependencies, ``name@revision``.
        git_sha256: sha256 of each one's archive (``sm75.gitarchive``), by the same name; those that
            are not there were never read by whoever made the lock, and are not used.
    """

    modes: tuple[RustMode, ...]
    default: RustMode
    channel: Text
    cargo_lock_sha256: Sha256
    git: tuple[Text, ...] = ()
    git_sha256: dict[Text, Sha256] = msgspec.field(default_factory=dict)


class Constraint(_Record, frozen=True, kw_only=True):
    """A version bound of the package, with its reason.

    Attributes:
        name: The project bounded.
        spec: The bound, for instance ``>=5.5.3``.
        reason: Why.
        error: What happens outside the bound, when it is known.
        source: Who says so.
        test: What checks it.
    """

    name: Text
    spec: Text
    reason: Text
    error: str = ""
    source: str = ""
    test: str = ""


class Skipped(_Record, frozen=True, kw_only=True):
    """A newer release that ``lock --vllm latest`` could not take.

    Attributes:
        release: The vLLM release.
        reason: What stopped it: the pin, bound or patch, as it was said then.
    """

    release: Text
    reason: Text


class ReleaseLock(_Record, frozen=True, kw_only=True):
    """All inputs of one release.

    Attributes:
        schema: Must be ``SCHEMA``.
        vllm: The vLLM version, also the name of the lock's directory.
        target: Name of the target contract, a file below ``lock/targets``.
        artifacts: Every input file.
        patches: Every file below ``patches/<release>``, pinned.
        declared: Pins read out of the source tree.
        substitutions: Departures from them.
        rust: How the Rust frontend is had.
        constraints: Version bounds of the package.
        skipped: Newer releases that were tried first, newest first.
    """

    schema: int
    vllm: Text
    target: Text
    artifacts: tuple[Artifact, ...]
    rust: Rust
    patches: tuple[PatchRef, ...] = ()
    declared: tuple[Declared, ...] = ()
    substitutions: tuple[Substitution, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def artifact(self, name: str) -> Artifact:
        """The artifact of that id.

        Raises:
            LockError: There is none.
        """
        for artifact in self.artifacts:
            if artifact.id == name:
                return artifact
        raise LockError(
            f"the lock of vLLM {self.vllm} has no artifact '{name}'",
            why="known: " + ", ".join(a.id for a in self.artifacts),
            fix="correct the name, or restore the lock: git checkout -- lock",
        )


class TargetContract(_Record, frozen=True, kw_only=True):
    """What the machine that runs the package provides.

    Attributes:
        name: The contract's name, also its file's stem.
        torch: Version of the torch found there, local label included.
        torch_arches: Arch list that torch was compiled for (``sm_75`` ...).
        cuda: CUDA version of that torch.
        python: Python minors (``3.12``); empty: not known.
        glibc: glibc version; empty: not known.
        driver: NVIDIA driver version; empty: not known.
        path: Directory of the environment that holds torch.
        standing: ``seen`` on a real machine, or ``published`` by its maker.
        sources: Where the facts come from.
    """

    name: Text
    torch: Text
    torch_arches: tuple[Text, ...]
    cuda: Text
    python: tuple[Text, ...]
    glibc: str
    driver: str
    path: Text
    standing: Literal["published", "seen"]
    sources: tuple[Text, ...]


def known_releases(root: Path) -> list[str]:
    """Names of the releases that have a lock below ``root/lock``, oldest first."""
    found = [path.parent.name for path in (root / "lock").glob("*/release.toml")]
    return sorted(found, key=_version_key)


def load_release(root: Path, release: str | None = None) -> ReleaseLock:
    """Read and check a release lock.

    Args:
        root: The repository.
        release: Its name; None: the one that ``lock/default`` names.

    Raises:
        LockError: Unknown release, unreadable, malformed or self-contradicting lock.
    """
    if release is None:
        release = _default_release(root)
    known = known_releases(root)
    if release not in known:
        raise LockError(
            f"there is no lock for vLLM release '{release}'",
            why="known releases: " + (", ".join(known) or "none"),
            fix="name one of those with --release",
        )
    path = root / "lock" / release / "release.toml"
    lock = parse_release(_read(path), where=str(path))
    if lock.vllm != release:
        raise LockError(
            f"{path} says vllm = '{lock.vllm}'",
            why=f"a lock in lock/{release} must be for vLLM {release}",
            fix="move it to the directory of its own release",
        )
    return lock


def parse_release(text: str, *, where: str = "release.toml") -> ReleaseLock:
    """Read a release lock from its text.

    Args:
        text: TOML.
        where: Named in errors.

    Raises:
        LockError: Malformed, another schema, or self-contradicting.
    """
    raw = _toml(text, where)
    if (schema := raw.get("schema")) != SCHEMA:
        # Python refuses to write a number of more than 4,300 digits.
        large = isinstance(schema, int) and abs(schema) > 999
        raise LockError(
            f"{where} has schema {'of that number' if large else repr(schema)}",
            why=f"this program reads schema {SCHEMA}",
            fix="use the program version that wrote it, or restore it: git checkout -- lock",
        )
    lock = _convert(raw, ReleaseLock, where)
    faults = list(_faults(lock))
    if faults:
        raise LockError(
            f"{where} contradicts itself",
            why="; ".join(faults),
            fix="correct it, or restore it: git checkout -- lock",
        )
    return lock


def dump_release(lock: ReleaseLock) -> str:
    """Write a release lock as TOML.

    The same lock always gives the same bytes, and ``parse_release`` gives the lock back.
    """
    document = tomlkit.document()
    document.add(tomlkit.comment(f"Every input of a build of vLLM {lock.vllm}, pinned by hash."))
    document.add(tomlkit.comment("Files are looked up on the package index the user configured."))
    raw: dict[str, Any] = msgspec.to_builtins(lock)
    tables = [(key, value) for key, value in raw.items() if isinstance(value, list | dict)]
    for key, value in raw.items():
        if not isinstance(value, list | dict):
            document.add(key, value)
    for key, value in sorted(tables, key=lambda item: _TABLES.index(item[0])):
        if isinstance(value, dict):
            document.add(tomlkit.nl())
            document.add(key, _table(value))
        elif value:
            array = tomlkit.aot()
            for entry in value:
                array.append(_table(entry))
            document.add(tomlkit.nl())
            document.add(key, array)
        else:
            document.add(key, tomlkit.array())
    return tomlkit.dumps(document)


def artifacts_for(
    lock: ReleaseLock, build_platform: str, rust: str, target: str = G5G
) -> list[Artifact]:
    """The artifacts that a build needs.

    Args:
        lock: The release lock.
        build_platform: The machine that builds, one of ``BUILD_PLATFORMS``.
        rust: One of the lock's ``rust.modes``.
        target: What is built for, one of ``TARGET_PLATFORMS``.

    Raises:
        UsageError: Unknown platform, or a mode that this release does not offer.
    """
    if build_platform not in BUILD_PLATFORMS:
        raise UsageError(
            f"cannot build on '{build_platform}'",
            why="build platforms: " + ", ".join(BUILD_PLATFORMS),
        )
    if rust not in lock.rust.modes:
        raise UsageError(
            f"vLLM {lock.vllm} has no Rust mode '{rust}'",
            why="this lock offers: " + ", ".join(lock.rust.modes),
        )
    return [a for a in lock.artifacts if a.needed(build_platform, target, rust)]


def load_target(root: Path, name: str) -> TargetContract:
    """Read a target contract, ``lock/targets/<name>.toml``.

    Raises:
        LockError: Unknown, unreadable or malformed contract.
    """
    folder = root / "lock" / "targets"
    known = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in known:
        raise LockError(
            f"there is no target contract '{name}'",
            why="known targets: " + (", ".join(known) or "none"),
            fix="name one of those, or write one on the machine: doctor --write-contract",
        )
    path = folder / f"{name}.toml"
    contract = _convert(_toml(_read(path), str(path)), TargetContract, str(path))
    if contract.name != name:
        raise LockError(f"{path} says name = '{contract.name}'", fix="rename the file or the name")
    return contract


_TABLES = (
    "skipped", "rust", "substitutions", "constraints", "declared", "patches", "artifacts",
)  # fmt: skip


def _table(entry: dict[str, Any]) -> tomlkit.items.Table:
    table = tomlkit.table()
    for key, value in entry.items():
        if isinstance(value, dict):
            inline = tomlkit.inline_table()
            inline.update(value)
            table.add(key, inline)
        elif isinstance(value, list):
            array = tomlkit.array()
            array.extend(value)
            table.add(key, array.multiline(sum(len(str(item)) for item in value) > 60))
        else:
            table.add(key, value)
    return table


def _version_key(release: str) -> tuple[int, Version, str]:
    try:
        return (1, Version(release), release)
    except InvalidVersion:
        return (0, Version("0"), release)


def _default_release(root: Path) -> str:
    path = root / "lock" / "default"
    release = _read(path).strip()
    if not release:
        raise LockError(f"{path} is empty", fix="write the name of a release into it")
    return release


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(
            f"cannot read {path}", why=str(error), fix="restore it from version control"
        ) from error


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise LockError(
            f"{where} is not TOML", why=str(error), fix="restore it from version control"
        ) from error


def _convert(raw: dict[str, Any], kind: type[_Kind], where: str) -> _Kind:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        why = str(error)
        if (hit := re.search(r"artifacts\[(\d+)\]", why)) is not None:
            entry = raw["artifacts"][int(hit.group(1))]
            name = entry.get("id") if isinstance(entry, dict) else None
            why += f" (artifact '{name}')" if name else ""
        raise LockError(
            f"{where} is malformed", why=why, fix="correct it, or restore it: git checkout -- lock"
        ) from error


def _faults(lock: ReleaseLock) -> Iterable[str]:
    ids = [artifact.id for artifact in lock.artifacts]
    yield from (f"artifact id '{name}' is used twice" for name in sorted(_repeated(ids)))
    if lock.rust.default not in lock.rust.modes:
        yield f"rust.default '{lock.rust.default}' is not one of rust.modes"
    for name in sorted(lock.rust.git_sha256.keys() - set(lock.rust.git)):
        yield f"rust.git_sha256 has '{name}', which is not one of rust.git"
    for artifact in lock.artifacts:
        for fault in _artifact_faults(artifact):
            yield f"artifact '{artifact.id}': {fault}"


def filename_identity(filename: str) -> tuple[str, Version] | None:
    """Project (normalized) and version that a wheel's or sdist's file name states, if it is one."""
    try:
        return _name_and_version(filename)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def _artifact_faults(artifact: Artifact) -> Iterable[str]:
    if not artifact.platforms:
        yield "platforms is empty"
    try:
        name, version = _name_and_version(artifact.filename)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion) as error:
        yield f"bad file name: {error}"
        return
    if canonicalize_name(artifact.project) != name or _differ(artifact.version, version):
        yield (
            f"{artifact.filename} is {name} {version}, not {artifact.project} {artifact.version}"
        )
    parts = (bool(artifact.members), bool(artifact.record_sha256), artifact.partial is not None)
    if any(parts) and not all(parts):
        yield "members, record_sha256 and partial go together"
    if artifact.members and not artifact.filename.endswith(".whl"):
        yield "members can only be taken from a wheel"
    if artifact.partial and not artifact.partial.filename.endswith(".whl"):
        yield "the thin wheel's name must end in .whl"


def _name_and_version(filename: str) -> tuple[str, Version]:
    if filename.endswith(".whl"):
        name, version, _, _ = parse_wheel_filename(filename)
    else:
        name, version = parse_sdist_filename(filename)
    return name, version


def _differ(stated: str, found: Version) -> bool:
    try:
        return Version(stated) != found
    except InvalidVersion:
        return True


def _repeated(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}
