"""Making a release's lock: what is resolved, kept, refused, said and written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sm75 import closureresolve, lockcheck
from sm75.errors import FetchError, LockError, PatchError, UsageError
from sm75.lockfile import Constraint, load_release
from tests.unit.badserver import BadServer
from tests.unit.commandkit import Runner, take_for_project
from tests.unit.lockkit import EXTENSIONS, PATCH, REQUIRES, World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(lockcheck, "EXTENSIONS", EXTENSIONS)
    with BadServer() as server:
        yield World(tmp_path, server)


def new_project(files: dict[str, str]) -> None:
    """The tree gets another external project with an extension of its own."""
    deep = files["cmake/external_projects/deep.cmake"]
    files["cmake/external_projects/novel.cmake"] = deep.replace("deep", "novel").replace("abc", "f")
    files["CMakeLists.txt"] = files["CMakeLists.txt"].replace(
        "  include(cmake/external_projects/deep.cmake)\n",
        "  include(cmake/external_projects/deep.cmake)\n"
        "  include(cmake/external_projects/novel.cmake)\n",
    )
    files["setup.py"] = files["setup.py"].replace(
        "if _build_custom_ops():",
        'ext_modules.append(CMakeExtension(name="vllm._novel_C"))\nif _build_custom_ops():',
    )


def test_a_lock_is_made_and_agrees_with_its_tree(world: World) -> None:
    done = world.lock("0.33.0")
    assert done.written
    lock = load_release(world.root, "0.33.0")
    assert lock == done.made.lock
    assert lock.artifact("torch-dev").version == "2.12.0"
    assert [a.id for a in lock.artifacts] == [
        "vllm-sdist", "vllm-rs", "cutlass", "torch-dev", "torch-dev-for-linux-64",
        "cuda-nvcc-linux-64", "speedups-cp311-linux-64", "speedups-cp312-linux-64",
        "cuda-nvcc-linux-aarch64", "speedups-cp311-linux-aarch64", "speedups-cp312-linux-aarch64",
    ]  # fmt: skip
    lockcheck.check(world.root, lock, world.store)
    assert "patches: patches/0.33.0: 1 file, all apply" in list(done.lines())
    # This tree's modules have no kernels, and nothing was proved here.
    assert done.to_json()["kernels"] == done.kernels
    assert f"kernels: {done.kernels}" in list(done.lines())
    assert "are not those that were proved" in done.kernels
    text = (world.root / "lock/0.33.0/omissions.toml").read_text()
    assert text.startswith("# Requirements of vLLM 0.33.0 that")
    assert "gadget" not in text
    assert 'vllm_version == "0.33.0"' in (world.root / "recipes/vllm-sm75/recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        (
            "lock/policy.toml",
            "needs 8.0",
            "needs 9.0",
            "substitution requirement:flashinfer-python",
        ),
        ("lock/policy.toml", '"external:deep"', '"external:no"', "substitution external:deep"),
        ("lock/omissions.toml", "the image's", "gone", "lock/0.33.0/omissions.toml: not what"),
        ("lock/constraints.toml", "all of C++20", "C++20", "constraint gcc"),
    ],
)
def test_what_a_lock_is_made_of_may_not_change_without_it(
    world: World, file: str, old: str, new: str, named: str
) -> None:
    lock = world.lock("0.33.0").made.lock
    world.edit(file, old, new)
    with pytest.raises(LockError) as error:
        lockcheck.check(world.root, lock, world.store)
    assert named in str(error.value)


def test_the_closure_and_the_recipe_get_the_locks_own_bounds() -> None:
    ours = [Requirement("transformers>=5.5.3"), Requirement("torch==2.13.0"), Requirement("tqdm")]
    bounds = [
        Constraint(name="transformers", spec=">=5.5.3,<5.17", reason="x"),
        Constraint(name="torch", spec=">=2.11", reason="x"),
    ]
    found = closureresolve.bounded(ours, bounds)
    assert [str(r.specifier) for r in found] == ["<5.17,>=5.5.3", "==2.13.0", ""]
    assert str(ours[0].specifier) == ">=5.5.3"


def test_twice_gives_identical_files_and_reads_nothing_again(world: World) -> None:
    world.lock("0.33.0")
    before = world.files()
    world.server.log.clear()
    again = world.lock("0.33.0")
    assert world.files() == before
    assert again.changed == ()
    assert again.diff.empty
    read = {path for path, _ in world.server.log if not path.startswith("/simple/")}
    # The lists of toolkits are too small to be worth a store.
    assert all("cuda_toolkit" in path for path in read)


def test_versions_stay_until_an_upgrade_is_asked_for(world: World) -> None:
    for name in [n for n in world.server.files if "13.2.86" in n or "13.2.2" in n or "3.0.4" in n]:
        world.server.files[f"kept/{name}"] = world.server.files.pop(name)
    first = world.lock("0.33.0").made.lock
    assert first.artifact("cuda-nvcc-linux-64").version == "13.2.78"
    for name in [n for n in world.server.files if n.startswith("kept/")]:
        world.server.files[name.removeprefix("kept/")] = world.server.files.pop(name)
    assert world.lock("0.33.0").made.lock == first
    done = world.lock("0.33.0", upgrade=True)
    assert done.made.lock.artifact("cuda-nvcc-linux-64").version == "13.2.86"
    assert done.made.lock.artifact("speedups-cp311-linux-64").version == "3.0.4"
    assert {change.name for change in done.diff.sections["Sources"]} == {
        f"{name}-{platform}"
        for name in ("cuda-nvcc", "speedups-cp311", "speedups-cp312")
        for platform in ("linux-64", "linux-aarch64")
    }


def test_all_files_of_a_version_or_another_version(world: World) -> None:
    """One Python's wheel is missing of the newest: the one before it is taken for all."""
    (name,) = [n for n in world.server.files if "speedups-3.0.4-cp312" in n and "aarch64" in n]
    del world.server.files[name]
    lock = world.lock("0.33.0").made.lock
    assert {a.version for a in lock.artifacts if a.project == "speedups"} == {"3.0.3"}


def test_an_unaccounted_project_is_refused_by_name(world: World) -> None:
    world.release("0.34.0", edit=new_project)
    world.patches("0.34.0")
    before = world.files()
    with pytest.raises(LockError) as error:
        world.lock("0.34.0")
    text = str(error.value)
    for name in ("external:novel", "extension:vllm._novel_C", "target:_novel_C"):
        assert f"{name}: " in text
    assert "neither uses it nor says why not" in text
    assert "lock/policy.toml" in text
    assert world.files() == before


def test_a_departure_makes_it_acceptable(world: World) -> None:
    world.release("0.34.0", edit=new_project)
    world.patches("0.34.0")
    policy = (world.root / "lock/policy.toml").read_text()
    (world.root / "lock/policy.toml").write_text(
        policy + '\n[[substitution]]\nname = "external:novel"\nused = "not built"\n'
        'reason = "9.0 only"\ncovers = ["extension:vllm._novel_C", "target:_novel_C"]\n'
        'patch = "1.patch"\n'
    )
    world.lock("0.33.0")
    done = world.lock("0.34.0")
    (new,) = [c for c in done.diff.sections["External projects"] if c.sign == "+"]
    assert (new.name, new.note) == ("external:novel", "not built: 9.0 only")
    assert "extension:vllm._novel_C" in {c.name for c in done.diff.sections["Extensions"]}


def test_a_departure_whose_patch_does_not_exist_is_refused(world: World) -> None:
    world.edit("lock/policy.toml", 'reason = "needs 8.0"', 'reason = "x"\npatch = "2.patch"')
    with pytest.raises(LockError, match=r"the lock pins no patch 2\.patch"):
        world.lock("0.33.0")


def test_latest_falls_back_and_says_why(world: World) -> None:
    world.release("0.34.0", edit=new_project)
    world.patches("0.34.0")
    world.release("0.35.0")  # no patches
    world.release("0.36.0rc1")
    done = world.lock("latest")
    assert done.made.lock.vllm == "0.33.0"
    newest, next_one = done.made.lock.skipped
    assert newest.release == "0.35.0"
    assert "there is no patches/0.35.0" in newest.reason
    assert next_one.release == "0.34.0"
    assert "external:novel: example.org/d/novel@f123" in next_one.reason
    assert world.said == [f"lock: not vLLM {s.release}: {s.reason}" for s in (newest, next_one)]
    assert load_release(world.root, "0.33.0").skipped == done.made.lock.skipped
    # It stays on record when the release is locked again by name.
    assert world.lock("0.33.0").changed == ()
    text = "\n".join(done.lines())
    assert "newer and not taken: 0.35.0" in text


def test_latest_takes_the_newest_that_can_be_had(world: World) -> None:
    world.release("0.33.1")
    world.patches("0.33.1")
    done = world.lock("latest")
    assert done.made.lock.vllm == "0.33.1"
    assert done.made.lock.skipped == ()


def test_latest_stops_at_the_floor(world: World) -> None:
    for name in [n for n in world.server.files if n.startswith("vllm/")]:
        del world.server.files[name]
    for release in ("0.26.0", "0.27.1"):
        world.release(release)
    with pytest.raises(LockError) as error:
        world.lock("latest")
    assert "AmbiguousGlobalPerLayerAttributeError: 'head_dim'" in str(error.value)
    assert "0.26.0" not in str(error.value)


def test_a_network_fault_is_no_reason_to_take_an_older_release(world: World) -> None:
    world.release("0.34.0")
    world.patches("0.34.0")
    world.server.always["vllm/vllm-0.34.0.tar.gz"] = 500
    with pytest.raises(FetchError):
        world.lock("latest")


def test_a_release_without_patches_is_locked_and_said_to_lack_them(world: World) -> None:
    world.lock("0.33.0")
    world.release("0.34.0", edit=lambda f: f.update({"setup.py": "\n" + f["setup.py"]}))
    done = world.lock("0.34.0")
    assert done.made.lock.patches == ()
    assert not done.made.standing.buildable
    text = "\n".join(done.lines())
    assert "there is no patches/0.34.0" in text
    assert "Of patches/0.33.0: applies elsewhere 1: 1.patch (applies elsewhere)" in text
    with pytest.raises(LockError, match=r"no patches/0\.34\.0: nothing can be built"):
        lockcheck.check(world.root, done.made.lock, world.store)
    world.patches("0.34.0", PATCH.replace("@@ -1,2 +1,3 @@", "@@ -2,2 +2,3 @@"))
    after = world.lock("0.34.0")
    assert [ref.file for ref in after.made.lock.patches] == ["1.patch"]
    assert [(c.sign, c.name) for c in after.diff.sections["Patches"]] == [("+", "1.patch")]
    lockcheck.check(world.root, after.made.lock, world.store)


def test_own_patches_that_do_not_apply_stop_it(world: World) -> None:
    world.release("0.34.0", edit=lambda f: f.update({"setup.py": "\n" + f["setup.py"]}))
    world.patches("0.34.0")
    with pytest.raises(LockError, match=r"not applying: 1\.patch \(applies elsewhere\)"):
        world.lock("0.34.0")
    (world.root / "patches/0.34.0/series.toml").write_text("schema = 1\nrelease = 'x'\n")
    with pytest.raises(PatchError):
        world.lock("0.34.0")


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"torch": "2.10.0"}, "constraint torch >=2.11: the torch asked for is 2.10.0"),
        ({"target": "old"}, "constraint driver >=580: the driver of old is 570.1"),
    ],
)
def test_a_broken_bound_stops_it_before_anything_is_fetched(
    world: World, request_: dict[str, str], named: str
) -> None:
    old = (world.root / "lock/targets/box.toml").read_text()
    (world.root / "lock/targets/old.toml").write_text(
        old.replace('"box"', '"old"').replace("595.71.05", "570.1")
    )
    with pytest.raises(LockError) as error:
        world.lock("0.33.0", **request_)
    assert named in str(error.value)
    assert not [path for path, _ in world.server.log if path.startswith("/files/")]


def test_a_triton_that_torch_requires_is_held_to_its_bound(world: World) -> None:
    for arch in ("x86_64", "aarch64"):
        world.wheel(
            "torch", "2.12.0", f"cp312-cp312-manylinux_2_28_{arch}",
            {"torch/include/x.h": b"torch"}, metadata="Requires-Dist: triton==3.9.0",
        )  # fmt: skip
    with pytest.raises(LockError, match="constraint triton"):
        world.lock("0.33.0")


def test_another_torch_may_be_compiled_against(world: World) -> None:
    lock = world.lock("0.33.0", torch="2.14.0").made.lock
    assert lock.artifact("torch-dev").version == "2.14.0"
    # It is the declared one, so that nothing is departed from.
    assert "TORCH_SUPPORTED_VERSION_CUDA" not in {s.name for s in lock.substitutions}


def test_headers_of_another_cutlass_are_refused(world: World) -> None:
    world.release("0.34.0", cutlass_patch="9")
    world.patches("0.34.0")
    with pytest.raises(LockError, match=r"the lock says v4\.7\.1, the headers say v4\.7\.9"):
        world.lock("0.34.0")


def test_a_revision_that_no_entry_provides_is_refused(world: World) -> None:
    world.release(
        "0.34.0",
        edit=lambda f: f.update(
            {"CMakeLists.txt": f["CMakeLists.txt"].replace('"v4.7.1"', '"v5.0.0"')}
        ),
    )
    with pytest.raises(LockError) as error:
        world.lock("0.34.0")
    assert "0 entries of the artifact 'cutlass'" in str(error.value)
    assert "CUTLASS_REVISION v5.0.0" in str(error.value)


def test_a_dry_run_writes_nothing(world: World) -> None:
    before = world.files()
    done = world.lock("0.33.0", dry_run=True)
    assert world.files() == before
    assert not done.written
    assert "lock/0.33.0/release.toml" in done.changed
    assert any(line.startswith("would write lock/0.33.0/release.toml") for line in done.lines())


def test_a_good_lock_survives_bad_input(world: World) -> None:
    world.lock("0.33.0")
    before = world.files()
    world.edit("lock/omissions.toml", "schema = 1", "schema = 7")
    changed = world.files()
    with pytest.raises(LockError, match="schema 7"):
        world.lock("0.33.0")
    assert world.files() == changed
    assert {n for n in before if before[n] != changed[n]} == {"lock/omissions.toml"}


def test_the_diff_names_what_a_person_has_to_know(world: World) -> None:
    world.lock("0.33.0")
    world.release(
        "0.34.0",
        requires=(REQUIRES[0], "torch==2.14.0", "orjson>=3", 'odd; python_version < "3"',
                  'six; python_version > "3.11"'),
        edit=lambda f: f.update(
            {
                "docker/versions.json": f["docker/versions.json"].replace("8.0", "8.9"),
                "rust-toolchain.toml": '[toolchain]\nchannel = "1.97"\n',
            }
        ),
    )  # fmt: skip
    world.patches("0.34.0")
    done = world.lock("0.34.0")
    text = "\n".join(done.lines())
    assert "compared with 0.33.0" in text
    assert "  ~ docker:torch_cuda_arch_list  7.5 8.0 12.0 -> 7.5 8.9 12.0" in text
    assert "  + orjson  >=3" in text
    assert '  + six  any; python_version > "3.11"' in text
    assert "  - tqdm  any" in text
    assert "odd" not in text
    assert "  ~ channel  1.95 -> 1.97" in text
    assert text.count("\n") < 40
    data = json.loads(json.dumps(done.to_json()))
    assert data["diff"]["from"] == "0.33.0"
    names = [c["name"] for c in data["diff"]["sections"]["Requirements of vLLM"]]
    assert names == ["orjson", "six", "tqdm"]


def test_another_lock_to_compare_with(world: World) -> None:
    world.lock("0.33.0")
    world.release("0.34.0")
    world.patches("0.34.0")
    world.lock("0.34.0")
    done = world.lock("0.34.0", base="0.33.0")
    assert done.diff.old == "0.33.0"
    assert "vllm-sdist" in {c.name for c in done.diff.sections["Sources"]}
    assert done.changed == ()
    # No index has to keep a former release for ever.
    del world.server.files["vllm/vllm-0.33.0.tar.gz"]
    shutil.rmtree(world.store.root)
    done = world.lock("0.34.0", base="0.33.0")
    (change,) = done.diff.sections["Requirements of vLLM"]
    assert "cannot be had" in change.note
    with pytest.raises(UsageError, match=r"no lock for vLLM 9\.9"):
        world.lock("0.34.0", base="9.9")


def test_the_same_name_with_other_content_is_pointed_at(world: World) -> None:
    world.lock("0.33.0")
    world.release("0.33.0", requires=(*REQUIRES, "more"))
    done = world.lock("0.33.0", dry_run=True)
    (change,) = [c for c in done.diff.sections["Sources"] if c.name == "vllm-sdist"]
    assert "the same name with other content" in change.note


@pytest.mark.parametrize("vllm", ["newest", "0", "../0.33.0", "0.33.0/.."])
def test_no_release(world: World, vllm: str) -> None:
    with pytest.raises(UsageError):
        world.lock(vllm)


def test_a_release_that_the_index_lacks(world: World) -> None:
    with pytest.raises(LockError, match=r"no vLLM 9\.9\.9"):
        world.lock("9.9.9")
    with pytest.raises(UsageError, match="no version of torch"):
        world.lock("0.33.0", torch="new")


def test_the_command_line(world: World, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    take_for_project(monkeypatch, world.root)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", world.server.url)
    monkeypatch.setenv("SM75_STORE", str(world.store.root))
    world.release("0.34.0", edit=new_project)
    told = run("lock", "--vllm", "latest", "--no-closure", "--json")
    assert told.code == 0, told.err
    assert told.json["release"] == "0.33.0"
    assert [s["release"] for s in told.json["skipped"]] == ["0.34.0"]
    assert "lock: not vLLM 0.34.0: " in told.err
    told = run("lock", "--vllm", "0.33.0", "--no-closure")
    assert "every file is as it was" in told.out
    told = run("lock", "--vllm", "0.34.0", "--no-closure")
    assert told.code == 3
    assert "external:novel" in told.err
    assert "Traceback" not in told.err
    assert told.out == ""
