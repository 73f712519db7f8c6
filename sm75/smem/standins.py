"""Import single modules of a vLLM tree without torch, without vLLM's dependencies, without a GPU.

A module named in ``real`` is the tree's own; all the rest of ``vllm`` and of ``torch`` are
stand-ins that have every attribute. Runs inside the audit's environment, which holds Triton only.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from sm75.smem import faketorch, faketriton

# Packages that the real modules name in annotations, decorators or dead branches only.
_HOLLOW = ("torch", "vllm", "numpy", "tqdm", "transformers", "pydantic", "regex", "msgspec")


# vLLM's settings are the tree's own, at their defaults: the caller clears the environment.
ALWAYS_REAL = ("vllm.envs", "vllm.utils.math_utils")
_TRITON = ("triton.language", "triton.runtime", "triton.runtime.autotuner", "triton.runtime.jit")


class StandIn(types.ModuleType):
    """A module that has every attribute; its submodules are what they are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules or full in ALWAYS_REAL:
            value = importlib.import_module(full)
        else:
            value = _anything(full)
        setattr(self, name, value)
        return value


class Unknown(MagicMock):
    """A value nobody made: it may be passed on, but no branch may hang on it."""

    def __bool__(self) -> bool:
        raise TypeError(f"a branch hangs on {self}, which the audit only stands in for")


class Hollow(type):
    """A class that may be a base, a type parameter or an enumeration: any attribute is there."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(name=f"{cls.__name__}.{name}")

    def __getitem__(cls, _: Any) -> Hollow:
        return cls


def _member(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Unknown(name=name)


def _anything(name: str) -> Any:
    """A value for an attribute: a class where it looks like one (it may be a base), else a mock."""
    last = name.rpartition(".")[2]
    if last[:1].isupper() and not last.isupper():
        return Hollow(last, (), {"__init__": lambda self, *_, **__: None, "__getattr__": _member})
    mock = Unknown(name=name)
    if last.startswith("is_") or last.startswith("has_"):
        mock.return_value = False
    return mock


class Platform:
    """vLLM's CUDA platform on a device of the given capability."""

    device_type = "cuda"

    def __init__(self, capability: tuple[int, int], fp8: Any) -> None:
        self.capability = Capability(capability)
        self.fp8 = fp8

    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def get_device_capability(self, device_id: int = 0) -> Capability:
        return self.capability

    def has_device_capability(self, wanted: tuple[int, int] | int, device_id: int = 0) -> bool:
        pair = wanted if isinstance(wanted, tuple) else divmod(wanted, 10)
        return self.capability >= pair

    def is_device_capability(self, wanted: tuple[int, int] | int, device_id: int = 0) -> bool:
        pair = wanted if isinstance(wanted, tuple) else divmod(wanted, 10)
        return tuple(self.capability) == pair

    def is_device_capability_family(self, wanted: int, device_id: int = 0) -> bool:
        return self.capability[0] == wanted // 10

    def fp8_dtype(self) -> Any:
        return self.fp8

    def get_device_name(self, device_id: int = 0) -> str:
        return f"stand-in of capability {self.capability.as_version_str()}"

    def num_compute_units(self, device_id: int = 0) -> int:
        return 40  # T4G: 2560 CUDA cores, 64 an SM

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("is_", "has_", "supports_", "use_")):
            return lambda *_, **__: False
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(name=f"current_platform.{name}")


class Capability(tuple[int, int]):
    """vLLM's DeviceCapability, as far as it is asked."""

    __slots__ = ()
    major = property(lambda self: self[0])
    minor = property(lambda self: self[1])

    def as_version_str(self) -> str:
        return f"{self[0]}.{self[1]}"

    def to_int(self) -> int:
        return self[0] * 10 + self[1]


class Logger(logging.Logger):
    """vLLM's logger: the once-variants too."""

    def info_once(self, message: str, *args: Any, **_: Any) -> None:
        self.info(message, *args)

    def warning_once(self, message: str, *args: Any, **_: Any) -> None:
        self.warning(message, *args)

    def debug_once(self, message: str, *args: Any, **_: Any) -> None:
        self.debug(message, *args)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the real modules in the tree and makes stand-ins for their surroundings."""

    def __init__(self, tree: Path, real: Sequence[str], hollow: Sequence[str]) -> None:
        self.tree = tree
        self.real = tuple(real)
        self.hollow = tuple(hollow)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.hollow:
            return None
        if name in self.real:
            file = self.tree / name.replace(".", "/")
            if (package := file / "__init__.py").is_file():
                return importlib.util.spec_from_file_location(name, package)
            if (module := file.with_suffix(".py")).is_file():
                return importlib.util.spec_from_file_location(name, module)
            raise ModuleNotFoundError(f"the tree has no {name}", name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(
    tree: Path,
    real: Sequence[str],
    capability: tuple[int, int],
    *,
    compiler: bool,
    torch: types.ModuleType | None = None,
) -> Platform:
    """Make ``real`` importable from ``tree``, everything around it hollow.

    Args:
        tree: A directory that holds ``vllm/``.
        real: Module names to take from it.
        capability: Of the device that is pretended.
        compiler: Whether Triton is the real one; else launches can only be recorded.
        torch: The real torch, where tensors are to be real; default: ``faketorch``.
    """
    if compiler:
        triton: Any = importlib.import_module("triton")
        tl = importlib.import_module("triton.language")
        tldevice = importlib.import_module("triton.language.extra.libdevice")
    else:
        triton = faketriton.make(StandIn, _TRITON, register=torch is None)
        tl, tldevice = triton.language, StandIn("libdevice")
    hollow: tuple[str, ...] = _HOLLOW
    if torch is None:
        torch = faketorch.install(capability, lambda name: _missing("torch", name))
        nn = StandIn("torch.nn")
        nn.__dict__["__path__"] = []
        torch.nn = sys.modules["torch.nn"] = nn  # type: ignore[attr-defined]
        inductor = StandIn("torch._inductor.runtime.triton_helpers")
        inductor.__dict__["libdevice"] = tldevice
        sys.modules[inductor.__name__] = inductor
    else:
        # What is installed is torch's own surroundings, and stays.
        hollow = tuple(name for name in _HOLLOW if name == "vllm" or not _installed(name))
    fp8: Any = torch.float8_e4m3fn
    platform = Platform(capability, fp8)
    sys.meta_path.insert(0, Finder(tree, [*real, *ALWAYS_REAL], hollow))
    utils = StandIn("vllm.triton_utils")
    utils.__dict__.update(
        triton=triton, tl=tl, tldevice=tldevice, HAS_TRITON=True,
        LOG2E=1.4426950408889634, LOGE2=0.6931471805599453, __path__=[],
    )  # fmt: skip
    quantisation = StandIn("vllm.model_executor.layers.quantization.utils.quant_utils")
    largest = torch.finfo(fp8)
    quantisation.__dict__.update(
        get_fp8_min_max=lambda *_: (largest.min, largest.max), FP8_DTYPE=fp8
    )
    platforms = StandIn("vllm.platforms")
    platforms.__dict__.update(current_platform=platform, __path__=[])
    logger = StandIn("vllm.logger")
    logger.__dict__["init_logger"] = Logger
    devices = StandIn("vllm.utils.platform_utils")
    devices.__dict__["num_compute_units"] = platform.num_compute_units
    caches = StandIn("vllm.config.cache")
    caches.__dict__["get_kv_cache_dtype_handler"] = lambda _: None  # no plug-in has added one
    operators = StandIn("vllm._custom_ops")
    operators.__dict__["hadacore_transform"] = lambda tensor, inplace=False: tensor
    for module in (utils, platforms, logger, quantisation, devices, operators, caches):
        sys.modules[module.__name__] = module
    return platform


def _installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _missing(owner: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value = _anything(f"{owner}.{name}")
    setattr(sys.modules[owner], name, value)
    return value
