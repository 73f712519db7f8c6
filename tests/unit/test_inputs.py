"""Which change of an input changes which hash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from sm75 import build, channelcheck, fetch, inputs, proof
from sm75.errors import BuildError, LockError, PatchError, ToolchainError, UsageError
from sm75.inputs import Inputs
from sm75.lockfile import Artifact, ReleaseLock, load_release
from sm75.progress import SilentReporter
from sm75.series import load_series
from sm75.store import Store
from tests.unit.projectkit import PATCHES, RELEASE, ROOT, copy_project, load

TOOLCHAIN = {"provider": "bootstrap", "compiler": "g++ 12.2.0", "compiler_digest": "0" * 64}


@dataclass
class Project:
    """A copy of the project, and the options of a build of it."""

    root: Path
    options: dict[str, Any] = field(default_factory=dict)
    lock: ReleaseLock | None = None

    def collect(self) -> Inputs:
        lock = self.lock or load_release(self.root, RELEASE)
        values: dict[str, Any] = {
            "toolchain": TOOLCHAIN,
            "build_platform": "linux-64",
            "target_platform": "linux-aarch64",
            "rust": "prebuilt",
        }
        series = load_series(self.root / PATCHES)
        return inputs.collect(self.root, lock, series, **{**values, **self.options})

    def seal(self) -> None:
        proof.seal(self.root, load_release(self.root, RELEASE))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    found = Project(copy_project(tmp_path / "project"))
    found.seal()
    return found


Change = Callable[[Project], None]


def _byte(path: Path) -> None:
    """One byte more, which changes the meaning of nothing."""
    path.write_bytes(path.read_bytes() + b"\n")


def _file(name: str) -> Change:
    return lambda project: _byte(project.root / name)


def _overlay(suffix: str) -> Change:
    """The first overlay file with that ending."""

    def change(project: Project) -> None:
        _byte(min((project.root / PATCHES / "overlay").rglob(f"*{suffix}")))
        project.seal()

    return change


def _patch(touches: str) -> Change:
    """One character of the first patch whose files all begin so: in a line that it adds."""

    def change(project: Project) -> None:
        patch = next(
            p
            for p in load_series(project.root / PATCHES).patches
            if all(diff.path.startswith(touches) for diff in p.diffs)
        )
        path = project.root / PATCHES / patch.file
        lines = path.read_text().split("\n")
        at = next(
            i for i, line in enumerate(lines) if line.startswith("+") and line.strip("+ ") and
            not line.startswith("+++")
        )  # fmt: skip
        lines[at] += "x"
        path.write_text("\n".join(lines))
        project.seal()

    return change


def _artifact(wanted: Callable[[Artifact], bool]) -> Change:
    """Another hash of what the store keeps of the first such artifact."""

    def change(project: Project) -> None:
        lock = load_release(project.root, RELEASE)
        chosen = next(a for a in lock.artifacts if wanted(a))
        other = (
            msgspec.structs.replace(
                chosen, partial=msgspec.structs.replace(chosen.partial, sha256="1" * 64)
            )
            if chosen.partial
            else msgspec.structs.replace(chosen, sha256="1" * 64)
        )
        artifacts = tuple(other if a is chosen else a for a in lock.artifacts)
        project.lock = msgspec.structs.replace(lock, artifacts=artifacts)

    return change


def _option(**changes: Any) -> Change:
    return lambda project: project.options.update(changes)


def _target(project: Project) -> None:
    """Another contract; this one is there."""
    other = next(
        path.stem
        for path in sorted((project.root / "lock" / "targets").glob("*.toml"))
        if path.stem != load_release(project.root, RELEASE).target
    )
    project.lock = msgspec.structs.replace(load_release(project.root, RELEASE), target=other)


def _contract(project: Project) -> None:
    target = load_release(project.root, RELEASE).target
    _byte(project.root / "lock" / "targets" / f"{target}.toml")


def _is(role: str, platform: str) -> Callable[[Artifact], bool]:
    return lambda a: a.role == role and platform in a.platforms


BOTH, INPUT, NEITHER = (True, True), (True, False), (False, False)
CHANGES: dict[str, tuple[Change, tuple[bool, bool]]] = {
    "sdist": (_artifact(lambda a: a.id == "vllm-sdist"), BOTH),
    "source, thin": (_artifact(lambda a: a.id == "cutlass"), BOTH),
    "target": (_artifact(_is("target", "any")), BOTH),
    "target of the proofs": (_artifact(lambda a: a.targets == ("linux-64",)), NEITHER),
    "tool of the build": (_artifact(_is("toolchain", "linux-64")), BOTH),
    "tool of another platform": (_artifact(_is("toolchain", "linux-aarch64")), NEITHER),
    "tool of the checks": (_artifact(_is("tool", "linux-64")), NEITHER),
    "Rust binary": (_artifact(_is("prebuilt", "any")), INPUT),
    "patch of CMake": (_patch("CMakeLists.txt"), BOTH),
    "patch of setup.py": (_patch("setup.py"), INPUT),
    "patch of Python": (_patch("vllm/"), INPUT),
    "overlay: CMake": (_overlay(".cmake"), BOTH),
    "overlay: order of sources": (_overlay("slowest.txt"), BOTH),
    "overlay: C++": (_overlay(".cpp"), BOTH),
    "overlay: header": (_overlay(".h"), BOTH),
    "overlay: CUDA": (_overlay(".cu"), BOTH),
    "overlay: Python": (_overlay(".py"), INPUT),
    "recipe": (_file("recipes/vllm-sm75/recipe.yaml"), INPUT),
    "omissions": (_file(f"lock/{RELEASE}/omissions.toml"), INPUT),
    "build script": (_file("recipes/vllm-sm75/build.py"), BOTH),
    "compiler": (_option(toolchain={**TOOLCHAIN, "compiler_digest": "1" + "0" * 63}), BOTH),
    "compiler's name": (_option(toolchain={**TOOLCHAIN, "compiler": "g++ 12.2.1"}), BOTH),
    "target platform": (_option(target_platform="linux-64"), BOTH),
    "build platform": (_option(build_platform="linux-aarch64"), BOTH),
    "PTX": (_option(ptx=True), BOTH),
    "no Rust": (_option(rust="none"), INPUT),
    "another target": (_target, INPUT),
    "target contract": (_contract, INPUT),
    "program that applies the patches": (_file("sm75/hunks.py"), BOTH),
    "another program": (_file("sm75/progress.py"), NEITHER),
    "a file that is no input": (_file("lock/tools.txt"), NEITHER),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_one_change(project: Project, kind: str) -> None:
    change, expected = CHANGES[kind]
    before = project.collect()
    change(project)
    after = project.collect()
    changed = (
        before.input_hash != after.input_hash,
        before.native_hash != after.native_hash,
    )
    assert changed == expected
    assert (before.facts != after.facts) is expected[0]
    assert (before.build_string != after.build_string) is expected[0]


def test_rust_binary_of_a_build_without_it(project: Project) -> None:
    project.options["rust"] = "none"
    before = project.collect()
    _artifact(_is("prebuilt", "any"))(project)
    assert project.collect() == before


def test_same_again_and_elsewhere(project: Project, tmp_path: Path) -> None:
    here = project.collect()
    assert project.collect() == here
    (tmp_path / "very" / "deep").mkdir(parents=True)
    project.root.rename(tmp_path / "very" / "deep" / "checkout")
    project.root = tmp_path / "very" / "deep" / "checkout"
    assert project.collect() == here
    assert str(tmp_path) not in repr(here.facts)


def test_build_string_names_the_input_hash(project: Project) -> None:
    made_of = project.collect()
    assert len(made_of.input_hash) == len(made_of.native_hash) == 64
    assert made_of.build_string == f"h{made_of.input_hash[:12]}_0"


def test_unsealed_patch_is_refused(project: Project) -> None:
    patch = next((project.root / PATCHES).glob("*.patch"))
    _byte(patch)
    with pytest.raises(PatchError, match=f"{patch.name} is not the file that series") as err:
        project.collect()
    assert err.value.exit_code == 5


def test_patch_sealed_in_the_series_only_is_refused(project: Project) -> None:
    """Whoever seals a series by hand has not changed what the release pins."""
    overlay = min((project.root / PATCHES / "overlay").rglob("*.py"))
    _byte(overlay)
    from sm75.series import seal

    assert seal(project.root / PATCHES) != []
    with pytest.raises(LockError, match="pins other patches") as err:
        project.collect()
    assert overlay.name in err.value.why
    assert "patches seal" in err.value.fix


def test_lock_of_a_patch_that_is_gone(project: Project) -> None:
    lock = load_release(project.root, RELEASE)
    extra = msgspec.structs.replace(lock.patches[0], file="0999-gone.patch")
    project.lock = msgspec.structs.replace(lock, patches=(*lock.patches, extra))
    with pytest.raises(LockError) as err:
        project.collect()
    assert "0999-gone.patch" in err.value.why


def test_every_file_of_the_recipe_is_hashed(project: Project) -> None:
    there = {p.name for p in (ROOT / "recipes" / "vllm-sm75").iterdir() if p.is_file()}
    assert there == set(project.collect().facts["recipe"])


def test_unknown_target(project: Project) -> None:
    lock = load_release(project.root, RELEASE)
    project.lock = msgspec.structs.replace(lock, target="no-such-box")
    with pytest.raises(LockError, match="no target contract 'no-such-box'"):
        project.collect()


def test_patcher_is_what_the_recipe_takes() -> None:
    recipe = yaml.safe_load((ROOT / "recipes" / "vllm-sm75" / "recipe.yaml").read_text())
    (source,) = (s for s in recipe["source"] if s.get("path") == "../../sm75")
    assert sorted(source["filter"]["include"]) == sorted(inputs.PATCHER)


def test_native_roots_are_what_cmake_is_given() -> None:
    """A path that CMake reads and the native hash ignores would leave stale objects."""
    script = load(ROOT / "recipes" / "vllm-sm75" / "build.py")
    given = {
        name if "." in name else f"{name}/" for name in script.NATIVE_INPUTS if name != "LICENSE"
    }
    assert given == set(inputs.NATIVE_ROOTS)


class _Provider:
    """Identity only; the platforms are part of it, as with the real ones."""

    name = "stub"

    def __init__(self, no_rust: str = "it needs Rust 1.95") -> None:
        self.no_rust = no_rust

    def rust(self, lock: ReleaseLock, build_platform: str, target_platform: str) -> str:
        return self.no_rust

    def describe(self) -> str:
        return "a stand-in"

    def identity(
        self, lock: ReleaseLock, build_platform: str, target_platform: str
    ) -> dict[str, str]:
        return {"build": build_platform, "target": target_platform}

    def channels(
        self, lock: ReleaseLock, store: Store, build_platform: str, target_platform: str
    ) -> list[str]:
        raise AssertionError("looking makes no channel")


def _settings(project: Project, tmp_path: Path, name: str, **changes: Any) -> build.Settings:
    values: dict[str, Any] = {
        "root": project.root,
        "store": Store(tmp_path / name / "store"),
        "channel": tmp_path / name / "channel",
        "rust": "prebuilt",
    }
    return build.Settings(**{**values, **changes})


def test_looking_depends_on_no_place_and_writes_nothing(project: Project, tmp_path: Path) -> None:
    lock = load_release(project.root, RELEASE)
    one = build.look(lock, _Provider(), _settings(project, tmp_path, "one"))
    two = build.look(lock, _Provider(), _settings(project, tmp_path, "two", jobs=7, wait=0.0))
    assert one.inputs == two.inputs
    assert one.needed
    assert one.package.name == f"vllm-sm75-{RELEASE}-{one.inputs.build_string}.conda"
    assert not (tmp_path / "one").exists()
    assert not (project.root / ".sm75").exists()


def test_a_package_that_another_build_made_meanwhile(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there once the other is done: nothing is built, and that is what is said."""
    lock = load_release(project.root, RELEASE)
    settings = _settings(project, tmp_path, "one")
    planned = build.look(lock, _Provider(), settings)
    assert planned.needed
    monkeypatch.setattr(fetch, "require", lambda plan: None)
    monkeypatch.setattr(channelcheck, "holds", lambda channel, rel: True)
    outcome = build.build(lock, _Provider(), settings, planned, SilentReporter())
    assert outcome.package == planned.package
    assert outcome.built is False


def test_inputs_edited_while_waiting_for_another_build(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is built is named by what there is when it begins."""
    lock = load_release(project.root, RELEASE)
    settings = _settings(project, tmp_path, "one")
    planned = build.look(lock, _Provider(), settings)
    monkeypatch.setattr(fetch, "require", lambda plan: None)
    seen: list[str] = []

    def note(*given: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        seen.append(given[3].inputs.input_hash)
        return (), ()

    monkeypatch.setattr(build, "_build", note)
    _byte(project.root / "recipes" / "vllm-sm75" / "recipe.yaml")
    outcome = build.build(lock, _Provider(), settings, planned, SilentReporter())
    now = build.look(lock, _Provider(), settings).inputs
    assert now != planned.inputs
    assert seen == [now.input_hash] == [outcome.inputs.input_hash]
    assert now.build_string in outcome.package.name


def test_inputs_edited_while_it_builds(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can say what such a package is made of."""
    lock = load_release(project.root, RELEASE)
    settings = _settings(project, tmp_path, "one")
    monkeypatch.setattr(fetch, "require", lambda plan: None)
    monkeypatch.setattr(_Provider, "channels", lambda *given: [])
    monkeypatch.setattr(build, "lay_out_sources", lambda *given: None)
    recipe = project.root / "recipes" / "vllm-sm75" / "recipe.yaml"
    monkeypatch.setattr(build, "_run_recipe", lambda *given: _byte(recipe))
    planned = build.look(lock, _Provider(), settings)
    with pytest.raises(BuildError, match="inputs were changed while the build ran") as err:
        build.build(lock, _Provider(), settings, planned, SilentReporter())
    assert err.value.why.endswith("recipe")
    assert not settings.channel.exists()


def test_rust_from_source_is_refused_with_the_way_out(project: Project, tmp_path: Path) -> None:
    lock = load_release(project.root, RELEASE)
    with pytest.raises(ToolchainError, match="cannot be built from source") as err:
        build.look(lock, _Provider(), _settings(project, tmp_path, "one", rust="source"))
    assert "--rust prebuilt" in err.value.fix
    assert err.value.why == "it needs Rust 1.95"


def test_rust_from_source_with_a_toolchain_that_has_it(project: Project, tmp_path: Path) -> None:
    """The crates are inputs, by Cargo.lock's hash and that of each git dependency."""
    lock = load_release(project.root, RELEASE)
    lock = msgspec.structs.replace(lock, rust=msgspec.structs.replace(lock.rust, git_sha256={}))
    settings = _settings(project, tmp_path, "one", rust="source")
    found = build.look(lock, _Provider(""), settings).inputs
    prebuilt = build.look(lock, _Provider(""), _settings(project, tmp_path, "two")).inputs
    assert found.facts["crates"] == {"Cargo.lock": lock.rust.cargo_lock_sha256}
    assert "crates" not in prebuilt.facts
    assert found.native_hash == prebuilt.native_hash  # CMake's state serves both
    rust = msgspec.structs.replace(lock.rust, git_sha256={lock.rust.git[0]: "0" * 64})
    pinned = msgspec.structs.replace(lock, rust=rust)
    assert build.look(pinned, _Provider(""), settings).inputs.input_hash != found.input_hash


PROOF = {"target_platform": "linux-64", "ptx": True, "rust": "none"}


def test_package_for_proofs_has_its_own_name_and_inputs(project: Project, tmp_path: Path) -> None:
    lock = load_release(project.root, RELEASE)
    ours = build.look(lock, _Provider(), _settings(project, tmp_path, "one"))
    proof_ = build.look(lock, _Provider(), _settings(project, tmp_path, "two", **PROOF))
    assert proof_.package.parent.name == "linux-64"
    assert proof_.package.name.startswith(f"vllm-sm75-ptx-{RELEASE}-")
    assert proof_.inputs.facts["ptx"] is True
    assert ours.inputs.facts["ptx"] is False
    targets = {name for name in proof_.inputs.facts["artifacts"] if name.endswith("-for-linux-64")}
    assert targets == {f"{name}-for-linux-64" for name in (
        "torch-dev", "cuda-cudart", "cuda-crt", "cuda-cccl", "cublas-dev")}  # fmt: skip
    assert not {name.removesuffix("-for-linux-64") for name in targets} & set(
        proof_.inputs.facts["artifacts"]
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ptx": True}, "linux-aarch64 is built without --ptx only"),
        ({**PROOF, "ptx": False}, "linux-64 is built with --ptx only"),
        ({**PROOF, "rust": "prebuilt"}, "no Rust frontend for linux-64"),
    ],
)
def test_proofs_and_the_g5g_are_kept_apart(
    project: Project, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    lock = load_release(project.root, RELEASE)
    with pytest.raises(UsageError, match=said):
        build.look(lock, _Provider(), _settings(project, tmp_path, "one", **changes))


@pytest.mark.parametrize(("proofs", "there"), [(True, "vllm-sm75"), (False, "vllm-sm75-ptx")])
def test_no_channel_holds_both(project: Project, tmp_path: Path, proofs: bool, there: str) -> None:
    lock = load_release(project.root, RELEASE)
    settings = _settings(project, tmp_path, "one", **(PROOF if proofs else {}))
    (settings.channel / "linux-x").mkdir(parents=True)
    (settings.channel / "linux-x" / f"{there}-0.1-h0_0.conda").touch()
    with pytest.raises(UsageError, match="does not go into") as err:
        build.look(lock, _Provider(), settings)
    assert f"{there}-0.1" in err.value.why


def test_proofs_never_go_into_the_channel_for_the_g5g(project: Project, tmp_path: Path) -> None:
    lock = load_release(project.root, RELEASE)
    settings = _settings(project, tmp_path, "one", channel=project.root / "channel", **PROOF)
    with pytest.raises(UsageError, match="does not go into"):
        build.look(lock, _Provider(), settings)


def test_what_a_lock_is_made_of_stops_no_build(project: Project) -> None:
    """Policy and bounds are for the lock step: a build needs none of them."""
    before = project.collect()
    for name in ("policy.toml", "constraints.toml", "omissions.toml"):
        (project.root / "lock" / name).unlink()
    lock = load_release(project.root, RELEASE)
    broken = tuple(msgspec.structs.replace(c, spec="==0") for c in lock.constraints)
    project.lock = msgspec.structs.replace(lock, constraints=broken)
    assert project.collect() == before
