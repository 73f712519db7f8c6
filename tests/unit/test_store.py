"""The store: a name means checked bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sm75.errors import DiskError, FetchError
from sm75.store import AlteredError, Store, default_root, hash_file
from tests.unit.fetchkit import sdist

CONTENT = b"content\n" * 1000
ARTIFACT = sdist(CONTENT)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "demo-1.0.tar.gz"
    path.write_bytes(CONTENT)
    return path


def test_layout(store: Store, file: Path) -> None:
    path = store.add(file, sha256=SHA256, size=len(CONTENT))
    assert path == store.root / "sha256" / SHA256[:2] / SHA256 / "demo-1.0.tar.gz"
    assert store.path(SHA256) == path
    assert path.stat().st_mode & 0o777 == 0o444
    assert file.exists()
    assert store.has(ARTIFACT)
    assert store.get(ARTIFACT) == path
    assert list((store.root / "partial").iterdir()) == []


def test_move_takes_the_file_itself(store: Store, file: Path) -> None:
    part = store.part(SHA256)
    file.rename(part)
    store.add(part, sha256=SHA256, filename=ARTIFACT.filename, move=True)
    assert not part.exists()
    assert store.has(ARTIFACT)


def test_wrong_bytes_get_no_name(store: Store, file: Path) -> None:
    with pytest.raises(AlteredError, match=f"expected sha256 {'0' * 64}, got {SHA256}"):
        store.add(file, sha256="0" * 64)
    with pytest.raises(AlteredError, match="has 8000 bytes instead of 7999"):
        store.add(file, sha256=SHA256, size=7999)
    assert not (store.root / "sha256").exists()
    assert file.read_bytes() == CONTENT
    assert list((store.root / "partial").iterdir()) == []


def test_absent(store: Store) -> None:
    assert not store.has(ARTIFACT)
    with pytest.raises(FetchError, match="is not in the store"):
        store.get(ARTIFACT)
    with pytest.raises(FetchError, match="no file with sha256"):
        store.path(SHA256)


def test_altered_afterwards_is_noticed(store: Store, file: Path) -> None:
    path = store.add(file, sha256=SHA256)
    times = path.stat()
    path.chmod(0o644)
    path.write_bytes(CONTENT[:-1] + b"?")
    # Same size, same modification time: the change time tells.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not store.has(ARTIFACT)
    with pytest.raises(FetchError, match="was altered"):
        store.get(ARTIFACT)


def test_truncated_afterwards_is_noticed(store: Store, file: Path) -> None:
    path = store.add(file, sha256=SHA256)
    path.chmod(0o644)
    path.write_bytes(CONTENT[:-1])
    assert not store.has(ARTIFACT)


def test_a_second_look_reads_no_bytes(
    store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.add(file, sha256=SHA256)
    looks: list[Path] = []

    def counted(path: Path) -> str:
        looks.append(path)
        return hash_file(path)

    monkeypatch.setattr("sm75.store.hash_file", counted)
    assert store.has(ARTIFACT)
    assert looks == []
    os.link(path, path.with_name("other"))  # changes the change time, not the bytes
    assert store.has(ARTIFACT)
    assert store.has(ARTIFACT)
    assert looks == [path]


def test_spoilt_memo_means_a_new_check(store: Store, file: Path) -> None:
    path = store.add(file, sha256=SHA256)
    (path.parent / ".checked").write_text("{")
    assert store.has(ARTIFACT)


def test_store_that_cannot_be_written(tmp_path: Path, file: Path) -> None:
    (tmp_path / "way").write_text("")
    with pytest.raises(DiskError, match="cannot write") as caught:
        Store(tmp_path / "way" / "store").add(file, sha256=SHA256)
    assert "SM75_STORE" in caught.value.fix


def test_source_that_is_missing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="cannot read"):
        store.add(tmp_path / "nothing", sha256=SHA256)


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SM75_STORE", str(tmp_path / "mine"))
    assert default_root() == tmp_path / "mine"
    monkeypatch.delenv("SM75_STORE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_root() == tmp_path / "cache" / "vllm-sm75" / "store"


def test_killed_writer_leaves_no_name(store: Store, tmp_path: Path) -> None:
    """A process that dies between check and rename leaves the store as it was."""
    script = (
        "import os, sys; from pathlib import Path; from sm75.store import Store; "
        "Path.replace = lambda *a: os._exit(9); "
        "Store(Path(sys.argv[1])).add(Path(sys.argv[2]), sha256=sys.argv[3])"
    )
    file = tmp_path / "f"
    file.write_bytes(CONTENT)
    done = subprocess.run(
        [sys.executable, "-c", script, str(store.root), str(file), SHA256],
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 9
    assert list((store.root / "sha256").glob("*/*/*")) == []
