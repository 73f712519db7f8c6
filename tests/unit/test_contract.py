"""A contract written on a box."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from sm75 import contract
from sm75.errors import UsageError
from sm75.lockfile import load_target

_FAKE = """\
class _C:
    @staticmethod
    def _cuda_getArchFlags():
        return "sm_75 sm_80"
class version:
    cuda = "13.2"
__version__ = "2.12.0+cu132"
"""


def make_image(place: Path, torch: str | None) -> Path:
    """An environment with this machine's Python and a made-up torch."""
    site = place / "lib" / "python3.12" / "site-packages" / "torch"
    site.mkdir(parents=True)
    (site / "version.py").write_text("__version__ = '2.12.0+cu132'\ncuda: Optional[str] = '13.2'\n")
    (place / "bin").mkdir()
    program = place / "bin" / "python3"
    folder = place / "modules"
    folder.mkdir()
    if torch is not None:
        (folder / "torch.py").write_text(torch)
    program.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return place


def test_facts_of_a_box(tmp_path: Path) -> None:
    found = contract.probe(make_image(tmp_path / "image", _FAKE))
    assert (found.torch, found.cuda, found.torch_arches) == (
        "2.12.0+cu132",
        "13.2",
        ("sm_75", "sm_80"),
    )
    assert found.python == (f"{sys.version_info[0]}.{sys.version_info[1]}",)
    assert found.standing == "seen"
    assert found.name.startswith("dlami-pytorch-2.12-")


def test_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    """Its files say the version; what they do not say is unknown."""
    found = contract.probe(make_image(tmp_path / "image", "raise ImportError('no libcudart')"))
    assert (found.torch, found.cuda, found.python) == ("2.12.0+cu132", "13.2", ("3.12",))
    assert found.torch_arches == ()
    assert "torch_arches = [] # unknown" in contract.dump(found)


def test_no_environment_and_no_torch(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Python environment"):
        contract.probe(tmp_path)
    image = make_image(tmp_path / "image", None)
    shutil.rmtree(image / "lib")
    with pytest.raises(UsageError, match="no torch"):
        contract.probe(image)


def test_written_and_read_back(tmp_path: Path) -> None:
    found = contract.probe(make_image(tmp_path / "image", _FAKE))
    path = contract.write(tmp_path, found, name="my-box")
    assert path == tmp_path / "lock" / "targets" / "my-box.toml"
    assert load_target(tmp_path, "my-box").torch == found.torch
    with pytest.raises(UsageError, match="already"):
        contract.write(tmp_path, found, name="my-box")
    with pytest.raises(UsageError, match="cannot name"):
        contract.write(tmp_path, found, name="../x")
