"""Calls of the package's own wrappers, with the shapes of real models.

Nothing here knows a launch parameter: the wrappers choose them, on the device that ``standins``
pretends. Runs inside the audit's environment.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sm75.smem import faketorch as torch
from sm75.smem.models import MODELS, WIDE, Layer, Model

ATTENTION = "vllm.v1.attention.ops.triton_unified_attention"
INT4 = "vllm.v1.attention.ops.int4_per_token_head"
CACHE = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"
ENCODER = "vllm.v1.attention.ops.triton_prefill_attention"
MERGE = "vllm.v1.attention.ops.triton_merge_attn_states"
KV_INTERFACE = "vllm.v1.kv_cache_interface"
OURS = "vllm.sm75.attention"

# vllm/v1/attention/backends/triton_attn.py: MIN_LAUNCH_GRID_SIZE_2D, NUM_PAR_SOFTMAX_SEGMENTS.
GRID_2D, SEGMENTS = 128, 16
# vllm/config/cache.py: block_size of the CUDA platform.
BLOCK = 16
BLOCKS = 1000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    Attributes:
        group: ``attention`` or the name of another family of kernels.
        name: What is launched, for the report.
        modules: Modules of the tree it takes.
        call: Makes the call; the launches are recorded.
    """

    group: str
    name: str
    modules: tuple[str, ...]
    call: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Path:
    """A way through the attention wrapper.

    Attributes:
        name: For the report.
        requests: In the batch.
        queries: Query tokens of each request.
        cache: "auto", "int8" or "int4" (the per-token-head modes).
        descriptors: VLLM_TRITON_USE_TD.
        causal: False for encoder-decoder and bidirectional models.
    """

    name: str
    requests: int
    queries: int
    cache: str = "auto"
    descriptors: bool = False
    causal: bool = True


PREFILL = Path(name="prefill", requests=4, queries=512)
DECODE = Path(name="decode", requests=4, queries=1)
# More requests than MIN_LAUNCH_GRID_SIZE_2D over the KV heads: decode without split KV.
FULL_DECODE = Path(name="decode, full batch", requests=250, queries=1)
VERIFY = Path(name="speculative verify", requests=2, queries=4)
USUAL = (PREFILL, DECODE)
FEATURES = (
    FULL_DECODE,
    VERIFY,
    Path(name="prefill int8 cache", requests=4, queries=512, cache="int8"),
    Path(name="decode int8 cache", requests=4, queries=1, cache="int8"),
    Path(name="prefill int4 cache", requests=4, queries=512, cache="int4"),
    Path(name="decode int4 cache", requests=4, queries=1, cache="int4"),
    Path(name="prefill not causal", requests=4, queries=512, causal=False),
    Path(name="prefill descriptors", requests=4, queries=512, descriptors=True),
    Path(name="decode descriptors", requests=4, queries=1, descriptors=True),
)


def all_cases() -> Iterator[Case]:
    """Every call of the audit: all models on the usual paths, all paths on Gemma 4 E2B.

    Each case is seconds of compilation, and the whole is to stay under three minutes on two
    cores; so no shape is here twice.
    """
    for model in MODELS:
        for layer in model.layers:
            yield from (_attention(model, layer, path) for path in USUAL)
    for layer in MODELS[0].layers:
        yield from (_attention(MODELS[0], layer, path) for path in FEATURES)
    for layer in WIDE.layers:
        yield from (_attention(WIDE, layer, path) for path in USUAL)
    int4 = [path for path in FEATURES if path.cache == "int4"]
    yield from (_attention(MODELS[-1], MODELS[-1].layers[0], path) for path in int4)
    yield from _cache_writes()
    yield from _encoders()
    from sm75.smem import morecases

    yield from morecases.cases()


def call_attention(layer: Layer, path: Path, **more: Any) -> None:
    """Call ``unified_attention`` as ``TritonAttentionImpl.forward`` does."""
    wrapper = importlib.import_module(ATTENTION)
    modes = importlib.import_module(KV_INTERFACE).KVQuantMode
    mode, kind, width, scale = {
        "auto": (modes.NONE, torch.float16, layer.head, 0),
        "int8": (modes.INT8_PER_TOKEN_HEAD, torch.int8, layer.head + 4, 4),
        "int4": (modes.INT4_PER_TOKEN_HEAD, torch.uint8, layer.head // 2 + 4, 4),
    }[path.cache]
    tokens = path.requests * path.queries
    paged = torch.empty(BLOCKS, layer.kv_heads, BLOCK, 2 * width, dtype=kind)
    key, value = paged.transpose(1, 2).split(width, dim=-1)
    scales = {}
    if scale:
        strides = tuple(step // scale for step in key.stride()[:3])
        for name in ("k_scale_cache", "v_scale_cache"):
            shape = (BLOCKS, BLOCK, layer.kv_heads)
            scales[name] = torch.empty_strided(shape, strides, dtype=torch.float32)
    padded = 1 << (layer.head - 1).bit_length()
    rows = GRID_2D // layer.kv_heads
    split = (rows * 8, layer.q_heads, SEGMENTS)
    descale = torch.empty(1).expand(path.requests, layer.kv_heads)
    per_head = path.cache != "auto"
    prefix = torch.empty(path.requests, 4, 2, dtype=torch.int32)
    wrapper.unified_attention(
        q=torch.empty(tokens, layer.q_heads, layer.head, dtype=torch.float16),
        k=key,
        v=value,
        out=torch.empty(tokens, layer.q_heads, layer.head, dtype=torch.float16),
        cu_seqlens_q=torch.empty(path.requests + 1, dtype=torch.int32),
        max_seqlen_q=path.queries,
        seqused_k=torch.empty(path.requests, dtype=torch.int32),
        max_seqlen_k=4096,
        softmax_scale=layer.head**-0.5,
        causal=path.causal,
        window_size=(layer.window - 1, 0) if layer.window else (-1, -1),
        block_table=torch.empty(path.requests, 256, dtype=torch.int32),
        softcap=0,
        q_descale=None,
        k_descale=None if per_head else descale,
        v_descale=None if per_head else descale,
        seq_threshold_3D=rows,
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=torch.empty(*split, padded),
        softmax_segm_max=torch.empty(*split),
        softmax_segm_expsum=torch.empty(*split),
        mm_prefix_range=prefix if layer.mm_prefix and path.queries > 1 and not per_head else None,
        mm_prefix_clamp_sliding_window=layer.mm_prefix,
        kv_quant_mode=mode,
        use_td=path.descriptors,
        **scales,
        **more,
    )


def _attention(model: Model, layer: Layer, path: Path) -> Case:
    modules = [ATTENTION, ATTENTION.replace("unified_attention", "attention_helpers"), KV_INTERFACE]
    if path.cache == "int4":
        modules.append(INT4)
    return Case(
        group="attention",
        name=f"{model.name}, {layer.name}, {path.name}",
        modules=tuple(modules),
        call=lambda: call_attention(layer, path),
    )


def _cache_writes() -> Iterator[Case]:
    for head, kv_heads in ((512, 1), (256, 8), (128, 8), (64, 8)):
        for cache in ("auto", "int8", "int4"):
            yield Case(
                group="cache",
                name=f"KV write, h{head}, {cache} cache",
                modules=(CACHE, KV_INTERFACE, INT4, ATTENTION),
                call=functools.partial(_write, head, kv_heads, cache),
            )


def _write(head: int, kv_heads: int, cache: str) -> None:
    writes = importlib.import_module(CACHE)
    modes = importlib.import_module(KV_INTERFACE).KVQuantMode
    key = torch.empty(64, kv_heads, head, dtype=torch.float16)
    slots = torch.empty(64, dtype=torch.int64)
    kind = {"auto": torch.float16, "int8": torch.int8, "int4": torch.uint8}[cache]
    width = {"auto": head, "int8": head + 4, "int4": head // 2 + 4}[cache]
    paged = torch.empty(BLOCKS, kv_heads, BLOCK, 2 * width, dtype=kind)
    key_cache, value_cache = paged.transpose(1, 2).split(width, dim=-1)
    one = torch.empty(1)
    if cache == "auto":
        writes.triton_reshape_and_cache_flash(
            key, key, key_cache, value_cache, slots, "auto", one, one
        )
        return
    strides = tuple(step // 4 for step in key_cache.stride()[:3])
    scales = torch.empty_strided((BLOCKS, BLOCK, kv_heads), strides, dtype=torch.float32)
    mode = modes.INT8_PER_TOKEN_HEAD if cache == "int8" else modes.INT4_PER_TOKEN_HEAD
    writes.triton_reshape_and_cache_flash_per_token_head_quant(
        key, key, key_cache, value_cache, scales, scales, slots, kv_quant_mode=mode
    )


def _encoders() -> Iterator[Case]:
    heads = (
        (64, "Gemma 4 E2B vision tower"),
        (72, "Gemma 4 31B vision tower"),
        (128, "encoder of head 128"),
        (256, "EmbeddingGemma"),
        (512, "encoder of head 512"),
    )
    for head, name in heads:
        yield Case(
            group="encoder",
            name=f"{name}, h{head}",
            modules=(ENCODER,),
            call=functools.partial(_encode, head),
        )


def _encode(head: int) -> None:
    ops = importlib.import_module(ENCODER)
    q = torch.empty(2048, 8, head, dtype=torch.float16)
    lengths = torch.empty(4, dtype=torch.int32)
    ops.context_attention_fwd(
        q=q, k=q, v=q, o=q, b_start_loc=lengths, b_seq_len=lengths, max_input_len=512,
        is_causal=False, softmax_scale=0.1, sliding_window_q=-1, sliding_window_k=-1,
    )  # fmt: skip
