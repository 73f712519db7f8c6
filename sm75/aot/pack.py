"""The files of the package of kernels: an index, the machine code, and the PTX it was made from."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm75 import atomic
from sm75.aot.plan import Wanted

SCHEMA = 1
"""As ``vllm.sm75.kernels`` of the overlay reads it."""
INDEX, CUBINS, PTX = "index.json", "cubins.bin", "ptx.bin"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A variant as it was compiled.

    Attributes:
        wanted: What for.
        entry: Its name in the code.
        ptx: The text.
        cubin: Machine code for sm_75.
        shared: Bytes of shared memory a block.
        extra: Parameters of Triton's own behind the kernel's.
        registers: A thread's.
        spills: Bytes of spill stores a thread.
        mma: Tensor-core instructions in the machine code.
    """

    wanted: Wanted
    entry: str
    ptx: str
    cubin: bytes
    shared: int
    extra: int
    registers: int
    spills: int
    mma: int


def write(
    home: Path, compiled: Iterable[Compiled], about: Mapping[str, Any], sources: Mapping[str, str]
) -> None:
    """Write the package's data; the same for the same variants.

    Args:
        home: The directory of the Python package; made.
        compiled: The variants, in order.
        about: What they were made of and with; goes into the index.
        sources: sha256 of each module that they were made of, as it is installed.

    Raises:
        DiskError: It cannot be written.
    """
    home.mkdir(parents=True, exist_ok=True)
    blobs: dict[str, bytearray] = {"cubin": bytearray(), "ptx": bytearray()}
    places: dict[tuple[str, str], list[Any]] = {}
    kernels: dict[str, dict[str, list[str]]] = {}
    facts = []
    every = list(compiled)
    for one in every:
        known = kernels.setdefault(one.wanted.kernel, {"constants": [], "tensors": []})
        known["constants"] = list(one.wanted.names)
        known["tensors"] += [name for name in one.wanted.tensors if name not in known["tensors"]]
    for one in every:
        wanted, known = one.wanted, kernels[one.wanted.kernel]
        if list(wanted.names) != known["constants"]:
            raise ValueError(f"launches of {wanted.kernel} pass different constants")
        held: dict[str, Any] = {}
        for kind, data in (("cubin", one.cubin), ("ptx", one.ptx.encode())):
            packed = zlib.compress(data, 9)
            digest = hashlib.sha256(packed).hexdigest()
            if (kind, digest) not in places:
                places[kind, digest] = [len(blobs[kind]), len(packed), digest]
                blobs[kind] += packed
            held[kind] = places[kind, digest]
        passed = {name for name, _ in wanted.parameters}
        key = [wanted.constants[name] for name in known["constants"]]
        # What is no tensor in this variant and not None is a number.
        key += [
            wanted.tensors.get(name, "" if name in passed else None) for name in known["tensors"]
        ]
        facts.append(
            {
                "kernel": wanted.kernel, "key": key, "launch": dict(wanted.launch),
                "queries": wanted.queries, "warps": wanted.warps, "shared": one.shared,
                "entry": one.entry, "extra": one.extra,
                "parameters": [list(pair) for pair in wanted.parameters],
                "aligned": list(wanted.aligned), "registers": one.registers,
                "spills": one.spills, "mma": one.mma, **held,
            }
        )  # fmt: skip
    index = {
        "schema": SCHEMA, "about": dict(about), "sources": dict(sources),
        "files": {"cubin": _file(CUBINS, blobs["cubin"]), "ptx": _file(PTX, blobs["ptx"])},
        "kernels": kernels, "variants": facts,
    }  # fmt: skip
    atomic.write_bytes(home / CUBINS, bytes(blobs["cubin"]))
    atomic.write_bytes(home / PTX, bytes(blobs["ptx"]))
    atomic.write_bytes(home / INDEX, _lines(index).encode())
    atomic.write_bytes(home / "__init__.py", _INIT.encode())


_INIT = '"""Attention kernels for compute capability 7.5; vllm.sm75.kernels launches them."""\n'


def _file(name: str, data: bytes | bytearray) -> dict[str, Any]:
    return {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _lines(index: Mapping[str, Any]) -> str:
    """JSON with a line a variant, for people and for diffs."""
    rest = json.dumps({k: v for k, v in index.items() if k != "variants"}, indent=1, sort_keys=True)
    rows = ",\n".join(json.dumps(one, sort_keys=True) for one in index["variants"])
    return f'{rest[:-2]},\n "variants": [\n{rows}\n ]\n}}\n'
