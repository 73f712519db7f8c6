"""transformers' answer to what an engine generated, in float32 on the GPU.

    python -m tests.device.reference MODEL DTYPE IN OUT

IN is a list of ``{"prompt": [...], "tokens": [...]}``; OUT gets, for each, how far each token's
logit is below the best one (``deficits``) and its log probability. With ``-`` for IN, prompts.json
beside the model is answered greedily instead (64 tokens each), in DTYPE, and its own log
probabilities are given.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

TOKENS = 64


def load(model: Path, dtype: str) -> Any:
    """The model, on the GPU where there is one."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = transformers.Gemma4ForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    return made.to(device).eval()


def score(model: Any, prompt: list[int], tokens: list[int]) -> dict[str, list[float]]:
    """Deficits and log probabilities of the tokens, each after those before it."""
    torch: Any = importlib.import_module("torch")
    ids = torch.tensor([prompt + tokens], device=model.device)
    with torch.no_grad():
        logits = model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
    chosen = torch.tensor(tokens, device=model.device)[:, None]
    own = logits.gather(1, chosen)[:, 0]
    return {
        "deficits": (logits.max(-1).values - own).tolist(),
        "logprobs": (own - logits.logsumexp(-1)).tolist(),
    }


def answer(model: Any, prompt: list[int]) -> list[int]:
    """Greedy generation."""
    torch: Any = importlib.import_module("torch")
    ids = torch.tensor([prompt], device=model.device)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
        min_new_tokens=TOKENS, eos_token_id=None,
    )  # fmt: skip
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def main() -> None:
    """Score or answer."""
    model, dtype, given, out = Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    torch: Any = importlib.import_module("torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    made = load(model, dtype)
    if given == "-":
        prompts = json.loads((model.parent / "prompts.json").read_text())
        found: list[Any] = []
        for prompt in prompts:
            tokens = answer(made, prompt)
            own = score(made, prompt, tokens)["logprobs"]
            found.append({"prompt": prompt, "tokens": tokens, "logprobs": own})
    else:
        found = [
            score(made, row["prompt"], row["tokens"]) for row in json.loads(Path(given).read_text())
        ]
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
