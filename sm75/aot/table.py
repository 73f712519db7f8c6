"""The variants of a package as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def variants(index: Mapping[str, Any]) -> Table:
    """A row a variant.

    Args:
        index: The package's index.
    """
    made = Table(title="kernels compiled ahead of time for sm_75")
    made.add_column("kernel")
    for name in ("head", "heads", "block", "from queries", "BLOCK_M", "tile", "warps",
                 "shared B", "registers", "spills B", "HMMA"):  # fmt: skip
        made.add_column(name, justify="right")
    names = {kernel: about["constants"] for kernel, about in index["kernels"].items()}
    for fact in index["variants"]:
        key = dict(zip(names[fact["kernel"]], fact["key"], strict=False))
        cells = (
            key.get("HEAD_SIZE", key.get("Lk", "")), key.get("num_query_heads", ""),
            key.get("BLOCK_SIZE", ""), fact["queries"] or "", fact["launch"].get("BLOCK_M", ""),
            fact["launch"].get("TILE_SIZE", key.get("TILE_SIZE", "")), fact["warps"],
            fact["shared"], fact["registers"], fact["spills"], fact["mma"],
        )  # fmt: skip
        made.add_row(fact["kernel"], *map(str, cells))
    return made
