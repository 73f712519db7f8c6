"""The Rust frontend's sources: fetched under their hashes, and nothing else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sm75 import cargolock, crates, lockmake
from sm75.cargolock import CRATES_IO
from sm75.crateindex import DEFAULT, CrateIndex
from sm75.errors import FetchError, LockError
from sm75.fetch import obtain
from sm75.gitarchive import filename
from sm75.lockcheck import with_declared
from sm75.lockfile import dump_release, load_release, parse_release
from sm75.pins import TreePins
from sm75.progress import SilentReporter
from sm75.pythonpins import RustPins
from sm75.store import AlteredError, Store, default_root
from sm75.treefiles import read_sdist
from tests.unit import cratekit
from tests.unit.badserver import BadServer
from tests.unit.cratekit import ADD, sha256, sources
from tests.unit.fetchkit import HASTY, leftovers, stored
from tests.unit.projectkit import RELEASE, ROOT
from tests.unit.treekit import FILES, sdist

GIT = "#67dcba97559ebe8e8206dab753710d8b9cb07591"


def fetch(wanted: crates.Sources, store: Store, registry: str) -> int:
    return crates.fetch(
        wanted, store, SilentReporter(), index=CrateIndex(registry=registry), options=HASTY
    )


def test_fetch_takes_what_is_missing_and_nothing_twice(server: BadServer, store: Store) -> None:
    registry = cratekit.offer(server)
    wanted = sources()
    with pytest.raises(FetchError, match="2 of 2 sources") as err:
        crates.require(wanted, store)
    assert "add-1.2.3.crate" in err.value.why
    assert fetch(wanted, store, registry) == 2
    assert stored(store) == ["add-1.2.3.crate", "base-0.1.0.crate"]
    assert store.path(sha256(ADD)).read_bytes() == ADD
    crates.require(wanted, store)
    asked = len(server.log)
    assert fetch(wanted, store, registry) == 0
    assert len(server.log) == asked


@pytest.mark.parametrize("mood", ["alter", "chunked-short"])
def test_other_bytes_never_enter_the_store(server: BadServer, store: Store, mood: str) -> None:
    registry = cratekit.offer(server)
    server.always["dl/add-1.2.3"] = mood
    with pytest.raises(AlteredError, match=r"add-1\.2\.3\.crate"):
        fetch(sources(), store, registry)
    assert "add-1.2.3.crate" not in stored(store)
    assert leftovers(store) == []


def test_a_bad_connection_is_tried_again(server: BadServer, store: Store) -> None:
    registry = cratekit.offer(server)
    server.moods["dl/add-1.2.3"] = ["truncate", 503]
    server.moods["config.json"] = [500]
    assert fetch(sources(), store, registry) == 2


def test_a_crate_that_is_not_there_is_named(server: BadServer, store: Store) -> None:
    registry = cratekit.offer(server)
    del server.files["dl/add-1.2.3"]
    with pytest.raises(FetchError, match=r"add-1\.2\.3") as err:
        fetch(sources(), store, registry)
    assert "404" in err.value.why


@pytest.mark.parametrize(
    "page", [b"{", b"[]", b"{}", b'{"dl": 1}', b'{"dl":"x","auth-required":true}']
)
def test_a_registry_that_says_nothing_useful(server: BadServer, store: Store, page: bytes) -> None:
    registry = cratekit.offer(server)
    server.files["config.json"] = page
    with pytest.raises(FetchError) as err:
        fetch(sources(), store, registry)
    assert "config.toml" in err.value.fix


def test_fetch_from_a_directory(tmp_path: Path, store: Store) -> None:
    index = CrateIndex(directory=cratekit.local_registry(tmp_path / "r"))
    assert crates.fetch(sources(), store, SilentReporter(), index=index) == 2
    crates.require(sources(), store)


# --- where crates are --------------------------------------------------------------------------


def discover(home: Path, text: str) -> CrateIndex:
    (home / "cargo").mkdir(exist_ok=True)
    (home / "cargo" / "config.toml").write_text(text)
    return CrateIndex.discover({"CARGO_HOME": str(home / "cargo")})


def test_crates_io_is_the_default(tmp_path: Path) -> None:
    assert CrateIndex.discover({"HOME": str(tmp_path)}).registry == DEFAULT.removeprefix("sparse+")
    assert discover(tmp_path, "[build]\njobs = 1\n").registry == DEFAULT.removeprefix("sparse+")


def test_cargos_own_replacement_is_followed(tmp_path: Path) -> None:
    found = discover(
        tmp_path,
        '[source.crates-io]\nreplace-with = "one"\n[source.one]\nregistry = "sparse+http://a/b"\n',
    )
    assert found.registry == "http://a/b/"
    found = discover(
        tmp_path,
        '[source.crates-io]\nreplace-with = "one"\n[source.one]\nreplace-with = "two"\n'
        '[source.two]\nlocal-registry = "here"\n',
    )
    assert found.directory == tmp_path / "here"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[source.crates-io]\nreplace-with = "one"\n', "does not define"),
        ('[source.crates-io]\nreplace-with = "crates-io"\n', "circle"),
        ('[source.crates-io]\nregistry = "https://u:secret@a/index"\n', "cannot be fetched from"),
        ("source = 3\n", "no tables"),
        ("[source\n", "cannot read"),
    ],
)
def test_a_replacement_that_leads_nowhere(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(FetchError, match=said) as err:
        discover(tmp_path, text)
    assert "secret" not in str(err.value)


@pytest.mark.parametrize(
    ("template", "url"),
    [
        ("https://a/api/v1/crates", "https://a/api/v1/crates/Wide-Name/1.0.0/download"),
        ("https://a/{crate}/{version}", "https://a/Wide-Name/1.0.0"),
        ("https://a/{prefix}/{lowerprefix}/{crate}", "https://a/Wi/de/wi/de/Wide-Name"),
        ("https://a/{sha256-checksum}", "https://a/" + "5" * 64),
    ],
)
def test_where_a_registry_has_archives(template: str, url: str) -> None:
    crate = cargolock.Crate(name="Wide-Name", version="1.0.0", checksum="5" * 64)
    assert CrateIndex(registry="http://r/").link(crate, template).url == url


# --- Cargo.lock --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "add"', 'name = "../add"', "name and version"),
        ('"1.2.3"', '"1.2.3/.."', "name and version"),
        ('checksum = "', 'checksum = "zz', "as a sha256"),
        ("version = 3", "version = 9", "version 9"),
        (f"?rev={GIT[1:]}", "?rev=a&tag=b", "https"),
        ('name = "add"\nversion = "1.2.3"', 'name = "base"\nversion = "0.1.0"', "each crate once"),
        ("[[package]]", "[[package", "TOML"),
    ],
)
def test_a_lock_of_another_form_is_refused(old: str, new: str, said: str) -> None:
    text = cratekit.cargo_lock(GIT[1:])
    assert old in text
    with pytest.raises(LockError) as err:
        cargolock.parse(text.replace(old, new, 1))
    assert said in str(err.value)


def test_references_of_git_dependencies() -> None:
    text = cratekit.cargo_lock(GIT[1:])
    found = [
        cargolock.parse(text.replace(f"?rev={GIT[1:]}", query))[-1].git
        for query in ("?tag=v1%2B2", "?branch=main", "")
    ]
    assert [place.reference if place else 0 for place in found] == [
        ("tag", "v1+2"), ("branch", "main"), None,
    ]  # fmt: skip
    assert {place.key for place in found if place} == {f"tool@{GIT[1:]}"}


@pytest.mark.network
def test_the_real_cargo_lock() -> None:
    """vLLM's own, out of the pinned sdist: every crate can be checked, and the lock agrees."""
    lock = load_release(ROOT, RELEASE)
    store = Store(default_root())
    real = obtain(lock.artifact("vllm-sdist"), store, SilentReporter())
    wanted = crates.sources(lock, real)
    assert len(wanted.registry) == 606
    assert tuple(place.key for place in wanted.git) == lock.rust.git
    assert len({crate.directory for crate in wanted.crates}) == 609
    text = read_sdist(real, lambda path: path == cargolock.FILE).text(cargolock.FILE)
    assert text.count("checksum = ") == 606
    other = msgspec.structs.replace(
        lock, rust=msgspec.structs.replace(lock.rust, cargo_lock_sha256="0" * 64)
    )
    with pytest.raises(LockError, match="not the one that the lock pins"):
        crates.sources(other, real)


# --- git dependencies --------------------------------------------------------------------------


@pytest.fixture
def revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    found = cratekit.repository(tmp_path / "repository")
    for name, value in cratekit.git_settings(tmp_path / "repository").items():
        monkeypatch.setenv(name, value)
    return found


def test_a_git_dependency_without_hash_is_refused(
    revision: str, server: BadServer, store: Store
) -> None:
    with pytest.raises(LockError, match="no hash") as err:
        fetch(sources(revision), store, cratekit.offer(server))
    assert f"tool@{revision}" in err.value.why
    assert "lock --rust" in err.value.fix
    assert server.log == []
    with pytest.raises(LockError, match="no hash"):
        crates.require(sources(revision), store)


def project(root: Path, revision: str) -> None:
    """A project whose lock has one git dependency."""
    lock = load_release(ROOT, RELEASE)
    rust = msgspec.structs.replace(lock.rust, git=(f"tool@{revision}",))
    (root / "lock" / RELEASE).mkdir(parents=True)
    text = dump_release(msgspec.structs.replace(lock, rust=rust))
    (root / "lock" / RELEASE / "release.toml").write_text(text)


def test_pinned_once_and_the_same_ever_after(
    revision: str, server: BadServer, store: Store, tmp_path: Path
) -> None:
    project(tmp_path / "p", revision)
    lock = load_release(tmp_path / "p", RELEASE)
    done = crates.pin(tmp_path / "p", lock, sources(revision), store, SilentReporter())
    assert done == [f"tool@{revision}"]
    lock = load_release(tmp_path / "p", RELEASE)
    pinned = lock.rust.git_sha256
    assert list(pinned) == done
    assert crates.pin(tmp_path / "p", lock, sources(revision, **pinned), store,
                      SilentReporter()) == []  # fmt: skip
    # another machine, another day
    other = Store(tmp_path / "other")
    wanted = sources(revision, **pinned)
    assert fetch(wanted, other, cratekit.offer(server)) == 3
    (place,) = wanted.git
    assert other.sound(pinned[place.key], filename(place))
    crates.require(wanted, other)
    assert leftovers(other) == []


def test_a_repository_with_other_content_is_refused(
    revision: str, server: BadServer, store: Store
) -> None:
    wrong = sources(revision, **{f"tool@{revision}": "1" * 64})
    with pytest.raises(AlteredError, match=r"tool-.*\.tar"):
        fetch(wrong, store, cratekit.offer(server))
    assert "add-1.2.3.crate" in stored(store)
    assert not any(name.endswith(".tar") for name in stored(store))


def test_a_commit_that_is_not_there_is_said(revision: str, store: Store, tmp_path: Path) -> None:
    project(tmp_path / "p", "0" * 40)
    before = (tmp_path / "p" / "lock" / RELEASE / "release.toml").read_bytes()
    lock = load_release(tmp_path / "p", RELEASE)
    with pytest.raises(FetchError, match="commit 000000000000 of"):
        crates.pin(tmp_path / "p", lock, sources("0" * 40), store, SilentReporter())
    assert (tmp_path / "p" / "lock" / RELEASE / "release.toml").read_bytes() == before


def test_submodules_are_refused(revision: str, store: Store, tmp_path: Path) -> None:
    place = tmp_path / "repository"
    cratekit.git(place, "update-index", "--add", "--cacheinfo", f"160000,{revision},deps/sub")
    tree = cratekit.git(place, "write-tree").strip()
    new = cratekit.git(place, "-c", "user.name=t", "-c", "user.email=t@t", "commit-tree", tree,
                       "-m", "x").strip()  # fmt: skip
    cratekit.git(place, "update-ref", "refs/heads/main", new)
    project(tmp_path / "p", new)
    lock = load_release(tmp_path / "p", RELEASE)
    with pytest.raises(FetchError, match="has submodules") as err:
        crates.pin(tmp_path / "p", lock, sources(new), store, SilentReporter())
    assert err.value.why == "deps/sub"


def test_the_lock_keeps_the_hashes() -> None:
    lock = load_release(ROOT, RELEASE)
    pinned = {lock.rust.git[0]: "a" * 64}
    new = msgspec.structs.replace(lock, rust=msgspec.structs.replace(lock.rust, git_sha256=pinned))
    assert parse_release(dump_release(new)) == new
    wrong = {"unknown@1": "a" * 64}
    bad = msgspec.structs.replace(lock, rust=msgspec.structs.replace(lock.rust, git_sha256=wrong))
    with pytest.raises(LockError) as err:
        parse_release(dump_release(bad))
    assert "unknown@1" in err.value.why


def test_hashes_stay_when_the_lock_is_made_again() -> None:
    lock = load_release(ROOT, RELEASE)
    key = lock.rust.git[0]
    former = msgspec.structs.replace(
        lock, rust=msgspec.structs.replace(lock.rust, git_sha256={key: "a" * 64})
    )
    formers = (lockmake.Former(lock=lock, runtime=None), lockmake.Former(lock=former, runtime=None))
    assert lockmake.with_hashes(lock.rust, formers).git_sha256 == {key: "a" * 64}
    # that dependency is another one in the next release
    moved = msgspec.structs.replace(lock.rust, git=lock.rust.git[1:])
    assert lockmake.with_hashes(moved, formers).git_sha256 == {}
    pins = TreePins(
        declared=(), version=RELEASE,
        rust=RustPins(channel="1.95", cargo_lock_sha256="b" * 64, git=lock.rust.git[1:]),
    )  # fmt: skip
    assert with_declared(former, pins).rust.git_sha256 == {}


def test_crates_that_nothing_checks_are_refused(tmp_path: Path) -> None:
    lock = load_release(ROOT, RELEASE)
    archive = sdist(tmp_path / "demo.tar.gz", FILES)
    text = read_sdist(archive, lambda path: path == cargolock.FILE).text(cargolock.FILE)
    assert CRATES_IO not in text
    rust = msgspec.structs.replace(lock.rust, cargo_lock_sha256=sha256(text.encode()))
    with pytest.raises(LockError, match="cannot be checked") as err:
        crates.sources(msgspec.structs.replace(lock, rust=rust), archive)
    assert "serde-1.0.0" in err.value.why
