"""The vllm that kernels were compiled for: its sources, and which of its kernels have a dot."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sm75.aot.adapt import is_kernel
from sm75.archives import walk


def read(beside: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The sources of modules, as an installed vllm has them; what is not there is left out.

    Args:
        beside: vllm's package, or the site-packages that it is in.
        names: The modules.

    Raises:
        ChannelError: The package is damaged.
    """
    if beside.is_dir():
        found = {name: beside / _path(name) for name in names if _is_module(name)}
        return {name: path.read_bytes() for name, path in found.items() if path.is_file()}
    places = {_path(name): name for name in names if _is_module(name)}

    def place(member: str) -> str:
        return member.rpartition("site-packages/")[2]

    return {
        places[place(member.name)]: member.read()
        for member in walk(beside, want=lambda name: place(name) in places)
    }


def _path(name: str) -> str:
    return f"{name.replace('.', '/')}.py"


def _is_module(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def differing(sources: Mapping[str, str], modules: Mapping[str, bytes]) -> Iterator[str]:
    """Names of the sources of kernels that a vllm lacks or has otherwise.

    Args:
        sources: sha256 (hex) by module, as the kernels' index has them.
        modules: What :func:`read` found of the vllm.
    """
    for name, digest in sources.items():
        if name not in modules or hashlib.sha256(modules[name]).hexdigest() != digest:
            yield name


def with_dots(sources: Iterable[bytes]) -> set[str]:
    """Names of the Triton kernels that multiply matrices, themselves or by what they call.

    Args:
        sources: Modules, those that have what the kernels call among them.
    """
    calls: dict[str, set[str]] = {}
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and is_kernel(node):
                calls[node.name] = {
                    ast.unparse(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)
                }
    found = {name for name, made in calls.items() if made & {"tl.dot", "tl.dot_scaled"}}
    while more := {name for name, made in calls.items() if name not in found and made & found}:
        found |= more
    return found
