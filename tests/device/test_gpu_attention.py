"""``verify --gpu`` on a GPU: a part of the trials is right, and wrong machine code is found out.

Needs an NVIDIA GPU, torch and cuda.bindings in the Python that ``SM75_GPU_PYTHON`` names (or this
one). The bundle: ``SM75_GPU_BUNDLE``, or it is made here (needs the pinned sdist and the audit's
environment).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONLY = "h512 8:1, decode"


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("SM75_GPU_PYTHON", sys.executable)
    program = "import torch, cuda.bindings.driver; assert torch.cuda.is_available(), 'no GPU'"
    done = subprocess.run([found, "-c", program], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{found}: {done.stderr.strip().splitlines()[-1]}")
    return found


@pytest.fixture(scope="module")
def bundle(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("SM75_GPU_BUNDLE"):
        return Path(given)
    made = tmp_path_factory.mktemp("bundle") / "bundle.pyz"
    done = subprocess.run(
        [sys.executable, "orchestrator.py", "verify", "--gpu", "--bundle", str(made)],
        check=False, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"no bundle: {done.stderr.strip().splitlines()[0]}")
    return made


def altered(bundle: Path, into: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """A bundle with some of its files changed."""
    with zipfile.ZipFile(bundle) as old, zipfile.ZipFile(into, "w") as new:
        changed = 0
        for info in old.infolist():
            content = old.read(info)
            other = change(info.filename, content)
            changed += other != content
            new.writestr(info.filename, other)
    assert changed
    return into


def run(python: str, bundle: Path, out: Path) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [python, str(bundle), "--only", ONLY, "--side", "patched", "--no-times",
         "--json", str(out)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert out.exists(), done.stderr[-3000:]
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


def test_right_numbers_pass(python: str, bundle: Path, tmp_path: Path) -> None:
    code, result, said = run(python, bundle, tmp_path / "r.json")
    assert code == 0, said
    assert result["passed"]
    assert len(result["results"]) > 4
    assert all(0 < one["max_error"] < one["tolerance"] for one in result["results"])
    assert all(
        launch["shared"] <= 65_536 for one in result["results"] for launch in one["launches"]
    )


def test_wrong_machine_code_fails(python: str, bundle: Path, tmp_path: Path) -> None:
    """The softmax's log2(e) altered in the PTX by 5 %: still a fine-looking softmax."""

    def change(name: str, content: bytes) -> bytes:
        return content.replace(b"0f3FB8AA3B", b"0f3FC1E5F1") if name.endswith(".ptx") else content

    code, result, said = run(python, altered(bundle, tmp_path / "b.pyz", change), tmp_path / "r")
    assert code == 1, said
    assert not result["passed"]
    assert "WRONG" in said


def test_launch_that_was_not_prepared_is_refused(
    python: str, bundle: Path, tmp_path: Path
) -> None:  # fmt: skip
    """The wrapper's warps changed after the bundle was made."""

    def change(name: str, content: bytes) -> bytes:
        if name != "trees/patched/vllm/sm75/attention.py":
            return content
        return re.sub(rb"(?m)^NUM_WARPS.*$", b"NUM_WARPS = {512: (2, 2)}", content)

    code, result, said = run(python, altered(bundle, tmp_path / "b.pyz", change), tmp_path / "r")
    assert code == 1
    assert not result["passed"]
    assert "prepared for another launch" in said
