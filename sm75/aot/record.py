"""Which launches of the manifest's kernels the wrappers make, over the model table.

    python -m sm75.aot.record TREE < manifest as JSON    # a launch a line

Runs vLLM's own wrappers of a patched tree among stand-ins, once a process; needs neither torch nor
Triton. A launch is printed as the package's launcher sees it, so that what is compiled here and
what is looked up there are made by the same code.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sm75.smem import faketorch as torch
from sm75.smem import faketriton, inputs, standins
from sm75.smem.cases import ATTENTION, ENCODER, FILES, KV_INTERFACE, OURS, OVERLAY
from sm75.smem.models import IMAGES, TABLE, Layer, block_sizes
from sm75.words import counted

HELPERS = ATTENTION.replace("unified_attention", "attention_helpers")
MODULES = (ATTENTION, HELPERS, KV_INTERFACE, ENCODER, *OVERLAY)
# The capability that the wrappers are told.
CAPABILITY = (7, 5)
_ALIGNMENT = 16
_ELEMENTS = {"float16": "fp16", "float32": "fp32", "int8": "i8", "int32": "i32", "int64": "i64",
             "uint8": "u8", "bool": "i1"}  # fmt: skip


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Calls of the wrappers, by name: each kind of layer once, each way through the kernel."""
    seen = set()
    for model in TABLE:
        for layer, block in block_sizes(model).items():
            for cache in ("auto", "int8"):
                # Pages of INT8 hold scales as well; the factor is taken to be the same.
                for queries, images in _ways(layer, cache):
                    key = (layer, block, cache, queries, images)
                    if key not in seen:
                        seen.add(key)
                        name = f"{model.name}, {layer.name}, {cache}, {queries[0]} queries"
                        name += f", {counted(images, 'image')}" if images else ""
                        yield name, _attention(layer, queries, cache, block, images)
    for head in sorted({model.vision_head for model in TABLE if model.vision_head}):
        yield f"encoder h{head}", _encoder(head)


def _ways(layer: Layer, cache: str) -> Iterator[tuple[tuple[int, ...], int]]:
    # Queries of each request, and images. With images there is no split KV, so one call does.
    yield (512,) * 4, 0
    yield (1,) * 4, 0
    if layer.mm_prefix and cache == "auto":
        yield from (((512,) * 4, images) for images in range(1, IMAGES + 1))


def _attention(
    layer: Layer, queries: Sequence[int], cache: str, block: int, images: int
) -> Callable[[], None]:
    def call() -> None:
        modes = importlib.import_module(KV_INTERFACE).KVQuantMode
        made = inputs.attention(
            torch, layer, queries, cache=cache, block=block, prefix=images, softcap=layer.softcap
        )
        importlib.import_module(ATTENTION).unified_attention(**made.arguments(modes))

    return call


def _encoder(head: int) -> Callable[[], None]:
    def call() -> None:
        q = torch.empty(2048, 8, head, dtype=torch.float16)
        lengths = torch.empty(4, dtype=torch.int32)
        importlib.import_module(ENCODER).context_attention_fwd(
            q=q, k=q, v=q, o=q, b_start_loc=lengths, b_seq_len=lengths, max_input_len=512,
            is_causal=False, softmax_scale=0.1, sliding_window_q=-1, sliding_window_k=-1,
        )  # fmt: skip

    return call


def describe(
    kernel: faketriton.Kernel, arguments: Mapping[str, Any], about: Mapping[str, Any], ours: Any
) -> dict[str, Any]:
    """A launch by what it is compiled for.

    Args:
        kernel: The function.
        arguments: As the wrapper passes them.
        about: The kernel in the manifest.
        ours: The package's ``vllm.sm75.kernel_files``.
    """
    constants: dict[str, Any] = {}
    tensors: dict[str, str | None] = {}
    parameters: list[tuple[str, str]] = []
    aligned = []
    for name, parameter in kernel.signature.parameters.items():
        if name not in arguments:
            continue  # its default
        value = arguments[name]
        note = str(parameter.annotation)
        if "constexpr" in note:
            constants[name] = ours.plain(value)
            continue
        if isinstance(value, torch.Tensor) or value is None:
            tensors[name] = ours.element(value)
            if value is None:
                continue
            kind, number = f"*{_ELEMENTS[tensors[name] or '']}", value.data_ptr()
        elif name in about["floats"]:
            kind, number = "fp32", 1
        elif isinstance(value, int):
            kind, number = _integer(name, note), value
        else:
            raise TypeError(f"{kernel.__name__}: {name} is a {type(value).__name__}")
        parameters.append((name, kind))
        if name not in _BY_BATCH and kind in _WIDE and number and number % _ALIGNMENT == 0:
            aligned.append(name)
    return {
        "kernel": kernel.__name__, "constants": constants, "tensors": tensors,
        "parameters": parameters, "aligned": aligned,
    }  # fmt: skip


# Hang on the batch and on the longest prompt that a server takes.
_BY_BATCH = ("num_seqs", "block_table_stride", "qq_bias_stride_0")
# What wide loads and stores are made of: data, and the steps through it.
_WIDE = ("*fp16", "*fp32", "*i8", "i64")


def _integer(name: str, note: str) -> str:
    # Annotated as Triton is told; a stride that is not (int | None) may be large, nothing else is.
    if "int64" in note or (name.startswith("stride") and "int32" not in note):
        return "i64"
    return "i32"


class Recorder:
    """Stands in the place of the package's session."""

    def __init__(self, kernels: Mapping[str, Any], ours: Any) -> None:
        self.kernels, self.ours = kernels, ours
        self.found: list[dict[str, Any]] = []

    def __call__(self, kernel: Any) -> Any:
        recorder = self

        class Site:
            def __getitem__(self, grid: Any) -> Callable[..., None]:
                def launch(*given: Any, **named: Any) -> None:
                    everything = dict(zip(kernel.arg_names, given, strict=False)) | named
                    about = recorder.kernels.get(kernel.__name__)
                    if about is not None:
                        made = describe(kernel, everything, about, recorder.ours)
                        recorder.found.append(made | {"num_warps": named.get("num_warps", 4)})

                return launch

        return Site()


def main() -> None:
    """Print the launches."""
    kernels = {one["name"]: one for one in json.load(sys.stdin)["kernel"]}
    standins.install(Path(sys.argv[1]), MODULES, CAPABILITY, compiler=False)
    ours: Any = importlib.import_module(OURS)
    recorder = Recorder(kernels, importlib.import_module(FILES))
    ours.kernels = lambda: recorder
    for name, call in calls():
        recorder.found.clear()
        call()
        for launch in recorder.found:
            print(json.dumps({"call": name, **launch}))


if __name__ == "__main__":
    main()
