"""Is this machine right for vllm-sm75? Facts first, then rules over them."""
