# SPDX-License-Identifier: Apache-2.0
"""What vllm-sm75 adds to vLLM: the few decisions that differ on compute capability 7.5.

Patches only call into this package. It is imported on every start, so its modules import
nothing heavy at their top.
"""
