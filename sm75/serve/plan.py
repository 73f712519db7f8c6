"""From a model and the user's flags to the command line, with the arithmetic behind it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm75.doctor.rules import T4G_MIB
from sm75.errors import CheckFailed
from sm75.serve import flags
from sm75.serve import host as hosts
from sm75.serve import shape as shapes
from sm75.serve.flags import Given
from sm75.serve.host import Host, Note
from sm75.serve.kv import Cache
from sm75.serve.kv import plan as plan_cache
from sm75.serve.memory import MIB, Budget, Settings, divide
from sm75.serve.shape import Shape
from sm75.serve.weights import Weights, measure
from sm75.smem.models import Layer

# Sequences at once that are tried, the most first: vLLM's own on cards below 70 GiB is 256
# (vllm/engine/arg_utils.py:3003), too many for the logits of 262,144 words and for graphs.
_SEQS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
# Tokens of a chat with its history, for which as many sequences must fit: a choice of ours.
_USUAL = 2048
# Of the estimated cache, what a request of full length may take: vLLM ends at the start when it
# does not fit, and the rows above are estimates. A choice of ours.
_SURE = 0.85
# Below that nobody is served: the questions of health alone take some 100.
_LEAST = 512
_UNKNOWN_LENGTH = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is started, and why so.

    Attributes:
        command: The command line.
        model: The directory that was read.
        shape: The model.
        weights: Its weights.
        budget: The memory.
        cache: The KV cache's division; nothing where it cannot be told.
        settings: What vLLM is told.
        length: max-model-len; 0: left to vLLM.
        gave_way: Flags of ours that the user gives.
        host: What is to be said of RAM.
        warnings: What else is.
    """

    command: tuple[str, ...]
    model: Path
    shape: Shape
    weights: Weights
    budget: Budget
    cache: Cache | None
    settings: Settings
    length: int
    gave_way: tuple[str, ...]
    host: tuple[Note, ...]
    warnings: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command line for a shell."""
        return shlex.join(self.command)

    def sums(self) -> dict[str, float]:
        """What the KV cache means in tokens and requests; empty where it cannot be told."""
        if self.cache is None or not self.length:
            return {}
        cache, memory, flight = self.cache, max(0, self.budget.cache), self.settings.in_flight
        usual = min(_USUAL, self.length)
        full = cache.requests(memory, self.length, flight)
        return {
            "block_bytes": cache.block_bytes,
            "blocks": cache.blocks(memory),
            "bytes_a_token_beyond_the_windows": cache.token_bytes,
            "request_bytes": cache.request_bytes(self.length, flight),
            "requests_of_full_length": full,
            "tokens_as_vllm_logs_them": int(full * self.length),
            "usual_tokens": usual,
            "requests_of_usual_length": cache.requests(memory, usual, flight),
        }

    def lines(self) -> list[str]:
        """For people: the table, what it means, the command line last."""
        shape, budget = self.shape, self.budget
        text = [f"{'MiB':>8}"]
        for row in budget.rows:
            text.append(f"{row.mib:>8,.0f}  {row.what:<25} {row.known:<11} {row.note}".rstrip())
        text.append("estimated: not seen on a T4G; vLLM measures it at its start.")
        own = f"{len(shape.layers)} of {shape.count} layers own a cache: {_kinds(shape.layers)}"
        text += ["", f"KV cache ({shape.kind}): {own}"]
        if sums := self.sums():
            token = sums["bytes_a_token_beyond_the_windows"] / 1024
            request, fit = sums["request_bytes"] / MIB, sums["requests_of_full_length"]
            usual, many = sums["usual_tokens"], sums["requests_of_usual_length"]
            blocks, block = sums["blocks"], sums["block_bytes"] / 1024
            seqs = self.settings.seqs
            text.append(
                f"  {blocks:,.0f} blocks of {block:,.0f} KiB; {token:,.1f} KiB a token beyond the "
                "windows"
            )
            text.append(
                f"  a request of {self.length:,} tokens takes at most {request:,.0f} MiB: "
                f"{fit:.2f} fit"
            )
            text.append(
                f"  of {usual:,.0f} tokens {many:,.0f} fit; at most {seqs} run at once "
                "(--max-num-seqs)"
            )
        else:
            why = shape.unknown or "its length is not said"
            text.append(f"  not told here ({why}); vLLM takes the length that fits")
        text += ["", *(f"RAM: {note.says}" for note in self.host)]
        text += [f"warning: {warning}" for warning in self.warnings]
        if self.gave_way:
            text.append(f"yours, not ours: {', '.join(self.gave_way)}")
        return [*text, "", self.line]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "command": list(self.command),
            "line": self.line,
            "model": str(self.model),
            "kind": self.shape.kind,
            "weights_bytes": self.weights.disk_bytes,
            "weights_files": len(self.weights.files),
            "rows": [row.to_json() for row in self.budget.rows],
            "gpu_memory_utilization": self.budget.share,
            "kv_cache_bytes": self.budget.cache,
            "kv": self.sums(),
            "max_model_len": self.length,
            "max_num_seqs": self.settings.seqs,
            "yours": list(self.gave_way),
            "ram": [note.says for note in self.host],
            "warnings": list(self.warnings),
        }


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
    flags.refuse(given, environment)
    seen, card_mib = bool(card_mib), card_mib or T4G_MIB
    shape = shapes.load(model)
    weights = measure(model, tied=shape.tied)
    if weights is None:
        raise CheckFailed(
            f"{model} has no weights", why="there are no .safetensors, .bin or .pt files in it",
            fix="download the model again",
        )  # fmt: skip
    cards = given.number("--tensor-parallel-size") or 1
    cache = _cache(shape, cards)
    on_card = weights.card_bytes(4 if given.value("--dtype") in ("float32", "float") else 2)
    settings, budget, length = _choose(card_mib, on_card // cards, shape, cache, given, seen=seen)
    _must_fit(budget, on_card // cards, card_mib, cache, settings, length, given)
    ours = [
        ("--dtype", "float16"),
        ("--kv-cache-dtype", "auto"),
        ("--gpu-memory-utilization", f"{budget.share:g}"),
        ("--max-model-len", str(length) if length else "auto"),
        ("--max-num-seqs", str(settings.seqs)),
    ]
    arguments, gave_way = flags.merge(ours, given)
    said = flags.warnings(given, environment)
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
        warnings=tuple(said),
    )  # fmt: skip


def _choose(
    card_mib: int, weights: int, shape: Shape, cache: Cache | None, given: Given, *, seen: bool
) -> tuple[Settings, Budget, int]:
    """The most sequences for which usual requests fit, and the longest request then."""
    asked, length = given.number("--max-num-seqs"), given.number("--max-model-len")
    batched = given.number("--max-num-batched-tokens")
    graph = given.number("--max-cudagraph-capture-size")
    share = given.share()
    for seqs in (asked,) if asked else _SEQS:
        settings = Settings(
            seqs=seqs, share=share, graphs=not given.has("--enforce-eager"),
            batched=batched or max(2048, seqs), most_graph=graph or 0,
            element=4 if given.value("--dtype") in ("float32", "float") else 2,
            steps=1 if given.has("--no-async-scheduling") else 2,
        )  # fmt: skip
        budget = divide(card_mib, weights, shape, cache, settings, seen=seen)
        if cache is None or budget.cache <= 0:
            if cache is None and budget.cache > 0:
                return settings, budget, 0
            continue
        # A limit for the user's length too, so that the count of sequences suits it.
        most = length or shape.longest or _UNKNOWN_LENGTH
        usual = min(_USUAL, most)
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


def _cache(shape: Shape, cards: int) -> Cache | None:
    """The division on each of so many cards (vLLM repeats a KV head where there are fewer)."""
    if shape.unknown or not shape.layers:
        return None
    return plan_cache([
        Layer(head=layer.head, q_heads=max(1, layer.q_heads // cards),
              kv_heads=max(1, layer.kv_heads // cards), window=layer.window)
        for layer in shape.layers
    ])  # fmt: skip


def _kinds(layers: tuple[Layer, ...]) -> str:
    """Such as ``12 x head 256, window 512; 3 x head 512``."""
    counts: dict[Layer, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    return "; ".join(
        f"{number} x head {layer.head}, {layer.kv_heads} KV"
        + (f", window {layer.window:,}" if layer.window else ", all tokens")
        for layer, number in counts.items()
    )
