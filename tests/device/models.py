"""Make the checkpoints of the device tests: tiny, random, shaped like Gemma 4 E2B.

Eight layers, head size 256 with a sliding window of 512 and 512 without one, eight query heads on
one KV head, soft cap, per-layer embeddings, the last two layers with the KV of earlier ones. The
second checkpoint has its projections quantized to 4 bits in groups of 128 (compressed-tensors,
which vLLM runs with Marlin); the third holds those same weights unpacked, for the reference.

    python -m tests.device.models DIRECTORY
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 1024
WINDOW = 512
CONTEXT = 8192
PROMPTS = (5, 37, 201, 701, 2500, 6000)
GROUP = 128
QUANTIZED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def config(vocabulary: int = VOCABULARY, hidden: int = 512, layers: int = 8) -> Any:
    """The shape; with fewer layers, the last ones of it."""
    transformers: Any = importlib.import_module("transformers")
    sliding, full = "sliding_attention", "full_attention"
    return transformers.Gemma4TextConfig(
        vocab_size=vocabulary, vocab_size_per_layer_input=vocabulary, hidden_size=hidden,
        intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=1, head_dim=256, global_head_dim=512, hidden_size_per_layer_input=64,
        layer_types=[sliding, sliding, full, sliding, sliding, full, sliding, full][-layers:],
        num_kv_shared_layers=2, use_double_wide_mlp=True, sliding_window=WINDOW,
        max_position_embeddings=CONTEXT, final_logit_softcapping=30.0, pad_token_id=0,
        eos_token_id=1, bos_token_id=2, tie_word_embeddings=True,
        architectures=["Gemma4ForCausalLM"],
    )  # fmt: skip


def random_model(shape: Any) -> Any:
    """The model in float16, its weights random."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(shape).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            # Scales at which the logits differ from token to token, and nothing overflows.
            if "embed_tokens_per_layer" in name:
                weight.copy_(noise * 0.125)
            elif "embed_tokens" in name:
                weight.copy_(noise * 0.02)
            elif "q_norm" in name:
                weight.copy_(0.25 * (1 + 0.1 * noise))
            elif "k_norm" in name:
                weight.copy_(0.5 * (1 + 0.1 * noise))
            elif name == "model.norm.weight":
                weight.copy_(10 * (1 + 0.1 * noise))
            elif weight.ndim == 1:
                weight.copy_(1 + 0.1 * noise)
            else:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
    model.half()
    model.config.dtype = torch.float16
    return model


def make_plain(out: Path) -> None:
    """The float16 checkpoint."""
    random_model(config()).save_pretrained(out)
    _tokenizer().save_pretrained(out)


def _tokenizer() -> Any:
    """A word for each token."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}
    words.update({f"w{number}": number for number in range(4, VOCABULARY)})
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
        unk_token="<unk>",
    )  # fmt: skip


def make_quantized(plain: Path, packed: Path, unpacked: Path) -> None:
    """The 4-bit checkpoint, and what its weights stand for, exactly: in float32."""
    torch: Any = importlib.import_module("torch")
    tensors: Any = importlib.import_module("safetensors.torch")
    for directory in (packed, unpacked):
        shutil.copytree(plain, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = tensors.load_file(plain / "model.safetensors")
    small, same = {}, {}
    for name, weight in weights.items():
        if name.split(".")[-2] not in QUANTIZED:
            small[name] = same[name] = weight
            continue
        rows, columns = weight.shape
        groups = weight.float().reshape(rows, columns // GROUP, GROUP)
        scale = (groups.abs().amax(-1, keepdim=True) / 7.5).half()
        levels = (groups / scale.float()).round().clamp(-8, 7)
        same[name] = (levels * scale.float()).reshape(rows, columns)
        nibbles = (levels.reshape(rows, columns // 8, 8) + 8).to(torch.int64)
        shifts = torch.arange(0, 32, 4)
        words = (nibbles << shifts).sum(-1)
        stem = name.removesuffix(".weight")
        small[f"{stem}.weight_packed"] = torch.where(words >= 2**31, words - 2**32, words).int()
        small[f"{stem}.weight_scale"] = scale.squeeze(-1).contiguous()
        small[f"{stem}.weight_shape"] = torch.tensor([rows, columns])
    tensors.save_file(small, packed / "model.safetensors", metadata={"format": "pt"})
    tensors.save_file(same, unpacked / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((packed / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head", "re:.*per_layer.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
            "group_size": GROUP, "dynamic": False}}},
    }  # fmt: skip
    (packed / "config.json").write_text(json.dumps(settings, indent=2))


def prompts() -> list[list[int]]:
    """Random prompts of the lengths above."""
    torch: Any = importlib.import_module("torch")
    generator = torch.Generator().manual_seed(1)
    return [
        [2, *torch.randint(4, VOCABULARY, (length - 1,), generator=generator).tolist()]
        for length in PROMPTS
    ]


def main() -> None:
    """Make everything below the directory given."""
    out = Path(sys.argv[1])
    make_plain(out / "plain")
    make_quantized(out / "plain", out / "w4a16", out / "w4a16-unpacked")
    (out / "prompts.json").write_text(json.dumps(prompts()))


if __name__ == "__main__":
    main()
