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
import hashlib
import importlib.util
import itertools
import json
import os
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE = "vllm_sm75_kernels"
INDEX = "index.json"
SCHEMA = 1
SWITCH = "SM75_KERNELS"

# struct's letters for Triton's types of parameters.
_LETTERS = {"i1": "b", "i8": "b", "i32": "i", "i64": "q", "fp32": "f"}
# cuda.h: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUDA_ERROR_INVALID_CONTEXT.
_MAX_DYNAMIC_SHARED = 8
_INVALID_CONTEXT = 201
# What a block may have without opting in (CUDA programming guide, compute capabilities).
_STATIC_SHARED = 49_152
# Alignment that the variants' loads count on.
_ALIGNMENT = 16


def element(value: Any) -> str | None:
    """The name of a tensor's element type; None for None, "" for a number."""
    if value is None:
        return None
    return "" if isinstance(value, int | float) else str(value.dtype).rpartition(".")[2]


def plain(value: Any) -> Any:
    """A constant as JSON has it; members of enumerations are their number."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


class Unusable(Exception):
    """The package cannot serve here; its text says why."""


class Variant:
    """One kernel of the package.

    Attributes:
        fact: Its entry in the index.
        queries: Mean query tokens a request from which it is the better one.
    """

    def __init__(self, fact: Mapping[str, Any]) -> None:
        self.fact = fact
        self.queries: float = fact["queries"]
        self.warps: int = fact["warps"]
        self.shared: int = fact["shared"]
        self.block_q: int = fact["launch"].get("BLOCK_Q", 0)
        self.tile: int = fact["launch"].get("TILE_SIZE", 0)
        self.names = tuple(name for name, _ in fact["parameters"])
        kinds = [kind for _, kind in fact["parameters"]]
        # What Triton adds of its own behind the kernel's parameters.
        self.extra = (0,) * fact["extra"]
        letters = ["Q" if kind.startswith("*") else _LETTERS[kind] for kind in kinds]
        self.pointers = tuple(kind.startswith("*") for kind in kinds)
        self.format = "".join(letters) + "Q" * fact["extra"]
        self.aligned = tuple(name in fact["aligned"] for name in self.names)
        self.offsets = []
        for end in range(1, len(self.format) + 1):
            self.offsets.append(struct.calcsize(self.format[:end]) - _size(self.format[end - 1]))
        self.pack = struct.Struct(self.format)


def _size(letter: str) -> int:
    return struct.calcsize(letter)


class Package:
    """The installed kernels.

    Args:
        home: Directory with the index and the two files of code.

    Raises:
        Unusable: It is damaged, or of another version than this file.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        try:
            index = json.loads((home / INDEX).read_text(encoding="utf-8"))
            if index["schema"] != SCHEMA:
                raise Unusable(f"its schema is {index['schema']}, this vLLM reads {SCHEMA}")
            self.sources: dict[str, str] = index["sources"]
            self.files: dict[str, dict[str, Any]] = index["files"]
            self.kernels: dict[str, dict[str, list[str]]] = index["kernels"]
            self.variants: dict[str, dict[tuple[Any, ...], list[Variant]]] = {
                name: {} for name in self.kernels
            }
            for fact in index["variants"]:
                key = tuple(fact["key"])
                self.variants[fact["kernel"]].setdefault(key, []).append(Variant(fact))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unusable(f"{home}: {type(error).__name__}: {error}") from None
        for found in self.variants.values():
            for variants in found.values():
                variants.sort(key=lambda one: -one.queries)

    def code(self, fact: Mapping[str, Any], kind: str) -> bytes:
        """A variant's "cubin" or "ptx".

        Raises:
            Unusable: The file is not what the index was made with.
        """
        offset, size, digest = fact[kind]
        with open(self.home / self.files[kind]["name"], "rb") as file:
            file.seek(offset)
            data = file.read(size)
        if hashlib.sha256(data).hexdigest() != digest:
            raise Unusable(f"{self.home / self.files[kind]['name']} is damaged")
        return zlib.decompress(data)

    def key(self, kernel: str, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """What decides which variant a launch needs: constants, then types of tensors."""
        about = self.kernels[kernel]
        constants = [plain(arguments[name]) for name in about["constants"]]
        return (*constants, *(element(arguments[name]) for name in about["tensors"]))

    def find(self, kernel: str, arguments: Mapping[str, Any]) -> Variant | None:
        """The variant for a launch, or None."""
        known = self.variants.get(kernel)
        if known is None:
            return None
        found = known.get(self.key(kernel, arguments))
        if found is None:
            return None
        if len(found) > 1 and "num_seqs" in arguments:
            mean = arguments["query_ptr"].shape[0] / arguments["num_seqs"]
            return next(one for one in found if one.queries <= mean)
        return found[-1]


def installed() -> Package:
    """The package of this environment, made for the vLLM that is here.

    Raises:
        Unusable: There is none, or it is of other sources.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.origin:
        raise Unusable("the package vllm-sm75-kernels is not installed")
    package = Package(Path(spec.origin).parent)
    for module, digest in package.sources.items():
        found = importlib.util.find_spec(module)
        if found is None or not found.origin:
            raise Unusable(f"there is no {module}, which its kernels were made of")
        if hashlib.sha256(Path(found.origin).read_bytes()).hexdigest() != digest:
            raise Unusable(f"its kernels were made of another {module}")
    return package


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
        self.functions: dict[tuple[int, int], tuple[int, _Slot]] = {}
        self.lock = threading.Lock()

    def function(self, variant: Variant, device: int) -> tuple[int, _Slot]:
        """Load a variant, once a device."""
        key = (id(variant), device)
        with self.lock:
            if key not in self.functions:
                fact = variant.fact
                image = self.package.code(fact, self.kind)
                handle = self.driver.load(image, fact["entry"], variant.shared)
                self.functions[key] = (handle, _Slot(variant))
            return self.functions[key]

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
        values = []
        for name, pointer, aligned in zip(
            variant.names, variant.pointers, variant.aligned, strict=True
        ):
            value = arguments[name]
            if pointer:
                value = value.data_ptr()
            if aligned and value % _ALIGNMENT:
                return None
            values.append(value)
        return values

    def run(
        self, variant: Variant, grid: Sequence[int], values: Sequence[Any]
    ) -> None:
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
            _attach(device)  # a thread that has not used CUDA yet
        self.driver.check(code, f"launching {variant.fact['entry']}")


def _attach(device: int) -> None:
    import torch

    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).query()


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
        variant = launcher.package.find(name, named)
        values = None if variant is None else launcher.values(variant, named)
        if variant is None or values is None:
            _say_once(name, launcher.package, named, aligned=variant is None)
            return kernel[grid](*given, **arguments)
        if variant.block_q:
            grid = (named["query_ptr"].shape[0] // variant.block_q + named["num_seqs"], *grid[1:])
            session.tile = variant.tile
        launcher.run(variant, grid, values)
        return None


_said: set[Any] = set()


def _say_once(
    name: str, package: Package, arguments: Mapping[str, Any], *, aligned: bool
) -> None:
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


@functools.cache
def launcher() -> Launcher | None:
    """This process's launcher; None where the JIT is to do it all. Says once which it is."""
    from vllm.logger import init_logger

    log = init_logger(__name__)
    mode = os.environ.get(SWITCH, "on")
    if mode == "off":
        log.info("Compute capability 7.5: %s=off, Triton compiles the attention kernels.", SWITCH)
        return None
    if mode not in ("on", "ptx"):
        raise ValueError(f"{SWITCH} is {mode!r}: it can be on, off or ptx")
    try:
        package = installed()
    except Unusable as error:
        log.warning(
            "Compute capability 7.5: attention without tensor cores, for %s. Triton compiles it.",
            error,
        )
        return None
    made = Launcher(package, "ptx" if mode == "ptx" else "cubin")
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
    return _itself if found is None else Session(found)


def _itself(kernel: Any) -> Any:
    return kernel


def prepare(head_size: int, query_heads: int) -> int:
    """Load what layers of this shape can launch; returns how many variants.

    Raises:
        RuntimeError: The driver refuses one.
    """
    found = launcher()
    if found is None:
        return 0
    return found.prepare(
        lambda constants: constants.get("HEAD_SIZE") == head_size
        and constants.get("num_query_heads") == query_heads
    )


if sys.byteorder != "little":
    raise ImportError("the packing of parameters is for little-endian machines")
