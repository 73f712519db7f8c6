# SPDX-License-Identifier: Apache-2.0
"""FlashAttention has no kernel below compute capability 8.0, so this package has none at all."""

import functools


def may_be_left_out() -> bool:
    """Whether ``vllm.vllm_flash_attn`` may be imported without its extensions.

    True on CUDA: everything that asks there first asks which version the device supports and is
    told none. Elsewhere upstream's ImportError stands.
    """
    from vllm.platforms import current_platform

    return current_platform.is_cuda()


@functools.cache
def is_built() -> bool:
    """Whether any FlashAttention (2, 3 or 4) is in this installation."""
    from vllm.vllm_flash_attn import flash_attn_interface as interface

    return interface.FA2_AVAILABLE or interface.FA3_AVAILABLE or interface.FA4_AVAILABLE
