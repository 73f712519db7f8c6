"""Build the engine's configuration for a model on what vLLM takes for a T4G; prints JSON.

``MODEL PYTHON``: PYTHON starts this environment's Python (vLLM inspects a model's class in a
process of its own, and an emulated program cannot start another by itself).
"""

from __future__ import annotations

import json
import sys

sys.executable = sys.argv[2]

from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]  # noqa: E402
from vllm.platforms import current_platform  # type: ignore[import-not-found]  # noqa: E402

config = EngineArgs(
    model=sys.argv[1], load_format="dummy", max_model_len=4096
).create_engine_config()
print(
    json.dumps(
        {
            "platform": type(current_platform).__name__,
            "device": current_platform.get_device_name(),
            "capability": current_platform.get_device_capability().as_version_str(),
            "memory": current_platform.get_device_total_memory(),
            "architecture": config.model_config.architecture,
            "dtype": str(config.model_config.dtype),
            "attention": str(config.attention_config.backend),
            "max_model_len": config.model_config.max_model_len,
            "device_type": config.device_config.device_type,
        }
    )
)
