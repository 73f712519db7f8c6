"""The overlay's choice of launch parameters: its model, its limits, and who is left alone."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = ROOT / "patches" / "0.33.0" / "overlay" / "vllm" / "sm75" / "attention.py"
LIMIT = 65_536


class Platform:
    """vLLM's platform on a device of the given capability."""

    def __init__(self, capability: tuple[int, int] | None, cuda: bool = True) -> None:
        self.capability = capability
        self.cuda = cuda

    def is_cuda(self) -> bool:
        return self.cuda

    def get_device_capability(self) -> tuple[int, int] | None:
        return self.capability


class Logger(logging.Logger):
    """Keeps what is said once."""

    lines: list[str]

    def info_once(self, message: str, *args: object) -> None:
        self.lines.append(message % args)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The few names of vLLM that the overlay asks for."""
    world = types.SimpleNamespace(
        platform=Platform((7, 5)), lines=[], model="acme/model", prepared=[]
    )

    def module(name: str, **names: Any) -> None:
        made = types.ModuleType(name)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, made)

    def init_logger(name: str) -> Logger:
        logger = Logger(name)
        logger.lines = world.lines
        return logger

    def tile(head: int, window: int, size: int, is_prefill: bool) -> int:
        return 32 if is_prefill or window == 1024 else 16

    config = types.SimpleNamespace(model_config=types.SimpleNamespace(model=world.model))
    module("vllm")
    module("vllm.platforms", current_platform=world.platform)
    module("vllm.logger", init_logger=init_logger)
    module("vllm.config", get_current_vllm_config=lambda: config)
    for name in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        module(name)
    module("vllm.v1.attention.ops.triton_unified_attention", _get_tile_size=tile)
    module("vllm.sm75")
    module(
        "vllm.sm75.kernels",
        prepare=lambda *shape: world.prepared.append(shape),
        session=lambda: "session",
    )
    return world


@pytest.fixture
def overlay() -> Any:
    """The overlay module, imported with nothing but the standard library around it."""
    spec = importlib.util.spec_from_file_location("sm75_attention_overlay", OVERLAY)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Shared bytes that Triton 3.7.0 allocates for sm_75, compiled ahead of time: (head, rows, tile).
MEASURED = {
    (512, 16, 32): 98_304,
    (512, 16, 16): 65_536,
    (256, 16, 64): 81_920,
    (256, 16, 32): 49_152,
    (256, 16, 16): 32_768,
    (128, 16, 32): 24_576,
    (128, 16, 16): 16_384,
    (64, 16, 32): 12_288,
    (64, 16, 16): 8_192,
}


@pytest.mark.parametrize(("shape", "shared"), MEASURED.items())
def test_model_is_what_triton_allocates(
    overlay: Any, shape: tuple[int, int, int], shared: int
) -> None:
    assert overlay.shared_bytes(*shape) == shared


PACKED = {
    (512, 16, 16): 98_304,
    (512, 16, 32): 163_840,
    (512, 32, 16): 131_072,
    (512, 32, 32): 196_608,
    (128, 16, 32): 40_960,
    (128, 16, 16): 24_576,
}
TALL = {
    (64, 128, 32): 49_152,
    (64, 128, 16): 40_960,
    (128, 128, 32): 81_920,
    (128, 128, 16): 73_728,
    (256, 64, 16): 81_920,
    (512, 32, 32): 131_072,
}


def test_model_of_the_int4_kernel_and_of_tall_blocks(overlay: Any) -> None:
    assert {shape: overlay.shared_bytes(*shape, packed=True) for shape in PACKED} == PACKED
    assert {shape: overlay.shared_bytes(*shape) for shape in TALL} == TALL


def test_int4_cache_takes_smaller_tiles_or_is_refused(overlay: Any, vllm: Any) -> None:
    made = overlay.launch(256, 8, 16, 32, 16, 512, packed=True)
    assert (made.tile_prefill, made.tile_decode) == (16, 16)
    overlay.check_layer(8, 1, 256, (511, 0), "int4_per_token_head")
    overlay.check_layer(8, 1, 512, (-1, -1), "int8_per_token_head")
    with pytest.raises(ValueError, match="INT4 KV cache does not fit") as caught:
        overlay.check_layer(8, 1, 512, (-1, -1), "int4_per_token_head")
    assert "98304" in str(caught.value)
    assert "--kv-cache-dtype auto" in str(caught.value)


def test_padding(overlay: Any) -> None:
    assert [overlay.padded(n) for n in (1, 16, 17, 72, 96, 256, 257)] == [
        1, 16, 32, 128, 128, 256, 512,
    ]  # fmt: skip


@pytest.mark.parametrize("head", [64, 72, 80, 96, 128, 192, 256, 320, 512])
@pytest.mark.parametrize("group", [1, 2, 5, 7, 8, 16, 17, 24, 32, 48, 71, 128])
@pytest.mark.parametrize("tiles", [(32, 16), (32, 32), (16, 16), (128, 16)])
def test_everything_up_to_head_512_fits(
    overlay: Any, vllm: Any, head: int, group: int, tiles: tuple[int, int]
) -> None:
    parts = overlay.parts_of_group(head, group)
    assert group % parts == 0
    rows = max(16, overlay.padded(group // parts))
    for queries in (1, 4, 512):
        made = overlay.launch(head, group // parts, rows, *tiles, queries)
        assert made.block_q == made.block_m // (group // parts) >= 1
        for tile, wanted in zip((made.tile_prefill, made.tile_decode), tiles, strict=True):
            assert 16 <= tile <= wanted
            assert overlay.shared_bytes(head, made.block_m, tile) <= LIMIT
            # The largest that fits, not merely one, but for the table's.
            most = overlay.TILES.get(overlay.padded(head), wanted) if made.block_m == 16 else wanted
            larger = overlay.shared_bytes(head, made.block_m, 2 * tile)
            assert tile == min(wanted, most) or larger > LIMIT


def test_a_group_is_split_only_where_it_must_be(overlay: Any) -> None:
    parts = {(h, g): overlay.parts_of_group(h, g) for h in (128, 256, 512) for g in (8, 16, 32)}
    assert {shape for shape, count in parts.items() if count > 1} == {(512, 32)}
    assert overlay.parts_of_group(512, 32) == 2
    assert overlay.parts_of_group(256, 48) == 2
    assert overlay.parts_of_group(512, 17) == 17


def test_warps(overlay: Any, vllm: Any) -> None:
    """Head 512 takes 8 warps (no spills); the rest keeps Triton's default."""
    assert overlay.launch(512, 8, 16, 32, 16, 1).num_warps == 8
    assert overlay.launch(512, 8, 16, 32, 16, 512).num_warps == 8
    assert overlay.launch(256, 8, 16, 32, 16, 1).num_warps is None


def test_head_256_takes_tile_16(overlay: Any, vllm: Any) -> None:
    """Two blocks share a multiprocessor. Taller blocks and the INT4 cache are as they were."""
    made = overlay.launch(256, 8, 16, 32, 32, 512)
    assert (made.tile_prefill, made.tile_decode) == (16, 16)
    assert 2 * overlay.shared_bytes(256, 16, 16) == LIMIT
    assert overlay.launch(256, 32, 32, 32, 16, 512).tile_prefill == 32
    assert overlay.launch(128, 8, 16, 32, 16, 512).tile_prefill == 32
    assert overlay.launch(128, 8, 16, 32, 16, 512, packed=True).tile_prefill == 32


@pytest.mark.parametrize("capability", [(7, 0), (7, 2), (8, 0), (8, 6), (9, 0), (10, 0), None])
def test_other_devices_are_left_alone(overlay: Any, vllm: Any, capability: Any) -> None:
    vllm.platform.capability = capability
    assert overlay.launch(512, 8, 16, 32, 16, 512) is None
    assert overlay.encoder_block(256, 64) == 64
    overlay.check_layer(8, 1, 4096, (-1, -1), "auto")
    calls = []
    overlay.split_wide_groups(lambda q, k: calls.append((q, k)))("q", k="k")
    assert calls == [("q", "k")]
    assert vllm.lines == []


def test_7_5_of_another_maker_is_left_alone(overlay: Any, vllm: Any) -> None:
    vllm.platform.cuda = False
    assert overlay.launch(512, 8, 16, 32, 16, 512) is None


def test_encoder_blocks_fit(overlay: Any, vllm: Any) -> None:
    assert {h: overlay.encoder_block(h, 64) for h in (64, 72, 128, 256)} == {
        64: 64, 72: 64, 128: 64, 256: 32,
    }  # fmt: skip
    assert overlay.encoder_block(512, 32) == 16
    with pytest.raises(ValueError, match="head size 1024 does not fit"):
        overlay.encoder_block(1024, 32)


def test_refusal_at_start_names_model_head_and_limit(overlay: Any, vllm: Any) -> None:
    with pytest.raises(ValueError, match="acme/model") as caught:
        overlay.check_layer(8, 1, 576, (-1, -1), "auto")
    assert "head size 576" in str(caught.value)
    assert "65536" in str(caught.value)


def test_choice_is_logged(overlay: Any, vllm: Any) -> None:
    overlay.check_layer(8, 1, 512, (-1, -1), "auto")
    overlay.check_layer(32, 1, 512, (-1, -1), "auto")
    overlay.check_layer(16, 8, 256, (1023, 0), "auto")
    first, wide, gemma3 = vllm.lines
    assert "head size 512, 8 queries a KV head, auto cache" in first
    assert "tile 16 (prefill) and 16 (decode), 8 and 8 warps, at most 65536 of 65536" in first
    assert "32 queries a KV head in 2 parts" in wide
    assert "tile 16 (prefill) and 16 (decode)" in gemma3
    # What was compiled ahead of time is loaded before the first request.
    assert vllm.prepared == [(512, 8, 8), (512, 32, 32), (256, 16, 2)]


def test_kernels_ahead_of_time_are_for_turing_alone(
    overlay: Any, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert overlay.kernels() == "session"
    for capability in ((7, 0), (8, 0), (9, 0), None):
        vllm.platform.capability = capability
        # Importing it there would be an error, not only unwanted.
        monkeypatch.setitem(sys.modules, "vllm.sm75.kernels", None)
        kernel = object()
        assert overlay.kernels()(kernel) is kernel
        overlay.check_layer(8, 1, 512, (-1, -1), "auto")
    assert not vllm.prepared


def test_wide_groups_run_part_by_part(overlay: Any, vllm: Any) -> None:
    """Two KV heads of 32 queries each, head 512: two launches of two half groups by views."""
    from sm75.smem import faketorch as torch

    seen: list[dict[str, Any]] = []

    def attention(q: Any, k: Any, v: Any, out: Any, sinks: Any = None, other: Any = 1) -> None:
        seen.append({"q": q, "k": k, "v": v, "out": out, "sinks": sinks, "other": other})

    q = torch.empty(5, 64, 512, dtype=torch.float16)
    cache = torch.empty(100, 16, 2, 512, dtype=torch.float16)
    wrapped = overlay.split_wide_groups(attention)
    wrapped(q, cache, cache, q, sinks=torch.empty(64), other=7)
    assert len(seen) == 2
    for number, call in enumerate(seen):
        assert call["q"].shape == (5, 32, 512)
        assert call["q"].storage_offset() == number * 32 * 512
        assert call["out"].storage_offset() == number * 32 * 512
        assert call["k"].shape == (100, 16, 2, 512)
        assert call["k"].stride() == (16 * 2 * 512, 2 * 512, 0, 512 // 512)
        assert call["k"].storage_offset() == number * 512
        assert call["sinks"].shape == (32,)
        assert call["other"] == 7


def test_narrow_groups_go_straight_through(overlay: Any, vllm: Any) -> None:
    from sm75.smem import faketorch as torch

    seen: list[Any] = []
    q = torch.empty(5, 8, 512, dtype=torch.float16)
    k = torch.empty(100, 16, 1, 512, dtype=torch.float16)
    overlay.split_wide_groups(lambda q, k: seen.append((q, k)))(q, k)
    assert seen == [(q, k)]
    assert seen[0][0] is q
