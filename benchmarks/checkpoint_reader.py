"""Read a checkpoint as vLLM's loader does and hand every tensor to a stand-in for the GPU.

    python checkpoint_reader.py STRATEGY DIRECTORY [--passes N] [--staging BYTES]

One process, to be run under a memory limit; prints JSON. It needs nothing of this project. The
strategies are those of ``safetensors_weights_iterator`` in vLLM 0.33.0
(vllm/model_executor/model_loader/weight_utils.py), and what they are compared with:

- ``lazy``: ``safe_open`` and one ``get_tensor`` a tensor (the default, and "lazy");
- ``convert``: the same, and the tensor made into float16 first. A blocking ``copy_`` from the CPU
  to a CUDA tensor of another type does that on the CPU, in a temporary of the tensor's size
  (PyTorch, aten/src/ATen/native/cuda/Copy.cu, ``copy_kernel_cuda``), and vLLM takes no bfloat16
  below capability 8.0;
- ``eager``: the whole file into memory, then ``load``;
- ``prefetch``: eight threads read the files in blocks of 16 MiB meanwhile, then as ``lazy``;
- ``keep``: a copy of every tensor is kept in memory: what would need as much as the file;
- ``plain``: ``mmap`` without torch and safetensors;
- ``import``: imports torch and safetensors, and reads nothing.

The stand-in is one locked buffer, filled again and again: the GPU's memory is not the host's, and
the driver copies pageable memory through locked buffers of its own. Their size is not documented.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import mmap
import resource
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STAGING = 64 << 20
"""Bytes of the buffer that stands for the driver's, unless given; generous."""

PREFETCH_BLOCK = 16 << 20
PREFETCH_THREADS = 8
"""vLLM 0.33.0, vllm/config/load.py, DEFAULT_SAFETENSORS_PREFETCH_*."""

Tensors = Iterator[tuple[str, memoryview]]


class Watch:
    """The largest values of this process's memory that were seen, in KiB, as /proc calls them."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    def look(self) -> None:
        """Look now."""
        for line in Path("/proc/self/status").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in ("VmHWM", "VmRSS", "RssAnon", "RssFile", "VmLck"):
                self.peaks[key] = max(self.peaks.get(key, 0), int(value.split()[0]))


class Device:
    """Where tensors go: a locked buffer of fixed size, and a checksum of what went through it."""

    def __init__(self, watch: Watch, size: int) -> None:
        self.size = size
        self.buffer = mmap.mmap(-1, size)
        self.view = memoryview(self.buffer)
        self.watch = watch
        self.bytes = 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        libc = ctypes.CDLL(None, use_errno=True)
        self.locked = libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0

    def take(self, data: memoryview) -> int:
        """Copy a tensor through the buffer; its CRC-32."""
        crc = 0
        for start in range(0, len(data), self.size):
            part = data[start : start + self.size]
            self.view[: len(part)] = part
            crc = zlib.crc32(self.view[: len(part)], crc)
            self.watch.look()
        self.bytes += len(data)
        return crc


def plain(path: Path) -> Tensors:
    """Tensors by a map of the file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as whole:
        (length,) = struct.unpack("<Q", whole[:8])
        entries = json.loads(whole[8 : 8 + length])
        entries.pop("__metadata__", None)
        with memoryview(whole) as view:
            for name, entry in entries.items():
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                with view[start:end] as part:
                    yield name, part


def _bytes_of(tensor: Any) -> memoryview:
    torch = importlib.import_module("torch")
    # numpy has no bfloat16; as bytes it has.
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def lazy(path: Path) -> Tensors:
    """As vLLM's default."""
    for name, tensor in _opened(path):
        yield name, _bytes_of(tensor)


def convert(path: Path) -> Tensors:
    """As vLLM's default with ``--dtype float16``."""
    torch = importlib.import_module("torch")
    for name, tensor in _opened(path):
        yield name, _bytes_of(tensor.to(torch.float16))


def eager(path: Path) -> Tensors:
    """As ``--safetensors-load-strategy eager``."""
    load = importlib.import_module("safetensors.torch").load
    with path.open("rb") as file:
        state = load(file.read())
    for name, tensor in state.items():
        yield name, _bytes_of(tensor)


def keep(path: Path) -> Tensors:
    """All of it in anonymous memory."""
    kept = []
    for name, tensor in _opened(path):
        kept.append(tensor.clone())
        yield name, _bytes_of(kept[-1])


def _opened(path: Path) -> Iterator[tuple[str, Any]]:
    safe_open = importlib.import_module("safetensors").safe_open
    with safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            yield name, file.get_tensor(name)


STRATEGIES: dict[str, Callable[[Path], Tensors]] = {
    "lazy": lazy, "convert": convert, "eager": eager, "prefetch": lazy, "keep": keep,
    "plain": plain,
}  # fmt: skip


def prefetch(paths: list[Path]) -> None:
    """Read the files into the page cache, meanwhile, as vLLM does."""

    def read(path: Path) -> None:
        with path.open("rb") as file:
            while file.read(PREFETCH_BLOCK):
                pass

    def all_of_them() -> None:
        with ThreadPoolExecutor(PREFETCH_THREADS) as pool:
            list(pool.map(read, paths))

    threading.Thread(target=all_of_them, daemon=True).start()


def read_once(strategy: str, paths: list[Path], watch: Watch, staging: int) -> dict[str, Any]:
    """One pass over all files."""
    sums_at = paths[0].parent / "sums.json"
    expected: dict[str, int] = json.loads(sums_at.read_text()) if sums_at.is_file() else {}
    before, started, faults = _read_bytes(), time.monotonic(), _major_faults()
    if strategy == "prefetch":
        prefetch(paths)
    device = Device(watch, staging)
    sums = {}
    for path in paths:
        for name, data in STRATEGIES[strategy](path):
            sums[name] = device.take(data)
            data.release()  # or it lives while the next is made
    return {
        "seconds": round(time.monotonic() - started, 2),
        "tensors": len(sums),
        "bytes": device.bytes,
        "bytes_from_disk": _read_bytes() - before,
        "major_faults": _major_faults() - faults,
        "staging_locked": device.locked,
        # What was converted has other bytes.
        "sums_agree": None if strategy == "convert" or not expected else sums == expected,
    }


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def main() -> None:
    """Read and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy", choices=[*STRATEGIES, "import"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--staging", type=int, default=STAGING, help="bytes of the buffer")
    options = parser.parse_args()
    watch = Watch()
    watch.look()
    result: dict[str, Any] = {"strategy": options.strategy, "python_kib": dict(watch.peaks)}
    if options.strategy != "plain":
        started = time.monotonic()
        result["torch"] = importlib.import_module("torch").__version__
        importlib.import_module("safetensors.torch")
        result["safetensors"] = importlib.import_module("safetensors").__version__
        result["import_seconds"] = round(time.monotonic() - started, 2)
        watch.look()
        result["imported_kib"] = dict(watch.peaks)
    if options.strategy != "import":
        paths = sorted(options.directory.glob("*.safetensors"))
        try:
            result["passes"] = [
                read_once(options.strategy, paths, watch, options.staging)
                for _ in range(options.passes)
            ]
        except RuntimeError as error:  # torch's word for a map that it is not given
            result["error"] = str(error).replace(f"{options.directory}/", "")
    watch.look()
    result["peak_kib"] = watch.peaks
    print(json.dumps(result))


if __name__ == "__main__":
    main()
