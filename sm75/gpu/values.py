"""A trial with numbers in it: filled, run, and compared with the reference."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from sm75.gpu import bundles, reference, trials
from sm75.gpu.trials import BFLOAT16_HEAD, Trial, tolerance
from sm75.smem.cases import INT4


class Numbers:
    """A trial's tensors on the device, filled: cache poisoned, then written by the package."""

    def __init__(self, trial: Trial, device: str, seed: int) -> None:
        self.trial, self.device = trial, device
        self.random = torch.Generator(device=device)
        self.random.manual_seed(zlib.crc32(trial.name.encode()) + seed)
        layer, batch = trial.layer, trial.batch
        tokens = sum(batch.keys)
        shape = (tokens, layer.kv_heads, layer.head)
        # Values are around 0.5, so that a long softmax does not average them to nothing.
        self.keys = self._normal(*shape)
        self.values = self._normal(*shape) + 0.5
        if trial.cache == "none":
            self.q = self._normal(tokens, layer.q_heads, layer.head)
            self.out = torch.full_like(self.q, torch.nan)
            self.starts = self._starts(batch.keys)
            self.lengths = self._ints(batch.keys)
            return
        self.made = made = trials.make(trial, torch, device)
        self.q, self.out = made.q, made.out
        # What nobody wrote is not a number: a kernel that reads it shows.
        for tensor in (made.out, *made.split):
            tensor.fill_(torch.nan)
        # Descriptors read whole blocks, as upstream has it: there it is 61,280 (0x7B7B).
        made.raw.view(torch.uint8).fill_(0x7B if trial.descriptors else 0xFF)
        made.q.copy_(self._normal(*made.q.shape) * trial.large)
        made.descale.fill_(1.0)
        made.starts.copy_(self._starts(batch.queries))
        made.lengths.copy_(self._ints(batch.keys))
        self.slots = self._scatter()
        if made.sinks is not None:
            made.sinks.copy_(self._normal(layer.q_heads).float())
        self.ranges = self._images() if trial.prefix else None

    def _normal(self, *shape: int) -> Any:
        made = torch.randn(*shape, device=self.device, generator=self.random)
        return made.to(torch.float16)

    def _ints(self, numbers: Sequence[int]) -> Any:
        return torch.tensor(list(numbers), dtype=torch.int32, device=self.device)

    def _starts(self, counts: Sequence[int]) -> Any:
        return self._ints([sum(counts[:number]) for number in range(len(counts) + 1)])

    def _scatter(self) -> Any:
        """Give each request shuffled blocks; returns the slot of each token."""
        made = self.made
        size = self.trial.block
        order = torch.randperm(len(made.raw), device=self.device, generator=self.random)
        # Columns behind a request's last block are never to be read; block 0 is somebody's.
        made.table.fill_(0)
        slots, start = [], 0
        for number, count in enumerate(self.trial.batch.keys):
            mine = order[start : start + -(-count // size)]
            start += len(mine)
            made.table[number, : len(mine)] = mine.int()
            at = torch.arange(count, device=self.device)
            slots.append(mine[at // size] * size + at % size)
        return torch.cat(slots)

    def _images(self) -> list[list[tuple[int, int]]]:
        """Up to ``prefix`` ranges a request; those not used are empty, as vLLM leaves them."""
        made, result = self.made, []
        for number, count in enumerate(self.trial.batch.keys):
            mine = [(count // 5, count // 3), (count // 2, count - 3)]
            mine = [pair for pair in mine if pair[0] < pair[1]][: self.trial.prefix]
            filled = [*mine, *[(0, 0)] * (self.trial.prefix - len(mine))]
            made.prefix[number] = self._ints([x for pair in filled for x in pair]).view(-1, 2)
            result.append(mine)
        return result

    def write(self) -> None:
        """Let the package write the cache."""
        one = torch.ones(1, device=self.device)
        trials.write(self.made, self.keys, self.values, self.slots, one)

    def run(self) -> None:
        """Let the package compute attention."""
        if self.trial.cache != "none":
            trials.attend(self.made)
            return
        trials.encode(
            self.trial.layer, self.q, self.keys, self.values, self.out, self.starts, self.lengths,
            max(self.trial.batch.keys),
        )  # fmt: skip

    def stored(self) -> tuple[Any, Any, float]:
        """Keys and values as the cache holds them, and the largest error beyond its rounding."""
        if self.trial.cache in ("none", "auto"):
            if self.trial.cache == "none":
                return self.keys, self.values, 0.0
            held = [self._at(tensor) for tensor in (self.made.key, self.made.value)]
            wrong = max(
                (held[n].float() - given.float()).abs().max().item()
                for n, given in enumerate((self.keys, self.values))
            )
            return held[0], held[1], wrong
        key, key_wrong = self._quantised(self.made.key, self.made.k_scale, self.keys)
        value, value_wrong = self._quantised(self.made.value, self.made.v_scale, self.values)
        return key, value, max(key_wrong, value_wrong)

    def _at(self, tensor: Any) -> Any:
        size = self.trial.block
        return tensor[self.slots // size, self.slots % size]

    def _quantised(self, tensor: Any, scales: Any, given: Any) -> tuple[Any, float]:
        head = self.trial.layer.head
        codes, scale = self._at(tensor), self._at(scales)
        if self.trial.cache == "int8":
            held = codes[..., :head].float() * scale[..., None]
            beyond = (held - given.float()).abs() - 0.501 * scale[..., None]
            return held, max(beyond.max().item(), 0.0)
        # Two numbers a byte, the even one low; the zero point is in the scale's lowest four bits.
        bits = scale.contiguous().view(torch.int32)
        zero, scale = (bits & 15).float()[..., None], (bits & -16).view(torch.float32)[..., None]
        packed = codes[..., : head // 2]
        numbers = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).float()
        turned = (numbers - zero) * scale
        signs = _signs(head, self.device)
        wanted = reference.rotate(given, signs)
        bits_kept = 8 if head <= BFLOAT16_HEAD else 11
        rounding = 2.0**-bits_kept * wanted.abs().amax(-1, keepdim=True)
        beyond = (turned - wanted).abs() - 0.501 * scale - 2 * rounding
        return reference.unrotate(turned, signs), max(beyond.max().item(), 0.0)


def _signs(head: int, device: str) -> Any:
    """The cache format's signs: a constant of the package, which has no other source."""
    ours = importlib.import_module(INT4)
    return ours._get_rht_signs(head & -head, 0, torch.device(device))


def compare(numbers: Numbers) -> dict[str, Any]:
    """Run attention's reference over what the cache holds, and measure the difference."""
    trial = numbers.trial
    keys, values, wrong = numbers.stored()
    queries = trial.batch.keys if trial.cache == "none" else trial.batch.queries
    wanted = reference.attention(
        numbers.q, keys.split(list(trial.batch.keys)), values.split(list(trial.batch.keys)),
        queries, trial.layer, causal=trial.causal, softcap=trial.softcap,
        sinks=None if trial.cache == "none" else numbers.made.sinks,
        ranges=numbers.ranges if trial.prefix else None,
    )  # fmt: skip
    difference = (numbers.out.float() - wanted).abs()
    whole = bool(torch.isfinite(numbers.out).all())
    allowed = tolerance(trial)
    largest = difference.max().item() if whole else None
    return {
        "max_error": largest,
        "mean_error": difference.mean().item() if whole else None,
        "tolerance": allowed,
        "cache_error": wrong,
        "passed": largest is not None and largest <= allowed and wrong <= bundles.CACHE_ERROR,
    }
