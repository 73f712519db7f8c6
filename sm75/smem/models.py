"""Shapes that decide what a kernel takes: attention heads, experts, vocabularies. With sources."""

from __future__ import annotations

from dataclasses import dataclass, field

# vllm/config/cache.py: tokens a block, the CUDA platform's default.
BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One kind of attention layer.

    Attributes:
        head: Head size.
        q_heads: Query heads.
        kv_heads: Key-value heads.
        window: Sliding window in tokens; 0 is full attention.
        mm_prefix: Whether image tokens see each other both ways.
        clamp: Whether they do so within the window only. vLLM says so of Gemma 4's sliding layers,
            images or not (vllm/model_executor/models/gemma4.py, mm_prefix_clamp_sliding_window).
    """

    head: int
    q_heads: int
    kv_heads: int
    window: int = 0
    mm_prefix: bool = False
    clamp: bool = False

    @property
    def name(self) -> str:
        window = f" w{self.window}" if self.window else ""
        prefix = " mm" if self.mm_prefix else ""
        return f"h{self.head} {self.q_heads}:{self.kv_heads}{window}{prefix}"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts: number, chosen a token, hidden and intermediate size."""

    count: int
    chosen: int
    hidden: int
    inner: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model by what its kernels are launched with."""

    name: str
    source: str
    layers: tuple[Layer, ...]
    hidden: int
    experts: Experts | None = None
    vision_head: int = 0
    vocab: int = 262_144
    tags: tuple[str, ...] = field(default=())


def block_sizes(model: Model) -> dict[Layer, int]:
    """Tokens a block of each layer's KV cache.

    vLLM gives all layers pages of one size: where a layer's own would be smaller, its block grows
    by as much (vllm/v1/core/kv_cache_utils.py, unify_kv_cache_spec_page_size).
    """
    pages = {layer: layer.kv_heads * layer.head for layer in model.layers}
    most = max(pages.values())
    return {
        layer: BLOCK * (most // page if most % page == 0 else 1) for layer, page in pages.items()
    }


_GEMMA4 = (
    "transformers, src/transformers/models/gemma4/convert_gemma4_weights.py, _VARIANTS "
    "(0f3f0632a387), and configuration_gemma4.py: head_dim 256, global_head_dim 512"
)
_GEMMA3 = "transformers, src/transformers/models/gemma3/convert_gemma3_weights.py, _VARIANTS"
_LLAMA3 = "config.json of meta-llama/Llama-3.2-1B and Llama-3.1-8B"
_QWEN3 = "config.json of Qwen/Qwen3-4B and Qwen3-14B"

MODELS: tuple[Model, ...] = (
    Model(
        name="Gemma 4 E2B", source=_GEMMA4, hidden=1536, vision_head=64,
        layers=(
            Layer(head=256, q_heads=8, kv_heads=1, window=512, clamp=True),
            Layer(head=512, q_heads=8, kv_heads=1),
        ),
    ),
    Model(
        name="Gemma 4 E4B", source=_GEMMA4, hidden=2560, vision_head=64,
        layers=(
            Layer(head=256, q_heads=8, kv_heads=2, window=512, clamp=True),
            Layer(head=512, q_heads=8, kv_heads=2),
        ),
    ),
    Model(
        name="Gemma 4 26B-A4B", source=_GEMMA4, hidden=2816, vision_head=72,
        experts=Experts(count=128, chosen=8, hidden=2816, inner=704),
        layers=(
            Layer(head=256, q_heads=16, kv_heads=8, window=1024, mm_prefix=True, clamp=True),
            Layer(head=512, q_heads=16, kv_heads=2, mm_prefix=True),
        ),
    ),
    Model(
        name="Gemma 4 31B", source=_GEMMA4, hidden=5376, vision_head=72,
        layers=(
            Layer(head=256, q_heads=32, kv_heads=16, window=1024, mm_prefix=True, clamp=True),
            Layer(head=512, q_heads=32, kv_heads=4, mm_prefix=True),
        ),
    ),
    Model(
        name="Gemma 3 4B", source=_GEMMA3, hidden=2560, vision_head=72,
        layers=(
            Layer(head=256, q_heads=8, kv_heads=4, window=1024),
            Layer(head=256, q_heads=8, kv_heads=4),
        ),
    ),
    Model(
        name="Gemma 3 27B", source=_GEMMA3, hidden=5376, vision_head=72,
        layers=(Layer(head=128, q_heads=32, kv_heads=16, window=1024),),
    ),
    Model(
        name="Llama 3.2 1B", source=_LLAMA3, hidden=2048, vocab=128_256,
        layers=(Layer(head=64, q_heads=32, kv_heads=8),),
    ),
    Model(
        name="Llama 3.1 8B", source=_LLAMA3, hidden=4096, vocab=128_256,
        layers=(Layer(head=128, q_heads=32, kv_heads=8),),
    ),
    Model(
        name="Qwen3 4B", source=_QWEN3, hidden=2560, vocab=151_936,
        layers=(Layer(head=128, q_heads=32, kv_heads=8),),
    ),
    Model(
        name="Qwen3 14B", source=_QWEN3, hidden=5120, vocab=151_936,
        layers=(Layer(head=128, q_heads=40, kv_heads=8),),
    ),
)  # fmt: skip

WIDE = Model(
    name="wide groups",
    source="no released model: the edges of the wrapper (more than 16 queries a KV head)",
    hidden=4096,
    layers=(
        Layer(head=512, q_heads=32, kv_heads=1),
        Layer(head=256, q_heads=48, kv_heads=1),
        Layer(head=128, q_heads=48, kv_heads=1),
        Layer(head=96, q_heads=32, kv_heads=32),
        Layer(head=64, q_heads=71, kv_heads=1),
    ),
)
"""Falcon-7B has 71 queries of head 64 on one KV head; the others are made up."""
