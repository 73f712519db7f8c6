# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of Triton's attention kernels on compute capability 7.5.

A block there has 64 KiB of shared memory, less than half of what upstream's choices are made for.
Triton has no tensor-core path for 7.5: a dot is done with FMA, and its operands are staged in
shared memory as float32 whatever their own type. The largest dot of these kernels is
Q (BLOCK_M x HEAD) by K (HEAD x TILE), so a block takes

    4 bytes x HEAD (padded to a power of two) x (BLOCK_M + TILE)

exactly, and P (BLOCK_M x TILE, float16) beside it where BLOCK_M is above HEAD. The INT4 kernel
holds two half-wide K tiles and two V tiles and so takes the tile twice. ``num_stages`` changes
nothing, since Triton pipelines loads from 8.0 on only. All of this is proved ahead of time, for
each variant, by ``verify --smem`` of the project.

Only capability 7.5 is decided here. Everywhere else the functions say None or call straight
through, and upstream's parameters stand.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

# CUDA programming guide, technical specifications per compute capability: the most a block can
# have on 7.5 with opt-in.
SHARED_LIMIT = 65_536
# float32, as which Triton stages operands of an FMA dot.
OPERAND_BYTES = 4
# Inner size of the dot P @ V; tl.dot takes no less.
MIN_TILE = 16
# Fewest query rows a block: upstream's choice up to 16 queries a KV head.
MIN_BLOCK_M = 16
# Queries a request up to which upstream decodes with split KV (MAX_3D_QUERY_LEN there).
DECODE_QUERIES = 8

# Warps a block, by padded head size: (decode, prefill). None keeps Triton's default of 4.
# Head 512, tile 16: with 4 warps ptxas gives up on sm_75's 255 registers, takes 64, and moves 5 KB a
# thread through local memory for each tile; 8 warps spill nothing. The sm_75 PTX on an H200 (no
# Turing card has been measured): decode 0.65 to 0.81 ms with 4 warps, 0.34 with 8. Prefill 14.4 ms
# with 4 and 18.4 with 8, but there the driver spills a third of what sm_75 code does, into an L2
# that holds it; a T4G's would not. docs/turing-attention.md has the table and the sum.
NUM_WARPS: dict[int, tuple[int | None, int | None]] = {512: (8, 8)}

# Largest tile, by padded head size, where a smaller one than fits is better. Head 256 with tile 32
# takes 49,152 bytes and spills 0.7 to 0.9 KB a thread; with 16 two blocks share a multiprocessor and
# nothing is spilled. Prefill, sm_75 PTX on an H200 with a T4G's number of blocks: 6.4 and 5.4 ms.
# For blocks of MIN_BLOCK_M rows and caches other than INT4, which were measured.
TILES: dict[int, int] = {256: 16}


class Launch(NamedTuple):
    """What one launch is given. ``num_warps`` None keeps Triton's default."""

    block_m: int
    block_q: int
    tile_prefill: int
    tile_decode: int
    num_warps: int | None


def on_turing() -> bool:
    """Whether the device is CUDA of capability 7.5, the only one decided here."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return False
    capability = current_platform.get_device_capability()
    return capability is not None and tuple(capability) == (7, 5)


def padded(size: int) -> int:
    """The next power of two, as the kernels pad heads and blocks."""
    return 1 << max(size - 1, 0).bit_length()


def shared_bytes(head_size: int, block_m: int, tile: int, packed: bool = False) -> int:
    """Shared memory of a block, as Triton allocates it for 7.5.

    Args:
        head_size: Unpadded.
        block_m: Query rows.
        tile: Keys.
        packed: The INT4 kernel. The figure is exact without a sliding window; with one it takes
            less.
    """
    width = padded(head_size)
    p_bytes = 2 * block_m * tile if block_m > width else 0
    return OPERAND_BYTES * width * (block_m + (2 * tile if packed else tile)) + p_bytes


def largest_tile(head_size: int, block_m: int, wanted: int, packed: bool = False) -> int | None:
    """The largest power of two up to ``wanted`` whose block fits, or None."""
    tile = wanted
    while tile >= MIN_TILE:
        if shared_bytes(head_size, block_m, tile, packed) <= SHARED_LIMIT:
            return tile
        tile //= 2
    return None


@functools.cache
def parts_of_group(head_size: int, queries_per_kv: int, packed: bool = False) -> int:
    """Into how many equal parts the queries of a KV head are split so that a block fits.

    One block holds all queries of a KV head, so more than 16 of them grow BLOCK_M. 1 is no split.

    Raises:
        ValueError: Not even 16 rows of this head size fit.
    """
    for parts in range(1, queries_per_kv + 1):
        rows = max(MIN_BLOCK_M, padded(queries_per_kv // parts))
        if queries_per_kv % parts == 0 and largest_tile(head_size, rows, MIN_TILE, packed):
            return parts
    needed = shared_bytes(head_size, MIN_BLOCK_M, MIN_TILE, packed)
    cache, way_out = "", "Head sizes up to 512 fit."
    if packed:
        cache = " with the INT4 KV cache"
        way_out = "Take --kv-cache-dtype auto or int8_per_token_head."
    raise ValueError(
        f"Attention head size {head_size}{cache} does not fit compute capability 7.5: its smallest "
        f"block takes {needed} bytes of shared memory, the limit is {SHARED_LIMIT}. {way_out}"
    )


@functools.cache
def choose(
    head_size: int,
    queries_per_kv: int,
    block_m: int,
    tile_prefill: int,
    tile_decode: int,
    decode: bool,
    packed: bool = False,
) -> Launch:
    """The largest tiles, up to upstream's and the table's, whose blocks fit; warps from the table.

    Raises:
        ValueError: No tile fits ``block_m`` rows of this head size.
    """
    if block_m == MIN_BLOCK_M and not packed:
        most = TILES.get(padded(head_size), max(tile_prefill, tile_decode))
        tile_prefill, tile_decode = min(tile_prefill, most), min(tile_decode, most)
    prefill = largest_tile(head_size, block_m, tile_prefill, packed)
    decoding = largest_tile(head_size, block_m, tile_decode, packed)
    if prefill is None or decoding is None:
        raise ValueError(
            f"Attention head size {head_size} with {queries_per_kv} queries a KV head does not fit "
            f"compute capability 7.5: {shared_bytes(head_size, block_m, MIN_TILE, packed)} bytes "
            f"of shared memory for {block_m} rows, the limit is {SHARED_LIMIT}."
        )
    warps = NUM_WARPS.get(padded(head_size), (None, None))[0 if decode else 1]
    return Launch(block_m, block_m // queries_per_kv, prefill, decoding, warps)


def launch(
    head_size: int,
    queries_per_kv: int,
    block_m: int,
    tile_prefill: int,
    tile_decode: int,
    max_seqlen_q: int,
    packed: bool = False,
) -> Launch | None:
    """Launch parameters for this call on capability 7.5; None on any other device.

    Args:
        head_size: Unpadded.
        queries_per_kv: Query heads that share a KV head.
        block_m: Upstream's number of query rows a block.
        tile_prefill: Upstream's KV tile of the 2D kernel.
        tile_decode: Upstream's KV tile of the split-KV kernel.
        max_seqlen_q: The longest query of the batch, which tells decode from prefill.
        packed: The INT4 kernel.
    """
    if not on_turing():
        return None
    decode = max_seqlen_q <= DECODE_QUERIES
    return choose(head_size, queries_per_kv, block_m, tile_prefill, tile_decode, decode, packed)


def kernels() -> Callable[[Any], Any]:
    """What each kernel goes through where it is launched: ``vllm.sm75.kernels`` on 7.5 alone."""
    if not on_turing():
        return _itself
    from vllm.sm75 import kernels as ahead_of_time

    return ahead_of_time.session()


def _itself(kernel: Any) -> Any:
    return kernel


def encoder_block(head_size: int, block: int) -> int:
    """Query rows and keys a block of the attention without KV cache (encoders, vision towers).

    Raises:
        ValueError: Not even 16 of this head size fit capability 7.5.
    """
    if not on_turing():
        return block
    # Q and K of one block each; this kernel never stages P beside them.
    while 2 * OPERAND_BYTES * padded(head_size) * block > SHARED_LIMIT:
        if block <= MIN_TILE:
            parts_of_group(head_size, 1)
        block //= 2
    return block


def split_wide_groups(attention: Callable[..., None]) -> Callable[..., None]:
    """Let attention over wide query groups run part by part where a whole group does not fit.

    Each part of a KV head's queries is given that KV head as its own, by views: no data moves, no
    kernel changes. Parts of one KV head share a launch.
    """
    signature = inspect.signature(attention)

    @functools.wraps(attention)
    def call(*args: Any, **kwargs: Any) -> None:
        if not on_turing():
            return attention(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        q, k = given["q"], given["k"]
        kv_heads = k.shape[2]
        group = q.shape[1] // kv_heads
        mode = getattr(given.get("kv_quant_mode"), "name", "")
        parts = parts_of_group(q.shape[2], group, mode == "INT4_PER_TOKEN_HEAD")
        if parts == 1:
            return attention(*args, **kwargs)
        for head in range(kv_heads):
            attention(**_one_group(given, head, group, parts))
        return None

    return call


def _one_group(given: dict[str, Any], head: int, group: int, parts: int) -> dict[str, Any]:
    """The arguments for one KV head's queries, its head repeated ``parts`` times (stride 0)."""
    mine = dict(given)
    queries = slice(head * group, (head + 1) * group)
    for name in ("q", "out"):
        mine[name] = given[name][:, queries]
    for name in ("alibi_slopes", "sinks"):
        if given.get(name) is not None:
            mine[name] = given[name][queries]
    for name in ("k", "v", "k_scale_cache", "v_scale_cache"):
        if (cache := given.get(name)) is not None:
            shape = [-1] * cache.ndim
            shape[2] = parts
            mine[name] = cache[:, :, head : head + 1].expand(*shape)
    return mine


def check_layer(
    num_heads: int, num_kv_heads: int, head_size: int, sliding_window: tuple[int, int], cache: str
) -> None:
    """Refuse at start-up what cannot run, and log what will.

    Called by each attention layer as the model is built, long before the first launch.

    Raises:
        ValueError: The head size cannot fit; the message names the model.
    """
    if not on_turing():
        return
    from vllm.logger import init_logger

    group = num_heads // num_kv_heads
    try:
        packed = cache.startswith("int4")
        parts = parts_of_group(head_size, group, packed)
    except ValueError as error:
        raise ValueError(f"{_model()}: {error}") from None
    rows = max(MIN_BLOCK_M, padded(group // parts))
    window = max(1 + sliding_window[0], 0)
    wanted = _upstream_tiles(head_size, window)
    made = [
        choose(head_size, group // parts, rows, *wanted, decode, packed) for decode in (False, True)
    ]
    tiles = (made[0].tile_prefill, made[1].tile_decode)
    init_logger(__name__).info_once(
        "Compute capability 7.5: attention of head size %d, %d queries a KV head%s, %s cache, by "
        "Triton: BLOCK_M %d, tile %d (prefill) and %d (decode), %d and %d warps, at most %d of %d bytes "
        "of shared memory.",
        head_size,
        group,
        f" in {parts} parts" if parts > 1 else "",
        cache,
        rows,
        *tiles,
        made[0].num_warps or 4,
        made[1].num_warps or 4,
        shared_bytes(head_size, rows, max(tiles), packed),
        SHARED_LIMIT,
    )
    from vllm.sm75 import kernels as ahead_of_time

    ahead_of_time.prepare(head_size, num_heads, group)


def _upstream_tiles(head_size: int, window: int) -> tuple[int, int]:
    from vllm.v1.attention.ops.triton_unified_attention import _get_tile_size

    # 7.5 runs float16 or float32 queries, of 2 bytes or more.
    prefill = _get_tile_size(head_size, window, 2, is_prefill=True)
    return prefill, _get_tile_size(head_size, window, 2, is_prefill=False)


def _model() -> str:
    from vllm.config import get_current_vllm_config

    try:
        return str(get_current_vllm_config().model_config.model)
    except (AssertionError, AttributeError):
        return "this model"
