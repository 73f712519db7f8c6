"""CUDA's driver, as far as it is needed to load PTX text and launch it.

Through ``cuda.bindings``, NVIDIA's own binding, which torch's CUDA wheels for Linux bring along.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sm75.errors import CheckFailed, ToolchainError

_CTYPES: dict[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16, "u16": ctypes.c_uint16, "i32": ctypes.c_int32, "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "f32": ctypes.c_float,
    "fp64": ctypes.c_double,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Function:
    """A loaded kernel. ``local`` are the bytes of local memory a thread, spills among them."""

    handle: Any
    registers: int
    local: int


@dataclass(frozen=True, kw_only=True)
class Device:
    """The GPU. Bytes of shared memory: of a multiprocessor, of a block, kept by the system."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared: int
    shared_block: int
    shared_kept: int
    driver: str
    cuda: str


class Driver:
    """Loads and launches on the current device of torch's context."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError as error:
            raise ToolchainError(
                "this Python has no torch", why=str(error),
                fix="take the Python that has it: on the DLAMI /opt/pytorch/bin/python",
            ) from error  # fmt: skip
        if not torch.cuda.is_available():
            raise ToolchainError(
                "torch finds no NVIDIA GPU here",
                why=f"torch.cuda.is_available() is False (torch {torch.__version__})",
                fix="run it on a machine that has one: copy the bundle there, and "
                "python3 BUNDLE --json result.json",
            )
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise ToolchainError(
                "this Python has no cuda.bindings", why=str(error),
                fix=f"python3 -m pip install 'cuda-bindings=={_wanted(torch.version.cuda)}.*'",
            ) from error  # fmt: skip
        self._cu = driver
        self._torch: Any = torch
        torch.zeros(1, device="cuda")  # makes torch's context the current one
        self.device = self._describe(torch)
        if self.device.capability < (7, 5):
            raise ToolchainError(
                f"{self.device.name} has compute capability "
                f"{'.'.join(map(str, self.device.capability))}",
                why="PTX for sm_75 runs on 7.5 and newer",
                fix="take a newer GPU",
            )

    def _describe(self, torch: Any) -> Device:
        kind = self._cu.CUdevice_attribute
        handle = self._call(self._cu.cuDeviceGet(torch.cuda.current_device()))

        def ask(name: str) -> int:
            return int(self._call(self._cu.cuDeviceGetAttribute(getattr(kind, name), handle)))

        version = int(self._call(self._cu.cuDriverGetVersion()))
        prefix = "CU_DEVICE_ATTRIBUTE_"
        return Device(
            name=torch.cuda.get_device_name(),
            capability=(
                ask(f"{prefix}COMPUTE_CAPABILITY_MAJOR"), ask(f"{prefix}COMPUTE_CAPABILITY_MINOR")
            ),
            multiprocessors=ask(f"{prefix}MULTIPROCESSOR_COUNT"),
            shared=ask(f"{prefix}MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            shared_block=ask(f"{prefix}MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            shared_kept=ask(f"{prefix}RESERVED_SHARED_MEMORY_PER_BLOCK"),
            driver=_driver_version(),
            cuda=f"{version // 1000}.{version % 1000 // 10}",
        )  # fmt: skip

    def _call(self, result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code) != 0:
            raise CheckFailed(
                f"the CUDA driver answers {code.name}",
                why="see the CUDA driver API, CUresult",
                fix="run it again with CUDA_LAUNCH_BLOCKING=1 to see which launch it is",
            )
        return values[0] if values else None

    def load(self, ptx: bytes, entry: str) -> Function:
        """Let the driver compile PTX text for this device."""
        module = self._call(self._cu.cuModuleLoadData(ptx + b"\0"))
        handle = self._call(self._cu.cuModuleGetFunction(module, entry.encode()))
        kind = self._cu.CUfunction_attribute

        def ask(name: str) -> int:
            return int(self._call(self._cu.cuFuncGetAttribute(getattr(kind, name), handle)))

        return Function(
            handle=(module, handle),
            registers=ask("CU_FUNC_ATTRIBUTE_NUM_REGS"),
            local=ask("CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES"),
        )

    def reserve(self, function: Function, shared: int) -> None:
        """Allow launches with so many bytes of dynamic shared memory."""
        name = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        attribute = getattr(self._cu.CUfunction_attribute, name)
        self._call(self._cu.cuFuncSetAttribute(function.handle[1], attribute, shared))

    def blocks(self, function: Function, threads: int, shared: int) -> int:
        """How many such blocks a multiprocessor holds at once."""
        return int(
            self._call(
                self._cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    function.handle[1], threads, shared
                )
            )
        )

    def launch(
        self, function: Function, grid: Sequence[int], threads: int, shared: int,
        values: Sequence[tuple[str, Any]],
    ) -> None:  # fmt: skip
        """Launch on torch's current stream. ``values`` are Triton's type names with numbers."""
        packed = [
            (ctypes.c_void_p if kind.startswith("*") else _CTYPES[kind])(value)
            for kind, value in values
        ]
        pointers = (ctypes.c_void_p * len(packed))(*map(ctypes.addressof, packed))
        x, y, z = (*grid, 1, 1)[:3]
        stream = self._torch.cuda.current_stream().cuda_stream
        self._call(
            self._cu.cuLaunchKernel(
                function.handle[1], x, y, z, threads, 1, 1, shared, stream,
                ctypes.addressof(pointers), 0,
            )
        )  # fmt: skip


def _wanted(cuda: str | None) -> str:
    return (cuda or "13").partition(".")[0]


def _driver_version() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split()[0] if done.stdout.split() else "unknown"
