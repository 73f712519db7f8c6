"""Bytes that a model reads from memory for one token, from its files alone.

Read out of the headers of its safetensors files
(https://github.com/huggingface/safetensors#format: eight bytes of length, then JSON) and
``config.json``; no weight is read.

Read whole for each token: all projections, norms, and the table of output logits (that of the input
embedding where both are tied). Not read whole: a table of embeddings gives one row a token. Of
Gemma 3n and Gemma 4 E models, ``embed_tokens_per_layer`` is such a table, the largest tensor of
the file. Not read at all for text: vision and audio towers, and the key and value projections of
layers that take another layer's (``num_kv_shared_layers``; vLLM 0.33.0, gemma4.py, does not load
them). Of a mixture of experts, the chosen ones' share.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm75 import jsontext
from sm75.errors import UsageError

# Floats are served as float16 on a card without bfloat16, whatever the file has.
SERVED_FLOAT = 2
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# More than any header; a file that claims more is none.
_MOST_HEADER = 100 << 20
_TOWERS = re.compile(
    r"(?:^|\.)(?:vision_tower|vision_model|visual|audio_tower|multi_modal_projector|"
    r"mm_projector|embed_vision|embed_audio|vision_embedder)\."
)
_LAYER = re.compile(r"\.layers\.(\d+)\.self_attn\.(?:[kv]_proj|[kv]_norm)\.")
_EXPERT = re.compile(r"\.experts\.")
# Kinds of use, in the order in which they are told.
WHOLE, ROW, EXPERTS, UNUSED = "read whole", "one row read", "experts, the chosen", "not read"


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of a file: its name, shape, and bytes as stored and as served."""

    name: str
    shape: tuple[int, ...]
    stored: int
    served: int


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What one token makes the card read.

    Attributes:
        weights: Bytes of weights.
        kinds: Bytes as served and bytes read of each kind of use.
        layers: (bytes of keys and values a token of context, window in tokens or 0) of each layer.
        source: Where that is from.
    """

    weights: int
    kinds: Mapping[str, tuple[int, int]]
    layers: tuple[tuple[int, int], ...]
    source: str

    def kv(self, context: int) -> int:
        """Bytes of keys and values read for one token.

        Args:
            context: Tokens before it.
        """
        return sum(size * (min(context, window) if window else context)
                   for size, window in self.layers)  # fmt: skip

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"{kind}: {read / 1e9:.3f} of {there / 1e9:.3f} GB"
            for kind, (there, read) in self.kinds.items()
        ]


def reads(model: Path, *, kv_item: int = 2) -> Reads:
    """Find out what a model's token reads.

    Args:
        model: A directory with ``config.json`` and safetensors files.
        kv_item: Bytes of an element of the KV cache (2: ``--kv-cache-dtype auto`` with float16).

    Raises:
        UsageError: It has none, or they are damaged.
    """
    config = _config(model)
    text = config.get("text_config", config)
    if not _whole(text, "num_hidden_layers"):
        raise UsageError(
            f"{model / 'config.json'} has no num_hidden_layers",
            fix="name the directory of a language model, or give --weight-bytes",
        )
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    shared_from = _whole(text, "num_hidden_layers") - _whole(text, "num_kv_shared_layers")
    chosen = _whole(text, "num_experts_per_tok", "top_k_experts")
    experts = _whole(text, "num_experts", "num_local_experts")
    share = chosen / experts if chosen and experts else 1.0
    there: Counter[str] = Counter()
    read: Counter[str] = Counter()
    tensors = list(_tensors(model))
    head = any(re.search(r"(?:^|\.)lm_head\.", tensor.name) for tensor in tensors)
    for tensor in tensors:
        kind = _kind(tensor, logits=tied and not head, shared_from=shared_from)
        there[kind] += tensor.served
        read[kind] += {
            WHOLE: tensor.served,
            ROW: tensor.served // max(1, tensor.shape[0] if tensor.shape else 1),
            EXPERTS: round(tensor.served * share),
            UNUSED: 0,
        }[kind]
    kinds = {kind: (there[kind], read[kind]) for kind in (WHOLE, ROW, EXPERTS, UNUSED)
             if there[kind]}  # fmt: skip
    return Reads(
        weights=sum(read.values()), kinds=kinds, layers=_layers(text, kv_item),
        source=f"{len(tensors)} tensors of {model.name}, floats as float16",
    )  # fmt: skip


def _kind(tensor: Tensor, *, logits: bool, shared_from: int) -> str:
    if _TOWERS.search(tensor.name):
        return UNUSED
    if (layer := _LAYER.search(tensor.name)) and int(layer[1]) >= shared_from:
        return UNUSED
    if "embed_tokens_per_layer" in tensor.name:
        return ROW
    if re.search(r"(?:^|\.)(?:embed_tokens|wte|tok_embeddings)\.weight$", tensor.name):
        return WHOLE if logits else ROW
    return EXPERTS if _EXPERT.search(tensor.name) else WHOLE


def _layers(text: Mapping[str, Any], item: int) -> tuple[tuple[int, int], ...]:
    """Each layer reads its own, or another's: between two of them, more weights pass than caches
    keep."""
    count = _whole(text, "num_hidden_layers")
    heads = _whole(text, "num_attention_heads")
    kv_heads = _whole(text, "num_key_value_heads") or heads
    head = _whole(text, "head_dim") or (_whole(text, "hidden_size") // heads if heads else 0)
    kinds = text.get("layer_types") or ["full_attention"] * count
    window = _whole(text, "sliding_window")
    found = []
    for kind in kinds[:count]:
        full = kind == "full_attention"
        size = (_whole(text, "global_head_dim") or head) if full else head
        number = (_whole(text, "num_global_key_value_heads") or kv_heads) if full else kv_heads
        found.append((2 * number * size * item, 0 if full else window))
    return tuple(found)


def _config(model: Path) -> dict[str, Any]:
    try:
        config = jsontext.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{model} has no readable config.json", why=str(error),
            fix="name the directory of the model's files, or give --weight-bytes",
        ) from error  # fmt: skip
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        raise UsageError(f"{model / 'config.json'} is no model's", fix="give --weight-bytes")
    return config


def _tensors(model: Path) -> Iterator[Tensor]:
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"there is no *.safetensors in {model}",
            fix="name the directory of the model's files, or give --weight-bytes",
        )
    for path in files:
        try:
            yield from _header(path)
        except (OSError, ValueError, KeyError, TypeError, struct.error, AttributeError) as error:
            raise UsageError(
                f"{path} is no safetensors file", why=f"{type(error).__name__}: {error}",
                fix="get it again, or give --weight-bytes",
            ) from error  # fmt: skip


def _header(path: Path) -> Iterator[Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, _MOST_HEADER):
            raise ValueError(f"its header says {length} bytes, the file has {size}")
        header = jsontext.loads(file.read(length))
    for name, about in header.items():
        if name == "__metadata__":
            continue
        start, end = about["data_offsets"]
        if not 0 <= start <= end <= size - 8 - length:
            raise ValueError(f"{name} is not inside the file")
        shape = tuple(int(side) for side in about["shape"])
        stored = end - start
        served = math.prod(shape) * SERVED_FLOAT if about["dtype"] in _FLOATS else stored
        yield Tensor(name=name, shape=shape, stored=stored, served=served)


def _whole(data: Mapping[str, Any], *names: str) -> int:
    """The first number of these names; 0 for none."""
    for name in names:
        value = data.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0
