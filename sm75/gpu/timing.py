"""Times of a trial's launches, as they are and with a T4G's number of blocks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from sm75.gpu.launcher import Launch, Launcher, Prepared

# What a T4G's multiprocessor has: CUDA programming guide, technical specifications, 7.5.
T4G_SHARED, T4G_REGISTERS, T4G_THREADS, T4G_BLOCKS = 65_536, 65_536, 1_024, 16
_ROUNDS = 15


def blocks_on_t4g(prepared: Prepared) -> int:
    """Blocks of a variant that a T4G's multiprocessor holds at once."""
    threads = 32 * prepared.warps
    # Registers are given to a warp in units of 256, so a thread's count in units of 8.
    registers = -(-max(prepared.registers, 1) // 8) * 8 * threads
    return max(
        1,
        min(
            T4G_SHARED // max(prepared.shared, 1), T4G_REGISTERS // registers,
            T4G_THREADS // threads, T4G_BLOCKS,
        ),
    )  # fmt: skip


def reservation(device: Any, prepared: Prepared, blocks: int) -> int:
    """Shared memory a block to ask for, so that a multiprocessor holds no more than ``blocks``."""
    most: int = device.shared // blocks - device.shared_kept
    wanted: int = min(most, device.shared_block) // 128 * 128
    return max(prepared.shared, wanted)


class Timer:
    """Times a trial's launches, without the wrapper's own work between them."""

    def __init__(self, launcher: Launcher, driver: Any) -> None:
        self.launcher, self.driver = launcher, driver

    def measure(self, launches: Sequence[Launch], shared: Sequence[int]) -> float:
        """Milliseconds, the median of several; replayed as a graph, so that the host is no part."""
        for launch, size in zip(launches, shared, strict=True):
            self.launcher.backend.reserve(launch.function, size)
        self._all(launches, shared)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._all(launches, shared)
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(_ROUNDS):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(float(first.elapsed_time(last)))
        return statistics.median(times)

    def _all(self, launches: Sequence[Launch], shared: Sequence[int]) -> None:
        for launch, size in zip(launches, shared, strict=True):
            self.launcher.repeat(launch, size)

    def figures(self, launches: Sequence[Launch]) -> dict[str, Any]:
        """The time as launched, and with as many blocks a multiprocessor as a T4G holds."""
        blocks = self.driver.blocks
        held = [blocks_on_t4g(launch.prepared) for launch in launches]
        fitted = [
            reservation(self.driver.device, launch.prepared, blocks)
            for launch, blocks in zip(launches, held, strict=True)
        ]
        own = [launch.prepared.shared for launch in launches]
        free, bound = self.measure(launches, own), self.measure(launches, fitted)
        return {
            "ms": round(free, 4),
            "ms_blocks_as_t4g": round(bound, 4),
            "blocks": [
                {"here": blocks(one.function, one.threads, as_is), "t4g": t4g,
                 "bound": blocks(one.function, one.threads, size)}
                for one, as_is, t4g, size in zip(launches, own, held, fitted, strict=True)
            ],
        }  # fmt: skip
