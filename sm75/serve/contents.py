"""What lies in a model's directory that is not what vLLM serves, and what should lie there."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from sm75.errors import CheckFailed
from sm75.serve.flags import Given
from sm75.words import counted

# Names of tokenizers' files (transformers, tokenization_utils_base.py and the tokenizers' own
# VOCAB_FILES_NAMES; vllm/tokenizers/mistral.py, tekken.json and tokenizer.model.vN).
_TOKENIZERS = (
    "tokenizer*", "*vocab*", "merges.txt", "*.tiktoken", "tekken*", "spiece.model",
    "sentencepiece*", "*.spm", "spm*", "bpe.codes", "tokenization_*.py",
)  # fmt: skip
# Layers of language models by transformers' names; towers and drafts have other prefixes.
_LAYER = re.compile(
    r"(?:|model\.|language_model\.|language_model\.model\.|model\.language_model\.|transformer\.)"
    r"(?:layers|h)\.(\d+)\."
)
# Weights in the form of another program, by pattern: what it is, and what to do.
_OTHERS = (
    ("*.gguf", "GGUF, llama.cpp's form, which this vLLM does not read",
     "download the model in safetensors: its page on the hub names what the GGUF was made of"),
    ("*.pth", "the original form of Llama and others (consolidated*.pth)",
     "download the directory in transformers' form, with *.safetensors"),
    ("*.onnx", "ONNX, which vLLM does not read", "download the model in safetensors"),
    ("*.h5", "TensorFlow's, which vLLM does not read", "download the model in safetensors"),
    ("*.msgpack", "Flax's, which vLLM does not read", "download the model in safetensors"),
    ("*.tflite", "LiteRT's, which vLLM does not read", "download the model in safetensors"),
    ("*.task", "LiteRT's, which vLLM does not read", "download the model in safetensors"),
    ("*.litertlm", "LiteRT's, which vLLM does not read", "download the model in safetensors"),
)  # fmt: skip
# Part of an index's tensors that may be missing: names that no model reads any more stay in the
# indexes of edited checkpoints. A choice of ours.
_STALE = 0.05
# Tensors and layers that a message names.
_SOME = 3


def refuse_other_kinds(directory: Path) -> None:
    """Refuse a directory that is no model of vLLM's, and say what it is.

    Raises:
        CheckFailed: It is an adapter, a diffusion pipeline, or in another program's form.
    """
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise CheckFailed(
            f"{directory} cannot be read", why=str(error.strerror), fix=f"ls -ld {directory}"
        ) from error
    weights = [name for name in names if name.endswith((".safetensors", ".bin", ".pt"))]
    base = [name for name in weights if not name.startswith("adapter_model")]
    if "adapter_config.json" in names and not base:
        raise CheckFailed(
            f"{directory} is a LoRA adapter, not a model",
            why="it has adapter_config.json and no weights of a base model",
            fix="serve the base with it: python3 orchestrator.py serve BASE -- --enable-lora "
            f"--lora-modules NAME={directory}",
        )
    if "model_index.json" in names and "config.json" not in names:
        raise CheckFailed(
            f"{directory} is a diffusion pipeline, not a language model",
            why="it has model_index.json and no config.json", fix="name a language model",
        )  # fmt: skip
    if base:
        return
    for pattern, what, fix in _OTHERS:
        found = sorted(directory.glob(pattern))
        if found:
            raise CheckFailed(
                f"the weights in {directory} are {what}",
                why=f"it has {found[0].name}, and no .safetensors, .bin or .pt file", fix=fix,
            )  # fmt: skip


def refuse_without_tokenizer(directory: Path, given: Given) -> None:
    """Refuse a model that has no tokenizer, where none is named either.

    Raises:
        CheckFailed: There is none.
    """
    if given.has("--tokenizer") or given.has("--skip-tokenizer-init"):
        return
    if any(next(directory.glob(pattern), None) for pattern in _TOKENIZERS):
        return
    raise CheckFailed(
        f"{directory} has no tokenizer",
        why="there is no tokenizer.json, tokenizer.model, vocabulary or the like in it",
        fix="download the model again, or name the directory that has it: -- --tokenizer DIR",
    )


def refuse_gaps(directory: Path, names: Collection[str], count: int) -> None:
    """Refuse weights that lack whole layers of the language model.

    Args:
        directory: The model's.
        names: Of all its tensors.
        count: Layers by config.json.

    Raises:
        CheckFailed: Some layers are there, and others are not.
    """
    there = {int(found[1]) for name in names if (found := _LAYER.match(name))}
    missing = sorted(set(range(count)) - there)
    if there and missing:
        raise CheckFailed(
            f"the weights in {directory} lack {counted(len(missing), 'layer')} of {count}",
            why=f"no tensor of layer {_some(str(number) for number in missing)}, by config.json's "
            "num_hidden_layers",
            fix="finish the download: the same command goes on where it stopped",
        )


def refuse_unlike_index(index: Path, mapped: Mapping[str, object], names: Collection[str]) -> None:
    """Refuse files that lack many tensors of their index.

    Args:
        index: The index's file.
        mapped: Its ``weight_map``.
        names: Of all tensors in the files.

    Raises:
        CheckFailed: Some are lacking.
    """
    missing = [name for name in mapped if name not in names]
    if len(missing) > _STALE * len(mapped):
        raise CheckFailed(
            f"the files beside {index} have {len(mapped) - len(missing)} of "
            f"{counted(len(mapped), 'tensor')}",
            why=f"missing: {_some(missing)}",
            fix="download the weights again: files and index are of different models",
        )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_SOME]) + (" …" if len(listed) > _SOME else "")
