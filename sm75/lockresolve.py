"""Find the artifacts of a release on the package index: which versions, which files, which hashes.

What a former lock pins stays as it is while it fits; ``upgrade`` takes the newest instead. Bytes
are read only of what no former lock has, for the index tells hashes and sizes.
"""

from __future__ import annotations

import asyncio
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from sm75.errors import LockError
from sm75.index import PackageIndex
from sm75.lockfile import Artifact, filename_identity
from sm75.lockgen import ArtifactSpec, choose, resolve_artifact
from sm75.lockpolicy import FILE, ArtifactRule, Wanted
from sm75.progress import Reporter
from sm75.transfer import FileLink, Transfer, TransferOptions

# NVIDIA's list of what belongs to one release of the toolkit; each of its versions requires the
# components' exact ones.
TOOLKIT = "cuda-toolkit"


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """One release of the CUDA toolkit.

    Attributes:
        version: For instance ``13.2.1``.
        components: Bounds by normalised project.
    """

    version: Version
    components: Mapping[str, SpecifierSet]

    @property
    def nvcc(self) -> SpecifierSet:
        """The bound of nvcc.

        Raises:
            LockError: The toolkit does not name it as those of CUDA 13 do.
        """
        if "nvidia-cuda-nvcc" in self.components:
            return self.components["nvidia-cuda-nvcc"]
        raise LockError(
            f"{TOOLKIT} {self.version} has no component nvidia-cuda-nvcc",
            why="it has " + ", ".join(sorted(self.components)[:6]),
            fix="name a target of CUDA 13, with --target",
        )


def find_toolkit(
    index: PackageIndex,
    cuda: str,
    former: Sequence[Artifact] = (),
    options: TransferOptions | None = None,
) -> Toolkit:
    """The toolkit release of a CUDA version: that of the former lock, else the newest.

    Args:
        index: The package index.
        cuda: Version of CUDA, for instance ``13.2``.
        former: Artifacts of former locks.
        options: How patient to be.

    Raises:
        LockError: The index has no toolkit of that version.
        FetchError: It cannot be read.
    """
    links = [link for link in index.files(TOOLKIT) if link.filename.endswith(".whl")]
    found = _versions(links, TOOLKIT, SpecifierSet(f"=={cuda}.*"))
    if not found:
        raise LockError(
            f"the package index has no {TOOLKIT} {cuda}",
            why="the toolkit must be of the CUDA version of the target's torch",
            fix="name a target whose CUDA it has, with --target",
        )
    pinned = {a.version for a in former if a.project == "nvidia-cuda-nvcc"}
    newest: Toolkit | None = None
    for release in sorted(found, reverse=True):
        link = choose(links, _exact(TOOLKIT, str(release), "*.whl"))
        toolkit = Toolkit(version=release, components=asyncio.run(_requires(link, options)))
        newest = newest or toolkit
        if not pinned or any(toolkit.nvcc.contains(version) for version in pinned):
            return toolkit
    assert newest is not None  # noqa: S101
    return newest


async def _requires(link: FileLink, options: TransferOptions | None) -> dict[str, SpecifierSet]:
    with tempfile.TemporaryDirectory(prefix="vllm-sm75-lock-") as scratch:
        wheel = Path(scratch) / "wheel"
        async with Transfer(options) as transfer:
            await transfer.download(link, wheel, total=link.size or await transfer.size(link))
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            text = archive.read(name).decode("utf-8", "replace")
    found: dict[str, SpecifierSet] = {}
    for line in HeaderParser().parsestr(text).get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        found[canonicalize_name(requirement.name)] = requirement.specifier
    return found


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What decides the versions that follow something.

    Attributes:
        release: The vLLM release.
        torch: The torch to compile against.
        toolkit: The CUDA toolkit.
    """

    release: str
    torch: str
    toolkit: Toolkit

    def bound(self, rule: ArtifactRule) -> SpecifierSet:
        """The bound of an artifact's version.

        Raises:
            LockError: The toolkit has no such component.
        """
        match rule.version:
            case "release":
                return SpecifierSet(f"=={self.release}", prereleases=True)
            case "torch":
                return SpecifierSet(f"=={self.torch}")
            case "toolkit":
                if rule.project in self.toolkit.components:
                    return self.toolkit.components[rule.project]
                raise LockError(
                    f"{TOOLKIT} {self.toolkit.version} has no component {rule.project}",
                    fix=f"give it a version of its own in {FILE}",
                )
            case bound:
                return SpecifierSet(bound)


def resolve(
    index: PackageIndex,
    wanted: Sequence[Wanted],
    versions: Versions,
    reporter: Reporter,
    *,
    former: Sequence[Artifact] = (),
    upgrade: bool = False,
    options: TransferOptions | None = None,
) -> tuple[Artifact, ...]:
    """Pin every artifact.

    Args:
        index: The package index.
        wanted: From ``lockpolicy.wanted``.
        versions: What decides versions.
        reporter: Shows progress.
        former: Artifacts of former locks, the most binding first.
        upgrade: Take the newest versions.
        options: How patient to be.

    Raises:
        LockError: A version or file is not there.
        FetchError: The index or a file cannot be read.
    """
    chosen: dict[int, str] = {}
    # Those of one rule must be of one version: that which all of them have.
    ordered = sorted(wanted, key=lambda w: id(w.rule))
    for key, group in groupby(ordered, key=lambda w: id(w.rule)):
        chosen[key] = _version(index, list(group), versions, former, upgrade)
    found = []
    for one in wanted:
        found.append(_pin(index, one, chosen[id(one.rule)], former, options))
        if found[-1] not in former:
            reporter.line(f"lock: {one.id} is {found[-1].filename}")
    return tuple(found)


def _version(
    index: PackageIndex,
    group: list[Wanted],
    versions: Versions,
    former: Sequence[Artifact],
    upgrade: bool,
) -> str:
    rule = group[0].rule
    bound = versions.bound(rule)
    files = index.files(rule.project)
    there = set.intersection(
        *(
            _versions([f for f in files if fnmatchcase(f.filename, w.pattern)], rule.project, bound)
            for w in group
        )
    )
    if not there:
        known = sorted(_versions(files, rule.project, SpecifierSet()))[-6:]
        raise LockError(
            f"the package index has no {rule.project}{bound} for '{rule.id}'",
            why=f"wanted are {', '.join(w.pattern for w in group)}; newest it has of the project: "
            + (", ".join(map(str, known)) or "nothing"),
            fix=f"look at the entry '{rule.id}' in {FILE}",
        )
    if not upgrade:
        for artifact in former:
            if artifact.project == rule.project and Version(artifact.version) in there:
                return artifact.version
    return str(max(there))


def _versions(links: Iterable[FileLink], project: str, bound: SpecifierSet) -> set[Version]:
    """Versions within a bound; none with a local label, which no public index should have."""
    found = {i[1] for link in links if (i := filename_identity(link.filename)) is not None
             and i[0] == canonicalize_name(project)}  # fmt: skip
    return {version for version in bound.filter(found) if version.local is None}


def _pin(
    index: PackageIndex,
    one: Wanted,
    version: str,
    former: Sequence[Artifact],
    options: TransferOptions | None,
) -> Artifact:
    rule = one.rule
    spec = ArtifactSpec(
        id=one.id, project=rule.project, version=version, pattern=one.pattern, role=rule.role,
        platforms=one.platforms, why=rule.why, members=rule.members,
    )  # fmt: skip
    link = choose(index.files(rule.project), spec)
    known = next(
        (
            artifact
            for artifact in former
            if (artifact.filename, artifact.members) == (link.filename, rule.members)
            and artifact.sha256 == link.sha256
        ),
        None,
    )
    found = known or resolve_artifact(index, spec, options)
    return msgspec.structs.replace(
        found, id=one.id, role=rule.role, platforms=one.platforms, targets=one.targets,
        why=rule.why, provides=rule.provides,
    )  # fmt: skip


def _exact(project: str, version: str, pattern: str) -> ArtifactSpec:
    return ArtifactSpec(id=project, project=project, version=version, pattern=pattern, role="tool")
