"""Measure the card's bandwidth: ``bench --memory``, or with nothing but Python and a driver

    python3 -m sm75.bench.memory [--json] [--size MIB] [--repeats N] [--device N]

Reads and copies memory far larger than the L2 cache with kernels of our own (``memory.ptx``), and
copies with the driver's own copy. Each figure is a median with its interval. What was read is
checked: the sum of all words must be the one that can be written down, and must change by one when
one word does, so that nothing can leave reading out. GB are 1e9 bytes; a copy counts what it reads
and what it writes.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from sm75.bench import stats
from sm75.bench.cuda import Device, Driver
from sm75.bench.roofline import T4G_COPY, T4G_READ, T4G_THEORETICAL
from sm75.errors import CheckFailed, Sm75Error, UsageError

PTX = Path(__file__).with_name("memory.ptx")
SIZE_MIB = 1024
REPEATS = 20
WARMUPS = 3
THREADS = 256
# Memory is read this many times the size of L2, so that what is left in it is little.
_TIMES_L2 = 4
_WORD, _VECTOR = 4, 16
_MODULUS = 1 << 32
# Odd: all words of a row shorter than 2^32 are different.
_FACTOR, _OFFSET = 2_654_435_761, 97
# GB/s.
T4G = {"read": T4G_READ, "copy": T4G_COPY, "theoretical": T4G_THEORETICAL}
T4G_SOURCE = "field report of a g5g (T4G), not ours"


class Gpu(Protocol):
    """What ``cuda.Driver`` is."""

    device: Device

    def load(self, ptx: bytes) -> None: ...
    def launch(self, kernel: str, blocks: int, threads: int, values: Sequence[Any]) -> None: ...
    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def fill(self, address: int, word: int, count: int) -> None: ...
    def copy(self, target: int, source: int, size: int) -> None: ...
    def fetch(self, address: int, size: int) -> bytes: ...
    def timed(self, work: Callable[[], None]) -> float: ...


def expected(words: int, *, factor: int = _FACTOR, offset: int = _OFFSET) -> int:
    """The sum of the row that ``fill`` writes, modulo 2^32."""
    return (factor * (words * (words - 1) // 2) + offset * words) % _MODULUS


class Bench:
    """Two rows of memory on a GPU.

    Args:
        gpu: The GPU.
        size: Bytes of one row.
        ptx: The kernels.

    Raises:
        UsageError: Two rows do not fit, or one is too small to say anything.
    """

    def __init__(self, gpu: Gpu, size: int, ptx: bytes) -> None:
        device = gpu.device
        if size < _TIMES_L2 * device.l2:
            raise UsageError(
                f"{size / 2**20:g} MiB are too few",
                why=f"the L2 cache has {device.l2 / 2**20:g} MiB: it would be measured instead",
                fix=f"--size {-(-_TIMES_L2 * device.l2 // 2**20)} or more",
            )
        if 2 * size > device.free:
            raise UsageError(
                f"two times {size / 2**20:g} MiB are not free on {device.name}",
                why=f"{device.free / 2**20:.0f} of {device.total / 2**20:.0f} MiB are",
                fix="end what else runs there, or a smaller --size",
            )
        self.gpu, self.size = gpu, size
        self.blocks = device.multiprocessors * max(1, device.threads // THREADS)
        gpu.load(ptx)
        self.source, self.target = gpu.allocate(size), gpu.allocate(size)
        self._sums = gpu.allocate(self.blocks * THREADS * _WORD)
        self._launch("fill", self.source, size // _WORD,
                     ctypes.c_uint32(_FACTOR), ctypes.c_uint32(_OFFSET))  # fmt: skip

    def _launch(self, kernel: str, first: int, count: int, *others: Any) -> None:
        values = [ctypes.c_uint64(first), ctypes.c_uint64(count), *others]
        self.gpu.launch(kernel, self.blocks, THREADS, values)

    def read(self, row: int) -> None:
        """Read a row."""
        self._launch("read", row, self.size // _VECTOR, ctypes.c_uint64(self._sums))

    def copy(self) -> None:
        """Copy by our kernel."""
        self._launch("copy", self.source, self.size // _VECTOR, ctypes.c_uint64(self.target))

    def driver_copy(self) -> None:
        """Copy by the driver."""
        self.gpu.copy(self.target, self.source, self.size)

    def sum(self, row: int) -> int:
        """The sum of a row's words, modulo 2^32, as the kernel read them."""
        self.forget()
        self.read(row)
        return self.last_sum()

    def forget(self) -> None:
        """Nothing was read."""
        self.gpu.fill(self._sums, 0, self.blocks * THREADS)

    def last_sum(self) -> int:
        """The sum of what was read last."""
        sums = array.array("I", self.gpu.fetch(self._sums, self.blocks * THREADS * _WORD))
        return sum(sums) % _MODULUS

    def check(self, row: int, what: str) -> None:
        """Have a row's sum be right.

        Raises:
            CheckFailed: It is not.
        """
        found, wanted = self.sum(row), expected(self.size // _WORD)
        if found != wanted:
            raise CheckFailed(
                f"{what} is wrong: the sum of its words is {found:#010x}, not {wanted:#010x}",
                why="memory, driver or kernel are at fault; a time of wrong work is no figure",
                fix="run it again; look at dmesg and at nvidia-smi -q -d ECC",
            )

    def check_notices(self) -> None:
        """Change the last word by one, see the sum follow, and put it back.

        Raises:
            CheckFailed: It does not: the kernel does not read all.
        """
        last = self.size // _WORD - 1
        place = self.source + last * _WORD
        word = (last * _FACTOR + _OFFSET) % _MODULUS
        self.gpu.fill(place, (word + 1) % _MODULUS, 1)
        found = self.sum(self.source)
        self.gpu.fill(place, word, 1)
        if found != (expected(self.size // _WORD) + 1) % _MODULUS:
            raise CheckFailed(
                "a changed word does not change the sum", why="the kernel does not read it",
                fix="please report it with the name of the GPU and its driver",
            )  # fmt: skip

    def close(self) -> None:
        """Give the memory back."""
        for address in (self.source, self.target, self._sums):
            self.gpu.free(address)

    def times(self, work: Callable[[], None], repeats: int) -> list[float]:
        """Seconds of each run, after some that do not count."""
        return [self.gpu.timed(work) for _ in range(WARMUPS + repeats)][WARMUPS:]


def measure(
    gpu: Gpu, sizes: Sequence[int], *, repeats: int = REPEATS, ptx: bytes | None = None
) -> dict[str, Any]:
    """Measure and check.

    Args:
        gpu: The GPU.
        sizes: Bytes of one row, each a multiple of 16.
        repeats: Timed runs of each kind.
        ptx: The kernels; default: ``memory.ptx``.

    Returns:
        JSON-ready data; rates in GB/s.

    Raises:
        CheckFailed: What was read or copied is wrong.
        UsageError: A size does not do.
    """
    text = PTX.read_bytes() if ptx is None else ptx
    results = []
    for size in sizes:
        bench = Bench(gpu, size, text)
        try:
            results += _measure(bench, repeats)
        finally:
            bench.close()
    device = gpu.device
    return {
        "schema": 1,
        "gpu": device.name,
        "capability": ".".join(map(str, device.capability)),
        "multiprocessors": device.multiprocessors,
        "l2_bytes": device.l2,
        "memory_bytes": device.total,
        "used_by_others_bytes": device.total - device.free,
        "driver": device.driver,
        "cuda": device.cuda,
        "theoretical_gb_s": round(device.theoretical, 1) or None,
        "repeats": repeats,
        "confidence_method": stats.METHOD,
        "checked": "sums of all words read; one changed word changes the sum",
        "results": results,
        "t4g": {"gb_s": T4G, "source": T4G_SOURCE},
    }


def _measure(bench: Bench, repeats: int) -> list[dict[str, Any]]:
    bench.check(bench.source, "what was filled")
    bench.check_notices()
    bench.check(bench.source, "what was put back")
    words = bench.size // _WORD
    kinds: dict[str, tuple[Callable[[], None], int]] = {
        "read": (lambda: bench.read(bench.source), 1),
        "copy": (bench.copy, 2),
        "driver copy": (bench.driver_copy, 2),
    }
    found = []
    for kind, (work, ways) in kinds.items():
        bench.gpu.fill(bench.target, 0, words)
        bench.forget()
        times = bench.times(work, repeats)
        if kind == "read":
            if bench.last_sum() != expected(words):
                bench.check(bench.source, "what was read while it was timed")
                raise CheckFailed("what was read while it was timed is wrong")
        else:
            bench.check(bench.target, f"what was copied ({kind})")
        summary = stats.summarise([ways * bench.size / seconds / 1e9 for seconds in times])
        assert summary is not None  # noqa: S101
        found.append(
            {"kind": kind, "bytes": bench.size, "moved_bytes": ways * bench.size,
             "gb_s": summary.to_json(), "text": summary.text()}
        )  # fmt: skip
    return found


def lines(data: dict[str, Any]) -> list[str]:
    """For people."""
    theoretical = data["theoretical_gb_s"]
    found = [
        (
            f"{data['gpu']} (capability {data['capability']}, driver {data['driver'] or '?'}, CUDA "
            f"{data['cuda']}, L2 {data['l2_bytes'] / 2**20:g} MiB), "
            f"{data['repeats']} run{'s' * (data['repeats'] != 1)} each"
        ),
        f"theoretical: {theoretical:g} GB/s (clock and bus, as the driver says)"
        if theoretical
        else "theoretical: the driver does not say",
    ]
    if data["used_by_others_bytes"] > 1 << 30:
        found.append(
            f"others hold {data['used_by_others_bytes'] / 2**30:.1f} GiB of its memory; if they "
            "work meanwhile, these figures are too low"
        )
    for one in data["results"]:
        share = f", {one['gb_s']['median'] / theoretical:.0%}" if theoretical else ""
        found.append(f"{one['kind']:<12} {one['bytes'] / 2**20:6g} MiB  {one['text']} GB/s{share}")
    t4g = data["t4g"]["gb_s"]
    found.append(
        f"beside it, {data['t4g']['source']}: read {t4g['read']:g}, copy {t4g['copy']:g}, "
        f"theoretical {t4g['theoretical']:g} GB/s"
    )
    found.append(
        f"median [interval: {data['confidence_method']}]; GB are 1e9 bytes, a copy counts both "
        "ways; sums of what was read are right"
    )
    return found


def run(sizes: Sequence[int], *, repeats: int, device: int) -> dict[str, Any]:
    """Measure a GPU of this machine.

    Args:
        sizes: MiB of one row.
        repeats: Timed runs of each kind.
        device: Its number.

    Raises:
        ToolchainError: No driver, no GPU, too little memory.
        CheckFailed: What was read or copied is wrong.
        UsageError: A size does not do.
    """
    with Driver(device) as gpu:
        return measure(gpu, [size << 20 for size in sizes], repeats=repeats)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line without the project's tools; exit codes of ``sm75/errors.py``."""
    parser = argparse.ArgumentParser(prog="python3 -m sm75.bench.memory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--size", type=int, action="append", help="MiB; may be repeated")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    chosen = parser.parse_args(arguments)
    if chosen.repeats < 1 or any(size < 1 for size in chosen.size or ()):
        parser.error("--size and --repeats are 1 or more")
    try:
        data = run(chosen.size or [SIZE_MIB], repeats=chosen.repeats, device=chosen.device)
    except Sm75Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(data, indent=2) if chosen.json else "\n".join(lines(data)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
