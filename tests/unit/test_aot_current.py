"""Whether ``build`` has to compile the kernels again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sm75.aot import package
from sm75.lockfile import load_release
from tests.unit.projectkit import ROOT


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What the package is made of, and a package in a channel."""
    root = tmp_path / "project"
    for name in ("recipes/vllm-sm75-kernels", "sm75/aot", "sm75/smem", "patches/0.33.0"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("LICENSE", "lock/kernel-tools.txt", "sm75/condapkg.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    made = root / "channel" / "noarch" / "vllm-sm75-kernels-0.33.0-h0_0.conda"
    made.parent.mkdir(parents=True)
    made.write_bytes(b"kernels")
    package.remember(root, load_release(ROOT, None), made)
    return root


def test_nothing_changed(project: Path) -> None:
    found = package.current(project, load_release(ROOT, None), project / "channel")
    assert found is not None
    assert found.read_bytes() == b"kernels"


@pytest.mark.parametrize(
    "name",
    [
        "recipes/vllm-sm75-kernels/proofs.json", "recipes/vllm-sm75-kernels/kernels.toml",
        "sm75/smem/models.toml", "sm75/aot/adapt.py", "lock/kernel-tools.txt",
        "patches/0.33.0/series.toml", "channel/noarch/vllm-sm75-kernels-0.33.0-h0_0.conda",
        ".sm75/records/kernels.json",
    ],
)  # fmt: skip
def test_a_byte_changed(project: Path, name: str) -> None:
    path = project / name
    path.write_bytes(path.read_bytes() + b"#")
    assert package.current(project, load_release(ROOT, None), project / "channel") is None


def test_nothing_is_there(project: Path) -> None:
    (project / "channel/noarch/vllm-sm75-kernels-0.33.0-h0_0.conda").unlink()
    lock = load_release(ROOT, None)
    assert package.current(project, lock, project / "channel") is None
    assert package.current(project, lock, project / "other") is None
    (project / package.RECORD).unlink()
    assert package.current(project, lock, project / "channel") is None
