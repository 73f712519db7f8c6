"""What vLLM's own code plans for the KV cache of some models: the truth of test_serve_kv.py.

    PYTHON reference.py SDIST-TREE > kv-RELEASE.json

PYTHON has torch. The modules that plan (kv_cache_interface, kv_cache_planning or kv_cache_utils)
are vLLM's, as they are; everything they import besides is replaced by stand-ins, for it would
need all of vLLM's requirements and none of it computes here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

REAL = (
    "vllm.v1.kv_cache_interface", "vllm.v1.kv_cache_layout", "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils", "vllm.utils.math_utils",
    "vllm.v1.core.kv_cache_config_builder", "vllm.v1.core.single_type_kv_cache_manager",
)  # fmt: skip
CASES = json.loads(Path(__file__).with_name("cases.json").read_text())


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """vLLM's files for ``REAL``, stand-ins for its other modules."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "vllm" and not name.startswith("vllm."):
            return None
        file = self.tree / (name.replace(".", "/") + ".py")
        if name in REAL and file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: _stand_in(name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: Any) -> None:
        if module.__name__ == "vllm.utils.torch_utils":
            module.get_dtype_size = lambda dtype: dtype.itemsize


class _Anything(type):
    """A class that may be subscripted, inherited from, or asked for a member."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {}) if name[:1].isupper() else MagicMock(name=name)


def plan(interface: Any, planner: Any, case: dict[str, Any]) -> dict[str, Any]:
    import torch

    config = MagicMock()
    config.model_config.max_model_len = case["length"]
    config.model_config.original_max_model_len = case["length"]
    config.max_in_flight_tokens = case["in_flight"]
    config.parallel_config.decode_context_parallel_size = 1
    config.parallel_config.prefill_context_parallel_size = 1
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.num_gpu_blocks_override = None
    config.cache_config.prefix_cache_retention_interval = None
    config.attention_config.hisparse_config = None
    config.kv_transfer_config = None
    if hasattr(planner, "get_hisparse_kv_cache_groups"):
        planner.get_hisparse_kv_cache_groups = lambda *_: None
        layout = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout.LBNHC
        config.cache_config.get_resolved_kv_cache_layout = lambda: layout
    specs = {}
    for number, (head, kv_heads, window) in enumerate(case["layers"]):
        shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": kv_heads, "head_size": head,
                                 "dtype": torch.float16}  # fmt: skip
        if window:
            spec = interface.SlidingWindowSpec(sliding_window=window, **shape)
        else:
            spec = interface.FullAttentionSpec(**shape)
        specs[f"layers.{number}"] = spec
    if "indexes_kv_by_block_stride" in interface.AttentionSpec.__dataclass_fields__:
        specs = {
            name: importlib.import_module("dataclasses").replace(
                spec, indexes_kv_by_block_stride=True
            )
            for name, spec in specs.items()
        }
    groups = planner.get_kv_cache_groups(config, specs)
    per_block = planner._pool_bytes_per_block(config, groups)
    made = planner.get_kv_cache_config_from_groups(config, groups, case["memory"])
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    tokens, concurrency = utils.get_kv_cache_capacity(config, made)
    request = round(made.num_blocks / concurrency)
    return {
        "groups": [len(group.layer_names) for group in groups],
        "bytes_per_block": per_block,
        "blocks": made.num_blocks,
        "blocks_per_request": request,
        "tokens": tokens,
        "concurrency": concurrency,
    }


def main() -> None:
    tree = Path(sys.argv[1])
    sys.meta_path.insert(0, Finder(tree))
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    split = (tree / "vllm/v1/core/kv_cache_planning.py").exists()
    planner = importlib.import_module(
        "vllm.v1.core.kv_cache_planning" if split else "vllm.v1.core.kv_cache_utils"
    )
    found = {case["name"]: plan(interface, planner, case) for case in CASES}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
