"""From a model and the user's flags to the command line, with the arithmetic behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sm75.doctor.rules import T4G_MIB
from sm75.errors import CheckFailed
from sm75.serve import arch, dtype, flags, known, quant, sane, typed
from sm75.serve import host as hosts
from sm75.serve import length as lengths
from sm75.serve import shape as shapes
from sm75.serve.flags import Given
from sm75.serve.host import Host
from sm75.serve.kv import Cache
from sm75.serve.kv import plan as plan_cache
from sm75.serve.memory import MIB, Budget, Settings, divide
from sm75.serve.planned import USUAL, Plan
from sm75.serve.quant import Quantization
from sm75.serve.shape import Shape
from sm75.serve.weights import Weights, measure
from sm75.smem.models import Layer

# Sequences at once that are tried, the most first: vLLM's own on cards below 70 GiB is 256
# (vllm/engine/arg_utils.py:3003), too many for the logits of 262,144 words and for graphs.
_SEQS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
# Of the estimated cache, what a request of full length may take: vLLM ends at the start when it
# does not fit, and the rows above are estimates. A choice of ours.
_SURE = 0.85
# Below that nobody is served: the questions of health alone take some 100.
_LEAST = 512


def make(
    program: Path,
    name: str,
    model: Path,
    given: Given,
    *,
    environment: Mapping[str, str],
    card_mib: int = 0,
    host: Host | None = None,
) -> Plan:
    """Plan a start.

    Args:
        program: vLLM's.
        name: The model as the user says it.
        model: Its directory.
        given: The user's own flags.
        environment: Variables.
        card_mib: The card's memory as nvidia-smi says; 0: none is seen, a T4G's is taken.
        host: The machine's memory; nothing where it cannot be seen.

    Raises:
        UsageError: The flags or variables ask for what cannot work.
        CheckFailed: The model does not fit, or is incomplete.
    """
    here = known.look(program)
    given = typed.check(given, here)
    flags.refuse(given, environment)
    seen, card_mib = bool(card_mib), card_mib or T4G_MIB
    config = shapes.config(model)
    with shapes.understood(model):
        sane.check(config, model / "config.json")
        said = arch.look(config, model, given, here)
        found = quant.read(config, model)
        quant.refuse(found, given, here)
        dtype.refuse(config, given, here)
        shape = shapes.parse(config)
    lengths.refuse(shape.length, given.number("--max-model-len"), given, environment)
    weights = measure(model, tied=shape.tied)
    if weights is None:
        raise CheckFailed(
            f"{model} has no weights", why="there are no .safetensors, .bin or .pt files in it",
            fix="download the model again",
        )  # fmt: skip
    element = dtype.element_bytes(config, given, here)
    cache_type, why = dtype.cache_type(found.cache, given)
    shape = replace(shape, quantized=found.said or given.value("--quantization") or "")
    cards = Cards.of(given)
    cache = _cache(shape, cards, dtype.cache_bytes(element, given))
    on_card = _share(weights, found, element, cards, given)
    settings, budget, length = _choose(card_mib, on_card, shape, cache, given, element, seen=seen)
    _must_fit(budget, on_card, card_mib, cache, settings, length, given)
    ours = [
        ("--dtype", "float16"),
        ("--kv-cache-dtype", cache_type),
        ("--gpu-memory-utilization", f"{budget.share:g}"),
        ("--max-model-len", str(length) if length else "auto"),
        ("--max-num-seqs", str(settings.seqs)),
    ]
    arguments, gave_way = flags.merge(ours, given)
    said += lengths.notes(shape.length, given)
    said += quant.notes(found, given) + ([why] if why else [])
    said += flags.warnings(given, environment)
    if given.has("--kv-cache-memory-bytes"):
        said.append("--kv-cache-memory-bytes: vLLM takes that, whatever the table says")
    if budget.cache <= 0:
        said.append(
            "by these estimates nothing is left for the KV cache; vLLM may end at its start"
        )
    return Plan(
        command=(str(program), "serve", name, *arguments), model=model, shape=shape,
        weights=weights, budget=budget, cache=cache, settings=settings, length=length,
        gave_way=tuple(gave_way), host=tuple(hosts.judge(weights, host or Host())),
        warnings=tuple(said), given=given,
    )  # fmt: skip


def _choose(
    card_mib: int, weights: int, shape: Shape, cache: Cache | None, given: Given, element: int,
    *, seen: bool,
) -> tuple[Settings, Budget, int]:  # fmt: skip
    """The most sequences for which usual requests fit, and the longest request then."""
    asked, length = given.number("--max-num-seqs"), given.number("--max-model-len")
    batched = given.number("--max-num-batched-tokens")
    graph = given.number("--max-cudagraph-capture-size")
    share = given.share()
    # vLLM refuses fewer tokens a step than sequences (vllm/config/scheduler.py).
    open_ = [seqs for seqs in _SEQS if not batched or seqs <= batched]
    for seqs in (asked,) if asked else open_:
        settings = Settings(
            seqs=seqs, share=share, graphs=not given.has("--enforce-eager"),
            batched=batched or max(2048, seqs), most_graph=graph or 0,
            element=element,
            steps=1 if given.has("--no-async-scheduling") else 2,
        )  # fmt: skip
        budget = divide(card_mib, weights, shape, cache, settings, seen=seen)
        if cache is None or budget.cache <= 0:
            if cache is None and budget.cache > 0:
                return settings, budget, 0
            continue
        # A limit for the user's length too, so that the count of sequences suits it.
        most = length or shape.length.own
        usual = min(USUAL, most)
        if asked or cache.requests(budget.cache, usual, settings.in_flight) >= seqs or seqs == 1:
            fits = cache.longest(int(budget.cache * _SURE), most, settings.in_flight)
            # Whole blocks; a model's own length as it is.
            fits = fits if fits == most else fits // 16 * 16
            return settings, budget, length or fits
    return settings, budget, length or 0


def _must_fit(
    budget: Budget, weights: int, card_mib: int, cache: Cache | None, settings: Settings,
    length: int, given: Given,
) -> None:  # fmt: skip
    asked = given.number("--max-model-len")
    short = budget.cache <= 0 or (cache and length < _LEAST)
    # Estimates refuse nothing that is asked for by name; what the card has does.
    if budget.at_most <= 0 or (short and not asked):
        left = budget.cache / MIB
        why = f"weights {weights / MIB:,.0f} MiB of the card's {card_mib:,}; " + (
            f"{-left:,.0f} MiB are missing before the first token" if left <= 0
            else f"{left:,.0f} MiB are left for the KV cache, {length} tokens")  # fmt: skip
        fix = "take a smaller or a 4-bit checkpoint (AWQ, GPTQ); with 2 GPUs: "
        fix += "-- --tensor-parallel-size 2"
        if budget.at_most > 0:
            fix += f"; to try it all the same: -- --max-model-len {_LEAST} --enforce-eager"
        raise CheckFailed("the model does not fit the card", why=why + "\n" + _table(budget),
                          fix=fix)  # fmt: skip
    if cache and asked:
        needed = cache.request_bytes(asked, settings.in_flight) + cache.block_bytes
        if needed > budget.at_most:
            raise CheckFailed(
                f"--max-model-len {asked} does not fit the card",
                why=f"one request of it takes {needed / MIB:,.0f} MiB, and beside the weights the "
                f"card has {budget.at_most / MIB:,.0f}",
                fix="leave it out: the longest that fits is taken",
            )


def _table(budget: Budget) -> str:
    return "\n".join(f"        {row.mib:>8,.0f}  {row.what}" for row in budget.rows)


@dataclass(frozen=True, kw_only=True)
class Cards:
    """How many cards a model is cut for.

    Attributes:
        tensor: Cards that share each layer.
        stages: Groups of them, with a part of the layers each.
    """

    tensor: int
    stages: int

    @classmethod
    def of(cls, given: Given) -> Cards:
        """As the user says."""
        return cls(
            tensor=given.number("--tensor-parallel-size") or 1,
            stages=given.number("--pipeline-parallel-size") or 1,
        )


def _share(
    weights: Weights, found: Quantization, element: int, cards: Cards, given: Given
) -> int:  # fmt: skip
    """Bytes of weights on one card, as if all had the same."""
    online = given.value("--quantization") in quant.ONLINE_FP8 and not found.method
    whole = weights.card_bytes(element, 1 if online else None)
    if found.block:
        # Marlin has a scale in float16 for each column of a block (marlin_utils_fp8.py).
        whole += weights.elements.get("F8_E4M3", 0) // found.block * 2
    return whole // (cards.tensor * cards.stages)


def _cache(shape: Shape, cards: Cards, item: int) -> Cache | None:
    """The division on each of so many cards (vLLM repeats a KV head where there are fewer)."""
    if shape.unknown or not shape.layers:
        return None
    count = math.ceil(len(shape.layers) / cards.stages)
    return plan_cache([
        Layer(head=layer.head, q_heads=max(1, layer.q_heads // cards.tensor),
              kv_heads=max(1, layer.kv_heads // cards.tensor), window=layer.window)
        for layer in shape.layers[:count]
    ], item)  # fmt: skip
