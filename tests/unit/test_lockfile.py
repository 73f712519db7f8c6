"""The release lock: what is read, what is refused, what is written."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm75.errors import LockError
from sm75.lockfile import (
    Artifact,
    Constraint,
    Declared,
    Partial,
    PatchRef,
    ReleaseLock,
    Rust,
    Substitution,
    artifacts_for,
    dump_release,
    filename_identity,
    known_releases,
    load_release,
    load_target,
    parse_release,
)

A, B, C = "a" * 64, "b" * 64, "c" * 64

LOCK = ReleaseLock(
    schema=1,
    vllm="0.33.0",
    target="dlami",
    artifacts=(
        Artifact(
            id="vllm-sdist",
            project="vllm",
            version="0.33.0",
            filename="vllm-0.33.0.tar.gz",
            sha256=A,
            size=47101396,
            role="source",
            platforms=("any",),
            why='the "source" itself',
        ),
        Artifact(
            id="torch",
            project="torch",
            version="2.12.0",
            filename="torch-2.12.0-cp312-cp312-manylinux_2_28_aarch64.whl",
            sha256=B,
            size=426376751,
            role="target",
            platforms=("linux-64", "linux-aarch64"),
            members=("torch/include/**", "torch/share/cmake/**", "torch/lib/libtorch.so"),
            record_sha256=C,
            partial=Partial(
                filename="torch-2.12.0-0thin-cp312-cp312-manylinux_2_28_aarch64.whl",
                sha256=A,
                size=46444792,
                download=12699591,
            ),
        ),
    ),
    patches=(PatchRef(file="0001-x.patch", sha256=C),),
    declared=(Declared(name="CUTLASS_REVISION", file="CMakeLists.txt", value="v4.7.1"),),
    substitutions=(
        Substitution(name="CUTLASS_REVISION", declared="v4.7.1", used="4.2.0", reason="2.x only"),
    ),
    rust=Rust(
        modes=("prebuilt", "none"),
        default="prebuilt",
        channel="1.95",
        cargo_lock_sha256=A,
        git=("crate@0123",),
    ),
    constraints=(Constraint(name="vllm", spec=">=0.28", reason="head_dim", error="Ambiguous"),),
)

TARGET = """
name = "dlami"
torch = "2.12.0+cu132"
torch_arches = ["sm_75", "sm_80"]
cuda = "13.2"
python = []
glibc = "2.39"
driver = "595.71.05"
path = "/opt/pytorch"
standing = "published"
sources = ["release notes"]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "lock" / "0.33.0"
    folder.mkdir(parents=True)
    (folder / "release.toml").write_text(dump_release(LOCK))
    (tmp_path / "lock" / "default").write_text("0.33.0\n")
    (tmp_path / "lock" / "targets").mkdir()
    (tmp_path / "lock" / "targets" / "dlami.toml").write_text(TARGET)
    return tmp_path


def test_what_is_written_is_read_back() -> None:
    text = dump_release(LOCK)
    assert parse_release(text) == LOCK
    assert dump_release(parse_release(text)) == text
    assert "://" not in text
    assert text.startswith("#")


def test_a_lock_with_nothing_optional() -> None:
    lock = ReleaseLock(schema=1, vllm="1", target="t", artifacts=(), rust=LOCK.rust)
    assert parse_release(dump_release(lock)) == lock


@settings(deadline=None)  # a loaded machine is no fault
@given(
    why=st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    size=st.integers(1, 2**62),
    reason=st.text(min_size=1, alphabet=st.characters(exclude_categories=["Cs"])),
)
def test_any_text_survives(why: str, size: int, reason: str) -> None:
    artifact = msgspec.structs.replace(LOCK.artifacts[0], why=why, size=size)
    constraint = Constraint(name="x", spec="==1", reason=reason)
    lock = msgspec.structs.replace(LOCK, artifacts=(artifact,), constraints=(constraint,))
    assert parse_release(dump_release(lock)) == lock


def test_default_and_named_release(root: Path) -> None:
    assert load_release(root) == LOCK
    assert load_release(root, "0.33.0") == LOCK


@pytest.mark.parametrize("release", ["9.9.9", "../lock/0.33.0", "", "targets"])
def test_unknown_release(root: Path, release: str) -> None:
    with pytest.raises(LockError, match=r"known releases: 0\.33\.0") as caught:
        load_release(root, release)
    assert release in caught.value.what
    assert caught.value.exit_code == 3


def test_missing_default(root: Path) -> None:
    (root / "lock" / "default").unlink()
    with pytest.raises(LockError, match="cannot read"):
        load_release(root)


def test_empty_default(root: Path) -> None:
    (root / "lock" / "default").write_text("\n")
    with pytest.raises(LockError, match="is empty"):
        load_release(root)


def test_releases_are_sorted_as_versions(root: Path) -> None:
    for name in ("0.9.0", "0.100.0", "odd name"):
        (root / "lock" / name).mkdir()
        (root / "lock" / name / "release.toml").write_text("")
    assert known_releases(root) == ["odd name", "0.9.0", "0.33.0", "0.100.0"]


def test_lock_in_the_wrong_directory(root: Path) -> None:
    (root / "lock" / "0.33.0").rename(root / "lock" / "0.34.0")
    with pytest.raises(LockError, match=r"says vllm = '0\.33\.0'"):
        load_release(root, "0.34.0")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("schema = 1", "schema = 2", "this program reads schema 1"),
        ("schema = 1", "", "schema None"),
        ("schema = 1", "schema = ", "is not TOML"),
        (f'sha256 = "{B}"\nsize', f'sha256 = "{"B" * 64}"\nsize', "artifact 'torch'"),
        (f'sha256 = "{B}"\nsize', 'sha256 = "bbbb"\nsize', "artifact 'torch'"),
        (f'sha256 = "{B}"\nsize', "size", "missing required field `sha256`"),
        ("size = 426376751", "size = 0", ">= 1"),
        ("size = 426376751", 'size = "426376751"', "Expected `int`"),
        ("size = 426376751", "size = 426376751\nurl = 'x'", "unknown field `url`"),
        ('role = "target"', 'role = "misc"', "Invalid enum value 'misc'"),
        ('"linux-64", "linux-aarch64"', '"win-64"', "Invalid enum value 'win-64'"),
        ('"linux-64", "linux-aarch64"', "", "platforms is empty"),
        ('id = "torch"', 'id = "vllm-sdist"', "'vllm-sdist' is used twice"),
        ('project = "torch"', 'project = "torchx"', "is torch 2.12.0, not torchx 2.12.0"),
        ('version = "2.12.0"', 'version = "2.12.1"', "is torch 2.12.0, not torch 2.12.1"),
        ('"vllm-0.33.0.tar.gz"', '"../vllm-0.33.0.tar.gz"', "matching regex"),
        ('"vllm-0.33.0.tar.gz"', '"vllm-0.33.0.zip7"', "bad file name"),
        (f'record_sha256 = "{C}"', "", "go together"),
        ('default = "prebuilt"', 'default = "source"', "rust.default 'source'"),
        ('name = "CUTLASS_REVISION"\nfile', "file", "missing required field `name`"),
    ],
)
def test_bad_locks_are_refused(old: str, new: str, expected: str) -> None:
    text = dump_release(LOCK)
    assert old in text
    with pytest.raises(LockError, match=re.escape(expected)) as caught:
        parse_release(text.replace(old, new, 1), where="here.toml")
    assert "here.toml" in caught.value.what


def test_members_of_an_sdist_are_refused() -> None:
    source = LOCK.artifacts[0]
    bad = msgspec.structs.replace(
        source, members=("x",), record_sha256=A, partial=LOCK.artifacts[1].partial
    )
    lock = msgspec.structs.replace(LOCK, artifacts=(bad,))
    with pytest.raises(LockError, match="only be taken from a wheel"):
        parse_release(dump_release(lock))


def test_artifact_by_id() -> None:
    assert LOCK.artifact("torch").stored_size == 46444792
    assert LOCK.artifact("torch").download_size == 12699591
    assert LOCK.artifact("vllm-sdist").stored_filename == "vllm-0.33.0.tar.gz"
    with pytest.raises(LockError, match="vllm-sdist, torch"):
        LOCK.artifact("nothing")


def test_target(root: Path) -> None:
    target = load_target(root, "dlami")
    assert target.torch_arches == ("sm_75", "sm_80")
    assert target.python == ()
    with pytest.raises(LockError, match="known targets: dlami"):
        load_target(root, "../targets/dlami")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"published"', '"guessed"', "guessed"),
        ('name = "dlami"', 'name = "other"', "says name = 'other'"),
        ('glibc = "2.39"', "", "glibc"),
        ('glibc = "2.39"', 'glibc = "2.39"\nextra = 1', "extra"),
    ],
)
def test_bad_targets_are_refused(root: Path, old: str, new: str, expected: str) -> None:
    path = root / "lock" / "targets" / "dlami.toml"
    path.write_text(TARGET.replace(old, new))
    with pytest.raises(LockError, match=expected):
        load_target(root, "dlami")


def test_filename_identity() -> None:
    assert filename_identity("nvidia_nvvm-13.2.78-py3-none-any.whl") is not None
    assert filename_identity("notes.txt") is None


def test_the_locks_of_this_repository() -> None:
    root = Path(__file__).parents[2]
    for release in known_releases(root):
        lock = load_release(root, release)
        load_target(root, lock.target)
        text = (root / "lock" / release / "release.toml").read_text()
        assert "://" not in text, "a lock carries no host names"


def test_targets(root: Path) -> None:
    """An artifact without targets serves all; one with them, those alone."""
    source, torch = LOCK.artifacts
    lock = msgspec.structs.replace(
        LOCK, artifacts=(source, msgspec.structs.replace(torch, targets=("linux-64",)))
    )
    assert parse_release(dump_release(lock)) == lock
    for target, expected in (("linux-aarch64", [source]), ("linux-64", list(lock.artifacts))):
        assert artifacts_for(lock, "linux-64", "none", target) == expected
    assert artifacts_for(lock, "linux-64", "none") == [source]
