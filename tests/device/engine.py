"""One engine, started by itself: prompts alone, all at once, and once more with what it remembers.

python -m tests.device.engine MODEL eager|graphs OUT
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.device.models import CONTEXT
from tests.device.reference import TOKENS

# Prefill steps: the longer prompts are cut into several.
CHUNK = 1024


def settings(mode: str) -> dict[str, Any]:
    """What the engine is given; what it chooses for attention and sampling is its own affair."""
    return {
        "dtype": "float16", "max_model_len": CONTEXT, "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 8, "seed": 0, "enable_prefix_caching": True,
        "enable_chunked_prefill": True, "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 2 << 30, "enforce_eager": mode == "eager",
    } | ({} if mode == "eager" else {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}})  # fmt: skip  # noqa: E501


def row(prompt: list[int], output: Any) -> dict[str, Any]:
    """One answer."""
    made = output.outputs[0]
    tokens = list(made.token_ids)
    return {
        "prompt": prompt,
        "tokens": tokens,
        "logprobs": [
            entry[token].logprob for entry, token in zip(made.logprobs, tokens, strict=True)
        ],
        "cached": output.num_cached_tokens or 0,
    }


def main() -> None:
    """Run and write what was generated."""
    model, mode, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    vllm: Any = importlib.import_module("vllm")
    platforms: Any = importlib.import_module("vllm.platforms")
    prompts = json.loads((model.parent / "prompts.json").read_text())
    started = time.monotonic()
    engine = vllm.LLM(model=str(model), **settings(mode))
    ready = time.monotonic()
    wanted = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)

    def ask(some: list[list[int]]) -> list[dict[str, Any]]:
        given = [{"prompt_token_ids": prompt} for prompt in some]
        made = engine.generate(given, wanted, use_tqdm=False)
        return [row(prompt, output) for prompt, output in zip(some, made, strict=True)]

    runs = {"single": [ask([prompt])[0] for prompt in prompts]}
    engine.reset_prefix_cache()
    runs["batched"] = ask(prompts)
    runs["batched, prefixes cached"] = ask(prompts)
    # The same beginnings with other ends: part of each is remembered.
    runs["longer, prefixes cached"] = ask([[*prompt, *range(10, 47)] for prompt in prompts])
    capability = platforms.current_platform.get_device_capability()
    out.write_text(
        json.dumps(
            {
                "capability": list(capability),
                "start_seconds": round(ready - started, 1),
                "generate_seconds": round(time.monotonic() - ready, 1),
                "runs": runs,
            }
        )
    )


if __name__ == "__main__":
    main()
