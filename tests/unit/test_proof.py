"""What the checks are given: tools out of the store, trees, and the author's seal."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sm75 import proof
from sm75.errors import UsageError
from sm75.lockfile import ReleaseLock, load_release
from sm75.store import Store
from tests.unit.projectkit import PATCHES, RELEASE, ROOT, copy_project
from tests.unit.test_bootstrap import WHEELS, stock

TOOL = b"#!/bin/sh\necho cuobjdump\n"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def lock(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> ReleaseLock:
    monkeypatch.setattr(proof, "build_platform", lambda: "linux-64")
    tag, role, files = WHEELS["cuda-cuobjdump-linux-64"]
    (name,) = files
    monkeypatch.setitem(WHEELS, "cuda-cuobjdump-linux-64", (tag, role, {name: TOOL}))
    return stock(tmp_path / "wheels", store)


def test_cuobjdump_comes_out_of_its_wheel(tmp_path: Path, store: Store, lock: ReleaseLock) -> None:
    tool = proof.cuobjdump(tmp_path, lock, store)
    assert tool is not None
    said = subprocess.run([tool], check=True, capture_output=True, text=True).stdout
    assert said == "cuobjdump\n"
    before = tool.stat().st_mtime_ns
    assert proof.cuobjdump(tmp_path, lock, store) == tool
    assert tool.stat().st_mtime_ns == before


def test_altered_cuobjdump_is_not_used(tmp_path: Path, store: Store, lock: ReleaseLock) -> None:
    tool = proof.cuobjdump(tmp_path, lock, store)
    assert tool is not None
    tool.write_bytes(b"#!/bin/sh\necho sm_75\n")
    assert proof.cuobjdump(tmp_path, lock, store) == tool
    assert tool.read_bytes() == TOOL


def test_no_cuobjdump_in_the_store(tmp_path: Path, lock: ReleaseLock) -> None:
    assert proof.cuobjdump(tmp_path, lock, Store(tmp_path / "empty")) is None
    assert not (tmp_path / ".sm75").exists()


def test_package_that_is_not_there(tmp_path: Path, store: Store, lock: ReleaseLock) -> None:
    with pytest.raises(UsageError, match=r"no-such\.conda"):
        proof.verify_package(tmp_path, lock, store, tmp_path / "no-such.conda")


def test_tree_by_path_and_by_release(tmp_path: Path, store: Store) -> None:
    lock = load_release(ROOT, RELEASE)
    assert proof.sdist(ROOT, lock, store, str(tmp_path)) == tmp_path
    with pytest.raises(UsageError, match=r"^9\.9\.9 is neither a path nor a release"):
        proof.sdist(ROOT, lock, store, "9.9.9")


def test_seal_pins_what_there_is_in_both_places(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    assert proof.seal(root, load_release(root, RELEASE)) == []
    patch = min((root / PATCHES).glob("*.patch"))
    name = patch.name
    lines = patch.read_text().split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith("+") and line[:3] != "+++")
    lines[at] += " "
    patch.write_text("\n".join(lines))
    assert name in proof.seal(root, load_release(root, RELEASE))
    pinned = {ref.file: ref.sha256 for ref in load_release(root, RELEASE).patches}
    assert f'sha256 = "{pinned[name]}"' in (root / PATCHES / "series.toml").read_text()
    assert proof.seal(root, load_release(root, RELEASE)) == []
