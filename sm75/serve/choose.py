"""How many sequences and tokens: the most that the card has room for, or what the user asks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sm75.serve import quant
from sm75.serve.flags import Given
from sm75.serve.kv import Cache
from sm75.serve.kv import plan as plan_cache
from sm75.serve.memory import Budget, Settings, divide
from sm75.serve.planned import USUAL
from sm75.serve.quant import Quantization
from sm75.serve.shape import Shape
from sm75.serve.weights import Weights
from sm75.smem.models import Layer

# Sequences at once that are tried, the most first: vLLM's own on cards below 70 GiB is 256
# (vllm/engine/arg_utils.py:3003), too many for the logits of 262,144 words and for graphs.
_SEQS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
# Tokens of a step: vLLM's own on cards below 70 GiB (vllm/engine/arg_utils.py:3001).
BATCHED = 2048
# Of the estimated cache, what a request of full length may take: vLLM ends at the start when it
# does not fit, and the rows above are estimates. A choice of ours.
_SURE = 0.85
# Below that nobody is served: the questions of health alone take some 100.
LEAST = 512


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user asks for; 0: nothing.

    Attributes:
        seqs: max-num-seqs.
        length: max-model-len.
        batched: max-num-batched-tokens.
        share: gpu-memory-utilization.
        graph: max-cudagraph-capture-size.
        eager: Whether CUDA graphs are off.
        steps: Steps in flight.
        tensor: Cards that share each layer.
        stages: Groups of them, with a part of the layers each.
    """

    seqs: int = 0
    length: int = 0
    batched: int = 0
    share: float = 0.0
    graph: int = 0
    eager: bool = False
    steps: int = 2
    tensor: int = 1
    stages: int = 1

    @classmethod
    def of(cls, given: Given) -> Asked:
        """As the user says.

        Raises:
            UsageError: A number is none.
        """
        return cls(
            seqs=given.number("--max-num-seqs") or 0,
            length=given.number("--max-model-len") or 0,
            batched=given.number("--max-num-batched-tokens") or 0,
            share=given.share(),
            graph=given.number("--max-cudagraph-capture-size") or 0,
            eager=given.has("--enforce-eager"),
            steps=1 if given.has("--no-async-scheduling") else 2,
            tensor=given.number("--tensor-parallel-size") or 1,
            stages=given.number("--pipeline-parallel-size") or 1,
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a card.

    Attributes:
        card_mib: The card's memory as nvidia-smi says.
        seen: Whether it is here.
        weights: The model's.
        found: How they are quantized.
        shape: Its shape.
        element: Bytes of the type that it is run in.
        item: Bytes of an element of the KV cache.
        online: Whether its linear layers become FP8 while they are loaded.
    """

    card_mib: int
    seen: bool
    weights: Weights
    found: Quantization
    shape: Shape
    element: int
    item: int
    online: bool

    def on_card(self, asked: Asked) -> int:
        """Bytes of weights on one card, as if all had the same."""
        whole = self.weights.card_bytes(self.element, 1 if self.online else None)
        if self.found.block:
            # Marlin has a scale in float16 for each column of a block (marlin_utils_fp8.py).
            whole += self.weights.elements.get("F8_E4M3", 0) // self.found.block * 2
        return whole // (asked.tensor * asked.stages)

    def cache(self, asked: Asked) -> Cache | None:
        """The division on each card (vLLM repeats a KV head where there are fewer)."""
        shape = self.shape
        if shape.unknown or not shape.layers:
            return None
        count = math.ceil(len(shape.layers) / asked.stages)
        return plan_cache([
            Layer(head=layer.head, q_heads=max(1, layer.q_heads // asked.tensor),
                  kv_heads=max(1, layer.kv_heads // asked.tensor), window=layer.window)
            for layer in shape.layers[:count]
        ], self.item)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What comes of it.

    Attributes:
        asked: What was asked.
        settings: What vLLM is told.
        budget: The memory.
        cache: The KV cache's division; nothing where it cannot be told.
        length: max-model-len; 0: left to vLLM, or there is no room.
        weights: Bytes of them on one card.
    """

    asked: Asked
    settings: Settings
    budget: Budget
    cache: Cache | None
    length: int
    weights: int

    @property
    def too_long(self) -> bool:
        """Whether a request of the length that is asked for is more than the card has, by what is
        known alone."""
        return bool(self.cache and self.asked.length) and self.needs > self.budget.at_most

    @property
    def needs(self) -> int:
        """Bytes of one request of full length, with the block that is never given to one."""
        if self.cache is None:
            return 0
        request = self.cache.request_bytes(self.length, self.settings.in_flight)
        return request + self.cache.block_bytes

    @property
    def fits(self) -> bool:
        """Whether it is started: estimates refuse no length that is asked for by name; what the
        card has, and vLLM's own rule for sequences, do.
        """
        if self.budget.at_most <= 0 or self.settings.seqs > self.settings.batched or self.too_long:
            return False
        short = self.budget.cache <= 0 or (self.cache is not None and self.length < LEAST)
        return not short or bool(self.asked.length)


def choose(case: Case, asked: Asked) -> Choice:
    """The most sequences for which usual requests fit, and the longest request then."""
    cache, weights = case.cache(asked), case.on_card(asked)
    batched = asked.batched or BATCHED
    for seqs in (asked.seqs,) if asked.seqs else _SEQS:
        if seqs > batched and not asked.seqs:
            continue  # vLLM refuses fewer tokens a step than sequences (vllm/config/scheduler.py)
        settings = Settings(
            seqs=seqs, share=asked.share, graphs=not asked.eager, batched=batched,
            most_graph=asked.graph, element=case.element, steps=asked.steps,
        )  # fmt: skip
        budget = divide(case.card_mib, weights, case.shape, cache, settings, seen=case.seen)
        made = Choice(asked=asked, settings=settings, budget=budget, cache=cache,
                      length=asked.length, weights=weights)  # fmt: skip
        if budget.cache <= 0:
            continue
        if cache is None:
            return Choice(asked=asked, settings=settings, budget=budget, cache=None, length=0,
                          weights=weights)  # fmt: skip
        # A limit for the user's length too, so that the count of sequences suits it.
        most = asked.length or case.shape.length.own
        usual = min(USUAL, most)
        many = cache.requests(budget.cache, usual, settings.in_flight)
        if asked.seqs or many >= seqs or seqs == 1:
            fits = cache.longest(int(budget.cache * _SURE), most, settings.in_flight)
            # Whole blocks; a model's own length as it is.
            fits = fits if fits == most else fits // 16 * 16
            return Choice(asked=asked, settings=settings, budget=budget, cache=cache,
                          length=asked.length or fits, weights=weights)  # fmt: skip
    return made


def case_of(
    card_mib: int, weights: Weights, found: Quantization, shape: Shape, given: Given, *,
    seen: bool, element: int, item: int,
) -> Case:  # fmt: skip
    """Put a case together; of the flags it reads ``--quantization`` alone."""
    online = given.value("--quantization") in quant.ONLINE_FP8 and not found.method
    return Case(card_mib=card_mib, seen=seen, weights=weights, found=found, shape=shape,
                element=element, item=item, online=online)  # fmt: skip
