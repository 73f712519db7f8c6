"""Models as directories: real config.json shapes, real safetensors headers, and no data.

The files have the length that their headers speak of, as holes: they take no space on the disk.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[str, list[int]]]
_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "U8": 1, "F8_E4M3": 1}

# transformers, src/transformers/models/gemma4/convert_gemma4_weights.py, _VARIANTS, and
# configuration_gemma4.py for what those leave out.
_GEMMA4 = {
    "model_type": "gemma4_text", "vocab_size": 262_144, "head_dim": 256, "global_head_dim": 512,
    "sliding_window": 512, "max_position_embeddings": 131_072, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144, "num_attention_heads": 8, "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
}  # fmt: skip
_FIVE = ["sliding_attention"] * 4 + ["full_attention"]
_SIX = ["sliding_attention"] * 5 + ["full_attention"]
E2B = {
    **_GEMMA4, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
    "layer_types": _FIVE * 7, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
}  # fmt: skip
E4B = {
    **_GEMMA4, "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 42,
    "layer_types": _SIX * 7, "num_key_value_heads": 2, "num_kv_shared_layers": 18,
}  # fmt: skip
A4B = {
    **_GEMMA4, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
    "layer_types": _SIX * 5, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_global_key_value_heads": 2, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
    "sliding_window": 1024, "hidden_size_per_layer_input": 0, "moe_intermediate_size": 704,
    "top_k_experts": 8, "max_position_embeddings": 262_144,
}  # fmt: skip
# config.json of meta-llama/Llama-3.2-1B and Llama-3.1-8B.
LLAMA1 = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072, "vocab_size": 128_256, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA8 = {
    **LLAMA1, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
# config.json of meta-llama/Llama-3.1-70B.
LLAMA70 = {
    **LLAMA8, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip
# config.json of Qwen/Qwen3-4B.
QWEN4 = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 40_960, "vocab_size": 151_936, "tie_word_embeddings": True,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36,
}  # fmt: skip
# config.json of google/gemma-3-4b-it, which leaves layer_types out.
GEMMA3 = {
    "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "head_dim": 256,
    "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 131_072, "vocab_size": 262_208, "sliding_window": 1024,
}  # fmt: skip
# The same kinds of layers, in a model that may be run in float16.
SLIDING = {**GEMMA3, "model_type": "exaone4", "sliding_window_pattern": 6}


def text_tensors(config: Mapping[str, Any], dtype: str = "BF16") -> Tensors:
    """The large tensors of a language model, by transformers' names; norms are left out."""
    hidden, count = config["hidden_size"], config["num_hidden_layers"]
    heads, shared = config["num_attention_heads"], config.get("num_kv_shared_layers") or 0
    found: Tensors = {"model.embed_tokens.weight": (dtype, [config["vocab_size"], hidden])}
    if wide := config.get("hidden_size_per_layer_input"):
        found["model.embed_tokens_per_layer.weight"] = (
            dtype, [config["vocab_size_per_layer_input"], count * wide])  # fmt: skip
        found["model.per_layer_model_projection.weight"] = (dtype, [count * wide, hidden])
    for number in range(count):
        full = (config.get("layer_types") or ["full_attention"] * count)[number] != (
            "sliding_attention")  # fmt: skip
        head = config["head_dim"]
        if full and config.get("global_head_dim"):
            head = config["global_head_dim"]
        inner = config["intermediate_size"]
        late = number >= count - shared
        if late and config.get("use_double_wide_mlp"):
            inner *= 2
        layer = f"model.layers.{number}."
        found[layer + "self_attn.q_proj.weight"] = (dtype, [heads * head, hidden])
        found[layer + "self_attn.o_proj.weight"] = (dtype, [hidden, heads * head])
        for name in ("k", "v"):
            found[layer + f"self_attn.{name}_proj.weight"] = (
                dtype, [config["num_key_value_heads"] * head, hidden])  # fmt: skip
        for name in ("gate", "up"):
            found[layer + f"mlp.{name}_proj.weight"] = (dtype, [inner, hidden])
        found[layer + "mlp.down_proj.weight"] = (dtype, [hidden, inner])
        if wide:
            found[layer + "per_layer_input_gate.weight"] = (dtype, [wide, hidden])
            found[layer + "per_layer_projection.weight"] = (dtype, [hidden, wide])
    if config.get("tie_word_embeddings") is False:
        found["lm_head.weight"] = (dtype, [config["vocab_size"], hidden])
    return found


def size(tensors: Tensors) -> int:
    return sum(math.prod(shape) * _BYTES[dtype] for dtype, shape in tensors.values())


def write_file(path: Path, tensors: Tensors) -> None:
    """A safetensors file whose data is a hole."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("r+b") as stream:
        stream.truncate(8 + len(text) + offset)


def model(
    directory: Path, config: Mapping[str, Any], tensors: Tensors | None = None, *, files: int = 1,
    whole: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """A model's directory.

    Args:
        directory: Where.
        config: The language model's part of config.json.
        tensors: Default: :func:`text_tensors`.
        files: Number of weight files; more than one has an index.
        whole: config.json around it, for a multimodal model.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(
        json.dumps({**whole, "text_config": config} if whole is not None else config)
    )
    (directory / "tokenizer.json").write_text("{}")
    tensors = text_tensors(config) if tensors is None else tensors
    if files == 1:
        write_file(directory / "model.safetensors", tensors)
        return directory
    mapped: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = dict(list(tensors.items())[number::files])
        write_file(directory / name, part)
        mapped |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size(tensors)}, "weight_map": mapped})
    )
    return directory


def prefix(directory: Path, script: str) -> Path:
    """An environment whose ``bin/vllm`` is a script."""
    program = directory / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(script)
    program.chmod(0o755)
    return directory
