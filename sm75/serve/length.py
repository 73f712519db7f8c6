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
KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# Kinds of RoPE whose factor is in max_position_embeddings already.
_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_ALLOW = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
# What vLLM assumes where config.json has none of them (vllm/config/model.py:2590,
# default_max_len).
_ASSUMED = 2048


@dataclass(frozen=True, kw_only=True)
class Length:
    """What a config.json says of it.

    Attributes:
        key: Where it is said; empty: nowhere.
        most: Tokens that vLLM allows; infinite: it is not said.
        own: What vLLM takes where nothing is asked.
    """

    key: str
    most: float
    own: int


def derive(text: Mapping[str, Any]) -> Length:
    """Read it.

    Args:
        text: The language model's part of config.json: vLLM reads no other (hf_text_config).

    Raises:
        TypeError, ValueError: A number is none.
    """
    said = {key: float(text[key]) for key in KEYS if text.get(key) is not None}
    if text.get("model_max_length"):
        said = {"model_max_length": said["model_max_length"]}
    key = min(said, key=lambda name: said[name], default="")
    ropes = list(ropes_of(text))
    kinds = [str(rope.get("rope_type") or rope.get("type") or "default") for rope in ropes]
    factor = 1.0
    if "gemma3" not in str(text.get("model_type") or ""):
        for rope, kind in zip(ropes, kinds, strict=True):
            if kind not in _SCALED:
                factor = float(rope.get("factor", factor) or 1.0)
    own = said.get(key, _ASSUMED) * factor
    if {"longrope", "su"} & set(kinds):
        # Beyond its original length LongRoPE is worse for short requests.
        own = float(text.get("original_max_position_embeddings") or own)
    return Length(key=key, most=said[key] * factor if key else math.inf, own=int(own))


def ropes_of(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """RoPE's parameters, one for each kind of layer where they differ."""
    found = text.get("rope_parameters") or text.get("rope_scaling")
    if isinstance(found, dict):
        nested = [part for part in found.values() if isinstance(part, dict)]
        yield from nested or [found]


def notes(length: Length, given: Given) -> list[str]:
    """What is to be said where config.json says nothing of it."""
    if length.key or given.has("--max-model-len"):
        return []
    says = (
        f"config.json has no max_position_embeddings, nor another key of a length: {length.own:,}"
    )
    return [f"{says} tokens are taken, as vLLM assumes; more: -- --max-model-len TOKENS"]


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
    if asked is None or asked <= length.most:
        return
    if environment.get(_ALLOW, "0").strip().lower() in ("1", "true") or given.has("--hf-overrides"):
        return
    raise UsageError(
        f"--max-model-len {asked} is more than the model has",
        why=f"vLLM: User-specified max_model_len ({asked}) is greater than the derived "
        f"max_model_len ({length.key}={int(length.most)} in model's config.json)",
        fix=f"-- --max-model-len {int(length.most)}, or leave it out. "
        f"{_ALLOW}=1 lets vLLM go on, with nonsense or a crash beyond",
    )
