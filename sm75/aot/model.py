"""What a variant should cost on a T4G, from what it was compiled to; no T4G has been timed.

Two figures decide: how many warps a multiprocessor holds, and how many bytes pass through memory
for each query row and key, local memory of spilled registers included.
"""

from __future__ import annotations

from dataclasses import dataclass

# CUDA programming guide, technical specifications per compute capability, 7.5.
REGISTERS, SHARED, THREADS, BLOCKS = 65_536, 65_536, 1_024, 16
WARP = 32
# Registers are given to a warp in units of 256, shared memory to a block in units of 256 bytes
# (CUDA occupancy calculator, allocation granularity of 7.5).
REGISTER_UNIT = SHARED_UNIT = 256
# Four schedulers a multiprocessor (Turing whitepaper), each with one warp to run and one to wait.
ENOUGH_WARPS = 8


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def blocks(registers: int, warps: int, shared: int) -> int:
    """Blocks that a multiprocessor of 7.5 holds; 0 where one does not fit.

    Args:
        registers: A thread's.
        warps: A block's.
        shared: Bytes a block.
    """
    of_registers = REGISTERS // _rounded(registers * WARP, REGISTER_UNIT) // warps
    of_shared = SHARED // _rounded(shared, SHARED_UNIT) if shared else BLOCKS
    return min(of_registers, of_shared, THREADS // (WARP * warps), BLOCKS)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The model's figures.

    Attributes:
        blocks: A multiprocessor's.
        warps: A multiprocessor's.
        spilled: Bytes that spilled registers move for a tile, out and in, as if all were in the
            loop: an upper bound.
        cache: Bytes of keys and values a tile.
        cost: Bytes for each query row and key, times what too few warps make of it. For
            comparing variants of one head and cache, no time.
    """

    blocks: int
    warps: int
    spilled: int
    cache: int
    cost: float


def cost(
    *, head: int, element: int, rows: int, tile: int, warps: int, registers: int, spills: int,
    shared: int,
) -> Cost:  # fmt: skip
    """The model's figures of a variant.

    Args:
        head: Padded head size.
        element: Bytes of a number in the cache.
        rows: BLOCK_M.
        tile: Keys a step.
        warps: A block's.
        registers: A thread's.
        spills: Bytes of spill stores a thread (ptxas).
        shared: Bytes a block.

    Raises:
        ValueError: It does not fit a multiprocessor.
    """
    held = blocks(registers, warps, shared)
    if not held:
        raise ValueError("no block of it fits a multiprocessor of 7.5")
    spilled, cache = 2 * spills * WARP * warps, 2 * head * element * tile
    idle = max(1.0, ENOUGH_WARPS / (held * warps))
    return Cost(
        blocks=held, warps=held * warps, spilled=spilled, cache=cache,
        cost=(spilled + cache) / (rows * tile) * idle,
    )  # fmt: skip
