"""Quantized checkpoints: which method vLLM takes, and what cannot run on 7.5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sm75.errors import CheckFailed, UsageError
from sm75.serve import quant
from sm75.serve.flags import Given
from sm75.serve.known import Installed
from tests.unit import servekit
from tests.unit.test_serve_plan import planned

HERE = Installed(release="0.33.0")
FLOAT = {"type": "float", "strategy": "channel", "num_bits": 8}
MICRO = {"type": "float", "strategy": "group", "group_size": 32, "num_bits": 4}
NVFP4 = {"type": "float", "strategy": "tensor_group", "group_size": 16, "num_bits": 4}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
INT4 = {"type": "int", "strategy": "group", "group_size": 128, "num_bits": 4}


def groups(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    one = {"weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": one}}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, **more}}


def judged(own: dict[str, Any], *arguments: str, here: Installed = HERE, **more: Any) -> str:
    """The method that is taken, once it was not refused."""
    found = quant.read({"quantization_config": own, **more}, Path("/none"))
    quant.refuse(found, Given(arguments), here)
    return found.method


@pytest.mark.parametrize(
    ("own", "method"),
    [
        (GPTQ, "auto_gptq"),
        (AWQ, "auto_awq"),
        ({"quant_method": "auto-round", "bits": 4}, "inc"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt_fp4"),
        (modelopt("NVFP4"), "modelopt_fp4"),
        (modelopt("MIXED_PRECISION"), "modelopt_mixed"),
        ({"quant_method": "compressed_tensors"}, "compressed-tensors"),
        (groups(INT4), "compressed-tensors"),
        (groups(FLOAT, FLOAT), "compressed-tensors"),
        (groups(NVFP4, NVFP4), "compressed-tensors"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8"}}}, "quark"),
    ],
)
def test_what_runs(own: dict[str, Any], method: str) -> None:
    assert judged(own) == method


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"quant_method": "mxfp4"}, "Mxfp4Config of vLLM 0.33.0 needs capability 8.0"),
        ({"quant_method": "mxfp8"}, "needs capability 8.0"),
        ({"quant_method": "experts_int8"}, "ExpertsInt8Config of vLLM 0.33.0 needs capability 8.0"),
        ({"quant_method": "fbgemm_fp8"}, "needs capability 8.0"),
        ({"quant_method": "fp_quant"}, "needs capability 10.0"),
        (modelopt("FP8"), "ModelOptFp8Config of vLLM 0.33.0 needs capability 8.0"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "needs capability 8.0"),
        ({"quant_method": "bitsandbytes"}, "has no method of that name"),
        ({"quant_method": "torchao"}, "has no module torchao"),
        (groups(MICRO), "CompressedTensorsW4A4Mxfp4 of vLLM 0.33.0 needs capability 8.0"),
        (groups({**MICRO, "num_bits": 8}), "no kernel for MXFP8 weights"),
        (groups(INT4, FLOAT), "CompressedTensorsW4A8Fp8 of vLLM 0.33.0 needs capability 9.0"),
        ({"quant_method": "quark", "global_quant_config": {
            "weight": {"dtype": "fp8_e4m3"}, "input_tensors": {"dtype": "fp8_e4m3"}}},
         "QuarkW8A8Fp8 of vLLM 0.33.0 needs capability 8.9"),
    ],
)  # fmt: skip
def test_what_cannot_run(own: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckFailed, match="cannot run here") as caught:
        judged(own)
    assert says in caught.value.why
    assert "AWQ" in caught.value.fix


def test_gpt_oss() -> None:
    with pytest.raises(CheckFailed, match=r"quantization, mxfp4, cannot") as caught:
        judged({"quant_method": "mxfp4"}, model_type="gpt_oss")
    assert "GptOssMxfp4Config" in caught.value.why


@pytest.mark.parametrize(
    ("own", "arguments", "says"),
    [
        ({"quant_method": "gptq"}, "--quantization fp8", "is quantized by gptq already"),
        (AWQ, "-q awq_marlin", ""),
        (GPTQ, "--quantization=marlin", ""),
        ({"quant_method": "gptq"}, "--quantization humming", "has no module humming"),
        ({}, "--quantization fp8", ""),
        ({}, "--quantization fp8_per_tensor", ""),
        ({}, "--quantization fp8_per_tensor --dtype float32", "not in float32"),
        ({}, "--quantization mxfp8", "no kernel for MXFP8"),
        ({}, "--quantization mxfp4", "no kernel for MXFP4"),
        ({}, "--quantization nvfp4_per_token", "FlashInfer"),
        ({}, "--quantization experts_int8", "capability 8.0"),
        ({}, "--quantization bitsandbytes", "no method of that name"),
    ],
)
def test_the_users_own(own: dict[str, Any], arguments: str, says: str) -> None:
    if not says:
        judged(own, *arguments.split())
        return
    with pytest.raises(UsageError) as caught:
        judged(own, *arguments.split())
    assert says in caught.value.why


def test_a_plugin_may_bring_a_method() -> None:
    here = Installed(release="0.33.0", plugins=("vllm-bits",))
    assert judged({"quant_method": "bitsandbytes"}, here=here) == "bitsandbytes"
    assert judged({"quant_method": "mxfp4"}, here=Installed(release="9.9.9")) == "mxfp4"


def test_a_file_of_its_own(tmp_path: Path) -> None:
    """Older ModelOpt checkpoints."""
    import json

    (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt("FP8")))
    assert quant.read({}, tmp_path).method == "modelopt"
    assert quant.read({}, tmp_path / "none").method == ""
    inside = {"text_config": {"quantization_config": {"quant_method": "awq"}}}
    assert quant.read(inside, tmp_path / "none").method == "auto_awq"


def model_of(directory: Path, own: dict[str, Any] | None = None) -> Path:
    config = {**servekit.LLAMA1, **({"quantization_config": own} if own else {})}
    return servekit.model(directory, config)


def test_serve_refuses_before_it_reads_weights(tmp_path: Path) -> None:
    model = model_of(tmp_path / "m", {"quant_method": "mxfp4"})
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckFailed, match="mxfp4, cannot run here"):
        planned(model)


@pytest.mark.parametrize(
    ("own", "asks"),
    [
        ({**groups(INT4), "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        (modelopt("NVFP4", kv_cache_quant_algo="FP8"), "fp8"),
        (groups(INT4), ""),
        ({**groups(INT4), "kv_cache_scheme": None}, ""),
    ],
)
def test_a_cache_that_the_checkpoint_asks_for(
    tmp_path: Path, own: dict[str, Any], asks: str
) -> None:
    """``auto`` would be fp8 then, which ends on 7.5."""
    model = model_of(tmp_path / "m", own)
    found = planned(model)
    at = found.command.index("--kv-cache-dtype")
    assert found.command[at + 1] == ("float16" if asks else "auto")
    assert any("asks for a KV cache in fp8" in line for line in found.warnings) == bool(asks)
    if asks:
        with pytest.raises(UsageError, match="auto cannot work with this checkpoint"):
            planned(model, "--kv-cache-dtype", "auto")
        mine = planned(model, "--kv-cache-dtype", "int8_per_token_head")
        assert not any("asks for a KV cache" in line for line in mine.warnings)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gemma3_text", "glm4"])
def test_models_that_are_refused_in_float16(tmp_path: Path, kind: str) -> None:
    model = servekit.model(tmp_path / "m", {**servekit.LLAMA1, "model_type": kind})
    for arguments in ((), ("--dtype", "half")):
        with pytest.raises(CheckFailed, match=f"refuses {kind} in float16") as caught:
            planned(model, *arguments)
        assert "bfloat16 or float32" in caught.value.why
    half = planned(servekit.model(tmp_path / "half", servekit.LLAMA1))
    for dtype in ("float32", "auto"):
        wide = planned(model, "--dtype", dtype)
        rows = {row.what: row.mib for row in wide.budget.rows}
        assert rows["- weights"] == pytest.approx(
            2 * {row.what: row.mib for row in half.budget.rows}["- weights"]
        )
        assert wide.cache is not None
        assert half.cache is not None
        assert wide.cache.block_bytes == 2 * half.cache.block_bytes


def on_card(*arguments: str, model: Path) -> float:
    return {row.what: row for row in planned(model, *arguments).budget.rows}["- weights"].mib


@pytest.mark.parametrize("name", quant.ONLINE_FP8)
def test_fp8_while_loading_halves_the_linear_layers(tmp_path: Path, name: str) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    linear = servekit.size({
        name: tensor for name, tensor in servekit.text_tensors(servekit.LLAMA1).items()
        if "embed" not in name
    })  # fmt: skip
    whole, halved = on_card(model=model), on_card("--quantization", name, model=model)
    assert whole - halved == pytest.approx(linear / 2 / 2**20)
    found = planned(model, "--quantization", name)
    row = next(row for row in found.budget.rows if row.what == "- weights")
    assert row.note.endswith(f", {name}")
    assert any("Marlin multiplies" in line for line in found.warnings)


def test_fp8_checkpoints(tmp_path: Path) -> None:
    tensors: servekit.Tensors = {"a.weight": ("F8_E4M3", [1024, 1024]), "b": ("BF16", [1024])}
    config = {**servekit.LLAMA1, "quantization_config": {"quant_method": "fp8"}}
    plain = servekit.model(tmp_path / "p", config, tensors)
    assert on_card(model=plain) == pytest.approx((2**20 + 2048) / 2**20)
    # Marlin repeats a block's scale for each of its columns, in float16.
    config["quantization_config"]["weight_block_size"] = [128, 128]  # type: ignore[index]
    blocks = servekit.model(tmp_path / "b", config, tensors)
    assert on_card(model=blocks) == pytest.approx((2**20 + 2048 + 2**20 // 128 * 2) / 2**20)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({**GPTQ, "bits": 3}, "its bits are 3 and sym is true, and vLLM takes 4 bits symmetric or"),
        ({**GPTQ, "sym": False}, "its bits are 4 and sym is false"),
        ({**GPTQ, "bits": "4"}, "its bits are '4'"),
        ({key: value for key, value in GPTQ.items() if key != "sym"}, "has no sym"),
        ({**GPTQ, "desc_act": True}, "no activation order any more"),
        ({**GPTQ, "dynamic": {"+:.*mlp": {"desc_act": True}}}, "by its dynamic rule '+:.*mlp'"),
        ({**AWQ, "bits": 8}, "its bits is 8, and vLLM takes 4 of AWQ"),
        ({**AWQ, "w_bit": 3}, "its w_bit is 3"),
        ({key: value for key, value in AWQ.items() if key != "group_size"},
         "has no q_group_size or group_size"),
    ],
)  # fmt: skip
def test_figures_of_gptq_and_awq_that_are_refused(own: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckFailed) as error:
        judged(own)
    assert says in error.value.why


def test_figures_of_gptq_that_run() -> None:
    judged({**GPTQ, "bits": 8})
    # One group a column needs no order; a rule that leaves modules out has none.
    judged({**GPTQ, "desc_act": True, "group_size": -1})
    judged({**GPTQ, "dynamic": {"-:.*mlp": {"desc_act": True}, "+:.*attn": {"bits": 8}}})
    # 0.28.0 takes the order still; the kernel of experts has rules of its own.
    judged({**GPTQ, "desc_act": True}, here=Installed(release="0.28.0"))
    judged({**AWQ, "bits": 8}, "--quantization", "moe_wna16")
