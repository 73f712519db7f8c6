"""The lock step on the real index and the real sdists: what is committed comes out again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sm75 import lockupdate
from sm75.lockfile import known_releases
from sm75.progress import SilentReporter
from sm75.store import Store, default_root
from tests.unit.projectkit import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.network]
# What a lock is made of and what it writes; not the closure, which `channel lock` has tests of.
PARTS = ("lock", "patches", "recipes")


def make(root: Path, vllm: str, base: str = "") -> lockupdate.Outcome:
    request = lockupdate.Request(vllm=vllm, base=base, with_closure=False)
    return lockupdate.update(root, request, Store(default_root()), SilentReporter())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for part in PARTS:
        shutil.copytree(ROOT / part, tmp_path / part)
    return tmp_path


@pytest.mark.parametrize("release", known_releases(ROOT))
def test_the_committed_lock_comes_out_again(project: Path, release: str) -> None:
    for _ in range(2):
        done = make(project, release)
        assert done.changed == ()
        assert done.diff.empty, "\n".join(done.diff.lines())
    for path in sorted((ROOT / "lock" / release).iterdir()):
        assert (project / "lock" / release / path.name).read_bytes() == path.read_bytes()


def test_from_an_older_release_in_one_step(project: Path) -> None:
    """Without a lock of 0.33.0, and without what only that one said."""
    shutil.rmtree(project / "lock" / "0.33.0")
    (project / "lock" / "default").write_text("0.28.0\n")
    done = make(project, "0.33.0")
    assert done.diff.old == "0.28.0"
    sections = done.diff.sections
    assert [c.name for c in sections["External projects"] if c.sign == "+"] == [
        "external:deepselect"
    ]
    assert "~" in {c.sign for c in sections["Requirements of vLLM"]}
    names = {c.name for c in sections["Requirements of vLLM"] if c.sign == "+"}
    assert {"certifi", "oss-harmony"} <= names
    assert done.made.standing.buildable
    for name in ("release.toml", "variants.yaml", "omissions.toml", "python-3.12.lock"):
        committed = (ROOT / "lock" / "0.33.0" / name).read_bytes()
        assert (project / "lock" / "0.33.0" / name).read_bytes() == committed
    # A minute's reading.
    assert sum(1 for _ in done.lines()) < 100
