"""One engine, started by itself: prompts alone, all at once, and once more with what it remembers.

A model with a pictures.json is shown its pictures.

    python -m tests.device.engine MODEL eager|graphs OUT
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.device import pictures
from tests.device.models import CONTEXT
from tests.device.reference import TOKENS, questions

# Prefill steps: the longer prompts are cut into several.
CHUNK = 1024
# Four images are what the kernels of ahead of time are made for; the towers for sound are absent.
SEEING: dict[str, Any] = {"limit_mm_per_prompt": {"image": 4, "video": 0, "audio": 0}}


def settings(mode: str) -> dict[str, Any]:
    """What the engine is given; what it chooses for attention and sampling is its own affair."""
    return {
        "dtype": "float16", "max_model_len": CONTEXT, "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 8, "seed": 0, "enable_prefix_caching": True,
        "enable_chunked_prefill": True, "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 2 << 30, "enforce_eager": mode == "eager",
    } | ({} if mode == "eager" else {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}})  # fmt: skip  # noqa: E501


def row(asked: dict[str, Any], output: Any) -> dict[str, Any]:
    """One answer.

    Raises:
        ValueError: The engine made another prompt of what it was given.
    """
    made = output.outputs[0]
    tokens = list(made.token_ids)
    if list(output.prompt_token_ids) != asked["prompt"]:
        raise ValueError(
            f"a prompt of {len(asked['prompt'])} tokens became one of "
            f"{len(output.prompt_token_ids)}, other than transformers' processor makes it"
        )
    return {
        **asked,
        "tokens": tokens,
        "logprobs": [
            entry[token].logprob for entry, token in zip(made.logprobs, tokens, strict=True)
        ],
        "cached": output.num_cached_tokens or 0,
    }


def given(asked: dict[str, Any], shown: list[Any]) -> dict[str, Any]:
    """A prompt as the engine takes it: its images beside it, each a single token in it.

    Args:
        asked: ``prompt`` as it is to come out of the processor, ``images`` by number.
        shown: All images.
    """
    if not asked.get("images"):
        return {"prompt_token_ids": asked["prompt"]}
    return {
        "prompt_token_ids": pictures.folded(asked["prompt"]),
        "multi_modal_data": {"image": [shown[number] for number in asked["images"]]},
    }


def main() -> None:
    """Run and write what was generated."""
    model, mode, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    vllm: Any = importlib.import_module("vllm")
    platforms: Any = importlib.import_module("vllm.platforms")
    rows = questions(model)
    sees = (model / "pictures.json").is_file()
    shown = pictures.images() if sees else []
    started = time.monotonic()
    engine = vllm.LLM(model=str(model), **settings(mode), **(SEEING if sees else {}))
    ready = time.monotonic()
    wanted = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)

    def ask(some: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made = engine.generate([given(asked, shown) for asked in some], wanted, use_tqdm=False)
        return [row(asked, output) for asked, output in zip(some, made, strict=True)]

    runs = {"single": [ask([asked])[0] for asked in rows]}
    engine.reset_prefix_cache()
    runs["batched"] = ask(rows)
    runs["batched, prefixes cached"] = ask(rows)
    # The same beginnings with other ends: part of each is remembered.
    ends = list(range(20, 57))
    runs["longer, prefixes cached"] = ask(
        [{**asked, "prompt": [*asked["prompt"], *ends]} for asked in rows]
    )
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
