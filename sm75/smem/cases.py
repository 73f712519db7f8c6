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
from sm75.smem import inputs
from sm75.smem.models import MODELS, WIDE, Layer, Model

ATTENTION = "vllm.v1.attention.ops.triton_unified_attention"
INT4 = "vllm.v1.attention.ops.int4_per_token_head"
CACHE = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"
ENCODER = "vllm.v1.attention.ops.triton_prefill_attention"
MERGE = "vllm.v1.attention.ops.triton_merge_attn_states"
KV_INTERFACE = "vllm.v1.kv_cache_interface"
OURS = "vllm.sm75.attention"
AHEAD = "vllm.sm75.kernels"
FILES = "vllm.sm75.kernel_files"
OVERLAY = ("vllm.sm75", OURS, AHEAD, FILES)
"""Our own modules beside the tree's."""

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
    made = inputs.attention(
        torch, layer, [path.queries] * path.requests, cache=path.cache, causal=path.causal,
        prefix=4 if layer.mm_prefix and path.queries > 1 and path.cache == "auto" else 0,
        descriptors=path.descriptors,
    )  # fmt: skip
    wrapper.unified_attention(**made.arguments(modes), **more)


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
    layer = Layer(head=head, q_heads=kv_heads, kv_heads=kv_heads)
    _, key_cache, value_cache, k_scale, v_scale = inputs.paged_cache(
        torch, layer, cache, BLOCKS, "cuda"
    )
    one = torch.empty(1)
    if cache == "auto":
        writes.triton_reshape_and_cache_flash(
            key, key, key_cache, value_cache, slots, "auto", one, one
        )
        return
    writes.triton_reshape_and_cache_flash_per_token_head_quant(
        key, key, key_cache, value_cache, k_scale, v_scale, slots,
        kv_quant_mode=inputs.mode_of(modes, cache),
    )  # fmt: skip


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
