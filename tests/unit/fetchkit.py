"""Artifacts, wheels and patience for the tests of fetching."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from sm75.fetch import FetchResult, fetch, plan_artifacts
from sm75.index import IndexConfig, PackageIndex
from sm75.lockfile import Artifact, Partial
from sm75.progress import SilentReporter
from sm75.remotezip import local_thin, thin_filename
from sm75.store import Store
from sm75.transfer import TransferOptions
from tests.unit.badserver import BadServer

HASTY = TransferOptions(
    connect_timeout=10,
    read_timeout=2,
    attempts=3,
    backoff=0.01,
    backoff_max=0.05,
    retry_after_max=5,
)


def noise(size: int, seed: int = 1) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size)


def sdist(content: bytes, project: str = "demo", **changes: Any) -> Artifact:
    """An artifact that is a whole file."""
    values: dict[str, Any] = {
        "id": project,
        "project": project,
        "version": "1.0",
        "filename": f"{project}-1.0.tar.gz",
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
        "role": "source",
        "platforms": ("any",),
    }
    return Artifact(**{**values, **changes})


def wheel_bytes(
    members: dict[str, bytes], *, project: str = "demo", record: bytes | None = None
) -> bytes:
    """A wheel with those members, its metadata, and a RECORD (right unless given)."""
    info = f"{project}-1.0.dist-info"
    members = {
        **members,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    if record is None:
        record = b"".join(record_line(name, data) for name, data in members.items())
        record += f"{info}/RECORD,,\n".encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, (2024, 5, 6, 7, 8, 10))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name.endswith("-rs") else 0o100664) << 16
            archive.writestr(entry, data)
        # Stored, so that a wheel of the same sizes has the same length.
        archive.writestr(f"{info}/RECORD", record, zipfile.ZIP_STORED)
    return out.getvalue()


def record_line(name: str, data: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n".encode()


def thin_artifact(content: bytes, members: tuple[str, ...], work: Path, **changes: Any) -> Artifact:
    """An artifact that is a thin wheel of ``content``."""
    filename = "demo-1.0-py3-none-any.whl"
    work.mkdir(exist_ok=True)
    whole = work / filename
    whole.write_bytes(content)
    thin = local_thin(whole, members=members, record_sha256=None, out=work / "thin")
    return sdist(
        content,
        filename=filename,
        members=members,
        record_sha256=thin.record_sha256,
        partial=Partial(
            filename=thin_filename(filename), sha256=thin.sha256, size=thin.size, download=70_000
        ),
        **changes,
    )


def offer(server: BadServer, artifact: Artifact, content: bytes) -> str:
    """Put a file on the server; returns its name there."""
    name = f"{artifact.project}/{artifact.filename}"
    server.files[name] = content
    return name


def index_of(server: BadServer) -> PackageIndex:
    """The server as the only index."""
    return PackageIndex(IndexConfig(indexes=(server.url,)), HASTY)


CONTENT = noise(3_000_000)


class Case(NamedTuple):
    """An artifact and its name on the server."""

    artifact: Artifact
    name: str


def run(server: BadServer, store: Store, *artifacts: Artifact) -> FetchResult:
    """Fetch artifacts, silently and with little patience."""
    return fetch(
        plan_artifacts(artifacts, store),
        store,
        SilentReporter(),
        index=index_of(server),
        options=HASTY,
    )


def stored(store: Store) -> list[str]:
    """Names of the files that the store holds."""
    return sorted(p.name for p in (store.root / "sha256").glob("*/*/[!.]*"))


def leftovers(store: Store) -> list[str]:
    """Names of what unfinished work left behind."""
    return sorted(p.name for p in (store.root / "partial").glob("*"))
