"""Fetching thin wheels from an index that misbehaves."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from sm75.errors import FetchError
from sm75.fetch import fetch, plan_artifacts
from sm75.progress import PlainReporter
from sm75.remotezip import TAIL
from sm75.store import Store
from tests.unit.badserver import BadServer
from tests.unit.fetchkit import (
    HASTY,
    Case,
    index_of,
    leftovers,
    noise,
    offer,
    run,
    stored,
    thin_artifact,
    wheel_bytes,
)

BIG = {
    "demo/a.txt": b"first\n",
    "demo/big.so": noise(2_000_000),
    "demo/tool-rs": noise(100_000, 2),
    "demo/more.so": noise(2_000_000, 3),
    "demo/include/x.h": b"int x;\n" * 1000,
}
GLOBS = ("demo/tool-rs", "demo/include/**")
WHEEL = wheel_bytes(BIG)


@pytest.fixture
def thin(server: BadServer, tmp_path: Path) -> Case:
    artifact = thin_artifact(WHEEL, GLOBS, tmp_path / "work")
    return Case(artifact, offer(server, artifact, WHEEL))


def test_thin_wheel_reads_a_fraction(server: BadServer, store: Store, thin: Case) -> None:
    result = run(server, store, thin.artifact)
    assert store.get(thin.artifact).name == "demo-1.0-0thin-py3-none-any.whl"
    assert result.bytes_received < 250_000
    ranges = server.requests(thin.name)
    assert 2 <= len(ranges) <= 3
    assert all(ranges)
    assert leftovers(store) == []


def test_thin_wheel_without_range_support_reads_the_whole(
    server: BadServer, store: Store, thin: Case
) -> None:
    server.always[thin.name] = "norange"
    out = io.StringIO()
    wanted = plan_artifacts([thin.artifact], store)
    fetch(wanted, store, PlainReporter(out), index=index_of(server), options=HASTY)
    assert store.has(thin.artifact)
    assert stored(store) == [thin.artifact.stored_filename]
    assert "range" in out.getvalue()
    assert leftovers(store) == []


def test_thin_wheel_from_the_whole_in_the_store_needs_no_network(
    server: BadServer, store: Store, thin: Case, tmp_path: Path
) -> None:
    store.add(tmp_path / "work" / thin.artifact.filename, sha256=thin.artifact.sha256)
    wanted = plan_artifacts([thin.artifact], store)
    assert wanted.bytes_download == 0
    result = run(server, store, thin.artifact)
    assert result.requests == 0
    assert store.has(thin.artifact)


def test_thin_wheel_resumes_a_segment(server: BadServer, store: Store, thin: Case) -> None:
    server.moods[thin.name] = ["", "truncate"]
    run(server, store, thin.artifact)
    assert store.has(thin.artifact)


def true_record(wheel: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        return archive.read("demo-1.0.dist-info/RECORD")


@pytest.mark.parametrize("mood", ["alter-member", "alter-record"])
def test_altered_thin_wheel_is_refused(
    server: BadServer, store: Store, thin: Case, mood: str
) -> None:
    server.hashes[thin.name] = thin.artifact.sha256
    members = {**BIG, "demo/tool-rs": noise(100_000, 9)}
    # The first lies in its RECORD, the second is a sound wheel of other content.
    record = true_record(WHEEL) if mood == "alter-member" else None
    altered = wheel_bytes(members, record=record)
    assert len(altered) == len(WHEEL)
    server.files[thin.name] = altered
    expected = "tool-rs is not what" if mood == "alter-member" else "another RECORD"
    with pytest.raises(FetchError, match=expected):
        run(server, store, thin.artifact)
    assert stored(store) == []
    assert leftovers(store) == []


def test_thin_wheel_of_another_hash_is_refused(
    server: BadServer, store: Store, thin: Case, tmp_path: Path
) -> None:
    import msgspec

    partial = thin.artifact.partial
    assert partial is not None
    wrong = msgspec.structs.replace(
        thin.artifact, partial=msgspec.structs.replace(partial, sha256="2" * 64)
    )
    with pytest.raises(FetchError, match="2222"):
        run(server, store, wrong)
    assert stored(store) == []
    assert leftovers(store) == []


def test_two_thin_wheels_of_one_file_without_range_support(
    server: BadServer, store: Store, thin: Case, tmp_path: Path
) -> None:
    other = thin_artifact(WHEEL, ("demo/a.txt",), tmp_path / "work")
    server.always[thin.name] = "norange"
    run(server, store, thin.artifact, other)
    assert store.has(thin.artifact)
    assert store.has(other)
    assert leftovers(store) == []
    # One after the other: nobody went on from the bytes that the other was writing.
    tail = f"bytes={len(WHEEL) - TAIL}-{len(WHEEL) - 1}"
    assert set(server.requests(thin.name)) == {tail, ""}


def test_thin_wheel_without_range_support_altered(
    server: BadServer, store: Store, thin: Case
) -> None:
    server.hashes[thin.name] = thin.artifact.sha256
    server.files[thin.name] = WHEEL[:-1] + b"?"
    server.always[thin.name] = "norange"
    with pytest.raises(FetchError, match="not the file that the lock pins"):
        run(server, store, thin.artifact)
    assert stored(store) == []


def test_what_a_killed_run_wrote_of_a_thin_wheel_is_removed(
    server: BadServer, store: Store, thin: Case
) -> None:
    left = store.part(thin.artifact.stored_sha256, ".4711.thin")
    left.write_bytes(b"half")
    other = store.part("0" * 64, ".4711.thin")
    other.write_bytes(b"of another file, which another run may be writing")
    run(server, store, thin.artifact)
    assert leftovers(store) == [other.name]
