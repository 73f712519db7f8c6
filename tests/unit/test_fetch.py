"""Fetching from an index that misbehaves: what arrives is right, or nothing does."""

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
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sm75 import fetch as fetch_module
from sm75.errors import DiskError, FetchError, UsageError
from sm75.fetch import FetchResult, fetch, plan, plan_artifacts, require
from sm75.index import IndexConfig, PackageIndex
from sm75.lockfile import Artifact, ReleaseLock, Rust
from sm75.progress import PlainReporter, SilentReporter
from sm75.store import Store
from tests.unit.badserver import BadServer, http_date
from tests.unit.fetchkit import (
    HASTY,
    index_of,
    noise,
    offer,
    sdist,
    thin_artifact,
    wheel_bytes,
)

CONTENT = noise(3_000_000)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def server() -> Iterator[BadServer]:
    with BadServer() as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def run(server: BadServer, store: Store, *artifacts: Artifact) -> FetchResult:
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
    return sorted(p.name for p in (store.root / "partial").glob("*"))


class Case(NamedTuple):
    artifact: Artifact
    name: str


@pytest.fixture
def case(server: BadServer) -> Case:
    artifact = sdist(CONTENT)
    return Case(artifact, offer(server, artifact, CONTENT))


def test_a_file_arrives_and_is_not_fetched_again(
    server: BadServer, store: Store, case: Case
) -> None:
    result = run(server, store, case.artifact)
    assert [a.id for a in result.fetched] == ["demo"]
    assert result.bytes_received == len(CONTENT)
    assert store.get(case.artifact).read_bytes() == CONTENT
    assert leftovers(store) == []
    before = len(server.log)
    again = plan_artifacts([case.artifact], store)
    assert again.todo == ()
    assert again.bytes_cached == len(CONTENT)
    assert fetch(again, store, SilentReporter()).requests == 0
    assert len(server.log) == before


def test_truncated_download_resumes_by_range(server: BadServer, store: Store, case: Case) -> None:
    server.moods[case.name] = ["truncate"]
    run(server, store, case.artifact)
    assert store.get(case.artifact).read_bytes() == CONTENT
    first, second = server.requests(case.name)
    assert first == ""
    assert second.startswith("bytes=")
    assert second != "bytes=0-2999999"


def test_forever_truncated_is_an_error_and_the_store_stays_empty(
    server: BadServer, store: Store, case: Case
) -> None:
    server.always[case.name] = "chunked-short"
    # Each try brings half of what is left; without ranges it never gets further.
    server.moods[case.name] = ["chunked-short", "norange"]
    server.files[case.name] = CONTENT[:1_000_000]
    server.hashes[case.name] = case.artifact.sha256
    with pytest.raises(FetchError) as caught:
        run(server, store, case.artifact)
    assert stored(store) == []
    assert case.artifact.filename in str(caught.value)


def test_shorter_file_than_pinned_is_refused_at_once(
    server: BadServer, store: Store, case: Case
) -> None:
    server.files[case.name] = CONTENT[:-1]
    server.hashes[case.name] = case.artifact.sha256
    with pytest.raises(FetchError, match="not the one that the lock pins") as caught:
        run(server, store, case.artifact)
    assert "3000000" in caught.value.why
    assert "2999999" in caught.value.why
    assert len(server.requests(case.name)) == 1
    assert stored(store) == []


def test_longer_answer_than_pinned_is_cut_off(server: BadServer, store: Store, case: Case) -> None:
    server.always[case.name] = "longer"
    with pytest.raises(FetchError, match="more than the 3000000 bytes"):
        run(server, store, case.artifact)
    assert stored(store) == []


def test_altered_download_is_refused_and_forgotten(
    server: BadServer, store: Store, case: Case
) -> None:
    server.always[case.name] = "alter"
    with pytest.raises(FetchError) as caught:
        run(server, store, case.artifact)
    assert case.artifact.filename in caught.value.what
    assert f"expected sha256 {case.artifact.sha256}, got " in caught.value.why
    assert stored(store) == []
    assert leftovers(store) == []
    assert caught.value.exit_code == 4


def test_not_found(server: BadServer, store: Store, case: Case) -> None:
    server.always[case.name] = 404
    with pytest.raises(FetchError) as caught:
        run(server, store, case.artifact)
    assert "HTTP 404" in str(caught.value)
    assert len(server.requests(case.name)) == 1


def test_forbidden_names_credentials(server: BadServer, store: Store, case: Case) -> None:
    server.always[case.name] = 403
    with pytest.raises(FetchError, match="credentials"):
        run(server, store, case.artifact)


def test_server_errors_are_tried_again(server: BadServer, store: Store, case: Case) -> None:
    server.moods[case.name] = [500, 503]
    server.moods["simple/demo"] = [502]
    run(server, store, case.artifact)
    assert store.get(case.artifact).read_bytes() == CONTENT
    assert len(server.requests(case.name)) == 3


def test_server_errors_without_end(server: BadServer, store: Store, case: Case) -> None:
    server.always[case.name] = 500
    with pytest.raises(FetchError, match="tried 3 times"):
        run(server, store, case.artifact)
    assert len(server.requests(case.name)) == 3


@pytest.mark.parametrize("header", ["1", "date"])
def test_retry_after_is_obeyed(server: BadServer, store: Store, case: Case, header: str) -> None:
    value = http_date(2) if header == "date" else header
    server.moods[case.name] = [(429, {"Retry-After": value})]
    start = time.monotonic()
    run(server, store, case.artifact)
    assert time.monotonic() - start >= 0.9
    assert store.has(case.artifact)


def test_long_retry_after_is_told(server: BadServer, store: Store, case: Case) -> None:
    server.always[case.name] = (429, {"Retry-After": "3600"})
    with pytest.raises(FetchError, match="come back in 3600 s"):
        run(server, store, case.artifact)


def test_stall_times_out_and_resumes(server: BadServer, store: Store, case: Case) -> None:
    server.moods[case.name] = ["stall"]
    run(server, store, case.artifact)
    assert store.get(case.artifact).read_bytes() == CONTENT
    assert server.requests(case.name)[1].startswith("bytes=1500000-")


def test_part_of_a_former_run_is_used(server: BadServer, store: Store, case: Case) -> None:
    store.part(case.artifact.sha256).write_bytes(CONTENT[:2_000_000])
    wanted = plan_artifacts([case.artifact], store)
    assert wanted.bytes_download == 1_000_000
    result = run(server, store, case.artifact)
    assert server.requests(case.name) == ["bytes=2000000-2999999"]
    assert result.bytes_received == 1_000_000
    assert store.get(case.artifact).read_bytes() == CONTENT


def test_spoilt_part_of_a_former_run_is_thrown_away(
    server: BadServer, store: Store, case: Case
) -> None:
    store.part(case.artifact.sha256).write_bytes(b"x" * 2_000_000)
    run(server, store, case.artifact)
    assert store.get(case.artifact).read_bytes() == CONTENT
    assert server.requests(case.name) == ["bytes=2000000-2999999", ""]


def test_overlong_part_is_thrown_away(server: BadServer, store: Store, case: Case) -> None:
    store.part(case.artifact.sha256).write_bytes(CONTENT + b"x")
    run(server, store, case.artifact)
    assert store.get(case.artifact).read_bytes() == CONTENT


def test_resuming_without_range_support_starts_over(
    server: BadServer, store: Store, case: Case
) -> None:
    store.part(case.artifact.sha256).write_bytes(CONTENT[:2_000_000])
    server.always[case.name] = "norange"
    run(server, store, case.artifact)
    assert store.get(case.artifact).read_bytes() == CONTENT


def test_other_total_in_content_range_is_refused(
    server: BadServer, store: Store, case: Case
) -> None:
    store.part(case.artifact.sha256).write_bytes(CONTENT[:2_000_000])
    server.always[case.name] = "wrong-total"
    with pytest.raises(FetchError, match="not the one that the lock pins"):
        run(server, store, case.artifact)


def test_wrong_hash_in_the_lock_is_told_before_any_download(
    server: BadServer, store: Store, case: Case
) -> None:
    wrong = sdist(CONTENT, sha256="0" * 64)
    with pytest.raises(FetchError, match="another hash than the lock pins") as caught:
        run(server, store, wrong)
    assert "0" * 64 in caught.value.why
    assert case.artifact.sha256 in caught.value.why
    assert server.requests(case.name) == []


def test_wrong_hash_with_an_index_that_states_none(
    server: BadServer, store: Store, case: Case
) -> None:
    server.hashes[case.name] = None
    wrong = sdist(CONTENT, sha256="0" * 64)
    with pytest.raises(FetchError, match="not the file that the lock pins"):
        run(server, store, wrong)
    assert stored(store) == []


def test_all_missing_files_are_named_at_once(server: BadServer, store: Store, case: Case) -> None:
    others = [sdist(b"a", "alpha"), sdist(b"b", "beta", sha256="1" * 64)]
    with pytest.raises(FetchError) as caught:
        run(server, store, case.artifact, *others)
    assert "alpha-1.0.tar.gz" in str(caught.value)
    assert "beta-1.0.tar.gz" in str(caught.value)
    assert server.requests(case.name) == []


def test_unreachable_index(store: Store) -> None:
    index = PackageIndex(IndexConfig(indexes=("http://127.0.0.1:9/simple/",)), HASTY)
    wanted = plan_artifacts([sdist(CONTENT)], store)
    with pytest.raises(FetchError, match=r"127\.0\.0\.1:9"):
        fetch(wanted, store, SilentReporter(), index=index, options=HASTY)


def test_one_failure_ends_the_others(server: BadServer, store: Store, case: Case) -> None:
    other = sdist(b"b" * 10, "beta")
    server.always[offer(server, other, b"b" * 10)] = 404
    server.always[case.name] = "stall"
    start = time.monotonic()
    with pytest.raises(FetchError, match="404"):
        run(server, store, case.artifact, other)
    assert time.monotonic() - start < 1.0


def test_second_place_serves_what_the_first_spoils(
    server: BadServer, store: Store, case: Case, tmp_path: Path
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / case.artifact.filename).write_bytes(CONTENT[:-1] + b"?")
    config = IndexConfig(indexes=(server.url,), find_links=(links,))
    wanted = plan_artifacts([case.artifact], store)
    index = PackageIndex(config, HASTY)
    fetch(wanted, store, SilentReporter(), index=index, options=HASTY)
    assert store.get(case.artifact).read_bytes() == CONTENT


# ---- thin wheels -------------------------------------------------------------------------


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


# ---- the disk ----------------------------------------------------------------------------


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


# ---- two at once, Ctrl-C -----------------------------------------------------------------


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


def wait_for(condition: Any, seconds: float = 20) -> None:
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
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - asked < 5
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
    process.communicate(timeout=20)
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
    _, err = process.communicate(timeout=20)
    thread.join(20)
    assert process.returncode == 0, err
    assert results[0].fetched == ()
    assert results[0].bytes_received == 0
    assert store.get(case.artifact).read_bytes() == CONTENT
    assert len(server.requests(case.name)) == 2


# ---- plans -------------------------------------------------------------------------------


def test_plan_follows_platform_and_rust_mode(store: Store) -> None:
    lock = ReleaseLock(
        schema=1,
        vllm="1.0",
        target="t",
        artifacts=(
            sdist(b"1", "src"),
            sdist(b"22", "tool", platforms=("linux-64",)),
            sdist(b"333", "arm", platforms=("linux-aarch64",)),
            sdist(b"4444", "pre", role="prebuilt"),
        ),
        rust=Rust(
            modes=("prebuilt", "none"), default="none", channel="1", cargo_lock_sha256="0" * 64
        ),
    )
    assert [a.id for a in plan(lock, store, "linux-64", "none").todo] == ["src", "tool"]
    full = plan(lock, store, "linux-aarch64", "prebuilt")
    assert [a.id for a in full.todo] == ["src", "arm", "pre"]
    assert full.bytes_download == 8
    assert "8 B to download" in full.describe()
    with pytest.raises(UsageError, match="win-64"):
        plan(lock, store, "win-64", "none")
    with pytest.raises(UsageError, match="source"):
        plan(lock, store, "linux-64", "source")


def test_require_names_what_is_missing(store: Store) -> None:
    with pytest.raises(FetchError, match=r"demo-1\.0\.tar\.gz"):
        require(plan_artifacts([sdist(CONTENT)], store))
    require(plan_artifacts([], store))


def test_altered_file_in_the_store_is_fetched_again(
    server: BadServer, store: Store, case: Case
) -> None:
    run(server, store, case.artifact)
    path = store.get(case.artifact)
    path.chmod(0o644)
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(FetchError, match="altered"):
        store.get(case.artifact)
    run(server, store, case.artifact)
    assert store.get(case.artifact).read_bytes() == CONTENT
