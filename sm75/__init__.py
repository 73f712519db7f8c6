"""vllm-sm75: from a release lock to a conda channel with vLLM built for compute capability 7.5."""

__version__ = "0.1.0"
