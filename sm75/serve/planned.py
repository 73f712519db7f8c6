"""A planned start, and how it is said."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm75.serve.flags import Given
from sm75.serve.host import Note
from sm75.serve.kv import Cache
from sm75.serve.memory import MIB, Budget, Settings
from sm75.serve.shape import Shape
from sm75.serve.weights import Weights
from sm75.smem.models import Layer

# Tokens of a chat with its history, for which as many sequences must fit: a choice of ours.
USUAL = 2048


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
        given: The user's own flags, spelled out.
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
    given: Given

    @property
    def line(self) -> str:
        """The command line for a shell."""
        return shlex.join(self.command)

    def sums(self) -> dict[str, float]:
        """What the KV cache means in tokens and requests; empty where it cannot be told."""
        if self.cache is None or not self.length:
            return {}
        cache, memory, flight = self.cache, max(0, self.budget.cache), self.settings.in_flight
        usual = min(USUAL, self.length)
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
            text.append(f"  not told here ({shape.unknown}); vLLM takes the length that fits")
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
