"""The ratios of the committed evidence, and that too small a one is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import attention_aot

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence" / "attention-h200-2026-12-01.json"


@pytest.fixture(scope="module")
def evidence() -> str:
    return EVIDENCE.read_text()


def test_the_committed_evidence_holds_and_the_docs_say_the_same(evidence: str) -> None:
    found = attention_aot.rows(json.loads(evidence))
    assert attention_aot.faults(found) == []
    assert {row.trial for row in found} >= set(attention_aot.MUST)
    # Attention that went to the JIT on both sides is no ratio.
    assert not [row for row in found if "int4" in row.trial]
    text = (ROOT / "docs" / "turing-attention.md").read_text()
    assert attention_aot.table(found) in text


def _slow(report: dict[str, Any], trial: str) -> None:
    for one in report["results"]:
        # The best of FMA, not what the field ran, comes too close.
        if one["trial"] == trial and one["side"] in ("patched", "8 warps", "largest tiles"):
            one["ms"] = 0.15


def _gone(report: dict[str, Any], trial: str) -> None:
    report["results"] = [one for one in report["results"] if one["trial"] != trial]


def _jit(report: dict[str, Any], trial: str) -> None:
    for one in report["results"]:
        if one["trial"] == trial:
            for launch in one["launches"]:
                launch["parameters"].pop("mma", None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_slow, "times the best FMA, 2.5 is wanted"),
        (_gone, "was not timed"),
        (_jit, "was not timed ahead of time"),
    ],
)
def test_what_does_not_hold_is_exit_code_1(
    evidence: str, tmp_path: Path, change: Any, said: str
) -> None:
    report = json.loads(evidence)
    change(report, "h512 8:1, decode 8 x 4096")
    path = tmp_path / "result.json"
    path.write_text(json.dumps(report))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.attention_aot", str(path)],
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
