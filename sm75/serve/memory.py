"""Where the card's memory goes: a row a use, each with how it is known.

vLLM measures most of this itself when it starts and gives the KV cache what is left of its share
(vLLM 0.33.0, ``vllm/v1/worker/gpu_worker.py``, ``determine_available_memory``). The rows say
beforehand whether a model fits and which length does, so estimates err on the large side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from sm75.serve.kv import Cache
from sm75.serve.shape import Shape
from sm75.words import counted

MIB = 1 << 20
# Of a T4's 15,360 MiB (nvidia-smi) CUDA offers 14.58 GiB: "GPU 0 has a total capacity of 14.58 GiB"
# in PyTorch's words (tests/data/logs/shapes.toml). A T4, not a T4G.
DRIVER_MIB = 15_360 - 14_930
# The CUDA context and cuBLAS's handles, which vLLM makes before it looks at what is free
# (gpu_worker.py:488). Not measured on 7.5.
CONTEXT_MIB = 300
# Code of kernels that is loaded while serving, and holes between allocations. Not measured.
RESERVE_MIB = 256
# One captured batch size. vllm-project/vllm issue 50780 has 24 MiB of full graphs; not a T4G's.
GRAPH_MIB = 24
# What the encoders of images and sound take while vLLM tries them with its largest input. A guess:
# with text alone it can be left out by --limit-mm-per-prompt.
TOWERS_MIB = 512
# vLLM captures up to so many tokens (vllm/config/vllm.py:2464).
_MOST_GRAPH = 512
# Bytes of an entry of the logits while sampling: itself in float16, and float32 copies for
# penalties, temperature, sorting and drawing (vllm/v1/sample/sampler.py). Four copies are a guess.
_LOGIT = 2 + 4 * 4
# Parallel parts of the decode kernel, and the grid it wants to fill
# (vllm/v1/attention/backends/triton_attn.py:58).
_SEGMENTS, _GRID = 16, 128

Known = Literal["known", "read", "vLLM's sum", "estimated", "yours", "result"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    Attributes:
        what: The use.
        mib: Its size.
        known: How it is known: ``read`` from the model's files, ``vLLM's sum`` of its own code,
            ``estimated``: not seen on a T4G, ``yours``: the user's.
        note: Numbers behind it.
    """

    what: str
    mib: float
    known: Known
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {"what": self.what, "mib": round(self.mib), "known": self.known, "note": self.note}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What vLLM is told, as far as memory depends on it.

    Attributes:
        seqs: max-num-seqs.
        batched: max-num-batched-tokens.
        graphs: Whether CUDA graphs are captured.
        share: gpu-memory-utilization; 0: to be chosen.
        element: Bytes of the model's type.
        most_graph: max-cudagraph-capture-size; 0: vLLM's own.
        steps: Steps in flight: 2, for scheduling runs ahead (vllm/config/vllm.py:588).
    """

    seqs: int
    batched: int = 2048
    graphs: bool = True
    share: float = 0.0
    element: int = 2
    most_graph: int = 0
    steps: int = 2

    @property
    def in_flight(self) -> int:
        """Tokens scheduled and not settled."""
        return self.steps * self.batched

    @property
    def captured(self) -> list[int]:
        """The batch sizes of CUDA graphs, as vLLM chooses them (vllm/config/vllm.py:2398)."""
        if not self.graphs:
            return []
        top = min(self.most_graph or min(2 * self.seqs, _MOST_GRAPH), self.batched)
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16)]
        return [size for size in sizes if size <= top]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The card's memory, divided.

    Attributes:
        rows: The table up to the KV cache.
        share: gpu-memory-utilization.
        cache: Bytes left for the KV cache; negative: so many are missing.
        at_most: Bytes that it could have if nothing but the weights took any, of the user's share
            or of the card.
    """

    rows: tuple[Row, ...]
    share: float
    cache: int
    at_most: int


def divide(
    card_mib: int, weights: int, shape: Shape, cache: Cache | None, settings: Settings,
    *, seen: bool,
) -> Budget:  # fmt: skip
    """Divide the card's memory.

    Args:
        card_mib: As nvidia-smi says.
        weights: Bytes of them on the card.
        shape: The model.
        cache: Its KV cache's division; nothing where it cannot be told.
        settings: What vLLM is told.
        seen: Whether the card is here.
    """
    offered = card_mib - DRIVER_MIB
    scratch = _scratch(shape, cache, settings) / MIB
    outside = CONTEXT_MIB + RESERVE_MIB + scratch
    share = settings.share or max(0.01, math.floor(100 * (offered - outside) / offered) / 100)
    forward, logits = _forward(shape, settings) / MIB, settings.seqs * shape.vocab * _LOGIT / MIB
    graphs = len(settings.captured) * GRAPH_MIB
    mine = share * offered
    towers = TOWERS_MIB if shape.towers else 0
    left = mine - weights / MIB - forward - logits - graphs - towers
    method = f", {shape.quantized}" if shape.quantized else ""
    rows = [
        Row(what="card", mib=card_mib, known="known",
            note="nvidia-smi" if seen else "a T4G's; no GPU is seen here"),
        Row(what="- kept by the driver", mib=DRIVER_MIB, known="estimated",
            note=f"CUDA offers {offered:,}"),
        Row(what="- CUDA context, cuBLAS", mib=CONTEXT_MIB, known="estimated"),
        Row(what="- attention scratch", mib=scratch, known="vLLM's sum",
            note=f"{counted(len(cache.groups) if cache else 0, 'group')}, widest head for all"),
        Row(what="- held back", mib=RESERVE_MIB, known="estimated",
            note="late kernels, fragments"),
    ]  # fmt: skip
    rows += [
        Row(what="= vLLM's share", mib=mine, known="yours" if settings.share else "result",
            note=f"--gpu-memory-utilization {share:g} of {offered:,}"),
        Row(what="- weights", mib=weights / MIB, known="read",
            note=f"{weights / 2**30:.2f} GiB{method}"),
        Row(what="- one step's activations", mib=forward, known="estimated",
            note=f"{settings.batched:,} tokens"),
        Row(what="- logits while sampling", mib=logits, known="estimated",
            note=f"{settings.seqs} x {shape.vocab:,} x {_LOGIT} bytes"),
        Row(what="- CUDA graphs", mib=graphs, known="estimated",
            note=f"{counted(len(settings.captured), 'size')} x {GRAPH_MIB}"),
        *([Row(what="- images and sound", mib=towers, known="estimated")] if towers else []),
        Row(what="= KV cache", mib=left, known="result"),
    ]  # fmt: skip
    return Budget(
        rows=tuple(rows), share=share, cache=int(left * MIB),
        at_most=int((mine if settings.share else offered) * MIB) - weights,
    )  # fmt: skip


def _scratch(shape: Shape, cache: Cache | None, settings: Settings) -> int:
    """Bytes that the Triton attention keeps for each group of layers (triton_attn.py:136-200).

    Each group has a buffer of the parallel decode kernel's parts, of the group's head size; the
    widest head is taken for all.
    """
    if cache is None or not shape.layers:
        return 0
    widest = max(shape.layers, key=lambda layer: layer.head)
    rows = max(1, _GRID // min(layer.kv_heads for layer in shape.layers))
    if settings.captured:
        rows = min(settings.captured, key=lambda size: abs(size - rows))
    rows = min(rows, settings.seqs)
    padded = 1 << (widest.head - 1).bit_length()
    return len(cache.groups) * rows * widest.q_heads * _SEGMENTS * padded * 4


def _forward(shape: Shape, settings: Settings) -> int:
    """Bytes that a step's tensors take at once: the widest layer's, and the residual stream.

    A token's: gate and up side by side and their product, four vectors of the stream, and the
    per-layer embeddings twice.
    """
    attention = max(
        ((layer.q_heads * 2 + 2 * layer.kv_heads) * layer.head for layer in shape.layers), default=0
    )
    a_token = max(3 * shape.inner, attention) + 4 * shape.hidden
    a_token += 2 * shape.count * shape.per_layer
    return settings.batched * a_token * settings.element
