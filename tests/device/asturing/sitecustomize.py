"""SHIM of the device tests: makes a newer NVIDIA GPU pass for one of capability 7.5.

Python imports this in every process whose PYTHONPATH has its directory. It changes nothing of the
package under test; it changes what two libraries are told about the machine:

1. vLLM's platform answers 7.5 when asked for the capability.
2. Triton compiles for sm_75 and hands its PTX to the driver, which compiles it for the GPU that is
   there; ptxas, whose sm_75 machine code this GPU could not run, is left out.

What C++ code is told is the matter of ``capability.c``. SM75_AS_TURING=0 switches both off.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _platform(module: Any) -> None:
    interface = sys.modules["vllm.platforms.interface"]
    turing = interface.DeviceCapability(7, 5)
    for name in ("CudaPlatformBase", "NvmlCudaPlatform", "NonNvmlCudaPlatform"):
        getattr(module, name).get_device_capability = classmethod(lambda cls, device_id=0: turing)


def _triton(module: Any) -> None:
    backend = module.CUDABackend
    real = backend.__init__

    # Whoever asks, Triton itself or Inductor: every step of the compilation sees this target. The
    # variable TRITON_OVERRIDE_ARCH would not do: the last step, to PTX, ignores it.
    def init(self: Any, target: Any) -> None:
        real(self, type(target)(target.backend, 75, target.warp_size))

    backend.__init__ = init
    backend.make_cubin = lambda self, src, metadata, opt, capability: src.encode()


_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "vllm.platforms.cuda": _platform,
    "triton.backends.nvidia.compiler": _triton,
}


class _Loader(importlib.abc.Loader):
    """The real loader; what is to be changed is changed once the module is there."""

    def __init__(self, real: importlib.abc.Loader) -> None:
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.real.exec_module(module)
        _AFTER[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if os.environ.get("SM75_AS_TURING") == "1":
    # Inductor's pool of compiling processes would be started before the change.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    sys.meta_path.insert(0, _Finder())
