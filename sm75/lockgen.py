"""Fill in an artifact's hashes and sizes from the package index, when a lock is made.

The index's word is taken here, and only here: from then on the lock's hashes decide.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from sm75.errors import LockError
from sm75.index import PackageIndex
from sm75.lockfile import Artifact, Partial, Role, filename_identity
from sm75.remotezip import Thin, remote_thin, thin_filename
from sm75.store import hash_file
from sm75.transfer import FileLink, RangeIgnored, Transfer, TransferOptions


@dataclass(frozen=True, kw_only=True)
class ArtifactSpec:
    """What is known of an artifact before the index is asked.

    Attributes:
        id: See ``Artifact``, as for the other fields of the same name.
        project: Project name.
        version: Exact version.
        pattern: Glob that exactly one file name of that version matches.
        members: Globs of wheel members; empty: the whole file.
    """

    id: str
    project: str
    version: str
    pattern: str
    role: Role
    platforms: tuple[str, ...] = ("any",)
    why: str = ""
    members: tuple[str, ...] = ()


def resolve_artifact(
    index: PackageIndex, spec: ArtifactSpec, options: TransferOptions | None = None
) -> Artifact:
    """Pin one artifact.

    Args:
        index: The package index.
        spec: What is wanted.
        options: How patient to be.

    Raises:
        LockError: No file or several match, or the server cannot serve parts of a file.
        FetchError: The index or the file cannot be read.
    """
    link = choose(index.files(spec.project), spec)
    return asyncio.run(_resolve(link, spec, options))


def choose(files: list[FileLink], spec: ArtifactSpec) -> FileLink:
    """The one file that a spec means; the same name on several indexes counts once.

    Raises:
        LockError: None or several match.
    """
    version = Version(spec.version)
    hits: dict[str, FileLink] = {}
    for link in files:
        identity = filename_identity(link.filename)
        if identity is None or identity != (canonicalize_name(spec.project), version):
            continue
        if fnmatchcase(link.filename, spec.pattern):
            known = hits.get(link.filename)
            # An entry with a hash spares the download that computing one takes.
            if known is None or (known.sha256 is None and link.sha256 is not None):
                hits[link.filename] = link
    if len(hits) != 1:
        raise LockError(
            f"'{spec.pattern}' matches {len(hits)} files of {spec.project} {spec.version}",
            why=", ".join(sorted(hits)) or f"the index lists {len(files)} files of the project",
            fix="make the pattern name exactly one file",
        )
    return next(iter(hits.values()))


async def _resolve(link: FileLink, spec: ArtifactSpec, options: TransferOptions | None) -> Artifact:
    with tempfile.TemporaryDirectory(prefix="vllm-sm75-lock-") as name:
        work = Path(name)
        async with Transfer(options) as transfer:
            size = link.size or await transfer.size(link)
            sha256 = link.sha256
            if sha256 is None:
                whole = work / "whole"
                await transfer.download(link, whole, total=size)
                sha256 = await asyncio.to_thread(hash_file, whole)
            thin: Thin | None = None
            read = 0
            if spec.members:
                before = transfer.received
                thin = await _thin(transfer, link, size, spec, work)
                read = transfer.received - before
    return Artifact(
        id=spec.id,
        project=canonicalize_name(spec.project),
        version=spec.version,
        filename=link.filename,
        sha256=sha256,
        size=size,
        role=spec.role,
        platforms=spec.platforms,  # type: ignore[arg-type]  # checked when the lock is read
        why=spec.why,
        members=spec.members,
        record_sha256=thin.record_sha256 if thin else "",
        partial=Partial(
            filename=thin_filename(link.filename),
            sha256=thin.sha256,
            size=thin.size,
            download=read or size,
        )
        if thin
        else None,
    )


async def _thin(
    transfer: Transfer, link: FileLink, size: int, spec: ArtifactSpec, work: Path
) -> Thin:
    try:
        return await remote_thin(
            transfer,
            link,
            size=size,
            members=spec.members,
            record_sha256=None,
            segments=work / "segments",
            out=work / "thin",
        )
    except RangeIgnored as error:
        raise LockError(
            f"cannot pin members of {link.filename}",
            why="the package index does not do range requests",
            fix="make the lock against an index that does",
        ) from error
