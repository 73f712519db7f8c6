"""How many tokens a KV cache of given size holds: vLLM's own plan, redone without vLLM.

vLLM puts the layers that own a cache into groups of the same kind and number, makes their pages
equally large, and draws blocks of one size for all groups from one pool. What a request takes is a
sum over groups; a sliding-window group stops growing at its window. Followed here (vLLM 0.33.0,
``vllm/v1/core/kv_cache_planning.py``): ``unify_kv_cache_spec_page_size`` (346),
``_get_kv_cache_groups_uniform_page_size`` (418), ``_get_kv_cache_bytes_per_block`` (581), and of
``vllm/v1/kv_cache_interface.py`` ``FullAttentionSpec.max_memory_usage_bytes`` (643) and
``SlidingWindowSpec.max_admission_blocks_per_request`` (918). 0.28.0 has the same sums in
``kv_cache_utils.py``. ``tests/unit/test_serve_kv.py`` compares with what that code itself says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sm75.smem.models import Layer

# Tokens of a block: CacheConfig.DEFAULT_BLOCK_SIZE (vllm/config/cache.py:185); TRITON_ATTN, the
# backend on 7.5, takes multiples of 16 (v1/attention/backends/triton_attn.py:339).
BLOCK = 16
# Above this ratio between the kinds' numbers of layers the smaller is the groups' size
# (kv_cache_planning.py:497).
_NEAR = 1.5


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share a block table.

    Attributes:
        layers: How many.
        block: Tokens of one of its blocks.
        window: Its sliding window in tokens; 0: full attention.
    """

    layers: int
    block: int
    window: int = 0

    def blocks(self, length: int, in_flight: int) -> int:
        """Blocks that one request takes at most.

        Args:
            length: Its tokens.
            in_flight: Tokens scheduled and not settled: steps at once x tokens a step.
        """
        if not self.window:
            return math.ceil(length / self.block)
        held = min(self.window - 1 + in_flight, length)
        return math.ceil(held / self.block) + 1


@dataclass(frozen=True, kw_only=True)
class Cache:
    """How a model's KV cache is divided.

    Attributes:
        groups: The groups.
        block_bytes: What one block takes in the pool, whichever group has it.
    """

    groups: tuple[Group, ...]
    block_bytes: int

    @property
    def token_bytes(self) -> float:
        """Bytes of one more token beyond all windows."""
        return sum(self.block_bytes / group.block for group in self.groups if not group.window)

    def request_blocks(self, length: int, in_flight: int) -> int:
        """Blocks of one request of ``length`` tokens."""
        return sum(group.blocks(length, in_flight) for group in self.groups)

    def request_bytes(self, length: int, in_flight: int) -> int:
        """Bytes of one request of ``length`` tokens."""
        return self.request_blocks(length, in_flight) * self.block_bytes

    def blocks(self, memory: int) -> int:
        """Blocks in ``memory`` bytes. One of them is never given to a request."""
        return memory // self.block_bytes

    def requests(self, memory: int, length: int, in_flight: int) -> float:
        """Requests of full length at once, as vLLM logs it."""
        return self.blocks(memory) / self.request_blocks(length, in_flight)

    def longest(self, memory: int, most: int, in_flight: int) -> int:
        """The longest request that fits ``memory`` bytes, up to ``most`` tokens; 0: none."""
        low, high = 0, most
        usable = self.blocks(memory) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_blocks(middle, in_flight) <= usable:
                low = middle
            else:
                high = middle - 1
        return low


def plan(layers: Sequence[Layer], item: int = 2) -> Cache:
    """Divide a KV cache.

    Args:
        layers: Those that own a cache, in order; at least one.
        item: Bytes of an element; 2 for float16.
    """
    pages = [BLOCK * layer.kv_heads * layer.head * 2 * item for layer in layers]
    windows = {layer.window for layer in layers}
    if len(windows) == 1:
        # One kind; pages of different size lie side by side.
        group = Group(layers=len(layers), block=BLOCK, window=windows.pop())
        return Cache(groups=(group,), block_bytes=sum(pages))
    page = max(pages)
    kinds: dict[tuple[object, ...], Group] = {}
    for layer, own in zip(layers, pages, strict=True):
        # A smaller page holds more tokens, or is padded where it does not divide the largest.
        grows = page % own == 0
        block = BLOCK * (page // own) if grows else BLOCK
        # Layers are of one kind when nothing but their place differs.
        key = (layer.head, layer.kv_heads, layer.window)
        known = kinds.get(key) or Group(layers=0, block=block, window=layer.window)
        kinds[key] = replace(known, layers=known.layers + 1)
    counts = [kind.layers for kind in kinds.values()]
    size = max(counts) if max(counts) < min(counts) * _NEAR else min(counts)
    groups = [
        replace(kind, layers=len(range(part, kind.layers, number)))
        for kind in kinds.values()
        for number in [math.ceil(kind.layers / size)]
        for part in range(number)
    ]
    return Cache(groups=tuple(groups), block_bytes=page * max(group.layers for group in groups))
