"""Whether disagreements between a release lock and what it speaks of are all found."""

from __future__ import annotations

import hashlib
import io
import posixpath
import re
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sm75 import constraints, fetch, lockcheck, recipedeps
from sm75.errors import LockError
from sm75.lockfile import (
    Declared,
    PatchRef,
    ReleaseLock,
    Substitution,
    dump_release,
    known_releases,
    load_release,
    load_target,
    parse_release,
)
from sm75.pins import TreePins
from sm75.progress import SilentReporter
from sm75.pythonpins import RustPins
from sm75.store import Store, default_root
from sm75.treefiles import read_sdist

ROOT = Path(__file__).resolve().parents[2]
LOCK = load_release(ROOT, "0.33.0")
TARGET = load_target(ROOT, LOCK.target)
PINS = TreePins(
    version=LOCK.vllm,
    declared=LOCK.declared,
    rust=RustPins(
        channel=LOCK.rust.channel,
        cargo_lock_sha256=LOCK.rust.cargo_lock_sha256,
        git=LOCK.rust.git,
    ),
)


def changed(record: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(record, **changes)


def with_pin(
    pins: TreePins, name: str, value: str | None, file: str = "CMakeLists.txt"
) -> TreePins:
    """The pins with one declaration set, or taken away (``None``)."""
    rest = [entry for entry in pins.declared if entry.name != name]
    if value is not None:
        rest.append(Declared(name=name, file=file, value=value))
    return TreePins(version=pins.version, declared=tuple(rest), rust=pins.rust)


def following(pins: TreePins) -> ReleaseLock:
    """The lock with the declarations updated to the tree's, and nothing else."""
    return lockcheck.with_declared(LOCK, pins)


def substituted(name: str, **changes: Any) -> ReleaseLock:
    """The lock with one substitution changed."""
    new = [changed(s, **changes) if s.name == name else s for s in LOCK.substitutions]
    assert new != list(LOCK.substitutions)
    return changed(LOCK, substitutions=tuple(new))  # type: ignore[no-any-return]


def problems(lock: ReleaseLock, pins: TreePins = PINS) -> list[str]:
    return list(lockcheck.tree_problems(lock, pins))


def only(found: list[str], *words: str) -> None:
    """Exactly one problem, which holds all the words."""
    assert len(found) == 1, found
    for word in words:
        assert word in found[0]


def test_the_lock_agrees_with_itself() -> None:
    assert problems(LOCK) == []
    assert list(constraints.problems(LOCK, TARGET)) == []
    assert list(lockcheck.variant_problems(ROOT, LOCK)) == []


def test_the_lock_is_as_dump_release_writes_it() -> None:
    text = (ROOT / "lock" / LOCK.vllm / "release.toml").read_text()
    assert dump_release(parse_release(text)) == text


def test_another_release_in_the_sdist() -> None:
    pins = TreePins(version="0.32.0", declared=PINS.declared, rust=PINS.rust)
    only(problems(LOCK, pins), "0.33.0", "0.32.0")


def test_the_tree_declares_another_value() -> None:
    found = problems(LOCK, with_pin(PINS, "gcc", "12.1"))
    assert any(p.startswith("gcc: the lock has 11.3") and "12.1" in p for p in found)


def test_the_tree_declares_more_or_less_than_the_lock() -> None:
    more = with_pin(PINS, "docker:torch_cuda_arch_list", None)
    only(problems(LOCK, more), "docker:torch_cuda_arch_list", "no longer declares")
    lock = changed(LOCK, declared=LOCK.declared[1:])
    only(problems(lock), LOCK.declared[0].name, "the lock does not have it")


def test_the_lock_declares_a_pin_twice() -> None:
    lock = changed(LOCK, declared=(*LOCK.declared, LOCK.declared[0]))
    only(problems(lock), LOCK.declared[0].name, "twice")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("external:newproject", "owner/new@abc"),
        ("extension:vllm._new_C", "optional"),
        ("target:_new_C", "CUDA abi3 3"),
        ("requirement:newthing", "==1"),
    ],
)
def test_what_upstream_adds_must_be_accounted_for(name: str, value: str) -> None:
    pins = with_pin(PINS, name, value)
    only(problems(following(pins), pins), name, value, "neither uses it nor says why not")
    reason = Substitution(name=name, declared=value, used="not built", reason="no sm_75 kernel")
    lock = changed(following(pins), substitutions=(*LOCK.substitutions, reason))
    assert problems(lock, pins) == []


@pytest.mark.parametrize(
    ("name", "value", "used"),
    [
        ("TORCH_TARGET_VERSION:_C_stable_libtorch", "2.13", "2.11"),
        ("requires-python", ">=3.12,<3.15", ">=3.11,<3.15"),
        ("PYTHON_SUPPORTED_VERSIONS", "3.12;3.13;3.14", "3.11;3.12;3.13;3.14"),
        ("requirement:transformers", ">=6", "<5.21.0,>=5.16.1"),
        ("gcc", "13", "11.3"),
        ("CUDA_SUPPORTED_ARCHS", "8.0;9.0", "7.5"),
        ("docker:torch_cuda_arch_list", "8.0 9.0", "7.5"),
    ],
)
def test_a_pin_used_otherwise_needs_a_reason(name: str, value: str, used: str) -> None:
    pins = with_pin(PINS, name, value)
    only(problems(following(pins), pins), name, value, f"uses {used} and gives no reason")


def test_the_order_of_a_bound_does_not_matter() -> None:
    pins = with_pin(PINS, "requirement:transformers", ">=5.16.1,<5.21.0")
    assert problems(following(pins), pins) == []


def test_an_extension_of_ours_that_upstream_drops() -> None:
    pins = with_pin(PINS, "extension:vllm.spinloop", None)
    only(problems(following(pins), pins), "extension:vllm.spinloop", "must hold it")


def test_a_substitution_without_need() -> None:
    pins = with_pin(PINS, "TORCH_SUPPORTED_VERSION_CUDA", "2.12.0")
    lock = changed(
        following(pins),
        substitutions=tuple(
            changed(s, declared="2.12.0") if s.name == "TORCH_SUPPORTED_VERSION_CUDA" else s
            for s in LOCK.substitutions
        ),
    )
    only(problems(lock, pins), "TORCH_SUPPORTED_VERSION_CUDA", "used as declared")


def test_a_substitution_that_is_out_of_date() -> None:
    only(problems(substituted("gcc:cuda", declared="12")), "departs from 12", "declares 13")
    only(problems(substituted("gcc:cuda", used="10")), "says 10", "uses 11.3")
    only(problems(substituted("gcc:cuda", patch="9-no.patch")), "gcc:cuda", "9-no.patch")
    stale = substituted("external:qutlass", covers=("extension:vllm.gone",))
    assert any("declares no extension:vllm.gone" in p for p in problems(stale))


def test_two_substitutions_of_one_pin() -> None:
    twice = (*LOCK.substitutions, LOCK.substitutions[-1])
    found = problems(changed(LOCK, substitutions=twice))
    assert any(p.startswith("external:vllm-flash-attn: 2 substitutions") for p in found)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("channel", "1.99", "rust channel"),
        ("cargo_lock_sha256", "0" * 64, "rust Cargo.lock"),
        ("git", ("new@" + "0" * 40,), "rust git dependencies"),
    ],
)
def test_rust_pins(field: str, value: Any, named: str) -> None:
    only(problems(changed(LOCK, rust=changed(LOCK.rust, **{field: value}))), named)


def test_nvcc_of_two_versions() -> None:
    artifacts = [
        changed(a, version="13.1.0") if a.id == "cuda-nvcc-linux-64" else a for a in LOCK.artifacts
    ]
    with pytest.raises(LockError, match="2 versions of nvcc"):
        lockcheck.cuda_version(changed(LOCK, artifacts=tuple(artifacts)))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with the lock's files and one patch with one overlay file."""
    shutil.copytree(ROOT / "lock", tmp_path / "lock")
    folder = tmp_path / "patches" / LOCK.vllm
    (folder / "overlay").mkdir(parents=True)
    (folder / "1.patch").write_text("--- a/x\n+++ b/x\n@@ -1,1 +1,1 @@\n-a\n+b\n")
    (folder / "overlay" / "new.py").write_text("x = 1\n")
    series(folder)
    return tmp_path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def series(folder: Path, release: str = LOCK.vllm) -> None:
    (folder / "series.toml").write_text(
        f'schema = 1\nrelease = "{release}"\n'
        f'[[patch]]\nfile = "1.patch"\nsha256 = "{digest(folder / "1.patch")}"\n'
        'purpose = "x"\nproof = "x"\n[[patch.drop_when]]\nfile = "x"\nabsent = "a"\n'
        f'[[overlay]]\nfile = "new.py"\ndest = "new.py"\npurpose = "x"\n'
        f'sha256 = "{digest(folder / "overlay" / "new.py")}"\n'
    )


def sealed(project: Path, **changes: str | None) -> ReleaseLock:
    folder = project / "patches" / LOCK.vllm
    pinned: dict[str, str | None] = {
        "1.patch": digest(folder / "1.patch"),
        "overlay/new.py": digest(folder / "overlay" / "new.py"),
        **changes,
    }
    refs = tuple(PatchRef(file=name, sha256=sha) for name, sha in pinned.items() if sha)
    return changed(LOCK, patches=refs)  # type: ignore[no-any-return]


def test_patches_on_disk(project: Path) -> None:
    def found(lock: ReleaseLock) -> list[str]:
        return list(lockcheck.patch_problems(project, lock))

    assert found(sealed(project)) == []
    only(found(sealed(project, **{"1.patch": None})), "does not pin 1.patch")
    only(found(sealed(project, **{"overlay/new.py": "0" * 64})), "another overlay/new.py")
    only(found(sealed(project, **{"2.patch": "0" * 64})), "2.patch", "lacks")
    lock = sealed(project)
    series(project / "patches" / LOCK.vllm, release="0.32.0")
    only(found(lock), "0.32.0")
    (project / "patches" / LOCK.vllm / "1.patch").write_text("altered")
    only(found(lock), "1.patch")


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ('  - "0.33.0"', '  - "0.32.0"', "vllm_version is ['0.32.0']"),
        ("vllm-0.33.0.tar.gz", "vllm-0.33.0.zip", "vllm_sdist"),
        ("f4c33c", "000000", "vllm_sdist_sha256"),
        ("- prebuilt", "- source", "rust_frontend"),
        ("rust_frontend:", "rusty:", "rusty"),
        ("vllm_sdist:\n  - vllm-0.33.0.tar.gz", "vllm_sdist: vllm-0.33.0.tar.gz", "must be a list"),
        ("vllm_version:", "[", "variants.yaml"),
    ],
)
def test_variants(project: Path, before: str, after: str, named: str) -> None:
    path = project / "lock" / LOCK.vllm / "variants.yaml"
    assert list(lockcheck.variant_problems(project, LOCK)) == []
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    found = list(lockcheck.variant_problems(project, LOCK))
    assert any(named in p for p in found), found


def test_no_variants_file(project: Path) -> None:
    (project / "lock" / LOCK.vllm / "variants.yaml").unlink()
    only(list(lockcheck.variant_problems(project, LOCK)), "no such file")


def stored(
    store: Store, lock: ReleaseLock, name: str, content: bytes, tmp_path: Path
) -> ReleaseLock:
    """The lock with one artifact replaced by a whole file of that content, put into the store."""
    artifact = lock.artifact(name)
    sha256 = hashlib.sha256(content).hexdigest()
    file = tmp_path / artifact.filename
    file.write_bytes(content)
    store.add(file, sha256=sha256)
    new = changed(
        artifact, sha256=sha256, size=len(content), members=(), record_sha256="", partial=None
    )
    return changed(  # type: ignore[no-any-return]
        lock, artifacts=tuple(new if a.id == name else a for a in lock.artifacts)
    )


def headers(version: tuple[int, int, int]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        names = ("MAJOR", "MINOR", "PATCH")
        text = "".join(f"#define CUTLASS_{n} {v}\n" for n, v in zip(names, version, strict=True))
        wheel.writestr("third_party/include/cutlass/version.h", text)
    return buffer.getvalue()


def test_the_headers_are_of_the_version_the_lock_says(store: Store, tmp_path: Path) -> None:
    assert list(lockcheck.cutlass_problems(LOCK, store)) == []
    good = stored(store, LOCK, "cutlass", headers((4, 8, 0)), tmp_path)
    assert list(lockcheck.cutlass_problems(good, store)) == []
    bad = stored(store, LOCK, "cutlass", headers((4, 7, 0)), tmp_path)
    only(list(lockcheck.cutlass_problems(bad, store)), "v4.8.0", "v4.7.0")
    buffer = io.BytesIO()
    zipfile.ZipFile(buffer, "w").close()
    none = stored(store, LOCK, "cutlass", buffer.getvalue(), tmp_path)
    only(list(lockcheck.cutlass_problems(none, store)), "holds 0")


def test_check_lists_every_disagreement(
    project: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "small.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("vllm-0.33.0/PKG-INFO")
        info.size = len(b"Requires-Dist: newthing\n")
        archive.addfile(info, io.BytesIO(b"Requires-Dist: newthing\n"))
    sdist = (tmp_path / "small.tar.gz").read_bytes()
    for name in (str(recipedeps.RECIPE), f"lock/{LOCK.vllm}/omissions.toml"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, project / name)
    lock = stored(store, sealed(project), "vllm-sdist", sdist, tmp_path)
    monkeypatch.setattr(lockcheck, "read_pins", lambda path, cuda: PINS)
    with pytest.raises(LockError) as caught:
        lockcheck.check(project, lock, store)
    message = str(caught.value)
    assert "0001-cmake-turing-only.patch" in message
    assert "vllm_sdist_sha256" in message
    assert "recipe.yaml: it does not list newthing" in message
    assert caught.value.exit_code == 3


def test_check_reads_the_sdist(project: Path, store: Store, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "empty.tar.gz", "w:gz"):
        pass
    sdist = (tmp_path / "empty.tar.gz").read_bytes()
    lock = stored(store, sealed(project), "vllm-sdist", sdist, tmp_path)
    with pytest.raises(LockError, match=r"CMakeLists\.txt"):
        lockcheck.check(project, lock, store)


def test_summary() -> None:
    facts = lockcheck.summary(LOCK)
    assert facts["vllm"] == "0.33.0"
    assert facts["cuda"] == "13.2.78"
    assert str(facts["rust"]).startswith("prebuilt (default)")
    download = facts["download_bytes_linux-64"]
    assert isinstance(download, int)
    # The goal of a first build on any machine.
    assert 100e6 < download < 800e6
    assert facts["artifacts"] == len(LOCK.artifacts)
    assert int(str(facts["patches"])) + int(str(facts["overlay_files"])) == len(LOCK.patches)
    msgspec.json.encode(facts)


def fetched(store: Store, name: str) -> Path:
    artifact = LOCK.artifact(name)
    fetch.fetch(fetch.plan_artifacts([artifact], store), store, SilentReporter())
    return store.get(artifact)


@pytest.mark.network
@pytest.mark.parametrize(
    "release", [name for name in known_releases(ROOT) if (ROOT / "patches" / name).is_dir()]
)
def test_the_real_locks_agree_with_everything(release: str) -> None:
    lockcheck.check(ROOT, load_release(ROOT, release), Store(default_root()))


# What the sources of the Turing build's GEMMs include of CUTLASS themselves: the 2.x GEMM, its
# epilogue visitors, and CuTe's layouts, which those visitors are written with.
CUTLASS_2X = {
    "cute/atom/mma_atom.hpp",
    "cute/tensor.hpp",
    "cutlass/arch/arch.h",
    "cutlass/arch/mma.h",
    "cutlass/arch/mma_sm75.h",
    "cutlass/cutlass.h",
    "cutlass/epilogue/threadblock/fusion/visitor_2x.hpp",
    "cutlass/epilogue/threadblock/fusion/visitors.hpp",
    "cutlass/gemm/device/gemm.h",
    "cutlass/gemm/device/gemm_universal_adapter.h",
    "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h",
    "cutlass/gemm_coord.h",
    "cutlass/numeric_types.h",
}


@pytest.mark.network
def test_our_sources_include_the_headers_of_cutlass_2x_only() -> None:
    store = Store(default_root())
    tree = read_sdist(fetched(store, "vllm-sdist"), lambda path: path.startswith("csrc/"))
    sources = {path.removeprefix("csrc/"): content for path, content in tree.content.items()}
    overlay = ROOT / "patches" / LOCK.vllm / "overlay" / "csrc"
    ours = [path.relative_to(overlay).as_posix() for path in sorted(overlay.rglob("scaled_mm*"))]
    sources |= {name: (overlay / name).read_bytes() for name in ours}
    with zipfile.ZipFile(fetched(store, "cutlass")) as wheel:
        there = {name.partition("/include/")[2] for name in wheel.namelist()}
    assert len(ours) == 5
    seen: set[str] = set()
    included: set[str] = set()
    todo = list(ours)
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for match in re.finditer(rb'(?m)^\s*#\s*include\s*[<"]([^>"]+)[>"]', sources[name]):
            header = match[1].decode()
            beside = posixpath.normpath(posixpath.join(posixpath.dirname(name), header))
            if inside := next((path for path in (beside, header) if path in sources), None):
                todo.append(inside)
            elif header.startswith(("cutlass/", "cute/")):
                included.add(header)
    assert included == CUTLASS_2X
    assert included <= there


def test_targets_of_one_version() -> None:
    lock = load_release(ROOT, None)
    assert list(lockcheck.target_problems(lock)) == []
    torch = lock.artifact("torch-dev-for-linux-64")
    for change, said in (
        ({"version": "2.13.0"}, "of another version"),
        ({"targets": ()}, "does not say to which one"),
        ({"id": "other-for-linux-64"}, "is missing"),
    ):
        other = msgspec.structs.replace(torch, **change)
        artifacts = tuple(other if a is torch else a for a in lock.artifacts)
        (problem,) = lockcheck.target_problems(msgspec.structs.replace(lock, artifacts=artifacts))
        assert said in problem
