"""Architectures that vLLM knows, and the length it lets a model have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sm75.errors import CheckFailed, UsageError
from sm75.serve import arch, length
from sm75.serve.flags import Given
from sm75.serve.known import Installed
from tests.unit import servekit
from tests.unit.test_serve_known import environment
from tests.unit.test_serve_plan import planned

HERE = Installed(release="0.33.0")


def said(name: str, *arguments: str, here: Installed = HERE, **config: Any) -> list[str]:
    return arch.look({"architectures": [name], **config}, Path("/none"), Given(arguments), here)


@pytest.mark.parametrize(
    "name",
    ["LlamaForCausalLM", "Gemma4ForConditionalGeneration", "SmolLM3ForCausalLM",
     "LlamaForConditionalGeneration"],
)  # fmt: skip
def test_what_is_known(name: str) -> None:
    """By itself, through transformers, or by the code of one that begins so."""
    assert said(name) == []


@pytest.mark.parametrize(
    "name", ["BertModel", "Qwen2ForRewardModel", "LlamaForTokenClassification"]
)
def test_embeddings_and_scores(name: str) -> None:
    [line] = said(name)
    assert line.startswith(f"{name} is served for embeddings or scores")
    assert said(name, "--runner", "generate") == []


def test_a_language_model_that_is_made_for_embeddings(tmp_path: Path) -> None:
    """As Qwen3-Embedding is: by sentence-transformers' files alone."""
    model = servekit.model(
        tmp_path / "m", {**servekit.QWEN4, "architectures": ["Qwen3ForCausalLM"]}
    )
    assert not any("embeddings" in line for line in planned(model).warnings)
    (model / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.Transformer"},
                    {"type": "sentence_transformers.models.Pooling"}])
    )  # fmt: skip
    assert any("embeddings" in line for line in planned(model).warnings)
    assert said("Qwen3ForCausalLM", "--runner", "pooling")
    (model / "modules.json").write_text("[1]")
    assert not any("embeddings" in line for line in planned(model).warnings)


def test_a_draft() -> None:
    [line] = said("EagleLlamaForCausalLM")
    assert "drafts for another model" in line


def transformers(prefix: Path, name: str) -> Installed:
    from sm75.serve import known

    program = environment(prefix, vllm="0.33.0")
    folder = program.parents[1] / "lib/python3.12/site-packages/transformers/models/new"
    folder.mkdir(parents=True)
    (folder / "modeling_new.py").write_text(
        f"import torch\n\nclass {name}(PreTrainedModel):\n    x = 1\n"
    )
    return known.look(program)


def test_what_only_transformers_has(tmp_path: Path) -> None:
    here = transformers(tmp_path / "env", "NewForCausalLM")
    [line] = said("NewForCausalLM", here=here)
    assert "it may run by transformers' code" in line
    for arguments in ((), ("--model-impl", "auto")):
        with pytest.raises(CheckFailed, match="does not support OtherForCausalLM") as caught:
            said("OtherForCausalLM", *arguments, here=here)
        assert "transformers has none" in caught.value.why
        assert "lock --vllm latest" in caught.value.fix
    with pytest.raises(CheckFailed):
        said("NewForCausalLM", "--model-impl", "vllm", here=here)
    own = {"auto_map": {"AutoModelForCausalLM": "modeling.Other"}}
    assert "--trust-remote-code" in said("OtherForCausalLM", here=here, **own)[0]
    # Where no environment is seen, nobody knows what transformers has.
    assert "it may run" in said("OtherForCausalLM")[0]
    # Or what a package brings.
    plugin = Installed(release="0.33.0", site=here.site, plugins=("vllm-other",))
    assert "vllm-other may bring it" in said("OtherForCausalLM", here=plugin)[0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Phi3SmallForCausalLM", "until v0.9.2"),
        ("BartModel", "github.com/vllm-project/bart-plugin"),
    ],
)
def test_what_is_gone(tmp_path: Path, name: str, says: str) -> None:
    here = transformers(tmp_path / "env", "NewForCausalLM")
    with pytest.raises(CheckFailed) as caught:
        said(name, here=here)
    assert says in str(caught.value)
    # vLLM tries transformers' code first.
    assert "it may run" in said(name, here=transformers(tmp_path / "has", name))[0]


def test_what_is_not_looked_at() -> None:
    assert arch.look({}, Path("/none"), Given(()), HERE) == []
    assert said("NewForCausalLM", "--hf-overrides", "{}") == []
    assert "9.9.9 was not read" in said("X", here=Installed(release="9.9.9"))[0]


def test_serve_looks_at_the_environments_release(tmp_path: Path) -> None:
    from sm75.serve.plan import make

    here = transformers(tmp_path / "env", "NewForCausalLM")
    assert here.site is not None
    program = here.site.parents[2] / "bin" / "vllm"
    config = {**servekit.LLAMA1, "architectures": ["OtherForCausalLM"]}
    model = servekit.model(tmp_path / "m", config)
    with pytest.raises(CheckFailed, match="does not support OtherForCausalLM"):
        make(program, "m", model, Given(()), environment={})
    assert any("it may run" in line for line in planned(model).warnings)


@pytest.mark.parametrize(
    ("config", "key", "most", "own"),
    [
        ({"max_position_embeddings": 4096}, "max_position_embeddings", 4096, 4096),
        ({"n_positions": 1024, "seq_length": 512}, "seq_length", 512, 512),
        ({"max_position_embeddings": 8192, "model_max_length": 131_072}, "model_max_length",
         131_072, 131_072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}},
         "max_position_embeddings", 16_384, 16_384),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", "factor": 4}},
         "max_position_embeddings", 4096, 4096),
        ({"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096,
          "rope_scaling": {"type": "longrope"}}, "max_position_embeddings", 131_072, 4096),
        ({"max_position_embeddings": 131_072, "model_type": "gemma3_text",
          "rope_scaling": {"rope_type": "linear", "factor": 8}}, "max_position_embeddings",
         131_072, 131_072),
        ({"max_position_embeddings": 64, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0},
            "sliding_attention": {"rope_type": "default"}}}, "max_position_embeddings", 128, 128),
        ({}, "", float("inf"), 2048),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "", float("inf"), 4096),
    ],
)  # fmt: skip
def test_lengths(config: dict[str, Any], key: str, most: float, own: int) -> None:
    found = length.derive(config)
    assert (found.key, found.most, found.own) == (key, most, own)


def test_more_than_the_model_has_is_refused(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.QWEN4)
    with pytest.raises(UsageError, match="--max-model-len 40961 is more than the model has") as no:
        planned(model, "--max-model-len", "40961")
    assert "(40961) is greater than the derived max_model_len (max_position_embeddings=40960" in (
        no.value.why
    )
    assert "--max-model-len 40960" in no.value.fix
    assert planned(model, "--max-model-len", "40960").length == 40_960
    allow = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    assert planned(model, "--max-model-len", "40961", environment=allow).length == 40_961
    with pytest.raises(UsageError):
        planned(model, "--max-model-len", "40961",
                environment={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "0"})  # fmt: skip
    assert planned(model, "--max-model-len", "40961", "--hf-overrides", "{}").length == 40_961
    # What stands beside the language model's part is not read: vLLM asks hf_text_config.
    both = servekit.model(
        tmp_path / "both", {**servekit.QWEN4, "max_position_embeddings": 4096},
        whole={"model_max_length": 8192, "rope_scaling": {"type": "linear", "factor": 2}},
    )  # fmt: skip
    assert planned(both).length == 4096
    with pytest.raises(UsageError, match="4097 is more than the model has"):
        planned(both, "--max-model-len", "4097")


def test_a_length_that_is_nowhere_said_is_vllms(tmp_path: Path) -> None:
    """vllm/config/model.py, default_max_len."""
    config = {key: of for key, of in servekit.LLAMA1.items() if key != "max_position_embeddings"}
    model = servekit.model(tmp_path / "m", config)
    found = planned(model)
    assert found.command[found.command.index("--max-model-len") + 1] == "2048"
    assert any("no max_position_embeddings" in line and "2,048" in line for line in found.warnings)
    asked = planned(model, "--max-model-len", "9999")
    assert asked.length == 9999
    assert not any("max_position_embeddings" in line for line in asked.warnings)
