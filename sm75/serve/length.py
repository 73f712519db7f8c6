"""How long a request vLLM lets a model have.

Followed: ``model_arch_config_convertor.py`` (``derive_max_model_len_and_key``) and
``config/model.py`` (``_get_and_verify_max_len``) of vLLM 0.33.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sm75.errors import UsageError
from sm75.serve.flags import Given

# Where config.json may say it; the smallest counts, but model_max_length alone where that is.
_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# Kinds of RoPE whose factor is in max_position_embeddings already.
_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_ALLOW = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


@dataclass(frozen=True, kw_only=True)
class Length:
    """What a config.json says of it.

    Attributes:
        key: Where it is said.
        most: Tokens that vLLM allows; infinite: it is not said.
        own: What vLLM takes where nothing is asked; 0: it is not said.
        other: model_max_length of config.json, up to which vLLM allows more; 0: none.
    """

    key: str
    most: float
    own: int
    other: int = 0


def derive(config: Mapping[str, Any], text: Mapping[str, Any]) -> Length:
    """Read it.

    Args:
        config: The whole config.json.
        text: The language model's part of it.

    Raises:
        TypeError, ValueError: A number is none.
    """
    said = {key: float(text[key]) for key in _KEYS if text.get(key) is not None}
    if wrong := next((key for key, value in said.items() if value < 0), ""):
        raise ValueError(f"{wrong} is {said[wrong]:g}")
    if text.get("model_max_length"):
        said = {"model_max_length": said["model_max_length"]}
    key = min(said, key=lambda name: said[name], default="")
    most = said.get(key, math.inf)
    ropes = list(_ropes(config))
    kinds = [str(rope.get("rope_type") or rope.get("type") or "default") for rope in ropes]
    if "gemma3" not in str(config.get("model_type") or ""):
        factor = 1.0
        for rope, kind in zip(ropes, kinds, strict=True):
            if kind not in _SCALED:
                factor = float(rope.get("factor", factor) or 1.0)
        most *= factor
    own = most
    if {"longrope", "su"} & set(kinds):
        # Beyond its original length LongRoPE is worse for short requests.
        own = float(config.get("original_max_position_embeddings") or most)
    return Length(key=key, most=most, own=0 if math.isinf(own) else int(own),
                  other=int(config.get("model_max_length") or 0))  # fmt: skip


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """RoPE's parameters, one for each kind of layer where they differ."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(found, dict):
        nested = [part for part in found.values() if isinstance(part, dict)]
        yield from nested or [found]


def refuse(length: Length, asked: int | None, given: Given, environment: Mapping[str, str]) -> None:
    """Refuse more than vLLM allows.

    Args:
        length: What the model says.
        asked: --max-model-len; nothing: none was asked.
        given: The user's own flags.
        environment: Variables.

    Raises:
        UsageError: It is more.
    """
    if asked is None or asked <= max(length.most, length.other):
        return
    if environment.get(_ALLOW, "0").strip().lower() in ("1", "true") or given.has("--hf-overrides"):
        return
    raise UsageError(
        f"--max-model-len {asked} is more than the model has",
        why=f"vLLM: User-specified max_model_len ({asked}) is greater than the derived "
        f"max_model_len ({length.key}={int(length.most)} in model's config.json)",
        fix=f"-- --max-model-len {int(max(length.most, length.other))}, or leave it out. "
        f"{_ALLOW}=1 lets vLLM go on, with nonsense or a crash beyond",
    )
