"""The audit of shared memory on the real vLLM files: recorded launches, and compiled ones.

Needs the pinned sdist (``SM75_TEST_SDIST``, or the store). Compiling needs the audit's
environment, which ``verify --smem`` makes, or ``SM75_AUDIT_PYTHON``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm75.progress import make_reporter
from sm75.smem import audit as audits
from sm75.smem import toolenv, trees
from sm75.smem.audit import Audit
from sm75.store import default_root
from tests.integration.conftest import Built, orchestrate

ROOT = Path(__file__).resolve().parents[2]
SERIES = Path(os.environ.get("SM75_TEST_SERIES") or ROOT / "patches" / "0.33.0")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def sdist() -> Path:
    given = os.environ.get("SM75_TEST_SDIST")
    name = "vllm-0.33.0.tar.gz"
    found = [Path(given)] if given else sorted(default_root().glob(f"sha256/*/*/{name}"))
    if not found:
        pytest.skip(f"{name} is neither in the store nor named by SM75_TEST_SDIST")
    return found[0]


@pytest.fixture(scope="module")
def unpatched(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("unpatched")
    trees.from_sdist(sdist, tree, series=None)
    return tree


@pytest.fixture(scope="module")
def patched(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("patched")
    trees.from_sdist(sdist, tree, series=trees.python_series(SERIES))
    return tree


def record(tree: Path, capability: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM", "TRITON"))}
    done = subprocess.run(
        [sys.executable, "-m", "sm75.smem.record", str(tree), capability],
        cwd=ROOT, env=clean, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def launches(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("capability", ["8.0", "8.6", "9.0", "10.0"])
def test_other_capabilities_get_upstreams_launches(
    unpatched: Path, patched: Path, capability: str
) -> None:
    """Byte for byte: every argument of every launch of every case."""
    given = record(patched, capability)
    assert len(launches(given)) > 100
    assert given == record(unpatched, capability)


def test_only_7_5_differs(unpatched: Path, patched: Path) -> None:
    before, after = (launches(record(tree, "7.5")) for tree in (unpatched, patched))
    changed = {b["case"] for b in before} & {
        a["case"] for a in after if a not in before and "refused" not in a
    }
    assert "Gemma 4 E2B, h512 8:1, prefill" in changed
    assert "EmbeddingGemma, h256" in changed
    # Where upstream's parameters fit and no other warps are better, nothing is touched.
    assert not any("h128" in case and "wide" not in case and "int4" not in case
                   for case in changed)  # fmt: skip


def test_model_bounds_every_attention_launch(patched: Path) -> None:
    """What the wrappers launch on 7.5 is within 64 KiB by the model, on every path."""
    count = 0
    for launch in launches(record(patched, "7.5")):
        if launch.get("kernel") not in ("kernel_unified_attention", "_attn_packed"):
            continue
        given = launch["arguments"]
        rows, tile = given["BLOCK_M"], given["TILE_SIZE"]
        assert given["BLOCK_Q"] == rows // given["num_queries_per_kv"] >= 1
        columns = rows + (2 * tile if launch["kernel"] == "_attn_packed" else tile)
        shared = 4 * given["HEAD_SIZE_PADDED"] * columns
        assert shared <= audits.SHARED_LIMIT, launch["case"]
        count += 1
    assert count > 50


@pytest.fixture(scope="module")
def python() -> Path:
    ready = (ROOT / ".sm75" / "audit-venv").is_dir() or os.environ.get("SM75_AUDIT_PYTHON")
    if not ready:
        pytest.skip("no environment for the audit: run verify --smem once")
    return toolenv.ensure(ROOT)


def compiled(python: Path, tree: Path, *groups: str) -> Audit:
    cache = ROOT / ".sm75" / "smem" / f"triton-{toolenv.pinned_triton(ROOT)}.json"
    with make_reporter(quiet=True) as reporter:
        return audits.run(python, ROOT, tree, cache, reporter, groups=groups)


def largest(audit: Audit, case: str) -> int:
    return max(audit.variants[use.key].shared for use in audit.uses if use.case == case)


def test_unpatched_head_512_takes_98304_bytes(python: Path, unpatched: Path) -> None:
    """The field report's error, to the byte."""
    audit = compiled(python, unpatched, "attention", "encoder")
    assert largest(audit, "Gemma 4 E2B, h512 8:1, prefill") == 98_304
    assert largest(audit, "EmbeddingGemma, h256") == 131_072
    rules = {problem.rule for problem in audits.problems(audit)}
    assert "shared memory" in rules


def test_patched_is_within_the_limits(python: Path, patched: Path) -> None:
    audit = compiled(python, patched)
    assert audits.problems(audit) == []
    assert not audit.failed
    assert all("h512" in case and "int4" in case for case in audit.refused)
    assert max(variant.shared for variant in audit.variants.values()) == 65_536
    decode = [
        audit.variants[use.key]
        for use in audit.uses
        if "h512" in use.case and "decode" in use.case and use.kernel == "kernel_unified_attention"
    ]
    assert decode
    assert {variant.spill_stores for variant in decode} == {0}


def test_built_package_is_what_the_sources_say(
    built: Built, patched: Path, python: Path, tmp_path: Path
) -> None:
    """The modules in the real ``.conda`` launch what the patched sources launch, and pass."""
    trees.from_package(built.package, tmp_path)
    assert record(tmp_path, "7.5") == record(patched, "7.5")
    done = orchestrate("verify", "--smem", "--json", str(built.package))
    result = json.loads(done.stdout)
    assert done.returncode == 0, result["problems"]
    assert result["subject"] == built.package.name
    assert len(result["launches"]) > 100


def test_model_is_exact(python: Path, patched: Path, unpatched: Path) -> None:
    """Triton's own figure equals the overlay's for every variant of the main kernel."""
    for tree in (patched, unpatched):
        audit = compiled(python, tree, "attention")
        for variant in audit.variants.values():
            if variant.kernel != "kernel_unified_attention":
                continue
            p = {name: int(value) for name, value in variant.parameters.items()}
            rows, tile = p["BLOCK_M"], p["TILE_SIZE"]
            model = 4 * p["HEAD_SIZE_PADDED"] * (rows + tile)
            model += 2 * rows * tile if rows > p["HEAD_SIZE_PADDED"] else 0
            assert variant.shared == model, p
