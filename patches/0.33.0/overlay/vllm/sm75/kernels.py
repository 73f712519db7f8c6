# SPDX-License-Identifier: Apache-2.0
"""Attention kernels that were compiled ahead of time, launched in the place of Triton's JIT.

The package ``vllm-sm75-kernels`` holds vLLM's own Triton kernels as machine code for compute
capability 7.5, compiled by Triton 3.2, the last release that uses Turing's tensor cores. A launch
that the package has a variant for goes to it, with that variant's own block sizes; any other goes
to the JIT as before, and is logged once. Only ``vllm.sm75.attention`` imports this module, on 7.5.

``SM75_KERNELS=off`` leaves everything to the JIT. ``SM75_KERNELS=ptx`` has the driver compile the
PTX from which the machine code was made, for proofs on other GPUs.
"""

import ctypes
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.sm75.kernel_files import Package, Unusable, Variant, installed

SWITCH = "SM75_KERNELS"

# cuda.h: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUDA_ERROR_INVALID_CONTEXT.
_MAX_DYNAMIC_SHARED = 8
_INVALID_CONTEXT = 201
# What a block may have without opting in (CUDA programming guide, compute capabilities).
_STATIC_SHARED = 49_152
# Alignment that the variants' loads count on.
_ALIGNMENT = 16


class Driver:
    """The CUDA driver, as far as a launch takes it."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        number, address = ctypes.c_uint, ctypes.c_void_p
        self.cuda.cuLaunchKernel.argtypes = [address, *[number] * 7, address, address, address]
        self.cuda.cuFuncSetAttribute.argtypes = [address, ctypes.c_int, ctypes.c_int]
        self.cuda.cuModuleGetFunction.argtypes = [address, address, ctypes.c_char_p]
        self.cuda.cuModuleLoadData.argtypes = [address, ctypes.c_char_p]
        self.cuda.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def check(self, code: int, what: str) -> None:
        """Raise for an error code of the driver."""
        if code:
            name = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(name))
            raise RuntimeError(f"{what}: {(name.value or b'').decode() or code}")

    def attach(self, device: int) -> None:
        """Make the device's context, which torch uses, this thread's.

        Allowed while a graph is captured, unlike what torch would do for it.
        """
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self.cuda.cuDeviceGet(ctypes.byref(number), device), f"device {device}")
        self.check(
            self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), f"device {device}"
        )
        self.check(self.cuda.cuCtxSetCurrent(context), f"device {device}")

    def load(self, image: bytes, entry: str, shared: int) -> int:
        """Load machine code or PTX into the current context; returns the function's handle."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(
            self.cuda.cuModuleLoadData(ctypes.byref(module), image + b"\0"), f"loading {entry}"
        )
        self.check(
            self.cuda.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()),
            f"looking for {entry}",
        )
        if shared > _STATIC_SHARED:
            self.check(
                self.cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared),
                f"{shared} bytes of shared memory for {entry}",
            )
        assert function.value is not None
        return function.value

    def parameters(self, function: int, most: int) -> list[tuple[int, int]] | None:
        """Offset and size of each of the code's parameters; None where the driver cannot say.

        The driver reads as many addresses as the code has parameters: with fewer, it reads what is
        none. cuFuncGetParamInfo is of CUDA 12.4.
        """
        ask = getattr(self.cuda, "cuFuncGetParamInfo", None)
        if ask is None:
            return None
        found: list[tuple[int, int]] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while len(found) <= most and not ask(
            ctypes.c_void_p(function), ctypes.c_size_t(len(found)),
            ctypes.byref(offset), ctypes.byref(size),
        ):  # fmt: skip
            found.append((offset.value, size.value))
        return found


class _Slot(threading.local):
    """A thread's own memory for the parameters of one variant's launches."""

    def __init__(self, variant: Variant) -> None:
        self.values = ctypes.create_string_buffer(variant.pack.size)
        start = ctypes.addressof(self.values)
        self.array = (ctypes.c_void_p * len(variant.offsets))(
            *(start + offset for offset in variant.offsets)
        )
        self.address = ctypes.addressof(self.array)


class Launcher:
    """Launches the package's variants on torch's current stream.

    Args:
        package: The kernels.
        kind: "cubin", or "ptx" for the driver to compile.
    """

    def __init__(self, package: Package, kind: str = "cubin") -> None:
        import torch

        self.package = package
        self.kind = kind
        self.driver = Driver()
        self.launch_kernel = self.driver.cuda.cuLaunchKernel
        self.device: Callable[[], int] = torch.cuda.current_device
        self.stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.given_up = False
        self.functions: dict[tuple[int, int], tuple[int, _Slot]] = {}
        self.lock = threading.Lock()

    def function(self, variant: Variant, device: int) -> tuple[int, _Slot]:
        """Load a variant, once a device."""
        key = (id(variant), device)
        with self.lock:
            if key not in self.functions:
                fact = variant.fact
                self.driver.attach(device)
                image = self.package.code(fact, self.kind)
                handle = self.driver.load(image, fact["entry"], variant.shared)
                own = list(zip(variant.offsets, variant.sizes, strict=True))
                if self.driver.parameters(handle, len(own)) not in (None, own):
                    raise RuntimeError(
                        f"{fact['entry']} takes other parameters than the index says"
                    )
                self.functions[key] = (handle, _Slot(variant))
            return self.functions[key]

    def give_up(self, error: Exception) -> None:
        """Leave everything to the JIT from now on, and say why, once."""
        with self.lock:
            first, self.given_up = not self.given_up, True
        if first:
            from vllm.logger import init_logger

            init_logger(__name__).warning(
                "Compute capability 7.5: attention without tensor cores, for %s. Triton compiles "
                "it.", error,
            )  # fmt: skip

    def prepare(self, chosen: Callable[[Mapping[str, Any]], bool]) -> int:
        """Load the variants whose constants are the chosen; returns how many.

        Before a graph is captured, and before the first request.
        """
        device, count = self.device(), 0
        for kernel, found in self.package.variants.items():
            names = self.package.kernels[kernel]["constants"]
            for key, variants in found.items():
                if chosen(dict(zip(names, key, strict=False))):
                    count += len(variants)
                    for variant in variants:
                        self.function(variant, device)
        return count

    def values(self, variant: Variant, arguments: Mapping[str, Any]) -> list[Any] | None:
        """The parameters of a launch; None where an alignment is missing that the code needs."""
        values = [
            value.data_ptr() if pointer else value
            for value, pointer in zip(variant.pick(arguments), variant.pointers, strict=True)
        ]
        for place in variant.aligned:
            if values[place] % _ALIGNMENT:
                return None
        return values

    def run(self, variant: Variant, grid: Sequence[int], values: Sequence[Any]) -> None:
        """Launch.

        Raises:
            RuntimeError: The driver refuses, with its name for the error.
        """
        device = self.device()
        known = self.functions.get((id(variant), device))
        handle, slot = known if known is not None else self.function(variant, device)
        variant.pack.pack_into(slot.values, 0, *values, *variant.extra)
        x, y, z = (*grid, 1, 1)[:3]
        for attempt in (0, 1):
            code = self.launch_kernel(
                handle, x, y, z, 32 * variant.warps, 1, 1, variant.shared,
                self.stream(device), slot.address, None,
            )  # fmt: skip
            if code != _INVALID_CONTEXT or attempt:
                break
            self.driver.attach(device)  # a thread that has not used CUDA yet
        self.driver.check(code, f"launching {variant.fact['entry']}")


class Session:
    """The launches of one call of attention: the reduction takes the tile that attention took."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.tile = 0

    def __call__(self, kernel: Any) -> "Site":
        return Site(self, kernel)


class Site:
    """Stands in a kernel's place where it is launched."""

    __slots__ = ("kernel", "session")

    def __init__(self, session: Session, kernel: Any) -> None:
        self.session = session
        self.kernel = kernel

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]:
        return functools.partial(self.launch, grid)

    def launch(self, grid: Sequence[int], *given: Any, **arguments: Any) -> Any:
        """Launch the variant for these arguments, or let the JIT."""
        session, kernel = self.session, self.kernel
        launcher = session.launcher
        if session.tile and "TILE_SIZE" in arguments:
            arguments["TILE_SIZE"] = session.tile
        named = arguments
        if given:
            named = dict(zip(kernel.arg_names, given, strict=False)) | arguments
        name = kernel.__name__
        variant = None if launcher.given_up else launcher.package.find(name, named)
        values = None if variant is None else launcher.values(variant, named)
        if launcher.given_up:
            return kernel[grid](*given, **arguments)
        if variant is None or values is None:
            _say_once(name, launcher.package, named, aligned=variant is None)
            return kernel[grid](*given, **arguments)
        own = grid
        if variant.block_q:
            own = (named["query_ptr"].shape[0] // variant.block_q + named["num_seqs"], *grid[1:])
        try:
            launcher.run(variant, own, values)
        except (RuntimeError, Unusable) as error:
            # What the driver refuses to launch has not run: the JIT can.
            launcher.give_up(error)
            return kernel[grid](*given, **arguments)
        if variant.block_q:
            session.tile = variant.tile
        return None


_said: set[Any] = set()


def _say_once(name: str, package: Package, arguments: Mapping[str, Any], *, aligned: bool) -> None:
    key: tuple[Any, ...] = (name, aligned)
    if name in package.kernels:
        about = package.kernels[name]
        pairs = zip(
            itertools.chain(about["constants"], about["tensors"]),
            package.key(name, arguments), strict=True,
        )  # fmt: skip
        key += tuple(f"{one}={value}" for one, value in pairs if value not in (None, False))
    if key in _said:
        return
    _said.add(key)
    from vllm.logger import init_logger

    init_logger(__name__).info(
        "Compute capability 7.5: no kernel ahead of time for %s (%s); Triton compiles it.",
        name,
        "no such variant" if aligned else "an argument is no multiple of 16",
    )
    init_logger(__name__).debug("The launch: %s", ", ".join(map(str, key[2:])))


_making = threading.Lock()


@functools.cache
def launcher() -> Launcher | None:
    """This process's launcher; None where the JIT is to do it all."""
    # The cache alone lets threads that come together make one each.
    with _making:
        return _make()


@functools.cache
def _make() -> Launcher | None:
    # Says once which it is.
    from vllm.logger import init_logger

    log = init_logger(__name__)
    mode = os.environ.get(SWITCH, "on")
    if mode == "off":
        log.info("Compute capability 7.5: %s=off, Triton compiles the attention kernels.", SWITCH)
        return None
    if mode not in ("on", "ptx"):
        raise ValueError(f"{SWITCH} is {mode!r}: it can be on, off or ptx")
    kind = "ptx" if mode == "ptx" else "cubin"
    try:
        package = installed()
        package.check(kind)
        made = Launcher(package, kind)
    except (Unusable, OSError, AttributeError) as error:  # the latter two: no libcuda that serves
        log.warning(
            "Compute capability 7.5: attention without tensor cores, for %s. Triton compiles it.",
            error,
        )
        return None
    log.info(
        "Compute capability 7.5: %d attention kernels from %s%s.",
        sum(len(one) for found in package.variants.values() for one in found.values()),
        package.home,
        " (PTX)" if mode == "ptx" else "",
    )
    return made


def session() -> Callable[[Any], Any]:
    """What kernels go through in one call of attention."""
    found = launcher()
    return _itself if found is None or found.given_up else Session(found)


def _itself(kernel: Any) -> Any:
    return kernel


def prepare(head_size: int, query_heads: int, group: int) -> int:
    """Load what layers of this shape can launch; returns how many variants.

    ``group``: query heads on a KV head.

    Where the driver refuses one, the JIT does it all from then on.
    """
    found = launcher()
    if found is None or found.given_up:
        return 0
    try:
        return found.prepare(
            lambda constants: (
                constants.get("HEAD_SIZE") == head_size
                and constants.get("num_query_heads") == query_heads
                # The reduction does not hang on it.
                and constants.get("num_queries_per_kv", group) == group
            )
        )
    except (RuntimeError, OSError, Unusable) as error:
        found.give_up(error)
        return 0


if sys.byteorder != "little":
    raise ImportError("the packing of parameters is for little-endian machines")
