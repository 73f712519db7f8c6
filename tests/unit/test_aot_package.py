"""The package of kernels: what is recorded for it, how it gets into a channel, and where."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sm75 import sbom
from sm75.aot import lower, manifest, pack, package, plan, tools
from sm75.errors import ChannelError, CheckFailed, ToolchainError
from sm75.lockfile import load_release
from sm75.progress import make_reporter
from sm75.smem.models import MODELS, block_sizes
from sm75.store import Store, default_root, hash_file
from tests.unit import channelkit, test_aot
from tests.unit.elfkit import DEVICE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def launches() -> list[dict[str, Any]]:
    """The launches of the patched release's own wrappers."""
    lock = load_release(ROOT, "0.33.0")
    store = Store(default_root())
    artifact = lock.artifact("vllm-sdist")
    try:
        store.get(artifact)
    except Exception as error:
        pytest.skip(f"the pinned sdist is not in the store: {error}")
    with package.patched(ROOT, lock, store) as tree:
        return lower.launches(ROOT, tree, manifest.load(ROOT))


def test_every_layer_of_the_model_table_is_recorded(launches: list[dict[str, Any]]) -> None:
    found = [one for one in launches if one["kernel"] == plan.ATTENTION]
    shapes = {
        (c["HEAD_SIZE"], c["num_query_heads"], c["BLOCK_SIZE"], c["SLIDING_WINDOW"],
         c["IS_3D"], bool(c["KV_QUANT_MODE"]))
        for c in (one["constants"] for one in found)
    }  # fmt: skip
    for model in MODELS:
        for layer, block in block_sizes(model).items():
            if layer.q_heads // layer.kv_heads > 16:
                continue  # in parts, as other shapes
            for quantised in (False, True):
                assert any(
                    shape[:4] == (layer.head, layer.q_heads, block, layer.window or 0)
                    and shape[5] == quantised
                    for shape in shapes
                ), (model.name, layer.name, quantised)
    assert {one["kernel"] for one in launches} == {one.name for one in manifest.load(ROOT).kernel}


def test_what_hangs_on_the_batch_is_not_counted_on(launches: list[dict[str, Any]]) -> None:
    for one in launches:
        assert not set(one["aligned"]) & {"num_seqs", "block_table_stride", "qq_bias_stride_0"}
        names = [name for name, _ in one["parameters"]]
        assert set(one["aligned"]) <= set(names)
        # None is compiled in, never passed.
        assert not [n for n, kind in one["tensors"].items() if kind is None and n in names]
        kinds = dict(one["parameters"])
        if one["kernel"] == plan.ATTENTION:
            assert kinds["scale"] == "fp32"
            assert kinds["block_table_stride"] == "i64"
            assert kinds["num_seqs"] == "i32"
            assert kinds["query_ptr"] == "*fp16"


def test_the_plan_of_the_release_is_whole(launches: list[dict[str, Any]]) -> None:
    found = plan.plan(launches, manifest.load(ROOT))
    assert len({(one.identity, one.queries) for one in found}) == len(found)
    for one in found:
        if one.kernel != plan.ATTENTION:
            continue
        group = one.constants["num_queries_per_kv"]
        assert one.launch["BLOCK_M"] >= group
        assert one.launch["BLOCK_Q"] == one.launch["BLOCK_M"] // group
    # Any tile of split KV has a reduction.
    tiles = {one.launch["TILE_SIZE"] for one in found
             if one.kernel == plan.ATTENTION and one.constants["IS_3D"]}  # fmt: skip
    reductions = {one.constants["TILE_SIZE"] for one in found if one.kernel == plan.REDUCTION}
    assert tiles <= reductions


def files(root: Path, home: Path) -> package.Made:
    made = test_aot.variants()
    pack.write(home, made, {"vllm": "0.33.0"}, {})
    return package.Made(package=None, packed=made, unknown=[], wrong=[])


def build(channel: Path, monkeypatch: pytest.MonkeyPatch) -> package.Made:
    """Build and publish, with the compilation left out."""

    def compiled(
        root: Path, lock: Any, store: Any, home: Path, reporter: Any, **_: Any
    ) -> package.Made:
        return files(root, home)

    monkeypatch.setattr(package, "compile_files", compiled)
    lock = load_release(ROOT, "0.33.0")
    with make_reporter(quiet=True) as reporter:
        return package.build(ROOT, lock, None, channel, reporter, print)  # type: ignore[arg-type]


def test_build_publishes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sm75 import condapkg

    made = [build(tmp_path / name, monkeypatch) for name in ("a", "b")]
    first, second = (one.package for one in made)
    assert first is not None
    assert second is not None
    assert first.read_bytes() == second.read_bytes()
    assert first.parent == tmp_path / "a" / "noarch"
    index = condapkg.read_info(first)["index"]
    assert (index["name"], index["version"]) == ("vllm-sm75-kernels", "0.33.0")
    assert index["depends"] == ["python >=3.11", "vllm-sm75 0.33.0.*"]
    listed = json.loads((tmp_path / "a" / "noarch" / "repodata.json").read_text())
    assert first.name in listed["packages.conda"]


def test_one_package_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another build takes the place of the one before."""
    before = build(tmp_path, monkeypatch).package
    assert before is not None
    changed = test_aot.variants()[:1]
    monkeypatch.setattr(test_aot, "variants", lambda: changed)
    made = build(tmp_path, monkeypatch)
    after = made.package
    assert after is not None
    assert after != before
    assert made.withdrawn == (f"noarch/{before.name}",)
    assert [path.name for path in (tmp_path / "noarch").glob("*.conda")] == [after.name]
    bill = json.loads((tmp_path / sbom.SBOM).read_bytes())["components"]
    assert [part["bom-ref"] for part in bill] == [f"noarch/{after.name}"]


def test_nothing_proved_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_aot, "variants", list)
    with pytest.raises(CheckFailed, match=r"no kernel for vLLM 0\.33\.0 has been proved"):
        build(tmp_path, monkeypatch)
    assert not list(tmp_path.rglob("*.conda"))


def test_a_package_from_elsewhere_is_taken_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = (DEVICE / "sm75.cubin").read_bytes()
    real = [
        dataclasses.replace(
            one, cubin=cubin, entry="scale", registers=8,
            wanted=dataclasses.replace(
                one.wanted, parameters=(("q", "*fp16"), ("a", "fp32"), ("n", "i32"))
            ),
        )
        for one in test_aot.variants()
    ]  # fmt: skip
    monkeypatch.setattr(test_aot, "variants", lambda: real)
    made = build(tmp_path / "there", monkeypatch).package
    assert made is not None
    here, digest, lock = tmp_path / "here", hash_file(made), load_release(ROOT, "0.33.0")
    with pytest.raises(ChannelError, match="is not the package that was meant"):
        package.add(ROOT, lock, here, made, "0" * 64, print)
    with pytest.raises(ChannelError, match="there is no file"):
        package.add(ROOT, lock, here, tmp_path / "none.conda", digest, print)
    other = channelkit.write(tmp_path / "other", "numpy")
    with pytest.raises(ChannelError, match="is no package of vllm-sm75-kernels"):
        package.add(ROOT, lock, here, other, hash_file(other), print)
    wrong = [dataclasses.replace(one, registers=9) for one in real]
    monkeypatch.setattr(test_aot, "variants", lambda: wrong)
    lies = build(tmp_path / "lies", monkeypatch).package
    assert lies is not None
    with pytest.raises(CheckFailed, match="breaks 1 of the kernels' rules") as error:
        package.add(ROOT, lock, here, lies, hash_file(lies), print)
    assert "the index says 9 registers, its code has 8" in error.value.why
    assert not list(here.rglob("*.conda"))
    found, _ = package.add(ROOT, lock, here, made, digest.upper(), print)
    assert found.read_bytes() == made.read_bytes()
    assert found.parent == here / "noarch"


def test_arm_is_told_to_take_the_package_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "build_platform", lambda: "linux-64")
    tools.check_machine()
    monkeypatch.setattr(tools, "build_platform", lambda: "linux-aarch64")
    with pytest.raises(ToolchainError, match="this is linux-aarch64") as error:
        tools.check_machine()
    assert "kernels add FILE --sha256 HASH" in str(error.value)
    assert "x86-64 only" in str(error.value)


def test_the_pinned_triton_is_the_last_with_turings_tensor_cores() -> None:
    assert tools.pinned_triton(ROOT).startswith("3.2.")
