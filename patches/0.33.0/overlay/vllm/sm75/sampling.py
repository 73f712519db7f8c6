# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's sampler is refused for compute capability 7.5 before FlashInfer is imported."""


def flashinfer_excluded() -> bool:
    """Whether the device rules FlashInfer's sampler out, so that FlashInfer need not be installed.

    Only capability 7.5 is answered here; every other device goes upstream's way.

    Raises:
        RuntimeError: The user asked for it with ``VLLM_USE_FLASHINFER_SAMPLER=1``, which upstream
            refuses in the same way.
    """
    from vllm import envs
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability is None or tuple(capability) != (7, 5):
        return False
    if envs.is_set("VLLM_USE_FLASHINFER_SAMPLER"):
        raise RuntimeError(
            "VLLM_USE_FLASHINFER_SAMPLER=1 asks for FlashInfer's sampler, which has no working "
            "path on compute capability 7.5. Unset the variable: vLLM's own sampler is used."
        )
    init_logger(__name__).info_once("Compute capability 7.5: sampling with vLLM's own kernels.")
    return True
