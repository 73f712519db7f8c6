"""Fetching onto a full disk, twice at once, and interrupted."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sm75 import fetch as fetch_module
from sm75.errors import DiskError
from sm75.fetch import FetchResult, fetch, plan_artifacts
from sm75.lockfile import Artifact
from sm75.progress import PlainReporter
from sm75.store import Store
from tests.unit.badserver import BadServer
from tests.unit.fetchkit import (
    CONTENT,
    HASTY,
    Case,
    index_of,
    leftovers,
    offer,
    run,
    stored,
    thin_artifact,
    wheel_bytes,
)

ROOT = Path(__file__).parents[2]


def test_too_little_room_is_told_before_the_start(
    server: BadServer, store: Store, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = (10**9, 10**9 - 10**6, 10**6)
    monkeypatch.setattr(
        "sm75.fetch.shutil.disk_usage", lambda path: type("U", (), {"free": usage[2]})
    )
    with pytest.raises(DiskError, match="not enough room"):
        run(server, store, case.artifact)
    assert server.log == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs takes root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(
    server: BadServer, case: Case, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_check_room", lambda wanted, store: None)
    store = Store(small_disk / "store")
    with pytest.raises(DiskError, match="the disk is full") as caught:
        run(server, store, case.artifact)
    assert caught.value.exit_code == 9
    assert stored(store) == []


def test_full_disk_while_a_thin_wheel_is_written(
    server: BadServer, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_check_room", lambda wanted, store: None)
    content = wheel_bytes({"demo/zeros-rs": bytes(3_000_000)})
    artifact = thin_artifact(content, ("demo/zeros-rs",), tmp_path / "work")
    offer(server, artifact, content)
    store = Store(small_disk / "store")
    with pytest.raises(DiskError, match="the disk is full"):
        run(server, store, artifact)
    assert stored(store) == []
    assert [p for p in leftovers(store) if p.endswith(".thin")] == []


def test_file_size_limit_counts_as_full(server: BadServer, store: Store, case: Case) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(DiskError, match="the disk is full"):
            run(server, store, case.artifact)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stored(store) == []
    run(server, store, case.artifact)
    assert store.has(case.artifact)


def test_store_that_is_a_file(server: BadServer, case: Case, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    with pytest.raises(DiskError, match="cannot write"):
        run(server, Store(tmp_path / "store"), case.artifact)


DRIVER = """
import sys
from pathlib import Path
from sm75.errors import Sm75Error
from sm75.fetch import fetch, plan_artifacts
from sm75.index import IndexConfig, PackageIndex
from sm75.lockfile import Artifact
from sm75.progress import make_reporter
from sm75.store import Store
from sm75.transfer import TransferOptions
url, root, sha256, size = sys.argv[1:]
artifact = Artifact(id="demo", project="demo", version="1.0", filename="demo-1.0.tar.gz",
    sha256=sha256, size=int(size), role="source", platforms=("any",))
store = Store(Path(root))
options = TransferOptions(read_timeout=60)
print("started", flush=True)
try:
    with make_reporter() as reporter:
        fetch(plan_artifacts([artifact], store), store, reporter,
              index=PackageIndex(IndexConfig(indexes=(url,)), options), options=options)
except Sm75Error as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def start(server: BadServer, store: Store, artifact: Artifact) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(DRIVER),
            server.url,
            str(store.root),
            artifact.sha256,
            str(artifact.size),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_ctrl_c(server: BadServer, store: Store, case: Case) -> None:
    server.moods[case.name] = ["stall"]
    process = start(server, store, case.artifact)
    part = store.root / "partial" / f"{case.artifact.sha256}.part"
    wait_for(lambda: part.exists() and part.stat().st_size > 1_000_000)
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - asked < 20
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "run the same command again" in err
    assert "Traceback" not in err
    assert stored(store) == []
    have = part.stat().st_size
    result = run(server, store, case.artifact)
    assert store.get(case.artifact).read_bytes() == CONTENT
    assert result.bytes_received == len(CONTENT) - have


def test_kill_leaves_nothing_in_the_store(server: BadServer, store: Store, case: Case) -> None:
    server.moods[case.name] = ["stall"]
    process = start(server, store, case.artifact)
    part = store.root / "partial" / f"{case.artifact.sha256}.part"
    wait_for(lambda: part.exists() and part.stat().st_size > 1_000_000)
    process.kill()
    process.communicate(timeout=60)
    assert stored(store) == []
    run(server, store, case.artifact)
    assert store.get(case.artifact).read_bytes() == CONTENT


def test_two_fetches_at_once_download_once(server: BadServer, store: Store, case: Case) -> None:
    server.moods[case.name] = ["stall"]
    process = start(server, store, case.artifact)
    wait_for(lambda: server.requests(case.name))
    out = io.StringIO()
    wanted = plan_artifacts([case.artifact], store)
    results: list[FetchResult] = []

    def second() -> None:
        reporter = PlainReporter(out)
        results.append(fetch(wanted, store, reporter, index=index_of(server), options=HASTY))

    thread = threading.Thread(target=second)
    thread.start()
    wait_for(lambda: "waiting" in out.getvalue())
    server.release.set()  # the first one's connection ends; it resumes
    _, err = process.communicate(timeout=60)
    thread.join(60)
    assert process.returncode == 0, err
    assert results[0].fetched == ()
    assert results[0].bytes_received == 0
    assert store.get(case.artifact).read_bytes() == CONTENT
    assert len(server.requests(case.name)) == 2
