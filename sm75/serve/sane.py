"""Whether the numbers of a config.json can be those of a model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm75.errors import CheckFailed
from sm75.serve import length, shape

# The largest that is believed: some ten times what the largest known models have. Ours.
_WIDTH, _COUNT, _WORDS = 1_000_000, 10_000, 100_000_000
# Whole numbers by key, the least and the most.
_WHOLE = {
    "num_hidden_layers": (1, _COUNT), "num_attention_heads": (1, _COUNT),
    "hidden_size": (1, _WIDTH), "vocab_size": (1, _WORDS),
    "head_dim": (1, _WIDTH), "global_head_dim": (1, _WIDTH),
    "num_key_value_heads": (1, _COUNT), "num_global_key_value_heads": (1, _COUNT),
    "intermediate_size": (0, _WIDTH), "moe_intermediate_size": (0, _WIDTH),
    "num_experts_per_tok": (0, _COUNT), "top_k_experts": (0, _COUNT),
    "num_kv_shared_layers": (0, _COUNT), "hidden_size_per_layer_input": (0, _WIDTH),
    "sliding_window": (0, 10**9), "max_window_layers": (0, _COUNT),
    "sliding_window_pattern": (0, _COUNT), "kv_lora_rank": (0, _WIDTH),
}  # fmt: skip
# Keys that may hold a number for each layer.
_LISTS = ("intermediate_size",)


def check(config: Mapping[str, Any], path: Path) -> None:
    """Refuse what cannot be a model's, before anything is reckoned with it.

    What is missing is another matter: some models call it otherwise.

    Args:
        config: The whole config.json.
        path: Where it lies, for the words.

    Raises:
        CheckFailed: A value cannot be; it names file and key.
    """
    text, before = shape.text_of(config)
    if not isinstance(text, dict):
        raise _wrong(path, before.rstrip("."), text, "a table")
    names = config.get("architectures")
    if names is not None and not isinstance(names, list):
        raise _wrong(path, "architectures", names, "a list of names")
    for key, (least, most) in _WHOLE.items():
        value = text.get(key)
        # Where attention is latent there are no such heads (model_arch_config_convertor.py).
        if value is None or (key == "head_dim" and value == 0 and text.get("kv_lora_rank")):
            continue
        for one in value if key in _LISTS and isinstance(value, list) else [value]:
            if type(one) is not int or not least <= one <= most:
                raise _wrong(path, before + key, one, f"a whole number, {least:,} to {most:,}")
    for key in (*length.KEYS, "original_max_position_embeddings"):
        value = text.get(key)
        if value is not None and not _positive(value):
            raise _wrong(path, before + key, value, "a number above 0")
    for rope in length.ropes_of(text):
        value = rope.get("factor")
        if value is not None and not _positive(value):
            raise _wrong(path, before + "rope_parameters (or rope_scaling): factor", value,
                         "a number above 0")  # fmt: skip
    _heads(text, before, path)


def _heads(text: Mapping[str, Any], before: str, path: Path) -> None:
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    shared = text.get("num_key_value_heads") or heads
    if not heads or not hidden or text.get("kv_lora_rank"):
        return
    if heads % shared:
        must = f"a divisor of num_attention_heads, {heads} (vLLM: num_heads % num_kv_heads == 0)"
        raise _wrong(path, before + "num_key_value_heads", shared, must)
    if not text.get("head_dim") and hidden < heads:
        must = f"at most hidden_size, {hidden}, where there is no head_dim"
        raise _wrong(path, before + "num_attention_heads", heads, must)


def _positive(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0  # type: ignore[arg-type,operator]


def _wrong(path: Path, key: str, value: object, must: str) -> CheckFailed:
    said = json.dumps(value)
    return CheckFailed(
        f"{path}: {key} is {said if len(said) < 60 else said[:57] + '...'}",
        why=f"it must be {must}", fix="the file is damaged or edited: download config.json again",
    )  # fmt: skip
