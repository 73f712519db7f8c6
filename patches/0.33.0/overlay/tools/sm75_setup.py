"""vllm-sm75: which extensions setup.py lists when Turing alone is built for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

# The extensions that have code for sm_75 or none for a GPU at all.
KEPT = frozenset(
    {
        "vllm._C_stable_libtorch",
        "vllm._moe_C_stable_libtorch",
        "vllm.cumem_allocator",
        "vllm.spinloop",
        "vllm.fs_io_C",
    }
)


class _Named(Protocol):
    name: str


Extension = TypeVar("Extension", bound=_Named)


def turing_only(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether TORCH_CUDA_ARCH_LIST asks for 7.5 (torch also calls it Turing) and nothing else."""
    wanted = [entry for entry in re.split(r"[;, ]+", environ.get("TORCH_CUDA_ARCH_LIST", "")) if entry]
    return bool(wanted) and all(re.fullmatch(r"(7\.5|Turing)(\+PTX)?", entry) for entry in wanted)


def keep(
    extensions: Sequence[Extension], environ: Mapping[str, str] = os.environ
) -> list[Extension]:
    """Leave out the extensions that have no code for sm_75, for a Turing-only build."""
    if not turing_only(environ):
        return list(extensions)
    return [extension for extension in extensions if extension.name in KEPT]
