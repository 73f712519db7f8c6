"""Attention in plain torch and float32, to compare with; and what caches hold, read back.

Written from the definition: scores, masks, softmax, weighted sum, request by request. Nothing of
the kernels' tiling or of their online softmax is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sm75.smem.models import Layer

# Query tokens at a time, so that the scores of a long request stay small.
_ROWS = 256


def attention(
    q: Any,
    keys: Sequence[Any],
    values: Sequence[Any],
    queries: Sequence[int],
    layer: Layer,
    *,
    causal: bool = True,
    softcap: float = 0,
    sinks: Any = None,
    ranges: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> Any:
    """Attention of all requests.

    Args:
        q: Queries (tokens, query heads, head).
        keys: Keys of each request (tokens, KV heads, head).
        values: Values likewise.
        queries: Query tokens of each request, which are its last.
        layer: Heads and window.
        causal: Whether a query sees keys up to its own position only.
        softcap: Soft cap of the scores; 0 for none.
        sinks: A score a query head that takes its share of the softmax and adds nothing.
        ranges: First and last positions of each request's images, whose tokens see each other;
            within the window only, where the layer clamps.

    Returns:
        float32, of the shape of ``q``.
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    group = layer.q_heads // layer.kv_heads
    start = 0
    for number, count in enumerate(queries):
        key = keys[number].float().repeat_interleave(group, dim=1)
        value = values[number].float().repeat_interleave(group, dim=1)
        for first in range(0, count, _ROWS):
            rows = slice(start + first, start + min(first + _ROWS, count))
            position = torch.arange(rows.start, rows.stop, device=q.device) - start
            seen = visible(
                position + len(key) - count, len(key), layer.window, causal,
                ranges[number] if ranges is not None else (), clamp=layer.clamp,
            )  # fmt: skip
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), key) * layer.head**-0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                sink = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, sink], dim=-1)
            weights = scores.softmax(-1)[..., : len(key)]
            out[rows] = torch.einsum("hqk,khd->qhd", weights, value)
        start += count
    return out


def visible(
    position: Any, keys: int, window: int, causal: bool, ranges: Sequence[tuple[int, int]],
    *, clamp: bool,
) -> Any:  # fmt: skip
    """Which keys each query sees.

    Args:
        position: Of each query in its request.
        keys: Number of keys.
        window: Sliding window; 0 for none.
        causal: Whether later keys are hidden.
        ranges: First and last positions of images.
        clamp: Whether the tokens of an image see each other within the window only.
    """
    query = position[:, None]
    key = torch.arange(keys, device=position.device)[None]
    seen = (key <= query) if causal else torch.ones_like(key <= query)
    if window:
        seen &= query - key < window
        if not causal:
            seen &= key - query < window
    for first, last in ranges:
        image = (query >= first) & (query <= last) & (key >= first) & (key <= last)
        if window and clamp:
            image &= query - key < window
        seen |= image
    return seen


def rotate(x: Any, signs: Any) -> Any:
    """The randomised Hadamard transform of the INT4 cache, unnormalised: H (signs x).

    Where the signs are fewer than the last dimension, each block of as many is transformed.
    """
    blocks = x.float().unflatten(-1, (-1, len(signs)))
    return ((blocks * signs) @ _hadamard(signs)).flatten(-2)


def unrotate(x: Any, signs: Any) -> Any:
    """The inverse of :func:`rotate`."""
    blocks = x.float().unflatten(-1, (-1, len(signs)))
    return (blocks @ _hadamard(signs) * signs / len(signs)).flatten(-2)


def _hadamard(signs: Any) -> Any:
    index = torch.arange(len(signs), device=signs.device)
    both = index[:, None] & index[None]
    parity = torch.zeros_like(both)
    while bool(both.any()):
        parity ^= both & 1
        both >>= 1
    return 1.0 - 2.0 * parity.float()
