"""The model of a variant's cost: its limits, and the table that is made with it."""

from __future__ import annotations

import json

import pytest

from benchmarks import attention_tuning
from sm75.aot import model


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "blocks"),
    [
        (32, 4, 0, 8),  # 1,024 threads
        (32, 1, 0, 16),  # 16 blocks
        (255, 4, 16_384, 2),  # 65,536 registers
        (255, 8, 16_384, 1),
        (81, 4, 0, 5),  # in units of 256 a warp, as 88 would take
        (32, 4, 21_845, 2),  # in units of 256 a block, or three would fit
        (64, 4, 65_536, 1),
        (64, 4, 32_768, 2),
        (64, 4, 32_769, 1),
        (64, 4, 65_537, 0),
        (255, 16, 1_024, 0),
    ],
)
def test_blocks_of_turing(registers: int, warps: int, shared: int, blocks: int) -> None:
    assert model.blocks(registers, warps, shared) == blocks


def test_the_evidence_counts_the_same_blocks() -> None:
    """Counted there by the driver's rules as the tuning had them, in another program."""
    rows = json.loads(attention_tuning.EVIDENCE.read_bytes())["rows"]
    assert len(rows) > 200
    for row in rows:
        assert model.blocks(row["regs"], row["warps"], row["shared"]) == row["t4g"]


def test_what_a_tile_costs() -> None:
    shape = {"head": 512, "element": 2, "tile": 16, "registers": 128, "shared": 49_152}
    made = model.cost(**shape, rows=16, warps=8, spills=0)
    assert (made.blocks, made.warps, made.spilled, made.cache) == (1, 8, 0, 32_768)
    assert made.cost == 32_768 / 256
    # Half the rows read as much for half the work; half the warps hide half.
    assert model.cost(**shape, rows=32, warps=8, spills=0).cost == made.cost / 2
    assert model.cost(**shape, rows=16, warps=4, spills=0).cost == made.cost * 2
    # 64 bytes out and in for each of 256 threads are as much as the keys and values.
    assert model.cost(**shape, rows=16, warps=8, spills=64).cost == made.cost * 2
    with pytest.raises(ValueError, match="no block"):
        model.cost(**(shape | {"shared": 70_000}), rows=16, warps=8, spills=0)


def test_the_docs_are_in_step() -> None:
    """After a change: python3 -m benchmarks.attention_tuning --write"""
    text = attention_tuning.DOCS.read_text(encoding="utf-8")
    assert attention_tuning.made(text) == text


def test_every_group_has_the_row_that_was_taken() -> None:
    table = "\n".join(attention_tuning.lines())
    rows = json.loads(attention_tuning.EVIDENCE.read_bytes())["rows"]
    assert table.count("**taken**") == len(attention_tuning.groups(rows))
    taken = [line for line in table.splitlines() if "**taken**" in line]
    assert not [line for line in taken if "wrong" in line]
