"""Spills of kernels compiled ahead of time that are known and accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sm75.smem.audit import Explained

# Accepted spills, each up to what the package of 0.33.0 has. The evidence for all but the last is
# docs/attention-tuning.md: what spills nothing there takes longer, on an H200; no T4G was timed.
EXPLAINED: tuple[Explained, ...] = (
    Explained(
        kernel="kernel_unified_attention",
        parameters={"HEAD_SIZE_PADDED": 512, "KV_QUANT_MODE": 0, "BLOCK_M": 16},
        most=28, why="head 512: 8 warps spill nothing and take longer",
    ),
    Explained(
        kernel="kernel_unified_attention",
        parameters={"HEAD_SIZE_PADDED": 256, "KV_QUANT_MODE": 2, "IS_3D": True, "TILE_SIZE": 32},
        most=260, why="INT8, head 256, decode: half the time of what spills nothing",
    ),
    Explained(
        kernel="kernel_unified_attention",
        parameters={"HEAD_SIZE_PADDED": 128, "KV_QUANT_MODE": 2, "BLOCK_M": 64},
        most=140, why="INT8, head 128, prefill: half the time of what spills nothing",
    ),
    Explained(
        kernel="kernel_unified_attention",
        parameters={"HEAD_SIZE_PADDED": 128, "KV_QUANT_MODE": 2, "BLOCK_M": 16},
        most=56, why="INT8, head 128: half the time of what spills nothing",
    ),
    Explained(
        kernel="kernel_unified_attention",
        parameters={"HEAD_SIZE_PADDED": 128, "KV_QUANT_MODE": 0, "BLOCK_M": 128},
        most=60, why="head 128, prefill: the same blocks with 4 queries a KV head spill nothing",
    ),
    # Those with images have the blocks that were found without: MAX_MM_RANGES is their number.
    *(
        Explained(
            kernel="kernel_unified_attention",
            parameters={"HEAD_SIZE_PADDED": head, "BLOCK_M": rows, "MAX_MM_RANGES": images},
            most=most, why="image ranges, prefill: the blocks of text, not tuned",
        )
        for head, rows, most in ((256, 32, 84), (128, 128, 200))
        for images in range(1, 5)
    ),
    Explained(
        kernel="kernel_unified_attention",
        parameters={"HEAD_SIZE_PADDED": 64, "num_queries_per_kv": 7, "IS_3D": True}, most=4,
        why="head 64, 7 queries a KV head, decode: one register",
    ),
    Explained(
        kernel="_fwd_kernel", parameters={"Lk": 72}, most=436,
        why="the vision tower's, with upstream's blocks: not tuned",
    ),
)  # fmt: skip


def explanation(kernel: str, parameters: Mapping[str, Any], spills: int) -> Explained | None:
    """The entry of :data:`EXPLAINED` that accounts for a variant's spills.

    Args:
        kernel: The function.
        parameters: Its constants by name, those that the variant chose among them.
        spills: Bytes of spill stores a thread.
    """
    for entry in EXPLAINED:
        same = all(parameters.get(name) == value for name, value in entry.parameters.items())
        if entry.kernel == kernel and same and spills <= entry.most:
            return entry
    return None
