"""The series of releases that have no lock, on their real sdists, as far as no build is needed.

Needs the sdists (``SM75_TEST_SDISTS`` names a directory with them, or the store).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sm75 import rebase, releases, sdists
from sm75.drift import KeptTree
from sm75.patching import State, check
from sm75.progress import make_reporter
from sm75.series import load_series
from sm75.smem import audit as audits
from sm75.smem import toolenv, trees
from sm75.smem.audit import SHARED_LIMIT
from sm75.store import Store, default_root
from sm75.trees import open_tree

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
OLD = "0.28.0"
pytestmark = pytest.mark.integration


def sdist(release: str) -> Path:
    """The release's sdist, or the test is skipped."""
    name = f"vllm-{release}.tar.gz"
    given = os.environ.get("SM75_TEST_SDISTS")
    found = [Path(given, name)] if given else sorted(default_root().glob(f"sha256/*/*/{name}"))
    if not found or not found[0].is_file():
        pytest.skip(f"{name} is neither in the store nor below SM75_TEST_SDISTS")
    return found[0]


def unpacked(release: str, into: Path) -> Path:
    """Its CMake files and C++ sources."""
    with tarfile.open(sdist(release), "r|gz") as handle:
        for member in handle:
            path = member.name.partition("/")[2]
            if path == "CMakeLists.txt" or path.startswith(("cmake/", "csrc/")):
                member.name = path
                handle.extract(member, into, filter="data")
    return into


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(OLD, tmp_path_factory.mktemp("tree"))


@pytest.mark.parametrize("release", sorted(p.name for p in PATCHES.iterdir() if p.is_dir()))
def test_series_applies_to_its_release(release: str) -> None:
    results = check(load_series(PATCHES / release), sdist(release))
    assert {result.name: result.state for result in results if result.state != State.APPLIES} == {}


def test_table_is_what_the_sdists_say() -> None:
    """The offline check sees a changed patch; this one sees a changed judgement as well."""
    for release in sdists.pinned(ROOT):
        sdist(release)
    made = releases.markdown(releases.survey(ROOT, Store(default_root())), releases.stamp(ROOT))
    assert made in (ROOT / releases.PAGE).read_text()


def test_the_next_release_takes_the_series_with_moves(tmp_path: Path) -> None:
    """0.28.0's becomes 0.29.0's; what is written applies strictly."""
    for name in (OLD, "0.33.0"):
        shutil.copytree(PATCHES / name, tmp_path / name)
    series = load_series(tmp_path / OLD)
    old, new = (KeptTree(open_tree(sdist(one)), series.paths()) for one in (OLD, "0.29.0"))
    proposal = rebase.propose(series, old, new, "0.29.0")
    assert {r.name for r in proposal.to_accept if r.state is State.ELSEWHERE} == {
        "0001-cmake-turing-only.patch", "0002-setup-turing-only.patch",
        "0102-flash-attention-availability.patch", "0201-attention-shared-memory.patch",
    }  # fmt: skip
    made = rebase.write(proposal, new, tmp_path, accept=True)
    results = check(load_series(made), sdist("0.29.0"))
    assert {result.state for result in results} == {State.APPLIES}
    assert {overlay.home for overlay in load_series(made).overlays} == {OLD, "0.33.0"}


def test_conflicts_of_the_default_release_with_the_oldest() -> None:
    series = load_series(PATCHES / "0.33.0")
    old, new = (KeptTree(open_tree(sdist(one)), series.paths()) for one in ("0.33.0", OLD))
    proposal = rebase.propose(series, old, new, OLD)
    assert [result.name[:4] for result in proposal.conflicts if result.kind == "patch"] == [
        "0001", "0201", "0203"
    ]  # fmt: skip
    faults = {f.hunk: f for r in proposal.conflicts if r.name[:4] == "0001" for f in r.faults}
    # The third hunk's two lines stand twice a page in CMakeLists.txt; the old file tells which.
    assert faults[3].elsewhere == (("CMakeLists.txt", 1566),)
    assert 'set(SCALED_MM_C2X_SRCS "csrc/quantization/' in "".join(faults[2].old)
    assert 'set(SCALED_MM_C2X_SRCS "csrc/libtorch_stable/' in "".join(faults[2].found)


def test_every_extension_and_project_is_known(tree: Path) -> None:
    """What ``known.cmake`` names is what the release declares for CUDA, no more and no less."""
    text = (tree / "CMakeLists.txt").read_text()
    known = (PATCHES / OLD / "overlay/cmake/sm75/known.cmake").read_text()

    def listed(name: str) -> set[str]:
        match = re.search(rf"set\({name} ([^)]*)\)", known)
        assert match is not None
        return set(match[1].split())

    projects = set(re.findall(r"^ *include\(cmake/external_projects/(\w+)\.cmake\)", text, re.M))
    assert projects == listed("SM75_KNOWN_PROJECTS")
    declared = set(re.findall(r"define_extension_target\(\s*(\w+)", text))
    # Both are declared for HIP alone.
    assert declared - {"_C", "_rocm_C"} == listed("SM75_KNOWN_EXTENSIONS")


def test_what_our_sources_include_is_there(tree: Path) -> None:
    series = load_series(PATCHES / OLD)
    ours = {o.dest: o.content.decode() for o in series.overlays if o.dest.startswith("csrc/")}
    wanted = {name for text in ours.values() for name in re.findall(r'#include "([^"]+)"', text)}
    # CUTLASS's own headers come from its package.
    missing = {
        name
        for name in wanted
        if not name.startswith("cutlass/")
        and f"csrc/{name}" not in ours
        and not (tree / "csrc" / name).is_file()
    }
    assert missing == set()


def test_dispatcher_calls_what_our_sources_define(tree: Path) -> None:
    """Upstream's source that ours replaces defines the same functions with the same arguments."""
    replaced = tree / "csrc/libtorch_stable/quantization/w8a8/cutlass/scaled_mm_c2x.cu"
    series = load_series(PATCHES / OLD)
    ours = next(
        o.content.decode() for o in series.overlays if o.dest.endswith("scaled_mm_sm75.cpp")
    )
    for arch in ("sm80", "sm89"):
        assert f"SM75_NOT_BUILT({arch})" in ours
    declared = signatures(replaced.read_text())
    assert set(declared) == {
        f"cutlass_scaled_mm{azp}_{arch}"
        for azp in ("", "_azp")
        for arch in ("sm75", "sm80", "sm89")
    }
    mine = signatures(ours)
    assert set(mine) == {"cutlass_scaled_mm_sm75", "cutlass_scaled_mm_azp_sm75"}
    for name, kinds in declared.items():
        assert kinds == mine[name.replace("sm80", "sm75").replace("sm89", "sm75")], name


def signatures(text: str) -> dict[str, list[tuple[bool, bool]]]:
    """Of the entry points that a source defines: is each argument const, is it optional."""
    found = {}
    for name, given in re.findall(r"^void (cutlass_scaled_mm\w*_sm\d+)\(([^)]*)\)", text, re.M):
        arguments = given.split(",")
        assert all("Tensor" in one and "&" in one for one in arguments)
        found[name] = [("const" in one, "Maybe" in one or "optional" in one) for one in arguments]
    return found


def test_sources_that_are_ordered_are_there(tree: Path) -> None:
    """Lines that name no source would be dead weight; Marlin's are generated while configuring."""
    listed = (PATCHES / OLD / "overlay/cmake/sm75/slowest.txt").read_text().splitlines()
    names = [line.split(" ", 1)[1] for line in listed if not line.startswith("#")]
    absent = [n for n in names if not (tree / n).is_file() and "/sm75" not in n]
    assert absent == []
    assert sum("/sm75_kernel_" in name for name in names) == 14


def record(where: Path, capability: str, group: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM", "TRITON"))}
    done = subprocess.run(
        [sys.executable, "-m", "sm75.smem.record", str(where), capability, "--group", group],
        cwd=ROOT, env=clean, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wrappers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The modules of 0.28.0 that the audit runs, unpatched and patched."""
    root = tmp_path_factory.mktemp("wrappers")
    trees.from_sdist(sdist(OLD), root / "unpatched", series=None)
    series = trees.python_series(PATCHES / OLD)
    trees.from_sdist(sdist(OLD), root / "patched", series=series)
    return root / "unpatched", root / "patched"


@pytest.mark.parametrize("group", ["attention", "encoder"])
def test_launches_are_within_the_limit(wrappers: tuple[Path, Path], group: str) -> None:
    """By the model: nothing is compiled here."""

    def launches(text: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in text.splitlines()]

    def over(found: list[dict[str, Any]]) -> set[str]:
        return {one["case"] for one in found if shared(one) > SHARED_LIMIT}

    unpatched, patched = (launches(record(where, "7.5", group)) for where in wrappers)
    assert over(patched) == set()
    before = over(unpatched)
    if group == "attention":
        assert "Gemma 4 E2B, h512 8:1, prefill" in before
        refused = {one["case"] for one in patched if "refused" in one}
        assert refused == {f"Gemma 4 E2B, h512 8:1, {kind} int4 cache"
                           for kind in ("prefill", "decode")}  # fmt: skip
    else:
        assert before == {"EmbeddingGemma, h256", "encoder of head 512, h512"}
    for capability in ("8.0", "9.0"):
        assert record(wrappers[1], capability, group) == record(wrappers[0], capability, group)


def shared(launch: dict[str, Any]) -> int:
    """Shared memory of an attention launch on 7.5, by the law of docs/turing-attention.md."""
    given = launch.get("arguments", {})
    if launch.get("kernel") == "_fwd_kernel":
        return int(4 * given["BLOCK_DMODEL"] * (given["BLOCK_M"] + given["BLOCK_N"]))
    if launch.get("kernel") not in ("kernel_unified_attention", "_attn_packed"):
        return 0
    tile = given["TILE_SIZE"] * (2 if launch["kernel"] == "_attn_packed" else 1)
    return int(4 * given["HEAD_SIZE_PADDED"] * (given["BLOCK_M"] + tile))


def test_compiled_attention_is_within_the_limit(wrappers: tuple[Path, Path]) -> None:
    """What the audit compiles for sm_75 of 0.28.0: the law is exact there too, and all of it fits.

    0.28.0's modules import typing_extensions, which the audit's own environment lacks.
    """
    python = os.environ.get("SM75_AUDIT_PYTHON")
    if not python:
        pytest.skip("SM75_AUDIT_PYTHON names no Python with the audit's Triton")
    if subprocess.run([python, "-c", "import typing_extensions"], check=False).returncode:
        pytest.skip("SM75_AUDIT_PYTHON lacks typing_extensions")
    cache = ROOT / ".sm75" / "smem" / f"triton-{toolenv.pinned_triton(ROOT)}.json"
    groups = ("attention", "encoder", "cache")
    with make_reporter(quiet=True) as reporter:
        audit = audits.run(toolenv.ensure(ROOT), ROOT, wrappers[1], cache, reporter, groups=groups)
    assert audit.failed == {}
    assert audits.problems(audit) == []
    assert max(variant.shared for variant in audit.variants.values()) == SHARED_LIMIT
    exact = 0
    for variant in audit.variants.values():
        if variant.kernel == "kernel_unified_attention":
            given = {name: int(value) for name, value in variant.parameters.items()}
            rows, tile = given["BLOCK_M"], given["TILE_SIZE"]
            p_bytes = 2 * rows * tile if rows > given["HEAD_SIZE_PADDED"] else 0
            assert variant.shared == 4 * given["HEAD_SIZE_PADDED"] * (rows + tile) + p_bytes
            exact += 1
    assert exact > 40
