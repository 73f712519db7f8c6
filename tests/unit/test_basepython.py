"""python of conda-forge for the channel: locked, mirrored when it can be had, else described."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import rattler

from sm75 import channel
from sm75.basepython import BasePython
from sm75.lockfile import load_release
from sm75.progress import SilentReporter
from sm75.store import Store
from sm75.toolchain.conda_forge import CHANNEL
from tests.unit import channelkit
from tests.unit.projectkit import RELEASE, ROOT
from tests.unit.test_conda_forge import serve

LOCK = load_release(ROOT, RELEASE)


@pytest.fixture
def forge(tmp_path: Path) -> Iterator[str]:
    """A conda-forge with python and ca-certificates, on this machine."""
    made = tmp_path / "made"
    packages = [
        channelkit.python(made, "3.12.4"),
        channelkit.write(made, "ca-certificates", "2026.1"),
    ]
    channel.publish(packages, tmp_path / "forge")
    with serve(tmp_path / "forge") as url:
        yield url


def base(tmp_path: Path, url: str, *minors: str) -> BasePython:
    name = rattler.Channel(CHANNEL).base_url
    config = rattler.Config.from_toml(
        f'[mirrors]\n"{name}" = ["{url}"]\n[repodata-config]\ndisable-sharded = true\n'
    )
    (tmp_path / "lock" / RELEASE).mkdir(parents=True, exist_ok=True)
    return BasePython(tmp_path, LOCK, minors, config=config, cache_dir=tmp_path / "cache")


def test_locked_then_mirrored_then_there(tmp_path: Path, forge: str, store: Store) -> None:
    python = base(tmp_path, forge, "3.12")
    python.resolve()
    assert (tmp_path / "lock" / RELEASE / "python-3.12.lock").exists()
    wanted = {"python-3.12.4-0_cp312.conda", "ca-certificates-2026.1-0.conda"}
    assert {p.filename for p in python.payloads("3.12")} == wanted
    assert python.packages(store) == []
    assert python.mirror(store, SilentReporter()) == ""
    assert {p.name for p in python.packages(store)} == wanted
    # half a python is none
    next(p for p in python.packages(store) if p.name.startswith("ca-")).unlink()
    assert python.packages(store) == []


def test_nothing_is_asked_when_the_store_has_all(tmp_path: Path, forge: str, store: Store) -> None:
    python = base(tmp_path, forge, "3.12")
    python.resolve()
    python.mirror(store, SilentReporter())
    with serve(tmp_path) as gone:
        pass
    assert base(tmp_path, gone, "3.12").mirror(store, SilentReporter()) == ""


def test_out_of_reach(tmp_path: Path, forge: str, store: Store) -> None:
    base(tmp_path, forge, "3.12").resolve()
    with serve(tmp_path) as gone:
        pass
    python = base(tmp_path, gone, "3.12")
    reason = python.mirror(store, SilentReporter())
    assert reason
    assert "\n" not in reason
    assert python.packages(store) == []


def test_description(tmp_path: Path, forge: str) -> None:
    python = base(tmp_path, forge, "3.12")
    python.resolve()
    text = python.describe("3.12")
    size = sum(p.size for p in python.payloads("3.12")) / 1e6
    assert text == (
        f"python 3.12 and its libraries: 2 files of conda-forge, {size:.1f} MB: "
        "ca-certificates-2026.1-0.conda, python-3.12.4-0_cp312.conda"
    )
    assert "no lock" in python.describe("3.11")


def test_committed_locks() -> None:
    """Real records of conda-forge, for every minor that the channel serves."""
    minors = ("3.11", "3.12", "3.13")
    python = BasePython(ROOT, LOCK, (*minors, "3.14"))
    assert python.payloads("3.14") == []
    for minor in minors:
        found = python.payloads(minor)
        assert any(p.filename.startswith(f"python-{minor}.") for p in found)
        assert {"linux-aarch64", "noarch"} >= {p.subdir for p in found}
        assert not any(re.match(r"(pytorch|libtorch|vllm)-", p.filename) for p in found)
        assert sum(p.size for p in found) < 60e6
