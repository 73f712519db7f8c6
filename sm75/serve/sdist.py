"""What a release of vLLM says of quantization, architectures, types and flags, from its sdist.

    python3 -m sm75.serve.sdist RELEASE     # writes sm75/serve/known/RELEASE.json

The sources are parsed, never run. ``tests/unit/test_serve_known.py`` reads each locked sdist again
and compares, and holds the sdist's sha256 against the lock: no table outlives its release.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm75.errors import LockError
from sm75.serve import sdistflags
from sm75.trees import SdistTree

HERE = Path(__file__).parent / "known"
_QUANT = "vllm/model_executor/layers/quantization/"
_REGISTRY = "vllm/model_executor/models/registry.py"
_MODEL = "vllm/config/model.py"
_ONLINE = "vllm/config/quantization.py"
# The check that came with the end of activation order in groups.
_ACT_ORDER = b"def normalize_and_validate_gptq_desc_act"
_MARLIN = "quantization/marlin/generate_kernels.py"
# The registry's own tables, by what they are for here.
_KINDS = {
    "generate": ("_TEXT_GENERATION_MODELS",),
    "multimodal": ("_MULTIMODAL_MODELS",),
    "transformers": ("_TRANSFORMERS_SUPPORTED_MODELS", "_TRANSFORMERS_BACKEND_MODELS"),
    "draft": ("_SPECULATIVE_DECODING_MODELS",),
    "pooling": ("_EMBEDDING_MODELS", "_LATE_INTERACTION_MODELS", "_REWARD_MODELS",
                "_TOKEN_CLASSIFICATION_MODELS", "_SEQUENCE_CLASSIFICATION_MODELS"),
}  # fmt: skip


class _Classes:
    """Classes by name, with what their methods return where that is plain."""

    def __init__(self) -> None:
        self._found: dict[str, ast.ClassDef] = {}

    def add(self, source: bytes) -> None:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                self._found.setdefault(node.name, node)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def heirs(self, ancestor: str) -> list[str]:
        """Names of the classes that come of another, near or far."""
        return [name for name in self._found if ancestor in self._line(name)]

    def _line(self, name: str) -> set[str]:
        node = self._found.get(name)
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)} if node else set()
        return bases.union(*(self._line(base) for base in bases - {name}))

    def returned(self, name: str, method: str) -> ast.expr | None:
        """What a method of a class, or of the first base that has it, returns."""
        node = self._found.get(name)
        if node is None:
            return None
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == method:
                last = [one for one in ast.walk(part) if isinstance(one, ast.Return)]
                return last[-1].value if last else None
        for base in node.bases:
            if isinstance(base, ast.Name) and (found := self.returned(base.id, method)):
                return found
        return None

    def capability(self, name: str) -> int | None:
        """The least compute capability that a class says, times ten."""
        said = self.returned(name, "get_min_capability")
        if isinstance(said, ast.Constant) and isinstance(said.value, int):
            return said.value
        if isinstance(said, ast.Call) and isinstance(said.func, ast.Attribute):
            other = said.func.value
            return self.capability(other.id) if isinstance(other, ast.Name) else None
        return None

    def types(self, name: str) -> list[str]:
        """The types of activations that it takes; empty where that is not plain."""
        said = self.returned(name, "get_supported_act_dtypes")
        if not isinstance(said, ast.List):
            return []
        names = [one.attr for one in said.elts if isinstance(one, ast.Attribute)]
        return sorted({"half": "float16"}.get(one, one) for one in names)


def read(sdist: Path) -> dict[str, Any]:
    """Read a release's sdist.

    Args:
        sdist: The archive. Its hash is the caller's business.

    Raises:
        LockError: The sources are built otherwise than this reader knows.
    """
    sources = {
        path: content
        for path, content in SdistTree(sdist).walk(".py")
        if path.startswith((_QUANT, "vllm/models/")) or path.endswith(_MARLIN)
        or path in (_REGISTRY, _MODEL, _ONLINE) or sdistflags.wanted(path)
    }  # fmt: skip
    try:
        classes = _Classes()
        for path, content in sources.items():
            if path.startswith(_QUANT):
                classes.add(content)
        methods, imported = _methods(sources[_QUANT + "__init__.py"])
        for folder, name in imported:
            _outside(classes, sources, folder, name)
        online = sorted(_table(sources[_ONLINE], "_ONLINE_SHORTHANDS"))
        marlin = next(text for path, text in sources.items() if path.endswith(_MARLIN))
        flags, inverse = sdistflags.read(sources)
        return {
            "methods": {
                name: _said(classes, kind)
                for name, kind in sorted({
                    **dict.fromkeys(online, "OnlineQuantizationConfig"), **methods}.items())
            },
            "deprecated": sorted(_strings(sources[_QUANT + "__init__.py"],
                                          "DEPRECATED_QUANTIZATION_METHODS")),
            "online": online,
            "schemes": {
                name: classes.capability(name)
                for name in sorted(classes.heirs("CompressedTensorsScheme")
                                   + classes.heirs("QuarkScheme"))
            },
            "gptq_bits": _keys(sources[_QUANT + "auto_gptq.py"], "AutoGPTQConfig", "TYPE_MAP"),
            "awq_bits": _keys(sources[_QUANT + "auto_awq.py"], "AutoAWQConfig", "TYPE_MAP"),
            "act_order": _ACT_ORDER not in sources[_QUANT + "utils/gptq_utils.py"],
            "marlin": _marlin(marlin),
            "architectures": {
                kind: sorted(name for table in tables
                             for name in _table(sources[_REGISTRY], table))
                for kind, tables in _KINDS.items()
            },
            "gone": _table(sources[_REGISTRY], "_PREVIOUSLY_SUPPORTED_MODELS"),
            "elsewhere": _table(sources[_REGISTRY], "_OOT_SUPPORTED_MODELS"),
            "suffixes": _suffixes(sources[_MODEL]),
            "not_in_float16": _table(sources[_MODEL], "_FLOAT16_NOT_SUPPORTED_MODELS"),
            "flags": flags,
            "inverse": inverse,
        }  # fmt: skip
    except (KeyError, StopIteration, SyntaxError) as error:
        raise LockError(
            f"{sdist.name} is not built as {Path(__file__).name} knows it",
            why=f"{type(error).__name__}: {error}",
            fix="look at what moved, and follow it there",
        ) from error


def _said(classes: _Classes, name: str) -> dict[str, Any]:
    least = classes.capability(name)
    if least is None:
        raise KeyError(f"get_min_capability of {name}")
    return {"class": name, "capability": least, "types": classes.types(name)}


def _methods(source: bytes) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Class by method, and the folder and name of those imported from elsewhere.

    Of a class that differs by platform the first branch counts, which is CUDA's.
    """
    function = next(
        node for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "get_quantization_config"
    )  # fmt: skip
    names: dict[str, str] = {}
    imported, found = [], dict[str, str]()
    for node in ast.walk(function):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names.setdefault(alias.asname or alias.name, alias.name)
                if (node.module or "").startswith("vllm.models."):
                    imported.append((str(node.module).replace(".", "/"), alias.name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if isinstance(node.value, ast.Name):
                names[node.target.id] = node.value.id
            elif isinstance(node.value, ast.Dict):
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Name):
                        found[str(key.value)] = value.id
    if not found:
        raise KeyError("method_to_config")

    def real(name: str) -> str:
        while name in names and names[name] != name:
            name = names[name]
        return name

    return {method: real(name) for method, name in found.items()}, imported


def _outside(classes: _Classes, sources: Mapping[str, bytes], folder: str, name: str) -> None:
    """Take a class in that lies somewhere below a folder."""
    if name in classes:
        return
    for path, content in sources.items():
        if path.startswith(folder + "/") and f"class {name}".encode() in content:
            classes.add(content)


def _assigned(source: bytes, name: str) -> ast.expr:
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else (
            [node.target] if isinstance(node, ast.AnnAssign) else [])  # fmt: skip
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            value = getattr(node, "value", None)
            if isinstance(value, ast.expr):
                return value
    raise KeyError(name)


def _table(source: bytes, name: str) -> dict[str, str]:
    """A dictionary's keys, with the values that are plain text."""
    value = _assigned(source, name)
    if not isinstance(value, ast.Dict):
        raise KeyError(name)
    return {
        str(key.value): str(of.value) if isinstance(of, ast.Constant) else ""
        for key, of in zip(value.keys, value.values, strict=True)
        if isinstance(key, ast.Constant)
    }


def _keys(source: bytes, name: str, table: str) -> list[Any]:
    """The keys of a dictionary in a class, where they are plain."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for part in node.body:
                if (isinstance(part, ast.Assign) and isinstance(part.value, ast.Dict)
                        and any(isinstance(one, ast.Name) and one.id == table
                                for one in part.targets)):  # fmt: skip
                    return [ast.literal_eval(key) for key in part.value.keys if key is not None]
    raise KeyError(f"{name}.{table}")


def _strings(source: bytes, name: str) -> list[str]:
    return [str(one) for one in ast.literal_eval(_assigned(source, name))]


def _suffixes(source: bytes) -> list[list[str]]:
    """Ends of an architecture's name, with the runner that vLLM takes for it."""
    return [[str(end), str(runner[0])] for end, runner in
            ast.literal_eval(_assigned(source, "_SUFFIX_TO_DEFAULTS"))]  # fmt: skip


def _marlin(source: bytes) -> list[list[str]]:
    """Activation and weight types of Marlin's kernels for 7.5, with the scales' type where it is
    another: those whose activations are float16 or int8 and whose output is float16, as
    generate_new_kernels chooses.
    """
    found: set[tuple[str, str, str]] = set()
    value = _assigned(source, "QUANT_CONFIGS")
    for entry in value.elts if isinstance(value, ast.List) else ():
        if not isinstance(entry, ast.Dict):
            continue
        row = {
            str(key.value): ast.literal_eval(of)
            for key, of in zip(entry.keys, entry.values, strict=True)
            if isinstance(key, ast.Constant) and str(key.value).endswith("_type")
        }
        both = ["kFloat16", "kBFloat16"]
        if "kFloat16" in row.get("c_type", both):
            found |= {(str(a), str(row["b_type"]), str(row.get("s_type", "")))
                      for a in row.get("a_type", both) if a in ("kFloat16", "kS8")}  # fmt: skip
    return sorted(map(list, found))


def main() -> None:
    """Write a locked release's table."""
    from sm75.atomic import write_bytes
    from sm75.lockfile import load_release
    from sm75.store import Store, default_root

    root = Path(__file__).parents[2]
    lock = load_release(root, sys.argv[1])
    source = next(one for one in lock.artifacts if one.id == "vllm-sdist")
    table = {
        "source": {"sdist": source.filename, "sha256": source.sha256},
        **read(Store(default_root()).get(source)),
    }
    write_bytes(HERE / f"{lock.vllm}.json", dump(table).encode())
    print(HERE / f"{lock.vllm}.json")


def dump(table: Mapping[str, Any]) -> str:
    """The table as the file has it."""
    return json.dumps(table, indent=1) + "\n"


if __name__ == "__main__":
    main()
