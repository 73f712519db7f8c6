"""The KV cache's arithmetic against what vLLM's own planner said of the same layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sm75.serve import kv
from sm75.smem.models import Layer

DATA = Path(__file__).parents[1] / "data" / "serve"
CASES = {case["name"]: case for case in json.loads((DATA / "cases.json").read_text())}
PLANNED = [
    (release, name, planned)
    for release in ("0.28.0", "0.33.0")
    for name, planned in json.loads((DATA / f"kv-{release}.json").read_text()).items()
]


def layers(case: dict[str, Any]) -> list[Layer]:
    return [Layer(head=h, q_heads=k, kv_heads=k, window=w) for h, k, w in case["layers"]]


@pytest.mark.parametrize(("release", "name", "planned"), PLANNED)
def test_as_vllm_plans(release: str, name: str, planned: dict[str, Any]) -> None:
    case = CASES[name]
    cache = kv.plan(layers(case))
    length, in_flight, memory = case["length"], case["in_flight"], case["memory"]
    assert [group.layers for group in cache.groups] == planned["groups"]
    assert cache.block_bytes == planned["bytes_per_block"]
    assert cache.blocks(memory) == planned["blocks"]
    assert cache.request_blocks(length, in_flight) == planned["blocks_per_request"]
    requests = cache.requests(memory, length, in_flight)
    assert requests == planned["concurrency"]
    assert int(requests * length) == planned["tokens"]


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: str(case["name"]))
def test_the_longest_fits_and_one_more_does_not(case: dict[str, Any]) -> None:
    cache = kv.plan(layers(case))
    in_flight, memory = case["in_flight"], case["memory"]
    most = 10**9
    found = cache.longest(memory, most, in_flight)
    usable = cache.blocks(memory) - 1
    assert cache.request_blocks(found, in_flight) <= usable
    if found < most:
        assert cache.request_blocks(found + 1, in_flight) > usable
    assert cache.longest(memory, min(found, 100), in_flight) == min(found, 100)


def test_nothing_fits_nothing() -> None:
    cache = kv.plan([Layer(head=128, q_heads=8, kv_heads=8)])
    assert cache.longest(cache.block_bytes, 4096, 0) == 0  # vLLM keeps one block for itself
    assert cache.longest(2 * cache.block_bytes, 4096, 0) == 16
