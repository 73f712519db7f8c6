"""``health`` on real servers: ``transformers serve`` of tiny models, broken and sane.

Needs a Python with torch and ``transformers[serving]``, named in ``SM75_TORCH_PYTHON``. The models
are made first, which takes minutes; ``SM75_REALSERVER_WORK`` names a directory that keeps them.
``python3 -m tests.realserver.run`` is the same with more runs.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.realserver import run

pytestmark = pytest.mark.integration
NEEDED = "torch, transformers, tokenizers, fastapi, uvicorn, openai"


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("SM75_TORCH_PYTHON", "")
    if not found:
        pytest.skip("no torch: name a Python that has it in SM75_TORCH_PYTHON")
    done = subprocess.run(
        [found, "-c", f"import {NEEDED}"], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(
            f"SM75_TORCH_PYTHON lacks transformers[serving]: {done.stderr.splitlines()[-1]}"
        )
    return found


def test_health_is_right_about_real_models(python: str, tmp_path: Path) -> None:
    work = Path(os.environ.get("SM75_REALSERVER_WORK") or tmp_path)
    evidence = run.campaign(python, work, times=5, few=1)
    assert evidence["faults"] == []
    assert set(evidence["models"]) == {*run.MODELS, "sane, in every manner"}
    # A sane model that always says the same would prove little.
    assert evidence["models"]["sane, in every manner"]["different_answers"] >= 10
