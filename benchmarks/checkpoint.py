"""Checkpoints of the size and the shapes of a real model, with random contents.

The format is safetensors: eight bytes with the length of a JSON header, the header, then the
tensors one after another (https://huggingface.co/docs/safetensors, "Format"). It is written by
hand because the library wants a whole file in memory, and these are larger than that.
"""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

Shapes = Mapping[str, tuple[int, ...]]

BLOCK = 1 << 20
"""Bytes made and written at a time."""

_BFLOAT16 = 2


def gemma4_e2b() -> dict[str, tuple[int, ...]]:
    """The tensors of Gemma 4 E2B's language model, and a stand-in for its vision and audio towers.

    Sizes: transformers, ``src/transformers/models/gemma4/convert_gemma4_weights.py``, ``_VARIANTS``
    (0f3f0632a387) and ``configuration_gemma4.py``. The names are like those of the checkpoint, not
    read from it. The towers' tensors have one plain shape; their number brings the sum to 9.5 GiB,
    which is what a field report gives for the weights.
    """
    hidden, per_layer, vocabulary, layers, shared = 1536, 256, 262_144, 35, 20
    shapes: dict[str, tuple[int, ...]] = {
        "language_model.embed_tokens.weight": (vocabulary, hidden),
        "language_model.embed_tokens_per_layer.weight": (vocabulary, layers * per_layer),
        "language_model.per_layer_model_projection.weight": (layers * per_layer, hidden),
    }
    for number in range(layers):
        name = f"language_model.layers.{number}"
        head = 512 if number % 5 == 4 else 256
        inner = 4 * hidden * (2 if number >= layers - shared else 1)
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (8 * head, hidden),
            f"{name}.self_attn.k_proj.weight": (head, hidden),
            f"{name}.self_attn.v_proj.weight": (head, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, 8 * head),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
            f"{name}.per_layer_input_gate.weight": (per_layer, hidden),
            f"{name}.per_layer_projection.weight": (hidden, per_layer),
            f"{name}.input_layernorm.weight": (hidden,),
        }
    rest = int(9.5 * 2**30) // _BFLOAT16 - sum(prod(shape) for shape in shapes.values())
    tower = (3072, 768)
    for number in range(rest // prod(tower)):
        shapes[f"towers.{number}.weight"] = tower
    return shapes


def split(shapes: Shapes, shards: int) -> list[dict[str, tuple[int, ...]]]:
    """Deal tensors to files in their order, each but the last as soon as it has its share."""
    share = sum(prod(shape) for shape in shapes.values()) / shards
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        filled = sum(prod(one) for one in parts[-1].values())
        if filled and filled + prod(shape) > share and len(parts) < shards:
            parts.append({})
        parts[-1][name] = shape
    return parts


def size(shapes: Shapes) -> int:
    """Bytes of the tensors, as bfloat16."""
    return _BFLOAT16 * sum(prod(shape) for shape in shapes.values())


def write(directory: Path, shapes: Shapes, *, shards: int = 1, seed: int = 0) -> list[Path]:
    """Write a checkpoint of bfloat16 tensors, and what it must read as.

    Args:
        directory: Where; it is made. ``sums.json`` in it has the CRC-32 of each tensor's bytes.
        shapes: The tensors.
        shards: Number of files.
        seed: Of the contents; the same seed gives the same bytes.

    Returns:
        The files.

    Raises:
        OSError: No room, or no right to write.
    """
    directory.mkdir(parents=True, exist_ok=True)
    source = random.Random(seed)
    sums: dict[str, int] = {}
    paths = []
    parts = split(shapes, shards)
    for number, part in enumerate(parts, 1):
        path = directory / (
            "model.safetensors"
            if len(parts) == 1
            else f"model-{number:05}-of-{len(parts):05}.safetensors"
        )
        with path.open("wb") as file:
            file.write(header(part))
            for name, shape in part.items():
                crc = 0
                for block in _blocks(source, _BFLOAT16 * prod(shape)):
                    file.write(block)
                    crc = zlib.crc32(block, crc)
                sums[name] = crc
            file.flush()
            os.fsync(file.fileno())  # dirty pages cannot be dropped from the page cache
        paths.append(path)
    (directory / "sums.json").write_text(json.dumps(sums))
    return paths


def write_sparse(path: Path, count: int) -> None:
    """Write a file of one tensor of ``count`` bytes that takes no room on the disk."""
    top = header({"weight": (count // _BFLOAT16,)})
    with path.open("wb") as file:
        file.write(top)
        file.truncate(len(top) + count // _BFLOAT16 * _BFLOAT16)


def header(shapes: Shapes) -> bytes:
    """The first bytes of a file with these tensors: length and JSON, padded to eight bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + _BFLOAT16 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _blocks(source: random.Random, count: int) -> Iterator[bytes]:
    while count > 0:
        yield source.randbytes(min(BLOCK, count))
        count -= BLOCK
