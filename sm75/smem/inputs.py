"""The tensors that vLLM gives its attention wrappers, laid out as ``TritonAttentionImpl`` does.

With ``faketorch`` they are shapes for the audit; with the real torch, memory on a device. So what
is compiled ahead of time and what is launched with numbers differ in nothing but the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sm75.smem.models import BLOCK, Layer

# vllm/v1/attention/backends/triton_attn.py: MIN_LAUNCH_GRID_SIZE_2D, NUM_PAR_SOFTMAX_SEGMENTS.
GRID_2D, SEGMENTS = 128, 16
# The same file as the first: split KV for up to so many queries a request.
SPLIT_QUERIES = 8
# Bytes of a float32 scale, which stands behind each head's numbers in a quantised cache.
SCALE = 4


@dataclass(kw_only=True)
class Attention:
    """One call's tensors. ``arguments`` are those of ``unified_attention``."""

    layer: Layer
    cache: str
    queries: tuple[int, ...]
    q: Any
    out: Any
    raw: Any
    key: Any
    value: Any
    k_scale: Any
    v_scale: Any
    starts: Any
    lengths: Any
    table: Any
    split: tuple[Any, Any, Any]
    descale: Any
    prefix: Any
    sinks: Any
    causal: bool
    softcap: float
    descriptors: bool

    def arguments(self, modes: Any) -> dict[str, Any]:
        """What ``unified_attention`` is called with.

        Args:
            modes: ``KVQuantMode`` of the tree.
        """
        layer = self.layer
        plain = self.cache == "auto"
        return {
            "q": self.q,
            "k": self.key,
            "v": self.value,
            "out": self.out,
            "cu_seqlens_q": self.starts,
            "max_seqlen_q": max(self.queries),
            "seqused_k": self.lengths,
            "max_seqlen_k": 4096,
            "softmax_scale": layer.head**-0.5,
            "causal": self.causal,
            "window_size": (layer.window - 1, 0) if layer.window else (-1, -1),
            "block_table": self.table,
            "softcap": self.softcap,
            "q_descale": None,
            "k_descale": self.descale if plain else None,
            "v_descale": self.descale if plain else None,
            "seq_threshold_3D": GRID_2D // layer.kv_heads,
            "num_par_softmax_segments": SEGMENTS,
            "softmax_segm_output": self.split[0],
            "softmax_segm_max": self.split[1],
            "softmax_segm_expsum": self.split[2],
            "mm_prefix_range": self.prefix,
            "mm_prefix_clamp_sliding_window": layer.clamp,
            "kv_quant_mode": mode_of(modes, self.cache),
            "use_td": self.descriptors,
            "sinks": self.sinks,
            "k_scale_cache": self.k_scale,
            "v_scale_cache": self.v_scale,
        }


def mode_of(modes: Any, cache: str) -> Any:
    """The tree's ``KVQuantMode`` of a cache: "auto", "int8" or "int4" (per token and head)."""
    names = {"auto": "NONE", "int8": "INT8_PER_TOKEN_HEAD", "int4": "INT4_PER_TOKEN_HEAD"}
    return getattr(modes, names[cache])


def paged_cache(
    torch: Any, layer: Layer, cache: str, blocks: int, device: str, block: int = BLOCK
) -> tuple[Any, Any, Any, Any, Any]:
    """A paged KV cache: the memory, then views of keys, values and their scales (or None).

    The content of a head is K and V, each with its float32 scale behind it where it is quantised.
    """
    kind, width = {
        "auto": (torch.float16, layer.head),
        "int8": (torch.int8, layer.head + SCALE),
        "int4": (torch.uint8, layer.head // 2 + SCALE),
    }[cache]
    raw = torch.empty(blocks, layer.kv_heads, block, 2 * width, dtype=kind, device=device)
    key, value = raw.transpose(1, 2).split(width, dim=-1)
    if cache == "auto":
        return raw, key, value, None, None
    scales = raw.view(torch.float32)
    k_scale, v_scale = (
        scales[..., (end - SCALE) // SCALE].transpose(1, 2) for end in (width, 2 * width)
    )
    return raw, key, value, k_scale, v_scale


def attention(
    torch: Any,
    layer: Layer,
    queries: Sequence[int],
    *,
    cache: str = "auto",
    blocks: int = 1000,
    table: int = 256,
    prefix: int = 0,
    sinks: bool = False,
    causal: bool = True,
    softcap: float = 0,
    descriptors: bool = False,
    device: str = "cuda",
    block: int = BLOCK,
) -> Attention:
    """Make the tensors, with nothing in them.

    Args:
        torch: ``faketorch`` or torch.
        layer: Heads and window.
        queries: Query tokens of each request.
        cache: "auto", "int8" or "int4".
        blocks: Of the paged cache.
        table: Columns of the block table.
        prefix: Ranges of image tokens a request; 0 for none.
        sinks: Whether each query head has a sink.
        causal: False for encoder-decoder and bidirectional models.
        softcap: Soft cap of the scores; 0 for none.
        descriptors: VLLM_TRITON_USE_TD.
        device: Where the tensors are.
        block: Tokens a block of the cache.
    """

    def empty(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.empty(*shape, dtype=dtype, device=device)

    requests, tokens = len(queries), sum(queries)
    raw, key, value, k_scale, v_scale = paged_cache(torch, layer, cache, blocks, device, block)
    rows = GRID_2D // layer.kv_heads * SPLIT_QUERIES
    padded = 1 << (layer.head - 1).bit_length()
    return Attention(
        layer=layer, cache=cache, queries=tuple(queries),
        q=empty(tokens, layer.q_heads, layer.head, dtype=torch.float16),
        out=empty(tokens, layer.q_heads, layer.head, dtype=torch.float16),
        raw=raw, key=key, value=value, k_scale=k_scale, v_scale=v_scale,
        starts=empty(requests + 1, dtype=torch.int32),
        lengths=empty(requests, dtype=torch.int32),
        table=empty(requests, table, dtype=torch.int32),
        split=(
            empty(rows, layer.q_heads, SEGMENTS, padded),
            empty(rows, layer.q_heads, SEGMENTS),
            empty(rows, layer.q_heads, SEGMENTS),
        ),
        descale=empty(1).expand(requests, layer.kv_heads),
        prefix=empty(requests, prefix, 2, dtype=torch.int32) if prefix else None,
        sinks=empty(layer.q_heads) if sinks else None,
        causal=causal, softcap=softcap, descriptors=descriptors,
    )  # fmt: skip
