"""The vendor directory: as the real cargo makes it, and the real cargo builds from it offline."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sm75 import crates, vendor
from sm75.cargolock import Crate
from sm75.crateindex import CrateIndex
from sm75.errors import ChannelError, FetchError, LockError
from sm75.gitarchive import filename
from sm75.progress import SilentReporter
from sm75.store import Store
from tests.unit import cratekit
from tests.unit.cratekit import ADD, BASE, GITTY, crate_bytes, git_settings, manifest, sources
from tests.unit.projectkit import ROOT, load

script = load(ROOT / "recipes" / "vllm-sm75" / "build.py")
PLATFORM = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}[platform.machine()]


def filled(store: Store, tmp_path: Path, revision: str = "") -> crates.Sources:
    """A store with the crates, and with the repository's archive where there is a commit."""
    index = CrateIndex(directory=cratekit.local_registry(tmp_path / "registry"))
    crates.fetch(sources(), store, SilentReporter(), index=index)
    pinned = {}
    if revision:
        (place,) = sources(revision).git
        pinned[place.key] = crates.archive_git(place, store, filename(place))
    return sources(revision, **pinned)


def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: str) -> str:
    files = {**GITTY, **{name.replace("__", "/").replace("_toml", ".toml"): text
                         for name, text in changes.items()}}  # fmt: skip
    found = cratekit.repository(tmp_path / "repository", files)
    for name, value in git_settings(tmp_path / "repository").items():
        monkeypatch.setenv(name, value)
    return found


def files_of(place: Path) -> dict[str, bytes]:
    return {
        path.relative_to(place).as_posix(): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


def checksums(place: Path) -> Any:
    return json.loads((place / vendor.CHECKSUMS).read_text())


def test_registry_crates(store: Store, tmp_path: Path) -> None:
    wanted = filled(store, tmp_path)
    vendor.prepare(wanted, store, tmp_path / "crates")
    place = tmp_path / "crates" / "vendor" / "add-1.2.3"
    assert set(files_of(place)) == {
        vendor.CHECKSUMS, "Cargo.toml", "Cargo.toml.orig", ".cargo_vcs_info.json", ".github/x.yml",
        "notes.orig", "notes.rej", "src/Cargo.toml.orig", "src/lib.rs", "tools/run.sh",
    }  # fmt: skip
    assert (place / "tools" / "run.sh").stat().st_mode & 0o111
    assert not (place / "Cargo.toml").stat().st_mode & 0o111
    found = checksums(place)
    assert found["package"] == cratekit.sha256(ADD)
    assert found["files"] == {
        name: cratekit.sha256(data)
        for name, data in files_of(place).items()
        if name != vendor.CHECKSUMS
    }


def test_git_crates(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own files only; a link inside becomes a copy, one that leads outside is left out."""
    wanted = filled(store, tmp_path, repository(tmp_path, monkeypatch))
    vendor.prepare(wanted, store, tmp_path / "crates")
    place = tmp_path / "crates" / "vendor" / "gitty-0.3.0"
    assert set(files_of(place)) == {
        vendor.CHECKSUMS, "Cargo.toml", "src/lib.rs", "docs/license.txt", "LICENSE", "build.sh",
    }  # fmt: skip
    assert (place / "LICENSE").read_text() == "free"
    assert (place / "build.sh").stat().st_mode & 0o111
    assert checksums(place)["package"] is None


def test_a_git_crate_below_the_top(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = '[workspace]\nmembers = ["deep/gitty"]\n'
    revision = repository(
        tmp_path, monkeypatch, Cargo_toml=top,
        deep__gitty__Cargo_toml=manifest("gitty", "0.3.0").decode(),
    )  # fmt: skip
    wanted = filled(store, tmp_path, revision)
    vendor.prepare(wanted, store, tmp_path / "crates")
    place = tmp_path / "crates" / "vendor" / "gitty-0.3.0"
    assert set(files_of(place)) == {vendor.CHECKSUMS, "Cargo.toml"}


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ('[package]\nname = "gitty"\nversion.workspace = true\n', LockError, "inherits from its"),
        (manifest("gitty", "0.3.0", "[dependencies]\nx = {workspace=true}\n").decode(), LockError,
         "inherits from its"),
        (manifest("gitty", "0.4.0").decode(), FetchError, "has no gitty 0.3.0"),
        ("[package\n", FetchError, "has no gitty 0.3.0"),
    ],
)  # fmt: skip
def test_a_git_crate_of_another_form(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    text: str, kind: type[Exception], said: str,
) -> None:  # fmt: skip
    wanted = filled(store, tmp_path, repository(tmp_path, monkeypatch, Cargo_toml=text))
    with pytest.raises(kind, match=said):
        vendor.prepare(wanted, store, tmp_path / "crates")
    assert not (tmp_path / "crates").exists()


def test_what_was_altered_in_the_store_is_not_used(store: Store, tmp_path: Path) -> None:
    wanted = filled(store, tmp_path)
    path = store.path(cratekit.sha256(ADD))
    path.chmod(0o644)
    path.write_bytes(BASE)
    with pytest.raises(FetchError, match="was altered"):
        vendor.prepare(wanted, store, tmp_path / "crates")


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


CARGO = {"Cargo.toml": manifest("bad", "1.0.0")}
LINK = member("bad-1.0.0/src", tarfile.SYMTYPE, "/etc")
BAD = {
    "up": (CARGO, (member("bad-1.0.0/../../escape"), b"x"), ChannelError, "outside"),
    "absolute": (CARGO, (member("/etc/escape"), b"x"), ChannelError, "outside"),
    "elsewhere": (CARGO, (member("other-1.0.0/escape"), b"x"), FetchError, "is no archive of"),
    "top": (CARGO, (member("loose"), b"x"), FetchError, "is no archive of"),
    "both": (CARGO, (member("bad-1.0.0/Cargo.toml/x"), b"x"), FetchError, "as a file and as a"),
    "bomb": (CARGO, (member("bad-1.0.0/big"), bytes(3 << 20)), ChannelError, "larger than"),
    "empty": ({}, (member("bad-1.0.0/x"), b"x"), FetchError, "no Cargo.toml"),
}


def adopt(store: Store, data: bytes, tmp_path: Path) -> crates.Sources:
    """Sources of one crate with that archive, which is in the store."""
    path = tmp_path / "bad-1.0.0.crate"
    path.write_bytes(data)
    store.add(path, sha256=cratekit.sha256(data))
    crate = Crate(name="bad", version="1.0.0", checksum=cratekit.sha256(data))
    return crates.Sources(crates=(crate,))


@pytest.mark.parametrize("case", BAD)
def test_archives_that_lead_out_or_explode(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Cargo.lock pins them, and yet: nobody here has made them."""
    monkeypatch.setattr(vendor, "LIMIT", 2 << 20)
    files, extra, kind, said = BAD[case]
    wanted = adopt(store, crate_bytes("bad", "1.0.0", files, extra=(extra,)), tmp_path)
    with pytest.raises(kind, match=said):
        vendor.prepare(wanted, store, tmp_path / "work" / "crates")
    assert list(tmp_path.rglob("*escape*")) == []
    assert list((tmp_path / "work").iterdir()) == []


def test_links_are_not_made(store: Store, tmp_path: Path) -> None:
    """Otherwise what comes after one would be written where it leads."""
    inside = (member("bad-1.0.0/src/escape"), b"x")
    data = crate_bytes("bad", "1.0.0", CARGO, extra=((LINK, b""), inside))
    vendor.prepare(adopt(store, data, tmp_path), store, tmp_path / "crates")
    place = tmp_path / "crates" / "vendor" / "bad-1.0.0"
    assert (place / "src").is_dir()
    assert not (place / "src").is_symlink()
    assert not Path("/etc/escape").exists()


def test_a_damaged_archive(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match="damaged"):
        vendor.prepare(adopt(store, b"no gzip", tmp_path), store, tmp_path / "crates")
    with pytest.raises(ChannelError, match="damaged"):
        vendor.prepare(adopt(store, ADD[: len(ADD) // 2], tmp_path), store, tmp_path / "crates")


# --- the real cargo ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cargo() -> str:
    return cratekit.cargo() or pytest.skip("there is no cargo, and only root may install it")


def run(command: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_what_cargo_vendor_makes(store: Store, tmp_path: Path, cargo: str) -> None:
    wanted = filled(store, tmp_path)
    cratekit.program(tmp_path / "tree")
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        '[source.crates-io]\nreplace-with = "here"\n[source.here]\n'
        f'local-registry = "{tmp_path / "registry"}"\n'
    )
    theirs = tmp_path / "theirs"
    run([cargo, "vendor", "--locked", "--versioned-dirs", "--respect-source-config", str(theirs)],
        tmp_path / "tree" / "rust", CARGO_HOME=str(home))  # fmt: skip
    vendor.prepare(wanted, store, tmp_path / "crates")
    ours, expected = (vendored(place) for place in (tmp_path / "crates" / "vendor", theirs))
    assert ours == expected
    assert "src/lib.rs" in expected["add-1.2.3"]


def vendored(vendor_dir: Path) -> dict[str, dict[str, Any]]:
    """The crates with their files and what ``.cargo-checksum.json`` says, in any order of keys.

    Without what patch(1) leaves: newer ones take it, older ones do not.
    """
    found = {}
    for place in sorted(vendor_dir.iterdir()):
        listed = checksums(place)
        assert listed.keys() == {"files", "package"}
        found[place.name] = {"package": listed["package"]} | {
            name: (data, listed["files"][name])
            for name, data in files_of(place).items()
            if name != vendor.CHECKSUMS and not name.endswith((".orig", ".rej"))
        }
    return found


@pytest.fixture
def frontend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cargo: str) -> Path:
    """A machine on which the recipe's build script compiles a program; gives the tree."""
    monkeypatch.setenv("target_platform", PLATFORM)
    monkeypatch.setenv("build_platform", PLATFORM)
    monkeypatch.setenv("CC", shutil.which("cc") or "gcc")
    monkeypatch.setenv("CXX", shutil.which("c++") or "g++")
    monkeypatch.setenv("PKG_VERSION", "9.8.7")
    monkeypatch.setenv("SM75_RUST", "source")
    monkeypatch.setenv("SM75_JOBS", "1")
    monkeypatch.setenv("SM75_CRATES", str(tmp_path / "crates"))
    # must have no say
    monkeypatch.setenv("RUSTFLAGS", "--cfg=nonsense --bad-flag")
    monkeypatch.setenv("CARGO_HOME", "/nonexistent")
    return tmp_path / "tree"


def compiled(tree: Path, native: Path, site: Path) -> bytes:
    (site / "vllm").mkdir(parents=True)
    script.install_rust(tree, native, site)
    return (site / "vllm" / "vllm-rs").read_bytes()


def test_the_recipe_builds_it_without_network(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frontend: Path
) -> None:
    revision = repository(tmp_path, monkeypatch)
    wanted = filled(store, tmp_path, revision)
    cratekit.program(frontend, revision)
    vendor.prepare(wanted, store, tmp_path / "crates")
    shutil.rmtree(tmp_path / "registry")
    shutil.rmtree(tmp_path / "repository")
    first = compiled(frontend, tmp_path / "native", tmp_path / "site")
    said = run([str(tmp_path / "site" / "vllm" / "vllm-rs")], tmp_path)
    assert said.split() == [
        "3", "/crates/add-1.2.3/src/lib.rs", "git", "true", 'Some("9.8.7")',
        "src/cmd/main.rs",
    ]  # fmt: skip
    assert str(tmp_path).encode() not in first
    # elsewhere: the same bytes
    shutil.copytree(frontend, tmp_path / "elsewhere" / "tree")
    monkeypatch.setenv("SM75_CRATES", str(tmp_path / "elsewhere" / "crates"))
    vendor.prepare(wanted, store, tmp_path / "elsewhere" / "crates")
    again = compiled(
        tmp_path / "elsewhere" / "tree", tmp_path / "elsewhere" / "n", tmp_path / "elsewhere" / "s"
    )
    assert again == first


def test_what_is_not_vendored_is_not_used(
    store: Store, tmp_path: Path, frontend: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = filled(store, tmp_path)
    cratekit.program(frontend)
    vendor.prepare(wanted, store, tmp_path / "crates")
    lib = tmp_path / "crates" / "vendor" / "add-1.2.3" / "src" / "lib.rs"
    lib.write_text(lib.read_text() + "// changed\n")
    with pytest.raises(SystemExit, match="cargo failed"):
        compiled(frontend, tmp_path / "native", tmp_path / "site")
    assert "checksum" in capfd.readouterr().err
    shutil.rmtree(lib.parents[1])
    with pytest.raises(SystemExit, match="cargo failed"):
        compiled(frontend, tmp_path / "native", tmp_path / "site2")


def test_a_tree_that_its_lock_does_not_fit_is_refused(
    store: Store, tmp_path: Path, frontend: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = filled(store, tmp_path)
    cratekit.program(frontend)
    vendor.prepare(wanted, store, tmp_path / "crates")
    cargo_toml = frontend / "rust" / "src" / "cmd" / "Cargo.toml"
    cargo_toml.write_text(cargo_toml.read_text().replace('"0.0.1"', '"0.0.2"'))
    with pytest.raises(SystemExit, match="cargo failed"):
        compiled(frontend, tmp_path / "native", tmp_path / "site")
    assert "--frozen" in capfd.readouterr().err
    assert not (tmp_path / "site" / "vllm" / "vllm-rs").exists()


def test_the_declaration_is_vllms_own(tmp_path: Path) -> None:
    cratekit.program(tmp_path)
    assert script.rust_program(tmp_path / "tools" / "build_rust.py") == (
        "rust/src/cmd/Cargo.toml", ["--bin", "vllm-rs", "--features", "loud"],
    )  # fmt: skip
    (tmp_path / "tools" / "build_rust.py").write_text("RustExtension(target='other', path='x')\n")
    with pytest.raises(SystemExit, match="no longer declares"):
        script.rust_program(tmp_path / "tools" / "build_rust.py")


def test_the_compiler_is_the_targets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "target_platform": "linux-aarch64", "build_platform": "linux-64", "CC": "aarch64-gcc",
        "CXX": "aarch64-g++", "PKG_VERSION": "1", "SM75_JOBS": "3", "CFLAGS": "-Dx",
        "CARGO_TARGET_DIR": "x", "RUSTC_WRAPPER": "x",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CC_FOR_BUILD", raising=False)
    env = script.rust_environment(
        tmp_path / "tree", tmp_path / "crates", tmp_path / "state", tmp_path / "home",
        "aarch64-unknown-linux-gnu",
    )  # fmt: skip
    assert env["CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER"] == "aarch64-gcc"
    assert env["CC_aarch64_unknown_linux_gnu"] == "aarch64-gcc"
    assert env["CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER"] == env["HOST_CC"] == "cc"
    assert env["VLLM_REQUIRE_RUST_FRONTEND"] == "1"
    assert env["CARGO_BUILD_JOBS"] == "3"
    assert not {"CFLAGS", "CARGO_TARGET_DIR", "RUSTC_WRAPPER"} & env.keys()
