"""The Python patches on the real vLLM files, run, each with and without its patch.

Needs the pinned sdist: ``SM75_TEST_SDIST``, or the store. The tests of whole modules also need a
Python that has torch and vLLM's requirements/common.txt: ``SM75_TORCH_PYTHON``.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sm75.patching import State, apply, check
from sm75.series import Series, load_series
from sm75.store import default_root

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("startprobe.py")
PATCHES = {
    "flash_attention": "0101-flash-attention-optional.patch",
    "availability": "0102-flash-attention-availability.patch",
    "sampler": "0103-sampler-capability-first.patch",
    "rotary": "0104-rotary-without-flash-attention.patch",
}
pytestmark = pytest.mark.integration
TreeMaker = Callable[[str], Path]


def _series() -> Series:
    """The part of the series that changes Python files of the package."""
    whole = load_series(Path(os.environ.get("SM75_TEST_SERIES") or ROOT / "patches" / "0.33.0"))
    return dataclasses.replace(
        whole,
        patches=tuple(
            patch
            for patch in whole.patches
            if all(d.path.startswith("vllm/") and d.path.endswith(".py") for d in patch.diffs)
        ),
        overlays=tuple(o for o in whole.overlays if o.dest.startswith("vllm/")),
    )


@pytest.fixture(scope="session")
def sdist() -> Path:
    name = "vllm-0.33.0.tar.gz"
    given = os.environ.get("SM75_TEST_SDIST")
    found = [Path(given)] if given else sorted(default_root().glob(f"sha256/*/*/{name}"))
    if not found:
        pytest.skip(f"{name} is neither in the store nor named by SM75_TEST_SDIST")
    return found[0]


@pytest.fixture(scope="session")
def torch_python() -> str:
    given = os.environ.get("SM75_TORCH_PYTHON")
    if not given:
        pytest.skip("SM75_TORCH_PYTHON names no Python with torch")
    return given


@pytest.fixture(scope="session")
def tree(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> TreeMaker:
    """Patched trees by the name of the patch left out ("" for none, "all" for unpatched)."""
    root = tmp_path_factory.mktemp("vllm")
    pristine = root / "all"
    with tarfile.open(sdist, "r|gz") as handle:
        for member in handle:
            path = member.name.partition("/")[2]
            if path.startswith(("vllm/", "vllm.egg-info/")) and not member.issym():
                member.name = path
                handle.extract(member, pristine, filter="data")
    series = _series()

    def make(without: str) -> Path:
        target = root / (without or "patched")
        if not target.exists():
            for folder, _, names in os.walk(pristine):
                there = target / Path(folder).relative_to(pristine)
                there.mkdir()
                for name in names:
                    # The applier replaces files by renaming, so links to the originals are safe.
                    (there / name).hardlink_to(Path(folder, name))
            kept = tuple(p for p in series.patches if p.file != PATCHES.get(without))
            assert len(kept) == len(series.patches) - bool(without)
            apply(dataclasses.replace(series, patches=kept), target)
        return target

    return make


def probe(
    tree: Path, *cases: str, python: str = "", capability: str = "7.5", **env: str
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM", "PYTHON"))}
    clean |= {"PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""} | env
    return subprocess.run(
        [python or sys.executable, str(PROBE), str(tree), *cases, "--capability", capability]
        + ([] if python else ["--stub"]),
        env=clean,
        capture_output=True,
        text=True,
        timeout=1800,  # the build may be using the cores
    )


def assert_ok(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stderr[-3000:]


def assert_fails(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode != 0
    assert words in done.stderr.splitlines()[-1], done.stderr[-3000:]


MISSING = "requires the CUDA flash attention extensions"
NEEDED = [
    ("flash_attention", "flash_attention", MISSING),
    ("availability", "flash_attention", "said to be available"),
    ("sampler", "sampler", "No module named 'flashinfer"),
    ("rotary", "rotary", "No module named 'vllm.vllm_flash_attn.layers'"),
]


def test_the_whole_series_applies_to_the_sdist(sdist: Path) -> None:
    assert {result.state for result in check(_series(), sdist)} == {State.APPLIES}


@pytest.mark.parametrize(("patch", "case", "fault"), NEEDED, ids=list(PATCHES))
def test_each_patch_is_needed_and_enough(
    tree: TreeMaker, patch: str, case: str, fault: str
) -> None:
    assert_ok(probe(tree(""), case))
    assert_fails(probe(tree(patch), case), fault)


def test_sampler_switch(tree: TreeMaker) -> None:
    """Asked for by name, FlashInfer's sampler is refused with the reason; off is off."""
    asked = probe(tree(""), "sampler", VLLM_USE_FLASHINFER_SAMPLER="1")
    assert_fails(asked, "no working path on compute capability 7.5")
    assert_ok(probe(tree(""), "sampler", VLLM_USE_FLASHINFER_SAMPLER="0"))


@pytest.mark.parametrize("capability", ["7.0", "8.0", "9.0"])
def test_other_capabilities_go_upstreams_way(tree: TreeMaker, capability: str) -> None:
    done = probe(tree(""), "sampler", capability=capability)
    assert_fails(done, "No module named 'flashinfer")


def test_engine_modules_import(tree: TreeMaker, torch_python: str) -> None:
    """The real modules of a start import and answer, over a real torch (about a minute)."""
    cases = ("flash_attention", "sampler", "rotary", "engine")
    assert_ok(probe(tree(""), *cases, python=torch_python))


def test_engine_modules_do_not_import_unpatched(tree: TreeMaker, torch_python: str) -> None:
    assert_fails(probe(tree("flash_attention"), "engine", python=torch_python), MISSING)
    assert_fails(probe(tree("sampler"), "sampler", python=torch_python), "'flashinfer'")
