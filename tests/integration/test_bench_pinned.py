"""``bench`` against what is pinned: ptxas of the toolchain, and vLLM's own benchmark."""

from __future__ import annotations

import platform
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from sm75.bench import memory, vllmtool
from sm75.bench.run import Case, plan_of
from sm75.lockfile import ReleaseLock, load_release
from sm75.store import Store, default_root
from tests.integration.conftest import ROOT, orchestrate


@pytest.fixture(scope="module")
def lock() -> ReleaseLock:
    """The default release, all of it fetched."""
    assert orchestrate("fetch").returncode == 0
    return load_release(ROOT, None)


def _ptxas(lock: ReleaseLock, home: Path) -> Path:
    machine = {"x86_64": "64", "aarch64": "aarch64"}[platform.machine()]
    wheel = Store(default_root()).get(lock.artifact(f"cuda-nvcc-linux-{machine}"))
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/bin/ptxas"))
        program = Path(archive.extract(name, home))
    program.chmod(0o755)
    return program


def test_ptxas_assembles_the_kernels_without_spills(lock: ReleaseLock, tmp_path: Path) -> None:
    program = _ptxas(lock, tmp_path)
    for arch in ("sm_75", "sm_90"):
        done = subprocess.run(
            [program, "-v", f"-arch={arch}", "-o", tmp_path / "out", memory.PTX],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert re.findall(r"entry function '(\w+)'", said) == ["copy", "read", "fill"]
        # Nothing in local memory: what would be moved there would be measured as well.
        spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", said)
        assert spills == [("0", "0", "0")] * 3


def test_vllm_knows_what_its_benchmark_is_given(lock: ReleaseLock) -> None:
    """Each flag stands in the sources of the pinned sdist, and each field that is read of it."""
    sources = {}
    with tarfile.open(Store(default_root()).get(lock.artifact("vllm-sdist"))) as archive:
        for member in archive:
            if name := re.search(r"vllm/benchmarks/(serve|datasets/datasets)\.py$", member.name):
                file = archive.extractfile(member)
                assert file is not None
                sources[name[1]] = file.read().decode()
    known = set(re.findall(r'"(--[a-z-]+)"', "".join(sources.values())))
    line = vllmtool.command(
        Path("vllm"), Case(prompt=32, output=8, streams=2),
        plan_of("32", "8", "2", repeats=3, warmups=1, seed=5),
        url="http://h", model="m", tokenizer=Path("t"), out=Path("o"),
    )  # fmt: skip
    given = {part for part in line if part.startswith("--")}
    assert len(given) == 20
    assert given - known == set()
    for field in ("output_throughput", *vllmtool.COLUMNS):
        assert f'"{field}":' in sources["serve"], field
