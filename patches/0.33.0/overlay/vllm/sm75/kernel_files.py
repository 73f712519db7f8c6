# SPDX-License-Identifier: Apache-2.0
"""The files of the package ``vllm-sm75-kernels``, for ``vllm.sm75.kernels``.

An index says for each variant what it was compiled for, and where its machine code and its PTX are.
"""

import hashlib
import importlib.util
import json
import operator
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE = "vllm_sm75_kernels"
INDEX = "index.json"
SCHEMA = 1

# struct's letters for Triton's types of parameters.
_LETTERS = {"i1": "b", "i8": "b", "i32": "i", "i64": "q", "fp32": "f"}
_ABSENT = object()
# Kinds of launches that are remembered; a server makes some tens.
_MOST_KNOWN = 4096


def element(value: Any) -> str | None:
    """The name of a tensor's element type; None for None, "" for a number."""
    if value is None or value is _ABSENT:
        return None if value is None else "absent"
    return "" if isinstance(value, int | float) else str(value.dtype).rpartition(".")[2]


def _kind(value: Any) -> Any:
    return None if value is None else getattr(value, "dtype", "")


def plain(value: Any) -> Any:
    """A constant as JSON has it; members of enumerations are their number."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def picker(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Takes the arguments of these names; KeyError where one is missing."""
    if len(names) == 1:
        return lambda arguments: (arguments[names[0]],)
    return operator.itemgetter(*names) if names else lambda _: ()


class Unusable(Exception):
    """The package cannot serve here; its text says why."""


class Variant:
    """One kernel of the package.

    Attributes:
        fact: Its entry in the index.
        queries: Mean query tokens a request from which it is the better one.
    """

    def __init__(self, fact: Mapping[str, Any]) -> None:
        self.fact = fact
        self.queries: float = fact["queries"]
        self.warps: int = fact["warps"]
        self.shared: int = fact["shared"]
        self.block_q: int = fact["launch"].get("BLOCK_Q", 0)
        self.tile: int = fact["launch"].get("TILE_SIZE", 0)
        self.names = tuple(name for name, _ in fact["parameters"])
        kinds = [kind for _, kind in fact["parameters"]]
        # What Triton adds of its own behind the kernel's parameters.
        self.extra = (0,) * fact["extra"]
        letters = ["Q" if kind.startswith("*") else _LETTERS[kind] for kind in kinds]
        self.pointers = tuple(kind.startswith("*") for kind in kinds)
        self.format = "".join(letters) + "Q" * fact["extra"]
        self.aligned = [place for place, name in enumerate(self.names) if name in fact["aligned"]]
        self.pick = picker(self.names)
        self.offsets = []
        for end in range(1, len(self.format) + 1):
            size = struct.calcsize(self.format[end - 1])
            self.offsets.append(struct.calcsize(self.format[:end]) - size)
        self.pack = struct.Struct(self.format)


class Package:
    """The installed kernels.

    Args:
        home: Directory with the index and the two files of code.

    Raises:
        Unusable: It is damaged, or of another version than this file.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        try:
            index = json.loads((home / INDEX).read_text(encoding="utf-8"))
            if index["schema"] != SCHEMA:
                raise Unusable(f"its schema is {index['schema']}, this vLLM reads {SCHEMA}")
            self.sources: dict[str, str] = index["sources"]
            self.files: dict[str, dict[str, Any]] = index["files"]
            self.kernels: dict[str, dict[str, list[str]]] = index["kernels"]
            self.variants: dict[str, dict[tuple[Any, ...], list[Variant]]] = {
                name: {} for name in self.kernels
            }
            for fact in index["variants"]:
                key = tuple(fact["key"])
                self.variants[fact["kernel"]].setdefault(key, []).append(Variant(fact))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unusable(f"{home}: {type(error).__name__}: {error}") from None
        self.pickers = {
            name: (picker(about["constants"]), picker(about["tensors"]))
            for name, about in self.kernels.items()
        }
        self.known: dict[tuple[Any, ...], list[Variant]] = {}
        for found in self.variants.values():
            for variants in found.values():
                variants.sort(key=lambda one: -one.queries)

    def check(self, kind: str) -> None:
        """See that the file of all "cubin"s or of all "ptx"s is what the index was made with.

        Raises:
            Unusable: It is not.
        """
        path = self.home / self.files[kind]["name"]
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise Unusable(f"{path}: {error.strerror}") from None
        if found != self.files[kind]["sha256"]:
            raise Unusable(f"{path} is damaged")

    def code(self, fact: Mapping[str, Any], kind: str) -> bytes:
        """A variant's "cubin" or "ptx".

        Raises:
            Unusable: The file is not what the index was made with.
        """
        offset, size, digest = fact[kind]
        with open(self.home / self.files[kind]["name"], "rb") as file:
            file.seek(offset)
            data = file.read(size)
        if hashlib.sha256(data).hexdigest() != digest:
            raise Unusable(f"{self.home / self.files[kind]['name']} is damaged")
        return zlib.decompress(data)

    def key(self, kernel: str, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """What decides which variant a launch needs: constants, then types of tensors."""
        about = self.kernels[kernel]
        # What is left to the kernel's default is of no variant.
        constants = [plain(arguments.get(name, _ABSENT)) for name in about["constants"]]
        return (*constants, *(element(arguments.get(name, _ABSENT)) for name in about["tensors"]))

    def find(self, kernel: str, arguments: Mapping[str, Any]) -> Variant | None:
        """The variant for a launch, or None."""
        pickers = self.pickers.get(kernel)
        if pickers is None:
            return None
        # A launch like an earlier one is known by what it was given, without names being made.
        try:
            given = (kernel, pickers[0](arguments), tuple(map(_kind, pickers[1](arguments))))
        except KeyError:
            return None
        found = self.known.get(given)
        if found is None:
            found = self.variants[kernel].get(self.key(kernel, arguments), [])
            if len(self.known) < _MOST_KNOWN:
                self.known[given] = found
        if not found:
            return None
        if len(found) > 1 and "num_seqs" in arguments:
            mean = arguments["query_ptr"].shape[0] / arguments["num_seqs"]
            # The variant for few queries may be the one that is not proved, and so not packed.
            return next((one for one in found if one.queries <= mean), found[-1])
        return found[-1]


def installed() -> Package:
    """The package of this environment, made for the vLLM that is here.

    Raises:
        Unusable: There is none, or it is of other sources.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.origin:
        raise Unusable("the package vllm-sm75-kernels is not installed")
    package = Package(Path(spec.origin).parent)
    for module, digest in package.sources.items():
        found = importlib.util.find_spec(module)
        if found is None or not found.origin:
            raise Unusable(f"there is no {module}, which its kernels were made of")
        if hashlib.sha256(Path(found.origin).read_bytes()).hexdigest() != digest:
            raise Unusable(f"its kernels were made of another {module}")
    return package
