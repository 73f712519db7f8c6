"""The command line in poor surroundings: no home, another locale, a narrow or closed terminal.

Each run is a process of its own, as a supervisor, a container or a pipe starts it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.elfkit import DEVICE
from tests.unit.projectkit import ROOT

START = [sys.executable, str(ROOT / "orchestrator.py")]
# A number that no user has, who may read everything all the same: without HOME, ~ is nothing.
NOBODY = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups",
          "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]  # fmt: skip
SURROUNDINGS = {
    "no HOME": {"HOME": ""},
    "no such HOME": {"HOME": "/nonexistent/home"},
    "HOME that takes nothing": {"HOME": "/proc"},
    "ASCII": {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    "narrow": {"COLUMNS": "20", "TERM": "dumb"},
    "no colour": {"NO_COLOR": "1", "TERM": "dumb"},
}


def environment(changes: dict[str, str]) -> dict[str, str]:
    """This process's own with changes; an empty value takes a variable away."""
    return {k: v for k, v in (os.environ | changes).items() if v or k not in changes}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "serve-\u00e9.log"
    path.write_text("\u2192 RuntimeError: Could not find nvcc \u00fc\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_no_traceback(name: str, log: Path) -> None:
    for arguments, code, word in (
        (["explain", str(log)], 0, "There is no CUDA compiler"),
        # A table with \u00d7 in its cells, and one with \u2026 where it is narrow.
        (["inspect", str(DEVICE / "two.so")], 1, "is unusable on"),
        (["lock"], 0, "constraints"),
        (["kernels", "show", str(log.parent)], 2, "there are no kernels"),
        (["health", "--url", "http://127.0.0.1:9"], 11, "does not answer"),
    ):
        done = subprocess.run(
            [*START, *arguments], env=environment(SURROUNDINGS[name]), capture_output=True,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        said = (done.stdout + done.stderr).decode(errors="replace")
        assert done.returncode == code, said
        assert word in " ".join(said.split())
        assert "Traceback" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    "arguments",
    [["serve", "~/m", "--dry-run"], ["doctor", "--model", "~/m"],
     ["build", "--dry-run", "--store", "~/s"], ["fetch", "--dry-run"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_nobody_has_no_home(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*NOBODY, *START, *arguments], env=environment({"HOME": "", "SM75_STORE": ""}),
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: there is no ")
    assert "next: " in done.stderr
    assert list(tmp_path.iterdir()) == [], "no directory by the name of ~"


@pytest.mark.parametrize("arguments", [["lock"], ["explain", "LOG"], ["lock", "--help"]])
def test_a_reader_that_leaves(arguments: list[str], log: Path) -> None:
    """As head(1) does."""
    words = [str(log) if word == "LOG" else word for word in arguments]
    with subprocess.Popen(
        [*START, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert said == b""
