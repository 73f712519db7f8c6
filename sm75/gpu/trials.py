"""What ``verify --gpu`` runs: attention over paged caches, and what each side chooses for it.

The same calls are made twice: ahead of time with tensors that are shapes, so that the launches are
recorded and compiled for sm_75, and on the device with numbers.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sm75.smem import inputs
from sm75.smem.cases import ATTENTION, CACHE, ENCODER, INT4, KV_INTERFACE, OURS, Case
from sm75.smem.models import BLOCK, IMAGES, MODELS, TABLE, WIDE, Layer, block_sizes


@dataclass(frozen=True, kw_only=True)
class Side:
    """Launch parameters to try.

    Attributes:
        tree: "patched" or "unpatched".
        warps: Warps a block, in place of the overlay's own table.
        largest: Take the largest tiles that fit, in place of the overlay's own table.
        timed: Run the timed trials only.
        ahead: Launch what was compiled ahead of time, where there is such a variant.
    """

    tree: str
    warps: int | None = None
    largest: bool = False
    timed: bool = False
    ahead: bool = False


SIDES: dict[str, Side] = {
    "patched": Side(tree="patched"),
    "ahead of time": Side(tree="patched", ahead=True),
    "unpatched": Side(tree="unpatched"),
    "4 warps": Side(tree="patched", warps=4, timed=True),
    "8 warps": Side(tree="patched", warps=8, timed=True),
    "largest tiles": Side(tree="patched", largest=True, timed=True),
}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Requests by their query tokens and by all their tokens, those of the queries included."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One call of attention and of the cache write before it.

    Attributes:
        layer: Heads and window.
        batch: Requests.
        cache: "auto", "int8" or "int4"; "none" is attention without a cache (encoders).
        softcap: Soft cap of the scores; 0 for none.
        sinks: Whether each query head has a sink.
        causal: False where queries see all keys.
        descriptors: VLLM_TRITON_USE_TD.
        prefix: Ranges of image tokens a request.
        block: Tokens a block of the cache.
        large: By how much queries are larger than standard normal: logits of hundreds.
        ahead: Of the side that is compiled ahead of time alone.
        timed: Whether the time is of interest: large, and run for all sides.
    """

    layer: Layer
    batch: Batch
    cache: str = "auto"
    softcap: float = 0
    sinks: bool = False
    causal: bool = True
    descriptors: bool = False
    prefix: int = 0
    timed: bool = False
    block: int = BLOCK
    large: int = 1
    ahead: bool = False

    @property
    def name(self) -> str:
        """Names the trial in bundles and results."""
        more = [
            *([f"{self.cache} cache"] if self.cache in ("int8", "int4") else []),
            *([f"soft cap {self.softcap:g}"] if self.softcap != self.layer.softcap else []),
            *(["sinks"] if self.sinks else []),
            *(["not causal"] if not self.causal and self.cache != "none" else []),
            *(["descriptors"] if self.descriptors else []),
            *(["image ranges"] if self.prefix == 3 else []),
            *([f"image ranges {self.prefix}"] if self.prefix not in (0, 3) else []),
            *([f"blocks of {self.block}"] if self.block != BLOCK else []),
            *([f"queries x {self.large}"] if self.large != 1 else []),
        ]
        kind = "encoder " if self.cache == "none" else ""
        return ", ".join([f"{kind}{self.layer.name}", self.batch.name, *more])


# Largest difference from the reference that passes, for values of size 1 (keys, values and queries
# are standard normal): float16 rounds outputs up to 4 by 0.001 and softmax weights by 0.0005 of
# themselves. The INT4 cache rounds queries and outputs once more, in the rotated space, and up to
# head 128 vLLM rotates in bfloat16, with 8 bits.
TOLERANCE = {"none": 4e-3, "auto": 4e-3, "int8": 4e-3, "int4": 8e-3}
TOLERANCE_BFLOAT16 = 4e-2
BFLOAT16_HEAD = 128


def tolerance(trial: Trial) -> float:
    """Largest difference from the reference that passes."""
    if trial.cache == "int4" and trial.layer.head <= BFLOAT16_HEAD:
        return TOLERANCE_BFLOAT16
    return TOLERANCE[trial.cache]


MIXED = Batch(
    name="prefill and decode",
    queries=(1, 7, 33, 1, 130, 64, 19),
    keys=(300, 7, 777, 1, 1029, 64, 515),
)
DECODE = Batch(name="decode", queries=(1,) * 6, keys=(1, 17, 130, 512, 1000, 2049))
DRAFT = Batch(name="speculative verify", queries=(4, 2, 4), keys=(40, 2, 901))
# More requests than split KV is for, with one KV head.
FULL = Batch(
    name="decode, full batch", queries=(1,) * 150, keys=tuple(1 + 37 * i % 399 for i in range(150))
)
WITH_IMAGES = Batch(name="prefill and decode", queries=(1, 70, 257, 33), keys=(90, 70, 700, 1400))
IMAGES_DECODE = Batch(name="decode", queries=(1, 2, 1, 1), keys=(90, 700, 1029, 2049))
# Odd lengths up to 32k, a prompt's last step and decodes in one batch.
LONG = Batch(name="to 32k", queries=(1, 3, 517, 1), keys=(32_749, 9_001, 16_385, 4_093))
CHUNKS = Batch(name="chunks", queries=(16,) * 3 + (31, 257), keys=(16, 1_000, 515, 31, 700))
# For tools that take a thousand times as long: prefill whose requests are short, and shorter.
TINY = Batch(name="tiny", queries=(33, 17), keys=(49, 70))
TINIEST = Batch(name="tiniest", queries=(9, 5), keys=(37, 65))
LONG_DECODE = Batch(name="decode 8 x 4096", queries=(1,) * 8, keys=(4096,) * 8)
ONE_DECODE = Batch(name="decode 1 x 4096", queries=(1,), keys=(4096,))
PREFILL = Batch(name="prefill 4 x 512 of 2048", queries=(512,) * 4, keys=(2048,) * 4)
TEXTS = Batch(name="odd lengths", queries=(1, 63, 257, 130), keys=(1, 63, 257, 130))

_FULL = Layer(head=512, q_heads=8, kv_heads=1)
_SLIDING = Layer(head=256, q_heads=8, kv_heads=1, window=512, clamp=True)
_GEMMA3 = Layer(head=256, q_heads=8, kv_heads=4)
_LLAMA8B = Layer(head=128, q_heads=32, kv_heads=8)
_LLAMA1B = Layer(head=64, q_heads=32, kv_heads=8)
_ENCODERS = tuple(Layer(head=head, q_heads=8, kv_heads=8) for head in (64, 72, 128, 256, 512))


def trials() -> Iterator[Trial]:
    """All of them: every layer of the audit's models and of its wide groups, then features."""
    seen = set()
    for model in (*MODELS, WIDE):
        for layer in model.layers:
            plain = Layer(
                head=layer.head, q_heads=layer.q_heads, kv_heads=layer.kv_heads,
                window=layer.window,
            )  # fmt: skip
            if plain not in seen:
                seen.add(plain)
                yield from (Trial(layer=plain, batch=batch) for batch in (MIXED, DECODE))
            if layer.mm_prefix:
                yield Trial(layer=layer, batch=WITH_IMAGES, prefix=3)
    for layer in (_FULL, _SLIDING):
        yield from (Trial(layer=layer, batch=batch) for batch in (DRAFT, FULL))
        for batch in (MIXED, DECODE):
            yield Trial(layer=layer, batch=batch, softcap=30.0)
            yield Trial(layer=layer, batch=batch, sinks=True)
            yield Trial(layer=layer, batch=batch, descriptors=True)
            yield Trial(layer=layer, batch=batch, cache="int8")
        yield Trial(layer=layer, batch=MIXED, causal=False)
        yield Trial(layer=layer, batch=MIXED, cache="int8", softcap=30.0, sinks=True)
    for batch in (MIXED, DECODE):
        for layer in (_SLIDING, _GEMMA3, _LLAMA8B, _LLAMA1B):
            yield Trial(layer=layer, batch=batch, cache="int4")
        for layer in (_LLAMA8B, _LLAMA1B):
            yield Trial(layer=layer, batch=batch, cache="int8")
        # Parts of a group over quantised caches.
        yield Trial(layer=WIDE.layers[0], batch=batch, cache="int8", sinks=True)
        yield Trial(layer=WIDE.layers[1], batch=batch, cache="int4")
    for layer in _ENCODERS:
        yield Trial(layer=layer, batch=TEXTS, cache="none", causal=False)
    # Upstream decodes this one with tile 32.
    yield Trial(layer=Layer(head=256, q_heads=16, kv_heads=8, window=1024), batch=LONG_DECODE,
                timed=True)  # fmt: skip
    for layer in (_FULL, _SLIDING, _GEMMA3, _LLAMA8B, _LLAMA1B):
        for batch in (LONG_DECODE, ONE_DECODE, PREFILL):
            # Where a model has both, vLLM doubles the sliding layers' blocks.
            block = 2 * BLOCK if layer is _SLIDING else BLOCK
            yield Trial(layer=layer, batch=batch, timed=True, block=block)
    for batch in (LONG_DECODE, PREFILL):
        yield Trial(layer=_FULL, batch=batch, cache="int8", timed=True)
        yield Trial(layer=_SLIDING, batch=batch, cache="int4", timed=True)


def ahead_trials() -> Iterator[Trial]:
    """Every kind of layer that has variants, with the blocks of its model; hard inputs."""
    seen = set()
    for model in TABLE:
        for layer, block in block_sizes(model).items():
            for trial in _ahead_of(layer, block):
                if trial not in seen:
                    seen.add(trial)
                    yield trial


def _ahead_of(layer: Layer, block: int) -> Iterator[Trial]:
    plain = Trial(layer=layer, batch=MIXED, softcap=layer.softcap, block=block, ahead=True)
    for cache in ("auto", "int8"):
        for batch in (MIXED, DECODE, DRAFT, FULL, LONG, CHUNKS):
            yield dataclasses.replace(plain, cache=cache, batch=batch)
    for batch in (TINY, TINIEST):
        yield dataclasses.replace(plain, batch=batch)
    for batch in (MIXED, DECODE):
        yield dataclasses.replace(plain, batch=batch, large=40)
    if layer.mm_prefix:
        for images in range(1, IMAGES + 1):
            for batch in (WITH_IMAGES, IMAGES_DECODE):
                yield dataclasses.replace(plain, batch=batch, prefix=images)


def of_side(name: str) -> list[Trial]:
    """The trials of a side."""
    side = SIDES[name]
    found = [trial for trial in trials() if trial.timed or not side.timed]
    if not side.ahead:
        return found
    own = list(ahead_trials())
    names = {trial.name for trial in own}
    return [*(trial for trial in found if trial.name not in names), *own]


def modules_of(trial: Trial) -> tuple[str, ...]:
    """The tree's modules that a trial takes."""
    if trial.cache == "none":
        return (ENCODER,)
    helpers = ATTENTION.replace("unified_attention", "attention_helpers")
    return (ATTENTION, helpers, KV_INTERFACE, CACHE, INT4)


def arrange(side: Side) -> None:
    """Set the overlay's own tables as the side says; what it decides by them stays its own."""
    if side.tree != "patched":
        return
    ours: Any = importlib.import_module(OURS)
    if side.warps is not None:
        ours.NUM_WARPS = {1 << n: (side.warps, side.warps) for n in range(5, 11)}
    if side.largest:
        ours.TILES = {}
    ours.choose.cache_clear()
    ours.parts_of_group.cache_clear()


def blocks_of(trial: Trial) -> int:
    """Blocks of the cache that the requests fill."""
    return sum(-(-keys // trial.block) for keys in trial.batch.keys)


def make(trial: Trial, torch: Any, device: str) -> inputs.Attention:
    """The trial's tensors, with nothing in them. A tenth of the cache belongs to nobody."""
    most = -(-max(trial.batch.keys) // trial.block)
    return inputs.attention(
        torch, trial.layer, trial.batch.queries, cache=trial.cache,
        blocks=blocks_of(trial) * 11 // 10 + 4, table=-(-most // 64) * 64, prefix=trial.prefix,
        sinks=trial.sinks, causal=trial.causal, softcap=trial.softcap,
        descriptors=trial.descriptors, device=device, block=trial.block,
    )  # fmt: skip


def write(made: inputs.Attention, key: Any, value: Any, slots: Any, one: Any) -> None:
    """Write keys and values into the cache, as the package does before attention.

    Args:
        made: The trial's tensors.
        key: Keys of all tokens.
        value: Values of all tokens.
        slots: Where each token belongs.
        one: A tensor that holds 1, the scale of an unquantised cache.
    """
    writes = importlib.import_module(CACHE)
    if made.cache == "auto":
        writes.triton_reshape_and_cache_flash(
            key, value, made.key, made.value, slots, "auto", one, one
        )
        return
    modes = importlib.import_module(KV_INTERFACE).KVQuantMode
    writes.triton_reshape_and_cache_flash_per_token_head_quant(
        key, value, made.key, made.value, made.k_scale, made.v_scale, slots,
        kv_quant_mode=inputs.mode_of(modes, made.cache),
    )  # fmt: skip


def attend(made: inputs.Attention) -> None:
    """Call the package's attention over the cache."""
    modes = importlib.import_module(KV_INTERFACE).KVQuantMode
    importlib.import_module(ATTENTION).unified_attention(**made.arguments(modes))


def encode(
    layer: Layer, q: Any, k: Any, v: Any, out: Any, starts: Any, lengths: Any, longest: int
) -> None:
    """Call the package's attention without a cache."""
    importlib.import_module(ENCODER).context_attention_fwd(
        q=q, k=k, v=v, o=out, b_start_loc=starts, b_seq_len=lengths, max_input_len=longest,
        is_causal=False, softmax_scale=layer.head**-0.5, sliding_window_q=-1, sliding_window_k=-1,
    )  # fmt: skip


def _record(trial: Trial, side: Side) -> None:
    from sm75.smem import faketorch as torch

    arrange(side)
    layer, tokens = trial.layer, sum(trial.batch.keys)
    key = torch.empty(tokens, layer.kv_heads, layer.head, dtype=torch.float16)
    if trial.cache == "none":
        lengths = torch.empty(len(trial.batch.keys), dtype=torch.int32)
        encode(layer, key, key, key, key, lengths, lengths, max(trial.batch.keys))
        return
    made = make(trial, torch, "cuda")
    write(made, key, key, torch.empty(tokens, dtype=torch.int64), torch.empty(1))
    attend(made)


def all_cases(side: str) -> list[Case]:
    """The side's trials as cases of the audit's recorder.

    Of the side that is compiled ahead of time those of its own: the others launch what "patched"
    does, where there is no variant.
    """

    def case(trial: Trial) -> Case:
        return Case(
            group="gpu", name=trial.name, modules=modules_of(trial),
            call=lambda: _record(trial, SIDES[side]),
        )  # fmt: skip

    return [case(trial) for trial in of_side(side) if trial.ahead == SIDES[side].ahead]


def by_name(name: str, among: Sequence[Trial]) -> Trial:
    """The trial of this name."""
    return next(trial for trial in among if trial.name == name)
