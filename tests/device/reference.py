"""transformers' answer to what an engine generated, in float32 on the GPU.

    python -m tests.device.reference MODEL DTYPE IN OUT

IN is a list of ``{"prompt": [...], "tokens": [...]}``, with ``images`` by number where the model
sees; OUT gets, for each, how far each token's logit is below the best one (``deficits``) and its
log probability. With ``-`` for IN, prompts.json beside the model, or the pictures.json in it, is
answered greedily instead (64 tokens each), in DTYPE, and its own log probabilities are given.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tests.device import pictures

TOKENS = 64


class Reference:
    """A model of transformers, on the GPU where there is one.

    Args:
        model: Its directory.
        dtype: Name of torch's type.
    """

    def __init__(self, model: Path, dtype: str) -> None:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self.sees = (model / "pictures.json").is_file()
        kind = "Gemma4ForConditionalGeneration" if self.sees else "Gemma4ForCausalLM"
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        made = getattr(transformers, kind).from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
        self.model = made.to(self.device).eval()
        self.images: list[Any] = []
        if self.sees:
            self.processor = transformers.AutoProcessor.from_pretrained(model)
            self.images = pictures.images()

    def _seen(self, ids: Any, row: dict[str, Any]) -> dict[str, Any]:
        """What the model is given beside the tokens."""
        if not row.get("images"):
            return {}
        made = self.processor.image_processor(
            images=[self.images[number] for number in row["images"]], return_tensors="pt"
        )
        return {
            "pixel_values": made["pixel_values"].to(self.device, self.model.dtype),
            "image_position_ids": made["image_position_ids"].to(self.device),
            "mm_token_type_ids": (ids == pictures.IMAGE).int(),
        }

    def score(self, row: dict[str, Any]) -> dict[str, list[float]]:
        """Deficits and log probabilities of a row's tokens, each after those before it."""
        torch: Any = importlib.import_module("torch")
        tokens = row["tokens"]
        ids = torch.tensor([row["prompt"] + tokens], device=self.device)
        with torch.no_grad():
            found = self.model(ids, logits_to_keep=len(tokens) + 1, **self._seen(ids, row))
        logits = found.logits[0, :-1].float()
        chosen = torch.tensor(tokens, device=self.device)[:, None]
        own = logits.gather(1, chosen)[:, 0]
        return {
            "deficits": (logits.max(-1).values - own).tolist(),
            "logprobs": (own - logits.logsumexp(-1)).tolist(),
        }

    def answer(self, row: dict[str, Any]) -> list[int]:
        """Greedy generation."""
        torch: Any = importlib.import_module("torch")
        ids = torch.tensor([row["prompt"]], device=self.device)
        made = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
            min_new_tokens=TOKENS, eos_token_id=None, **self._seen(ids, row),
        )  # fmt: skip
        tokens: list[int] = made[0, len(row["prompt"]) :].tolist()
        return tokens


def questions(model: Path) -> list[dict[str, Any]]:
    """The prompts of a model, each as a row without tokens."""
    own = model / "pictures.json"
    if own.is_file():
        return [
            {"prompt": entry["prompt"], "images": entry["images"]}
            for entry in json.loads(own.read_text())
        ]
    beside = model.parent / "prompts.json"
    return [{"prompt": prompt} for prompt in json.loads(beside.read_text())]


def main() -> None:
    """Score or answer."""
    model, dtype, given, out = Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    torch: Any = importlib.import_module("torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    made = Reference(model, dtype)
    if given == "-":
        rows = questions(model)
        for row in rows:
            row["tokens"] = made.answer(row)
            row["logprobs"] = made.score(row)["logprobs"]
        found: list[Any] = rows
    else:
        found = [made.score(row) for row in json.loads(Path(given).read_text())]
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
