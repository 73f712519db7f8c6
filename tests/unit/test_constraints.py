"""Bounds with their reasons: each is read, holds, and is named where it is broken."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from packaging.requirements import Requirement

from sm75 import constraints
from sm75.errors import LockError
from sm75.lockfile import Constraint, Declared, ReleaseLock, load_release, load_target
from sm75.store import Store, default_root

ROOT = Path(__file__).resolve().parents[2]
LOCK = load_release(ROOT, "0.33.0")
TARGET = load_target(ROOT, LOCK.target)
BOUNDS = constraints.load(ROOT)


def changed(record: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(record, **changes)


def bounded(name: str, spec: str) -> ReleaseLock:
    """The lock with one bound changed."""
    new = [changed(c, spec=spec) if c.name == name else c for c in LOCK.constraints]
    assert new != list(LOCK.constraints)
    return changed(LOCK, constraints=tuple(new))  # type: ignore[no-any-return]


def only(found: list[str], *words: str) -> None:
    """Exactly one problem, which holds all the words."""
    assert len(found) == 1, found
    for word in words:
        assert word in found[0]


def said(release: str, **declared: str) -> dict[str, str]:
    """The bounds of a release, by name."""
    entries = [Declared(name=n.replace("_", "-"), file="x", value=v) for n, v in declared.items()]
    entries = [
        changed(e, name="requirement:transformers") if e.name == "transformers" else e
        for e in entries
    ]
    return {c.name: c.spec for c in constraints.for_release(BOUNDS, release, entries)}


@pytest.mark.parametrize(
    ("name", "spec", "named"),
    [
        ("vllm", ">=0.34", "release is 0.33.0"),
        ("torch", ">=2.13", "torch-2.12.0"),
        ("torch", ">=2.12.1", f"torch of {TARGET.name} is 2.12.0+cu132"),
        ("cuda", "==12.*", "nvidia_cuda_runtime"),
        ("cuda", ">=13.2.1", f"CUDA of {TARGET.name} is 13.2"),
        ("driver", ">=600", "driver of"),
        ("glibc", ">=2.40", "glibc of"),
        ("glibc", ">=2.35", "verify holds to >=2.34"),
        ("gcc", ">=12", "toolchain holds to >=11.3"),
        ("driver", "new", "not a version bound"),
    ],
)
def test_a_broken_bound_is_named(name: str, spec: str, named: str) -> None:
    found = list(constraints.problems(bounded(name, spec), TARGET))
    assert any(p.startswith(f"constraint {name}") and named in p for p in found), found


def test_a_python_that_the_target_has_but_vllm_does_not_support() -> None:
    target = changed(TARGET, python=("3.10", "3.12"))
    only(list(constraints.problems(LOCK, target)), "python", "3.10")


def test_an_older_image_is_refused() -> None:
    older = load_target(ROOT, "dlami-pytorch-2.7")
    found = list(constraints.problems(LOCK, older))
    assert any("2.7.0+cu128" in p for p in found)
    assert any("CUDA of dlami-pytorch-2.7 is 12.8" in p for p in found)


def test_bounds_that_are_missing_repeated_or_unknown() -> None:
    missing = changed(LOCK, constraints=LOCK.constraints[1:])
    only(list(constraints.problems(missing, TARGET)), "constraint vllm", "lacks")
    twice = changed(LOCK, constraints=(*LOCK.constraints, LOCK.constraints[0]))
    only(list(constraints.problems(twice, TARGET)), "constraint vllm", "2 times")
    extra = Constraint(name="moon", spec=">=1", reason="x")
    unknown = changed(LOCK, constraints=(*LOCK.constraints, extra))
    only(list(constraints.problems(unknown, TARGET)), "constraint moon")


def test_every_bound_says_why_and_what_happens_otherwise() -> None:
    for constraint in LOCK.constraints:
        assert constraint.reason
        assert constraint.error
        assert constraint.source
        file, _, name = constraint.test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()
    text = {c.name: c.error for c in LOCK.constraints}["vllm"]
    assert text == "AmbiguousGlobalPerLayerAttributeError: 'head_dim'"


def test_the_lock_states_what_the_file_says() -> None:
    assert constraints.for_release(BOUNDS, LOCK.vllm, LOCK.declared) == LOCK.constraints
    assert list(constraints.drift(BOUNDS, LOCK)) == []
    only(list(constraints.drift(BOUNDS, bounded("cuda", "==12.*"))), "constraint cuda", "==13.*")


def test_upstreams_own_bound_is_taken() -> None:
    found = said("0.33.0", transformers="<5.21.0,>=5.16.1", requires_python=">=3.11,<3.15")
    assert found["transformers"] == "<5.21.0,>=5.16.1"
    assert found["python"] == ">=3.11,<3.15"
    assert said("0.33.0", requires_python=">=3.12")["python"] == ">=3.12"


def test_an_older_vllm_gets_a_ceiling_for_transformers() -> None:
    found = said("0.28.0", transformers=">=5.5.3", requires_python=">=3.10,<3.15")
    assert found["transformers"] == ">=5.5.3,<5.17"
    assert found["python"] == ">=3.11,<3.15"
    assert said("0.30.0", transformers=">=5.10.4")["transformers"] == ">=5.10.4,<5.17"
    assert said("0.31.0", transformers="<5.18.0,>=5.10.4")["transformers"] == "<5.18.0,>=5.10.4"


@pytest.mark.parametrize(
    ("one", "two", "both"),
    [
        ("", "", ""),
        ("", ">=1", ">=1"),
        (">=1", "", ">=1"),
        (">=2", ">=1", ">=2"),
        (">=1", ">=2", ">=2"),
        ("<5,>=1", ">=1", "<5,>=1"),
        (">=1", "<5", ">=1,<5"),
        ("==1.*", "!=1.2", "!=1.2,==1.*"),
    ],
)
def test_two_bounds_in_one(one: str, two: str, both: str) -> None:
    assert constraints.both(one, two) == both


def test_the_triton_of_torch_is_held_to_its_bound() -> None:
    good = [Requirement('triton==3.7.0; platform_system == "Linux"'), Requirement("sympy")]
    assert list(constraints.problems(LOCK, TARGET, good)) == []
    only(
        list(constraints.problems(LOCK, TARGET, [Requirement("triton==3.8.1")])),
        "constraint triton", "3.8.1", "OutOfResources",
    )  # fmt: skip


@pytest.mark.network
def test_the_triton_of_the_real_torch_is_known() -> None:
    from sm75 import fetch
    from sm75.progress import SilentReporter

    store = Store(default_root())
    fetch.obtain(LOCK.artifact("torch-dev"), store, SilentReporter())
    names = {requirement.name for requirement in constraints.torch_requires(LOCK, store)}
    assert "triton" in names


def test_what_a_broken_bound_leads_to_is_said() -> None:
    old = changed(LOCK, vllm="0.27.1")
    only(
        [p for p in constraints.problems(old, TARGET) if "constraint vllm" in p],
        "0.27.1", "AmbiguousGlobalPerLayerAttributeError: 'head_dim'",
    )  # fmt: skip


def test_every_entry_can_be_looked_up_and_is_tested() -> None:
    assert {bound.name for bound in BOUNDS} == set(constraints.NAMES)
    for bound in BOUNDS:
        assert bound.sources, bound.name
        assert all(source.startswith("https://") for source in bound.sources)
        file, _, name = bound.test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("schema = 1", "schema = 9", "schema 9"),
        ('name = "cuda"', 'name = "moon"', "moon"),
        ('spec = "==13.*"', 'spec = "thirteen"', "thirteen"),
        ('spec = "==13.*"', "spec = 13", "str"),
        ("schema = 1", "schema = ", "Invalid"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, old: str, new: str, named: str) -> None:
    (tmp_path / "lock").mkdir()
    text = (ROOT / constraints.FILE).read_text()
    assert old in text
    (tmp_path / constraints.FILE).write_text(text.replace(old, new, 1))
    with pytest.raises(LockError) as error:
        constraints.load(tmp_path)
    assert named in str(error.value)
    shutil.rmtree(tmp_path / "lock")
    with pytest.raises(LockError, match=r"cannot be read"):
        constraints.load(tmp_path)
