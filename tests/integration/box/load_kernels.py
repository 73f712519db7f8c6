"""Import vLLM, load both kernel extensions, list what they register; prints JSON."""

from __future__ import annotations

import importlib
import importlib.metadata
import json

import torch

EXTENSIONS = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator")

before = set(torch._C._dispatch_get_all_op_names())
vllm = importlib.import_module("vllm")
loaded = [importlib.import_module(name).__file__ for name in EXTENSIONS]
new = set(torch._C._dispatch_get_all_op_names()) - before
added = sorted(name for name in new if name.startswith(("_C", "_moe_C")))
print(
    json.dumps(
        {
            "vllm": vllm.__version__,
            "metadata": importlib.metadata.version("vllm"),
            "torch": importlib.metadata.version("torch"),
            "loaded": loaded,
            "operators": added,
        }
    )
)
