"""How large a model's weights are, on disk and on the card. Only headers are read."""

from __future__ import annotations

import math
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm75 import jsontext
from sm75.errors import CheckFailed
from sm75.serve import contents

# The longest header that safetensors itself reads, in bytes (safetensors, src/tensor.rs,
# MAX_HEADER_SIZE).
_MOST_HEADER = 100_000_000
# Bits of an element by its name in a header (safetensors, src/tensor.rs, Dtype).
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# What becomes the model's own type when it is loaded: vLLM makes the parameters in that type and
# copies into them (vllm/model_executor/model_loader/weight_utils.py, default_weight_loader).
_CONVERTED = ("F16", "BF16", "F32", "F64")
# The linear layers of the checkpoints of transformers, by name. What else is linear to vLLM is
# counted as it is: too much is the safe side.
_LINEAR = re.compile(r"_proj(\.weight)?$|\.experts\.")
_INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model's weights.

    Attributes:
        files: What vLLM would load.
        disk_bytes: Their size.
        elements: Elements by type, of safetensors files without tied copies; empty: unknown.
        tied_bytes: Bytes of what is in the files and not loaded.
        linear: Of the elements, those that ``--quantization fp8_per_tensor`` quantizes while they
            are loaded: projections and experts.
    """

    files: tuple[Path, ...]
    disk_bytes: int
    elements: Mapping[str, int] = field(default_factory=dict)
    tied_bytes: int = 0
    linear: Mapping[str, int] = field(default_factory=dict)

    def card_bytes(self, element_bytes: int = 2, linear_bytes: int | None = None) -> int:
        """Bytes on the card.

        Args:
            element_bytes: Of the type that the model is run in; 2 for float16.
            linear_bytes: Of what linear layers are quantized to while loading; nothing: not so.
        """
        if not self.elements:
            return self.disk_bytes
        whole = sum(
            count * element_bytes if name in _CONVERTED else math.ceil(count * _BITS[name] / 8)
            for name, count in self.elements.items()
        )
        if linear_bytes is None:
            return whole
        return whole - sum(self.linear.values()) * (element_bytes - linear_bytes)


def measure(directory: Path, *, tied: bool = False, layers: int = 0) -> Weights | None:
    """Measure a model's weights.

    Args:
        directory: The model's directory.
        tied: Whether the output layer is the embedding, so that a copy of it is not loaded.
        layers: Those of the language model, of which each must be there; 0: not looked at.

    Returns:
        Nothing where there are no weights.

    Raises:
        CheckFailed: They are incomplete or damaged.
    """
    files, mapped = _listed(directory)
    if not files:
        return None
    size = sum(file.stat().st_size for file in files)
    if any(file.suffix != ".safetensors" for file in files):
        for file in files:
            _pickled(file)
        return Weights(files=files, disk_bytes=size)
    elements: Counter[str] = Counter()
    linear: Counter[str] = Counter()
    skipped = 0
    names = set[str]()
    for file in files:
        for name, dtype, count in _tensors(file):
            names.add(name)
            if tied and name.endswith("lm_head.weight"):
                skipped += count * _BITS[dtype] // 8
            else:
                elements[dtype] += count
                if dtype in _CONVERTED and _LINEAR.search(name):
                    linear[dtype] += count
    contents.refuse_unlike_index(directory / _INDEX, mapped, names)
    contents.refuse_gaps(directory, names, layers)
    return Weights(
        files=files, disk_bytes=size, elements=elements, tied_bytes=skipped, linear=linear
    )


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The files that vLLM would load; see :func:`measure` for the errors."""
    return _listed(directory)[0]


def _listed(directory: Path) -> tuple[tuple[Path, ...], dict[str, object]]:
    """The files that vLLM would load: safetensors of the index, else all, else other kinds; and the
    index, tensors by name, where it counts.

    Raises:
        CheckFailed: The index names files that are not there, or cannot be read.
    """
    index = directory / _INDEX
    if index.exists():
        try:
            mapped: dict[str, object] = jsontext.loads(index.read_text(encoding="utf-8"))[
                "weight_map"
            ]
            names = sorted(set(map(str, mapped.values())))
            files = [directory / name for name in names if Path(name).name == name]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckFailed(
                f"{index} cannot be read", why=str(error), fix="download the model again"
            ) from error
        missing = [file.name for file in files if not file.exists()]
        if missing or not files:
            raise CheckFailed(
                f"{directory} has {len(files) - len(missing)} of {len(names)} files of its weights",
                why="missing: " + ", ".join(missing[:3]) + (" …" if len(missing) > 3 else ""),
                fix="finish the download: the same command goes on where it stopped",
            )
        return tuple(files), mapped
    # The kinds of default_loader.py, _prepare_weights, in its order.
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        found = sorted(directory.glob(pattern))
        # Mistral's own file beside Hugging Face's has the same weights.
        own = [file for file in found if not file.name.startswith("consolidated")]
        # Trainer states are no weights (weight_utils.py, filter_files_not_needed_for_inference).
        own = [file for file in own or found if not file.name.startswith(("training_", "optim"))]
        if own:
            return tuple(own), {}
    return (), {}


def _tensors(file: Path) -> Iterator[tuple[str, str, int]]:
    """Name, type and number of elements of each tensor."""
    header, start = _header(file)
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = entry["dtype"], [int(side) for side in entry["shape"]]
            end = max(end, int(entry["data_offsets"][1]))
            known = _BITS.get(dtype)
        except (LookupError, TypeError, ValueError) as error:
            raise _damaged(file, f"its entry of {name} is malformed") from error
        if known is None:
            raise _damaged(file, f"{name} has the unknown type {dtype}")
        yield name, dtype, math.prod(shape)
    size = file.stat().st_size
    if size < start + end:
        raise _damaged(file, f"it has {size:,} bytes, its header speaks of {start + end:,}")


def _pickled(file: Path) -> None:
    """Look at a file of torch.save: a zip archive since torch 1.6, which ends with its list; a
    pickle of protocol 2 or later before (torch/serialization.py)."""
    try:
        if not file.is_file():
            raise _damaged(file, "it is no file")
        with file.open("rb") as stream:
            head = stream.read(len(_POINTER))
        whole = not head.startswith(b"PK") or zipfile.is_zipfile(file)
    except OSError as error:
        raise _damaged(file, str(error.strerror)) from error
    if head == _POINTER:
        raise _damaged(file, "it is a Git LFS pointer, not the file: git lfs pull")
    if not head or not whole:
        raise _damaged(file, "it is empty" if not head else "it is cut short")
    if not head.startswith((b"PK", b"\x80")):
        raise _damaged(file, "it is neither a zip archive nor a pickle, as torch.save writes them")


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the data begins."""
    try:
        if not file.is_file():
            raise _damaged(file, "it is no file")
        with file.open("rb") as stream:
            head = stream.read(8)
            if head + stream.read(len(_POINTER) - 8) == _POINTER:
                raise _damaged(file, "it is a Git LFS pointer, not the file: git lfs pull")
            stream.seek(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else _MOST_HEADER + 1
            if length > _MOST_HEADER:
                raise _damaged(file, "it has no safetensors header")
            header = jsontext.loads(stream.read(length))
    except OSError as error:
        raise _damaged(file, str(error.strerror)) from error
    except ValueError as error:
        raise _damaged(file, "its header is no JSON") from error
    if not isinstance(header, dict):
        raise _damaged(file, "its header is no table")
    return header, 8 + length


def _damaged(file: Path, why: str) -> CheckFailed:
    return CheckFailed(f"{file} is damaged", why=why, fix="download the file again")
