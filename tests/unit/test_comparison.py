"""docs/comparison.md is of the recorded facts, and the facts are of real inspections."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import comparison
from sm75.errors import CheckFailed
from tests.unit.elfkit import MODULE, compile_library, with_device_code
from tests.unit.projectkit import ROOT
from tests.unit.test_inspection import official


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The page and its facts, to be changed."""
    for name in (comparison.PAGE, comparison.ROWS, comparison.INSPECTED):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_page_is_in_step() -> None:
    comparison.check(ROOT)


def test_a_changed_fact_makes_the_page_stale(root: Path) -> None:
    facts = json.loads((root / comparison.INSPECTED).read_text())
    own = next(one for one in facts if one["file"].startswith("vllm-sm75"))
    own["libraries"] = [library | {"sass": {}, "covered": 0} for library in own["libraries"]]
    (root / comparison.INSPECTED).write_text(json.dumps(facts))
    with pytest.raises(CheckFailed, match="--write"):
        comparison.check(root)
    comparison.write(root)
    comparison.check(root)
    line = next(x for x in comparison.markdown(root).splitlines() if "(this project)" in x)
    assert "| none | none | no |" in line


def test_what_is_recorded_is_what_inspect_finds(root: Path, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    compile_library(tmp_path / "tree" / "x.so", MODULE + with_device_code("sm75.fatbin"))
    comparison.record(root, tmp_path / "tree" / "x.so")
    (made,) = (one for one in comparison.inspected(root) if one["file"] == "x.so")
    assert made["libraries"] == [
        {"name": "x.so", "machine": "aarch64", "sass": {"sm_75": 1}, "ptx": {}, "sources": 1,
         "covered": 1}
    ]  # fmt: skip
    (root / comparison.ROWS).write_text('[[artifact]]\nname = "x"\nfile = "x.so"\n')
    assert "| x | yes | in 1 of 1 libraries with device code | none | yes | inspected " in (
        comparison.markdown(root)
    )


def test_the_official_wheel_is_the_one_the_tests_know() -> None:
    (kept,) = (one for one in comparison.inspected(ROOT) if one["file"] == official().source)
    assert {
        one["name"]: (one["sass"], one["ptx"], one["covered"]) for one in kept["libraries"]
    } == {one.name: (one.sass, one.ptx, one.covered) for one in official().libraries}


@pytest.mark.parametrize("row", ['name = "x"\nfile = "absent.whl"', 'name = "x"\nsass = "no"'])
def test_rows_without_proof_are_refused(root: Path, row: str) -> None:
    (root / comparison.ROWS).write_text(f"[[artifact]]\n{row}\n")
    with pytest.raises(CheckFailed):
        comparison.markdown(root)


def test_a_page_without_marks_is_refused(root: Path) -> None:
    (root / comparison.PAGE).write_text("# Nothing\n")
    with pytest.raises(CheckFailed, match="marks"):
        comparison.check(root)
