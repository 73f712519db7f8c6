"""Values of config.json that cannot be: each is named with its file, and nothing is reckoned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sm75.errors import CheckFailed
from tests.unit import servekit
from tests.unit.commandkit import Runner
from tests.unit.test_serve_plan import planned

NONSENSE = [
    ("num_hidden_layers", 0), ("num_hidden_layers", -3), ("num_hidden_layers", True),
    ("num_hidden_layers", 10**9), ("num_hidden_layers", "16"), ("num_hidden_layers", [16]),
    ("num_attention_heads", 0), ("num_attention_heads", 2.5), ("hidden_size", "wide"),
    ("hidden_size", {}), ("hidden_size", 0), ("hidden_size", 10**12), ("vocab_size", -1),
    ("vocab_size", 0), ("vocab_size", float("inf")), ("vocab_size", 10**30), ("head_dim", 0),
    ("head_dim", -64), ("head_dim", False), ("num_key_value_heads", 0), ("num_key_value_heads", -8),
    ("num_key_value_heads", 5), ("num_key_value_heads", 64), ("intermediate_size", -1),
    ("intermediate_size", [8192, "x"]), ("sliding_window", -1), ("num_kv_shared_layers", -1),
    ("max_position_embeddings", 0), ("max_position_embeddings", -1),
    ("max_position_embeddings", "long"), ("max_position_embeddings", True),
    ("max_position_embeddings", float("nan")), ("seq_length", -4), ("architectures", "Llama"),
    ("model_max_length", 0),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), NONSENSE)
@pytest.mark.parametrize("nested", [False, True])
def test_nonsense_is_named(tmp_path: Path, key: str, value: Any, nested: bool) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    config: dict[str, Any] = {**servekit.LLAMA1, key: value}
    if nested:
        config = config if key == "architectures" else {"text_config": config}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckFailed) as caught:
        planned(model)
    name = f"text_config.{key}" if "text_config" in config else key
    assert caught.value.what.startswith(f"{model / 'config.json'}: {name} is ")
    assert caught.value.why
    assert caught.value.fix


def test_a_factor_of_rope(tmp_path: Path) -> None:
    for factor in (0, -1, "8", True):
        model = servekit.model(
            tmp_path / str(factor),
            {**servekit.LLAMA1, "rope_scaling": {"type": "linear", "factor": factor}},
        )
        with pytest.raises(CheckFailed, match="factor is"):
            planned(model)


def test_heads_without_a_size(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    config = {**servekit.LLAMA1, "hidden_size": 16}
    del config["head_dim"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckFailed, match="num_attention_heads is 32"):
        planned(model)


@pytest.mark.parametrize(
    "change",
    [{"sliding_window": None}, {"num_key_value_heads": None},
     {"model_max_length": 1e30}, {"head_dim": None}, {"intermediate_size": [8192] * 16},
     {"head_dim": 0, "kv_lora_rank": 512}, {"max_position_embeddings": 4096.0}],
)  # fmt: skip
def test_what_models_do_say(tmp_path: Path, change: dict[str, Any]) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    (model / "config.json").write_text(json.dumps({**servekit.LLAMA1, **change}))
    assert planned(model).command


def test_no_traceback(tmp_path: Path, run: Runner) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    (model / "config.json").write_text(json.dumps({**servekit.LLAMA1, "vocab_size": -1}))
    for done in (run("serve", model, "--dry-run"), run("doctor", "--model", model)):
        assert done.code == 1
        assert f"{model / 'config.json'}: vocab_size is -1" in done.out + done.err
        assert "Traceback" not in done.err
