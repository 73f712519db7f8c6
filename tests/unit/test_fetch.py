"""Fetching from an index that misbehaves: what arrives is right, or nothing does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sm75 import fetch as fetch_module
from sm75.errors import DiskError, FetchError, UsageError
from sm75.fetch import fetch, plan, plan_artifacts, require
from sm75.index import IndexConfig, PackageIndex
from sm75.lockfile import ReleaseLock, Rust
from sm75.progress import SilentReporter
from sm75.store import Store
from tests.unit.badserver import BadServer, http_date
from tests.unit.fetchkit import (
    CONTENT,
    HASTY,
    Case,
    leftovers,
    offer,
    run,
    sdist,
    stored,
)


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
    server.always[case.name] = "norange-short"
    with pytest.raises(FetchError, match="is truncated: 1500000 of 3000000 bytes came"):
        run(server, store, case.artifact)
    # The first try brings something, two more bring nothing new: three tries are enough.
    assert len(server.requests(case.name)) == 3
    assert stored(store) == []


def test_other_file_when_resuming_without_range_support(
    server: BadServer, store: Store, case: Case
) -> None:
    store.part(case.artifact.sha256).write_bytes(CONTENT[:2_000_000])
    server.always[case.name] = "norange"
    server.files[case.name] = CONTENT[:-1]
    server.hashes[case.name] = case.artifact.sha256
    with pytest.raises(FetchError, match="not the one that the lock pins"):
        run(server, store, case.artifact)


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
    start = time.monotonic()
    run(server, store, case.artifact)
    assert time.monotonic() - start < 35
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
    assert time.monotonic() - start < 35


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


def test_second_place_has_what_the_first_lacks(
    server: BadServer, store: Store, case: Case, tmp_path: Path
) -> None:
    page = tmp_path / "simple" / "demo" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="{case.artifact.filename}">listed, but not there</a>')
    config = IndexConfig(indexes=((tmp_path / "simple").as_uri() + "/", server.url))
    wanted = plan_artifacts([case.artifact], store)
    index = PackageIndex(config, HASTY)
    fetch(wanted, store, SilentReporter(), index=index, options=HASTY)
    assert store.get(case.artifact).read_bytes() == CONTENT


def test_a_full_disk_is_the_error_shown_among_many() -> None:
    disk, ours, bug = DiskError("full"), FetchError("late"), ValueError("bug")
    nested = BaseExceptionGroup("", [bug, BaseExceptionGroup("", [ours, disk])])
    assert fetch_module.first_error(nested) is disk
    assert fetch_module.first_error(BaseExceptionGroup("", [bug, ours])) is ours
    assert fetch_module.first_error(BaseExceptionGroup("", [bug])) is bug
