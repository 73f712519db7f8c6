"""The types that a model computes and caches in, and those that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sm75.errors import CheckFailed, UsageError
from sm75.serve.flags import Given
from sm75.serve.known import Installed

WIDE = ("float32", "float")
# KV caches that checkpoints ask for and 7.5 cannot run (triton_attn.py, TritonAttentionImpl).
_SMALL = ("fp8", "nvfp4")


def refuse(config: Mapping[str, Any], given: Given, here: Installed) -> None:
    """Refuse float16 for models that vLLM refuses it for (``_check_valid_dtype``).

    Args:
        config: The model's config.json.
        given: The user's own flags.
        here: What is installed.

    Raises:
        CheckFailed: It is such a model.
    """
    reason = _against(config, here)
    if reason and (given.value("--dtype") or "float16") in ("float16", "half"):
        raise CheckFailed(
            f"vLLM refuses {config['model_type']} in float16",
            why=f"{reason} A T4G has no bfloat16",
            fix="for a small one: -- --dtype float32, which takes twice the memory and was not "
            "tried on 7.5; else take another model",
        )


def _against(config: Mapping[str, Any], here: Installed) -> str:
    known = here.known
    return known.not_in_float16.get(str(config.get("model_type") or ""), "") if known else ""


def element_bytes(config: Mapping[str, Any], given: Given, here: Installed) -> int:
    """Bytes of the type that a model is run in: 2 for float16, 4 for float32.

    ``--dtype auto`` is float32 for models that are refused in float16 (``_resolve_auto_dtype``).
    """
    dtype = given.value("--dtype")
    return 4 if dtype in WIDE or (dtype == "auto" and _against(config, here)) else 2


def cache_bytes(element: int, given: Given) -> int:
    """Bytes of an element of the KV cache; smaller types are counted as float16."""
    return element if given.value("--kv-cache-dtype") in (None, "auto") else 2


def cache_type(asks: str, given: Given) -> tuple[str, str]:
    """--kv-cache-dtype, and what is to be said of it.

    ``auto`` means float16, unless the checkpoint asks for another type
    (``resolve_kv_cache_dtype_string``).

    Args:
        asks: What the checkpoint asks for; empty: nothing.
        given: The user's own flags.

    Raises:
        UsageError: The user asks for ``auto``, and that means fp8 here.
    """
    if asks not in _SMALL:
        return "auto", ""
    typed = given.value("--kv-cache-dtype")
    if typed == "auto":
        raise UsageError(
            "--kv-cache-dtype auto cannot work with this checkpoint",
            why=f"it asks for a KV cache in {asks}, which begins with capability 8.9",
            fix="leave it out: float16 is passed; for more tokens: int8_per_token_head",
        )
    why = f"the checkpoint asks for a KV cache in {asks}, which 7.5 cannot run: float16 is passed"
    return "float16", "" if typed else why
