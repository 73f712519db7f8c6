"""The recipe's list of run dependencies, and whether it is noticed when it is wrong."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sm75 import recipedeps, wheelmeta
from sm75.closure import NAMES
from sm75.closurelock import load_omissions, load_runtime
from sm75.errors import LockError
from sm75.lockfile import load_release
from tests.unit.projectkit import RELEASE, ROOT, copy_project

LOCK = load_release(ROOT, RELEASE)
RECIPE = (ROOT / recipedeps.RECIPE).read_text()
COMMAND = "run: python3 orchestrator.py channel lock"


def make_sdist(place: Path, *requires: str) -> Path:
    """An sdist with nothing but these requirements."""
    text = "Metadata-Version: 2.4\nName: vllm\n" + "".join(
        f"Requires-Dist: {r}\n" for r in requires
    )
    path = place / "sdist.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("vllm-0/PKG-INFO")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return copy_project(tmp_path / "project")


def problems(project: Path, *requires: str) -> list[str]:
    return list(recipedeps.problems(project, LOCK, make_sdist(project, *requires)))


def test_committed_list_is_the_closures() -> None:
    """By name; `lock --check` compares the versions too, with the sdist at hand."""
    listed = {spec.partition(" ")[0] for spec in recipedeps.listed(RECIPE, RELEASE)}
    runtime = load_runtime(ROOT, RELEASE)
    left_out = load_omissions(ROOT, RELEASE)
    own = {
        wheelmeta.conda_name(Requirement(line).name, NAMES)
        for line in runtime.requirements
        if line not in (*left_out.torch, *left_out.offered)
    }
    assert len(listed) > 60
    assert listed == own
    packages = {wheelmeta.conda_name(p.project, NAMES) for p in runtime.packages}
    assert listed <= packages


def test_written_once_and_in_step(project: Path) -> None:
    wanted = ("alpha >=1", "beta")
    assert recipedeps.write(project, LOCK, wanted)
    assert not recipedeps.write(project, LOCK, wanted)
    assert problems(project, "beta", "alpha>=1", "tilelang==0.1.12") == []
    text = (project / recipedeps.RECIPE).read_text()
    assert recipedeps.listed(text, RELEASE) == wanted
    # nothing else of the recipe changed
    theirs = "".join(f"        - {spec}\n" for spec in recipedeps.listed(RECIPE, RELEASE))
    assert text == RECIPE.replace(theirs, "        - alpha >=1\n        - beta\n")


@pytest.mark.parametrize(
    ("requires", "words"),
    [
        (("alpha>=2", "beta"), "it lists alpha >=1, by vLLM's requirements alpha >=2"),
        (("alpha>=1", "beta", "gamma"), "it does not list gamma, which vLLM requires"),
        (("alpha>=1",), "it lists beta, which vLLM does not require"),
    ],
)
def test_disagreements_are_named(project: Path, requires: tuple[str, ...], words: str) -> None:
    recipedeps.write(project, LOCK, ("alpha >=1", "beta"))
    (found,) = problems(project, *requires)
    assert words in found
    assert found.endswith(COMMAND)


def test_order_matters(project: Path) -> None:
    recipedeps.write(project, LOCK, ("beta", "alpha >=1"))
    (found,) = problems(project, "beta", "alpha>=1")
    assert "not in order" in found


def test_a_release_without_a_list(project: Path) -> None:
    """Each release has its own; another one's stays."""
    path = project / recipedeps.RECIPE
    path.write_text(path.read_text().replace(f'"{RELEASE}"', '"0.1.0"'))
    (found,) = problems(project, "alpha")
    assert f"no run dependencies of vLLM {RELEASE}" in found
    assert found.endswith(COMMAND)
    recipedeps.write(project, LOCK, ("alpha",))
    text = path.read_text()
    assert recipedeps.listed(text, RELEASE) == ("alpha",)
    assert recipedeps.listed(text, "0.1.0") == recipedeps.listed(RECIPE, RELEASE)


def test_files_that_are_not_there(project: Path) -> None:
    (project / "lock" / RELEASE / "omissions.toml").unlink()
    (found,) = problems(project, "alpha")
    assert "omissions.toml" in found
    (project / recipedeps.RECIPE).unlink()
    (found,) = problems(project, "alpha")
    assert "recipe.yaml: No such file" in found


def test_a_recipe_with_no_place_for_it(project: Path) -> None:
    path = project / recipedeps.RECIPE
    text = path.read_text().replace(f'"{RELEASE}"', '"0.1.0"')
    path.write_text(text.replace("  run_constraints:\n", "  constraints:\n"))
    with pytest.raises(LockError, match="no place for the run dependencies"):
        recipedeps.write(project, LOCK, ("alpha",))
