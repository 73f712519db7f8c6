# SPDX-License-Identifier: Apache-2.0
"""The files of the package ``vllm-sm75-kernels``, for ``vllm.sm75.kernels``.

An index says for each variant what it was compiled for, and where its machine code and its PTX are.
"""

import hashlib
import importlib.util
import itertools
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
FILES = {"cubin": "cubins.bin", "ptx": "ptx.bin"}

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


def _checked(fact: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry, if a launch can be made of it.

    Raises:
        ValueError: It has a figure that no launch can have.
    """
    for name, most in (("warps", 32), ("shared", 65_536), ("extra", 8)):
        if type(fact[name]) is not int or not (name == "warps") <= fact[name] <= most:
            raise ValueError(f"a variant with {name} {fact[name]!r}")
    numbers = [*fact["launch"].values(), *fact["cubin"][:2], *fact["ptx"][:2]]
    if any(type(one) is not int or not 0 <= one < 2**31 for one in numbers):
        raise ValueError("a variant with numbers that are none")
    names = [fact["entry"], fact["cubin"][2], fact["ptx"][2], *itertools.chain(*fact["parameters"])]
    if not all(type(one) is str and one.isascii() for one in names):
        raise ValueError("a variant with names that are none")
    return fact


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
        self.sizes = []
        for end in range(1, len(self.format) + 1):
            self.sizes.append(struct.calcsize(self.format[end - 1]))
            self.offsets.append(struct.calcsize(self.format[:end]) - self.sizes[-1])
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
                self.variants[fact["kernel"]].setdefault(key, []).append(Variant(_checked(fact)))
            self.pickers = {
                name: (picker(about["constants"]), picker(about["tensors"]))
                for name, about in self.kernels.items()
            }
            for found in self.variants.values():
                for variants in found.values():
                    variants.sort(key=lambda one: -one.queries)
            names = [one for pair in self.sources.items() for one in pair]
            for about in self.kernels.values():
                names += [*about["constants"], *about["tensors"]]
            if any(type(one) is not str for one in names):
                raise ValueError("names that are none")
            if {kind: one["name"] for kind, one in self.files.items()} != FILES:
                raise ValueError("it names other files")
        except Unusable:
            raise
        except Exception as error:  # a damaged index can do anything; the JIT serves
            raise Unusable(f"{home}: {type(error).__name__}: {str(error)[:200]}") from None
        self.known: dict[tuple[Any, ...], list[Variant]] = {}

    def check(self, kind: str) -> None:
        """See that the file of all "cubin"s or of all "ptx"s is what the index was made with.

        And that every variant's piece of it can be unpacked, so that no later launch finds out.

        Raises:
            Unusable: It is not.
        """
        path = self.home / self.files[kind]["name"]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise Unusable(f"{path}: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != self.files[kind].get("sha256"):
            raise Unusable(f"{path} is damaged")
        every = itertools.chain(*(found.values() for found in self.variants.values()))
        for variant in itertools.chain(*every):
            offset, size, digest = variant.fact[kind]
            self._unpacked(data[offset : offset + size], digest, kind)

    def code(self, fact: Mapping[str, Any], kind: str) -> bytes:
        """A variant's "cubin" or "ptx".

        Raises:
            Unusable: The file is not what the index was made with.
        """
        offset, size, digest = fact[kind]
        with open(self.home / self.files[kind]["name"], "rb") as file:
            file.seek(offset)
            data = file.read(size)
        return self._unpacked(data, digest, kind)

    def _unpacked(self, data: bytes, digest: str, kind: str) -> bytes:
        try:
            if hashlib.sha256(data).hexdigest() == digest:
                return zlib.decompress(data)
        except zlib.error:
            pass
        raise Unusable(f"{self.home / self.files[kind]['name']} is damaged")

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
    spec = _spec(PACKAGE)
    if spec is None or not spec.origin:
        raise Unusable("the package vllm-sm75-kernels is not installed")
    package = Package(Path(spec.origin).parent)
    for module, digest in package.sources.items():
        found = _spec(module)
        if found is None or not found.origin or not Path(found.origin).is_file():
            raise Unusable(f"there is no {module}, which its kernels were made of")
        if hashlib.sha256(Path(found.origin).read_bytes()).hexdigest() != digest:
            raise Unusable(f"its kernels were made of another {module}")
    return package


def _spec(module: str) -> Any:
    """Where a module is; None where there is none, its parents not either."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
