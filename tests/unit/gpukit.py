"""What the tests of ``verify --gpu`` share: a prepared variant, a result, a bundle. Not a test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm75.gpu.launcher import Prepared

ROOT = Path(__file__).resolve().parents[2]


def prepared(**changes: Any) -> Prepared:
    """A variant of a kernel with a tensor, a number and a constant."""
    facts: dict[str, Any] = {
        "key": "k1", "kernel": "attend", "entry": "attend", "ptx": b".target sm_75",
        "types": {"out": "*fp16", "stride": "i64", "SIZE": "constexpr", "none": "constexpr"},
        "constants": {"SIZE": 16, "none": None}, "aligned": frozenset({"out"}),
        "shared": 65_536, "warps": 4, "registers": 64, "spills": 0,
        "parameters": {"SIZE": 16, "num_warps": 4},
    }  # fmt: skip
    return Prepared(**(facts | changes))


def result(
    side: str = "patched", trial: str = "h512 8:1, decode", **changes: Any
) -> dict[str, Any]:
    """A trial's result as the runner writes it."""
    launch = {
        "kernel": "kernel_unified_attention", "parameters": {"num_warps": 8}, "grid": [8, 1],
        "shared": 65_536, "registers_sm75": 249, "spill_stores_sm75": 0, "registers_here": 128,
        "local_here": 0,
    }  # fmt: skip
    made: dict[str, Any] = {
        "side": side, "trial": trial, "timed": False, "max_error": 1e-3, "mean_error": 1e-5,
        "tolerance": 4e-3, "cache_error": 0.0, "passed": True, "launches": [launch],
    }  # fmt: skip
    return made | changes


def report(*results: Mapping[str, Any]) -> dict[str, Any]:
    """A whole result file."""
    return {
        "schema": 1, "date": "2026-01-01T00:00:00+00:00", "subject": "vllm", "triton": "3.7.0",
        "gpu": "NVIDIA H200", "driver": "1", "passed": True, "results": list(results),
    }  # fmt: skip


def torch_python() -> str | None:
    """A Python with torch, on any device: ``SM75_TORCH_PYTHON``, or this one."""
    for python in (os.environ.get("SM75_TORCH_PYTHON"), sys.executable):
        if (
            python
            and not subprocess.run(
                [python, "-c", "import torch"], check=False, capture_output=True
            ).returncode
        ):
            return python
    return None


def run(python: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program with this project on its path."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM", "PYTHON"))}
    return subprocess.run(
        [python, "-c", program, *arguments], check=False, capture_output=True, text=True,
        timeout=600, cwd=ROOT, env=clean | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
