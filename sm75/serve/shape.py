"""What a model's config.json says of its layers, as far as memory goes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm75 import jsontext
from sm75.errors import CheckFailed
from sm75.serve import length as lengths
from sm75.serve.length import Length
from sm75.smem.models import Layer
from sm75.words import counted

# Where multimodal models keep the language model's part.
_TEXT = ("text_config", "language_config", "llm_config")
_SLIDING, _FULL = "sliding_attention", "full_attention"
# Of models whose config.json may leave layer_types out: every which layer is a full one
# (transformers, configuration_gemma3.py and configuration_gemma2.py, sliding_window_pattern).
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model as its memory depends on it.

    Attributes:
        kind: Its model_type.
        layers: Attention layers that own a KV cache, in order.
        shared: Layers that read another's cache.
        count: All layers.
        hidden: Width of the residual stream.
        inner: Widest intermediate size that a token passes in one layer.
        vocab: Its vocabulary.
        per_layer: Width of Gemma's per-layer embeddings; 0: none.
        length: Tokens that vLLM lets a request have.
        towers: Whether it also sees or hears.
        tied: Whether its output layer is the embedding.
        quantized: What its weights are quantized by, as it is said; empty: by nothing.
        unknown: Why the KV cache cannot be told; empty: it can.
    """

    kind: str
    layers: tuple[Layer, ...]
    shared: int
    count: int
    hidden: int
    inner: int
    vocab: int
    per_layer: int
    length: Length
    towers: bool
    tied: bool
    quantized: str = ""
    unknown: str = ""


def config(directory: Path) -> dict[str, Any]:
    """A model's config.json.

    Args:
        directory: The model's directory.

    Raises:
        CheckFailed: There is none, or it cannot be read.
    """
    path = directory / "config.json"
    try:
        found = jsontext.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no table")
    except FileNotFoundError as error:
        if (directory / "params.json").is_file():
            # vLLM takes it (transformers_utils/config.py, MistralConfigParser).
            raise CheckFailed(
                f"{directory} is in Mistral's own form, of which nothing is counted here",
                why="it has params.json and no config.json",
                fix="download the form with config.json, or start it uncounted: "
                f"PREFIX/bin/vllm serve {directory} --dtype float16",
            ) from error
        raise CheckFailed(
            f"{directory} has no config.json",
            why="vLLM knows a model by it",
            fix="name the directory that has config.json and the weights, or download it again",
        ) from error
    except (OSError, ValueError) as error:
        raise CheckFailed(
            f"{path} cannot be read", why=str(error), fix="download the model again"
        ) from error
    return found


@contextlib.contextmanager
def understood(directory: Path) -> Iterator[None]:
    """Make what reading a config.json stumbles over an error for people.

    Raises:
        CheckFailed: It was stumbled over.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckFailed(
            f"{directory / 'config.json'} is not understood",
            why=f"{type(error).__name__}: {error}",
            fix="is it a language model's? Its own way: PREFIX/bin/vllm serve MODEL",
        ) from error


def text_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The language model's part of a config.json, and what stands before its keys' names."""
    name = next((one for one in _TEXT if config.get(one)), "")
    return (config[name], f"{name}.") if name else (config, "")


def parse(config: Mapping[str, Any]) -> Shape:
    """Read a config.json that is loaded.

    Raises:
        LookupError, TypeError, ValueError: It is none of a language model.
    """
    text, _ = text_of(config)
    count, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
    hidden = int(text["hidden_size"])
    shared = int(text.get("num_kv_shared_layers") or 0)
    kinds = layer_kinds(text, count)
    other = sorted(set(kinds) - {_SLIDING, _FULL})
    unknown = f"layers of the kind {', '.join(other)}" if other else ""
    if text.get("kv_lora_rank"):
        unknown = "multi-head latent attention"
    owners = count - shared if 0 < shared < count else count
    layers = tuple(_layer(text, kind, heads, hidden) for kind in kinds[:owners])
    return Shape(
        kind=str(text.get("model_type") or config.get("model_type") or "unknown"),
        layers=layers,
        shared=count - owners,
        count=count,
        hidden=hidden,
        inner=_inner(text, hidden, shared),
        vocab=int(text.get("vocab_size") or 0),
        per_layer=int(text.get("hidden_size_per_layer_input") or 0),
        length=lengths.derive(text),
        towers=any(config.get(f"{what}_config") for what in ("vision", "audio")),
        # Where it is not said, a copy in the files is counted: too much is the safe side.
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        unknown=unknown,
    )


def layer_kinds(text: Mapping[str, Any], count: int) -> list[str]:
    """The kind of each layer: as it is said, or as transformers fills it in.

    Raises:
        ValueError: There are kinds for another number of layers.
    """
    given = text.get("layer_types")
    if given:
        if len(given) != count:
            raise ValueError(
                f"layer_types has {counted(len(given), 'entry', 'entries')} for {count} layers"
            )
        return [str(kind) for kind in given]
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return [_FULL] * count
    pattern = int(
        text.get("sliding_window_pattern") or _PATTERNS.get(str(text.get("model_type")), 0)
    )
    if pattern:
        return [_FULL if (i + 1) % pattern == 0 else _SLIDING for i in range(count)]
    # Qwen: full ones first; Mistral: none.
    first = int(text.get("max_window_layers") or 0) if text.get("use_sliding_window") else 0
    return [_FULL if i < first else _SLIDING for i in range(count)]


def _layer(text: Mapping[str, Any], kind: str, heads: int, hidden: int) -> Layer:
    """One layer. Of Gemma 4's the full ones have heads of another size, and perhaps another number
    of them (vllm/model_executor/models/gemma4.py, per_layer_config).
    """
    head = int(text.get("head_dim") or hidden // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    if kind == _SLIDING:
        window = int(text["sliding_window"])
        return Layer(head=head, q_heads=heads, kv_heads=kv_heads, window=window)
    if text.get("global_head_dim"):
        head = int(text["global_head_dim"])
        if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads"):
            kv_heads = int(text["num_global_key_value_heads"])
    return Layer(head=head, q_heads=heads, kv_heads=kv_heads)


def _inner(text: Mapping[str, Any], hidden: int, shared: int) -> int:
    given = text.get("intermediate_size") or 4 * hidden
    inner = max(int(size) for size in given) if isinstance(given, list) else int(given)
    if text.get("use_double_wide_mlp") and shared:
        inner *= 2
    chosen = text.get("top_k_experts") or text.get("num_experts_per_tok") or 0
    return max(inner, int(chosen) * int(text.get("moe_intermediate_size") or 0))
