"""Shapes that decide what a kernel takes: attention heads, experts, vocabularies.

The table is ``models.toml`` beside this module, with the source of each row.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sm75.errors import UsageError

# vllm/config/cache.py: tokens a block, the CUDA platform's default.
BLOCK = 16
# Images of a request, from one to so many, for which attention is compiled ahead of time. vLLM
# compiles their number in (vllm/v1/attention/backends/utils.py, compute_mm_prefix_range_tensor).
IMAGES = 4


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
        softcap: Soft cap of the scores; 0 for none.
    """

    head: int
    q_heads: int
    kv_heads: int
    window: int = 0
    mm_prefix: bool = False
    clamp: bool = False
    softcap: float = 0

    @property
    def name(self) -> str:
        window = f" w{self.window}" if self.window else ""
        prefix = " mm" if self.mm_prefix else ""
        # Gemma 3's images see beyond the window, Gemma 4's do not.
        prefix += " unclamped" if self.mm_prefix and self.window and not self.clamp else ""
        cap = f" cap {self.softcap:g}" if self.softcap else ""
        return f"h{self.head} {self.q_heads}:{self.kv_heads}{window}{prefix}{cap}"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts: number, chosen a token, hidden and intermediate size."""

    count: int
    chosen: int
    hidden: int
    inner: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model by what its kernels are launched with.

    Attributes:
        name: As people call it.
        source: Where its figures are from.
        layers: Its kinds of attention.
        audit: Whether the audit of shared memory has it; otherwise attention is compiled ahead of
            time for it, and nothing else is looked at.
        hidden: Hidden size; needed where ``audit`` is set.
        experts: Its mixture of experts.
        vision_head: Head size of its vision tower; 0 for none.
        vocab: Size of its vocabulary.
    """

    name: str
    source: str
    layers: tuple[Layer, ...]
    audit: bool = False
    hidden: int = 0
    experts: Experts | None = None
    vision_head: int = 0
    vocab: int = 262_144


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


def load(text: str) -> tuple[Model, ...]:
    """Read a table of models.

    Args:
        text: Of ``models.toml``.

    Raises:
        UsageError: It is damaged, or names a model or a field that it should not.
    """
    try:
        found = tomllib.loads(text)
        if found.pop("schema") != 1:
            raise ValueError("its schema is not 1")
        made = tuple(_model(row) for row in found.pop("model"))
        if found:
            raise ValueError(f"it has {', '.join(found)}")
        _check(made)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "the table of models cannot be read", why=f"{type(error).__name__}: {error}",
            fix="mend sm75/smem/models.toml; its first lines say what a row has",
        ) from error  # fmt: skip
    return made


def _model(row: Mapping[str, Any]) -> Model:
    layers = tuple(Layer(**layer) for layer in row["layers"])
    experts = Experts(**row["experts"]) if "experts" in row else None
    return Model(**{**row, "layers": layers, "experts": experts})


def _check(made: Iterable[Model]) -> None:
    names = set()
    for model in made:
        if model.name in names:
            raise ValueError(f"{model.name} stands twice")
        names.add(model.name)
        if not model.source or not model.layers or (model.audit and model.hidden < 1):
            raise ValueError(f"{model.name} lacks its source, its layers or its hidden size")
        for layer in model.layers:
            if min(layer.head, layer.q_heads, layer.kv_heads) < 1 or layer.q_heads % layer.kv_heads:
                raise ValueError(f"{model.name}: {layer.name} are no heads")


TABLE = load((resources.files("sm75.smem") / "models.toml").read_text(encoding="utf-8"))
"""All models: attention is compiled ahead of time for them."""

MODELS = tuple(model for model in TABLE if model.audit)
"""Those that are audited as well."""

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
