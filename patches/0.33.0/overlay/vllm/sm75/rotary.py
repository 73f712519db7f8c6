# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of vision and audio towers without FlashAttention's Python files.

Upstream's build copies ``vllm_flash_attn/layers`` from FlashAttention's sources, which are not
built here. The caller then takes vLLM's plain PyTorch form with float32 inside, as the missing
kernel has it. A constant and not a function, so that torch.compile sees no call.
"""

from importlib.util import find_spec


def _found() -> bool:
    try:
        return find_spec("vllm.vllm_flash_attn.layers.rotary") is not None
    except ImportError:
        return False


FLASH_ATTN_ROTARY: bool = _found()
