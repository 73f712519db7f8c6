"""NVIDIA's driver by ctypes: as much of it as measuring memory needs. Standard library only.

Names and values are those of the CUDA driver API (https://docs.nvidia.com/cuda/cuda-driver-api/);
functions with a second version are called by that, as cuda.h does.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sm75.errors import CheckFailed, ToolchainError

LIBRARY = "libcuda.so.1"
# CUdevice_attribute.
_MULTIPROCESSORS, _CLOCK, _BUS, _L2, _THREADS, _MAJOR, _MINOR = 16, 36, 37, 38, 39, 75, 76
_NO_DEVICE, _OUT_OF_MEMORY = 100, 2
_WITHOUT = "copy the project to a machine that has one, and: python3 -m sm75.bench.memory"


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU.

    Attributes:
        name: Its name.
        capability: Compute capability.
        multiprocessors: How many.
        threads: Resident threads of one multiprocessor.
        l2: Bytes of L2 cache.
        theoretical: GB/s by memory clock and width of the bus; 0 where the driver does not say.
        free: Bytes of memory that are free.
        total: Bytes of memory.
        driver: The driver's version; empty where it cannot be read.
        cuda: The newest CUDA that the driver knows.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    threads: int
    l2: int
    theoretical: float
    free: int
    total: int
    driver: str
    cuda: str


class Driver:
    """One GPU, in its primary context; a context manager.

    Args:
        number: Which GPU.

    Raises:
        ToolchainError: No driver, no such GPU, or an older one than 7.5.
    """

    def __init__(self, number: int = 0) -> None:
        try:
            self._lib = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise ToolchainError(
                "there is no NVIDIA driver here", why=str(error), fix=_WITHOUT
            ) from error
        code = self._lib.cuInit(0)
        count = ctypes.c_int(0)
        if code == 0:
            code = self._lib.cuDeviceGetCount(ctypes.byref(count))
        if code or not count.value:
            raise ToolchainError(
                "the NVIDIA driver finds no GPU here",
                why=self._name(code or _NO_DEVICE), fix=_WITHOUT,
            )  # fmt: skip
        if not 0 <= number < count.value:
            raise ToolchainError(
                f"there is no GPU {number}", why=f"the driver has {count.value}",
                fix="--device 0",
            )  # fmt: skip
        self._handle = ctypes.c_int(0)
        self._call("cuDeviceGet", ctypes.byref(self._handle), number)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._handle)
        self._call("cuCtxSetCurrent", self._context)
        self._module = ctypes.c_void_p()
        self._held: set[int] = set()
        self.device = self._describe()
        if self.device.capability < (7, 5):
            raise ToolchainError(
                f"{self.device.name} has compute capability "
                f"{'.'.join(map(str, self.device.capability))}",
                why="PTX for sm_75 runs on 7.5 and newer", fix="take a newer GPU",
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for address in tuple(self._held):
            self.free(address)
        self._call("cuDevicePrimaryCtxRelease_v2", self._handle)

    def _describe(self) -> Device:
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, len(name), self._handle)
        version = ctypes.c_int(0)
        self._call("cuDriverGetVersion", ctypes.byref(version))
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return Device(
            name=name.value.decode(errors="replace"),
            capability=(self._ask(_MAJOR), self._ask(_MINOR)),
            multiprocessors=self._ask(_MULTIPROCESSORS),
            threads=self._ask(_THREADS),
            l2=self._ask(_L2),
            # kHz, two transfers a clock, bits.
            theoretical=2e3 * self._ask(_CLOCK) * self._ask(_BUS) / 8 / 1e9,
            free=free.value,
            total=total.value,
            driver=_version(),
            cuda=f"{version.value // 1000}.{version.value % 1000 // 10}",
        )

    def _ask(self, attribute: int) -> int:
        value = ctypes.c_int(0)
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._handle)
        return value.value

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._lib.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or b"").decode() or f"CUresult {code}"

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._lib, function)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise ToolchainError(
                "the GPU has too little free memory", why=f"{function}: {self._name(code)}",
                fix="end what else runs there (a server takes most of it), or a smaller --size",
            )  # fmt: skip
        if code:
            raise CheckFailed(
                f"the CUDA driver answers {self._name(code)}", why=function,
                fix="look at the kernel's log: dmesg | grep -i xid",
            )  # fmt: skip

    def load(self, ptx: bytes) -> None:
        """Let the driver compile PTX text; its kernels can be launched then."""
        self._call("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(ptx))

    def launch(self, kernel: str, blocks: int, threads: int, values: Sequence[Any]) -> None:
        """Launch a kernel; ``values`` are ctypes numbers."""
        function = ctypes.c_void_p()
        self._call(
            "cuModuleGetFunction", ctypes.byref(function), self._module, kernel.encode()
        )  # fmt: skip
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self._call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, None, pointers, None)

    def allocate(self, size: int) -> int:
        """So many bytes; their address."""
        address = ctypes.c_uint64(0)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._held.add(address.value)
        return address.value

    def free(self, address: int) -> None:
        """Give them back."""
        self._held.discard(address)
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def fill(self, address: int, word: int, count: int) -> None:
        """Set 32-bit words."""
        self._call(
            "cuMemsetD32_v2", ctypes.c_uint64(address), ctypes.c_uint(word), ctypes.c_size_t(count)
        )

    def copy(self, target: int, source: int, size: int) -> None:
        """The driver's own copy on the device; does not wait for its end."""
        self._call(
            "cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source),
            ctypes.c_size_t(size), None,
        )  # fmt: skip

    def fetch(self, address: int, size: int) -> bytes:
        """Bytes of the device; waits for all that was launched."""
        out = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return out.raw

    def timed(self, work: Callable[[], None]) -> float:
        """Seconds that launched work takes on the GPU, by its own events (half a microsecond)."""
        start, end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (start, end):
            self._call("cuEventCreate", ctypes.byref(event), 0)
        try:
            self._call("cuEventRecord", start, None)
            work()
            self._call("cuEventRecord", end, None)
            self._call("cuEventSynchronize", end)
            milliseconds = ctypes.c_float(0)
            self._call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        finally:
            for event in (start, end):
                self._call("cuEventDestroy_v2", event)
        return milliseconds.value / 1e3


def _version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else ""
