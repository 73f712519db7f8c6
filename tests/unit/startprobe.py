"""Run parts of a (patched) vLLM tree as on a CUDA device of capability 7.5. Not a test itself.

    python startprobe.py TREE CASE... [--stub] [--capability 7.5]

With ``--stub`` only the patched modules are the tree's; torch and the rest of vLLM are stand-ins,
so that it runs anywhere. Without it, torch and vLLM's own dependencies must be installed, and only
the compiled extensions and the device are stand-ins. In both cases the packages that are not
shipped cannot be imported. Prints ``ok`` at the end.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

NOT_SHIPPED = {
    "PyNvVideoCodec", "cudnn", "cutlass", "fastsafetensors", "flash_attn", "flashinfer", "humming",
    "instanttensor", "nvtx", "quack", "tilelang", "tokenspeed_mla", "torchcodec", "triton_kernels",
}  # fmt: skip
FLASH_ATTENTION = "vllm.vllm_flash_attn"
FA_UTILS = "vllm.v1.attention.backends.fa_utils"
# Imports FlashInfer at its top.
FLASHINFER_BACKEND = "vllm.v1.attention.backends.flashinfer"
SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"
ROTARY = "vllm.model_executor.layers.rotary_embedding.common"
# What a CUDA start of Gemma 4 imports, in an order in which each stands alone.
ENGINE = (
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.turboquant_attn",
    "vllm.v1.attention.backends.mla.prefill.flash_attn",
    "vllm.model_executor.layers.attention.mm_encoder_attention",
    "vllm.model_executor.models.config",
    "vllm.model_executor.models.gemma4",
    "vllm.model_executor.models.gemma4_mm",
    "vllm.model_executor.models.qwen3_vl",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.engine.core",
    "vllm.entrypoints.openai.api_server",
)
EXTENSIONS = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "cumem_allocator", "spinloop")


class Installed(importlib.machinery.PathFinder):
    """The ordinary search for installed modules, blind to what is not shipped."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in NOT_SHIPPED:
            return None
        return super().find_spec(name, path, target)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for all of torch and vLLM but the patched modules."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if name == FLASHINFER_BACKEND:
            raise ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer")
        if top not in ("torch", "vllm"):
            return None
        if name in (FA_UTILS, SAMPLER, ROTARY) or name.startswith((FLASH_ATTENTION, "vllm.sm75")):
            file = self.tree / name.replace(".", "/")
            package = file / "__init__.py"
            file = package if package.is_file() else file.with_suffix(".py")
            if not file.is_file():
                return None
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class StandIn(types.ModuleType):
    """A module that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Capability(tuple[int, int]):
    """What the tree's DeviceCapability offers to the code under test."""

    major = property(lambda self: self[0])
    minor = property(lambda self: self[1])

    def as_version_str(self) -> str:
        return f"{self[0]}.{self[1]}"


def stub(tree: Path, capability: tuple[int, int]) -> None:
    """Stand-ins for torch and for vLLM around the patched modules."""
    sys.meta_path.insert(0, Finder(tree))
    module = type("Module", (), {"__init__": lambda self, *a, **k: None})
    importlib.import_module("torch.nn").Module = module  # type: ignore[attr-defined]
    custom = importlib.import_module("vllm.model_executor.custom_op")
    keep = staticmethod(lambda name: lambda cls: cls)
    custom.CustomOp = type("CustomOp", (module,), {"register": keep})  # type: ignore[attr-defined]
    importlib.import_module("vllm.triton_utils").HAS_TRITON = False  # type: ignore[attr-defined]
    envs: Any = importlib.import_module("vllm.envs")
    importlib.import_module("vllm").envs = envs  # type: ignore[attr-defined]
    config: Any = importlib.import_module("vllm.config")
    config.get_current_vllm_config_or_none = lambda: None
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    envs.VLLM_USE_FLASHINFER_SAMPLER = os.environ.get(name, "1") == "1"
    envs.is_set = lambda asked: asked in os.environ
    logger: Any = logging.getLogger("vllm")
    logger.info_once = logger.warning_once = logger.debug_once = lambda *a, **k: None
    importlib.import_module("vllm.logger").init_logger = lambda _: logger  # type: ignore[attr-defined]
    platforms: Any = importlib.import_module("vllm.platforms")
    platforms.current_platform = MagicMock(
        is_cuda=lambda: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        is_cpu=lambda: False,
        get_device_capability=lambda *a: Capability(capability),
        has_device_capability=lambda wanted, *a: capability >= divmod(wanted, 10),
        is_device_capability_family=lambda wanted, *a: capability[0] == wanted // 10,
    )


def real(tree: Path, capability: tuple[int, int]) -> None:
    """The whole tree over a real torch; only extensions and device are stand-ins."""
    sys.path.insert(0, str(tree))
    torch: Any = importlib.import_module("torch")
    for extension in EXTENSIONS:
        sys.modules[f"vllm.{extension}"] = types.ModuleType(f"vllm.{extension}")
    library = torch.library.Library("_C", "FRAGMENT")
    for question in (
        "scaled_mm_supports_block_fp8",
        "scaled_mm_supports_fp8",
        "group_gemm_supported",
    ):
        library.define(f"cutlass_{question}(int capability) -> bool")
        library.impl(f"cutlass_{question}", lambda _: False, "CompositeExplicitAutograd")
    platforms: Any = importlib.import_module("vllm.platforms")
    cuda: Any = importlib.import_module("vllm.platforms.cuda")
    interface: Any = importlib.import_module("vllm.platforms.interface")

    class Device(cuda.NonNvmlCudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return interface.DeviceCapability(*capability)

        @classmethod
        def has_device_capability(cls, wanted: Any, device_id: int = 0) -> bool:
            return capability >= (divmod(wanted, 10) if isinstance(wanted, int) else tuple(wanted))

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "stand-in"

    platforms._current_platform = Device()
    sys.modules["sm75_probe_library"] = library  # keeps the definitions alive


def flash_attention() -> None:
    """vllm_flash_attn and fa_utils import, and say that nothing is there, without an ERROR."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    logging.getLogger("vllm").addHandler(handler)
    importlib.import_module(FLASH_ATTENTION)
    utils: Any = importlib.import_module(FA_UTILS)
    assert utils.get_flash_attn_version() is None
    assert not any(utils.is_fa_version_supported(version) for version in (2, 3, 4))
    assert utils.is_flash_attn_varlen_func_available() is False, "said to be available"
    assert not records, records[0].getMessage()


def sampler() -> None:
    """The sampler's check answers with no FlashInfer."""
    module: Any = importlib.import_module(SAMPLER)
    assert module.flashinfer_sampler_supported() is False


def rotary() -> None:
    """``ApplyRotaryEmb.forward_cuda`` works without FlashAttention's layers."""
    module: Any = importlib.import_module(ROTARY)
    if isinstance(importlib.import_module("torch"), StandIn):
        operation = module.ApplyRotaryEmb.__new__(module.ApplyRotaryEmb)
        operation.is_neox_style, operation.enable_fp32_compute = True, False
        module.ApplyRotaryEmb.forward_static = staticmethod(lambda *given: given)
        assert operation.forward_cuda("x", "cos", "sin") == ("x", "cos", "sin", True, True)
        return
    rotary_numbers(module)


def rotary_numbers(module: Any) -> None:
    """Both styles, 3 and 4 dimensions, against the definition in float64."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    for neox in (True, False):
        for shape in ((37, 4, 64), (2, 37, 4, 64)):
            operation = module.ApplyRotaryEmb.__new__(module.ApplyRotaryEmb)
            torch.nn.Module.__init__(operation)
            operation.is_neox_style, operation.enable_fp32_compute = neox, False
            x = torch.randn(shape, dtype=torch.float16)
            angle = torch.rand(37, 32, dtype=torch.float64) * 6
            cos, sin = angle.cos().half(), angle.sin().half()
            got = operation.forward_cuda(x, cos, sin)
            assert got.dtype == x.dtype
            assert got.shape == x.shape
            first = slice(0, 32) if neox else slice(0, 64, 2)
            second = slice(32, 64) if neox else slice(1, 64, 2)
            c, s = cos.double()[:, None], sin.double()[:, None]
            want = torch.empty(shape, dtype=torch.float64)
            want[..., first] = x.double()[..., first] * c - x.double()[..., second] * s
            want[..., second] = x.double()[..., second] * c + x.double()[..., first] * s
            # Rounding the exact result to float16 is all the error that may remain.
            assert (got.double() - want.half().double()).abs().max() <= 2**-9


def engine() -> None:
    """Everything on the start path imports."""
    for name in ENGINE:
        importlib.import_module(name)


CASES: dict[str, Callable[[], None]] = {
    "flash_attention": flash_attention,
    "sampler": sampler,
    "rotary": rotary,
    "engine": engine,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tree", type=Path)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--stub", action="store_true")
    parser.add_argument("--capability", default="7.5")
    options = parser.parse_args()
    major, minor = map(int, options.capability.split("."))
    ordinary = sys.meta_path.index(importlib.machinery.PathFinder)
    sys.meta_path[ordinary] = Installed
    (stub if options.stub else real)(options.tree, (major, minor))
    for case in options.cases:
        CASES[case]()
    print("ok")


if __name__ == "__main__":
    main()
