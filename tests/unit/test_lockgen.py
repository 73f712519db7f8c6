"""Pins from an index: what a lock says is what a fetch then finds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sm75.errors import FetchError, LockError
from sm75.fetch import fetch, plan_artifacts
from sm75.index import PackageIndex
from sm75.lockfile import ReleaseLock, Rust, dump_release, parse_release
from sm75.lockgen import ArtifactSpec, resolve_artifact
from sm75.progress import SilentReporter
from sm75.store import Store
from tests.unit.badserver import BadServer
from tests.unit.fetchkit import HASTY, index_of, noise, wheel_bytes

WHEEL = wheel_bytes({"demo/a-rs": noise(50_000), "demo/big.so": noise(1_000_000)})
NAME = "demo/demo-1.0-py3-none-any.whl"
SPEC = ArtifactSpec(
    id="demo",
    project="Demo",
    version="1.0",
    pattern="*-any.whl",
    role="prebuilt",
    members=("demo/*-rs",),
    why="the binary",
)


@pytest.fixture
def server() -> Iterator[BadServer]:
    with BadServer() as running:
        running.files = {NAME: WHEEL, "demo/demo-1.0.tar.gz": b"s", "demo/demo-1.1.tar.gz": b"t"}
        yield running


def test_a_pinned_thin_wheel_is_then_fetched(server: BadServer, tmp_path: Path) -> None:
    artifact = resolve_artifact(index_of(server), SPEC, HASTY)
    assert artifact.sha256 == hashlib.sha256(WHEEL).hexdigest()
    assert artifact.size == len(WHEEL)
    assert artifact.partial is not None
    assert artifact.partial.download < 150_000
    rust = Rust(modes=("prebuilt",), default="prebuilt", channel="1", cargo_lock_sha256="0" * 64)
    lock = ReleaseLock(schema=1, vllm="1", target="t", artifacts=(artifact,), rust=rust)
    assert parse_release(dump_release(lock)) == lock
    store = Store(tmp_path / "store")
    result = fetch(
        plan_artifacts([artifact], store),
        store,
        SilentReporter(),
        index=index_of(server),
        options=HASTY,
    )
    assert result.bytes_received == artifact.partial.download
    assert store.has(artifact)


def test_a_whole_file_costs_one_page(server: BadServer) -> None:
    artifact = resolve_artifact(index_of(server), whole("*.tar.gz"), HASTY)
    assert artifact.filename == "demo-1.0.tar.gz"
    assert artifact.sha256 == hashlib.sha256(b"s").hexdigest()
    assert len(server.log) == 1


def test_an_index_without_hashes_or_sizes(server: BadServer) -> None:
    server.hashes["demo/demo-1.0.tar.gz"] = None
    artifact = resolve_artifact(index_of(server), whole("*.tar.gz"), HASTY)
    assert artifact.sha256 == hashlib.sha256(b"s").hexdigest()
    assert artifact.size == 1


def test_none_or_several_files(server: BadServer) -> None:
    with pytest.raises(LockError, match="matches 2 files"):
        resolve_artifact(index_of(server), whole("*"), HASTY)
    with pytest.raises(LockError, match="matches 0 files"):
        resolve_artifact(index_of(server), whole("*.zip"), HASTY)


def test_no_ranges(server: BadServer) -> None:
    server.always[NAME] = "norange"
    with pytest.raises(LockError, match="does not do range requests"):
        resolve_artifact(index_of(server), SPEC, HASTY)


def test_no_such_member(server: BadServer) -> None:
    with pytest.raises(FetchError, match="has no member 'demo/nothing'"):
        resolve_artifact(index_of(server), whole("*.whl", ("demo/nothing",)), HASTY)


def whole(pattern: str, members: tuple[str, ...] = ()) -> ArtifactSpec:
    return ArtifactSpec(
        id="demo", project="demo", version="1.0", pattern=pattern, role="source", members=members
    )


@pytest.mark.network
def test_a_real_member_of_a_real_wheel() -> None:
    """The Rust binary of the official wheel, without reading 333 MB."""
    spec = ArtifactSpec(
        id="vllm-rs",
        project="vllm",
        version="0.33.0",
        pattern="*aarch64.whl",
        role="prebuilt",
        members=("vllm/vllm-rs",),
    )
    artifact = resolve_artifact(PackageIndex(), spec)
    assert artifact.partial is not None
    assert artifact.partial.sha256 == (
        "7f5a9c2eca340efe88db3d5af3f48efe04062e2dc49faae25b7766d9fe373ac4"
    )
    assert artifact.partial.download < 25_000_000
