"""What a generated ``build.ninja`` is going to compile: objects, targets, GPU architectures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sm75.errors import UsageError

# nvcc's --generate-code / -gencode in any quoting CMake uses.
_GENCODE = re.compile(r"arch=compute_\w+,code=\[?([^\]\s\"']+)")
# CMake's object directories: CMakeFiles/<target>.dir/<source>.o
_TARGET = re.compile(r"CMakeFiles/([^/]+)\.dir/")


@dataclass(frozen=True, kw_only=True)
class BuildGraph:
    """The compile and link statements of a build.

    Attributes:
        objects: Object files, in order.
        cuda_objects: Those compiled from ``.cu``.
        libraries: Shared libraries and modules.
        sources: What objects are compiled from.
        targets: CMake targets that own the objects, sorted.
        codes: What device code is asked for (``sm_75``, ``compute_80``, …), sorted.
    """

    objects: tuple[str, ...]
    cuda_objects: tuple[str, ...]
    libraries: tuple[str, ...]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    codes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One build statement.

    Attributes:
        outputs: What it makes, implicit outputs included.
        rule: The rule's name; ``phony`` runs nothing.
        explicit: Inputs before the first ``|``.
        inputs: All of them: explicit, implicit and order-only.
    """

    outputs: tuple[str, ...]
    rule: str
    explicit: tuple[str, ...]
    inputs: tuple[str, ...]


def load(path: Path) -> BuildGraph:
    """Read the build graph of ``path`` (a ``build.ninja`` or the directory it is in).

    Raises:
        UsageError: There is none.
    """
    file = path / "build.ninja" if path.is_dir() else path
    try:
        return parse(file.read_text(encoding="utf-8", errors="replace"))
    except OSError as err:
        raise UsageError(
            f"cannot read {file}",
            why=err.strerror or str(err),
            fix="give the build directory, or leave the option out",
        ) from err


def parse(text: str) -> BuildGraph:
    """Read the build graph from a ``build.ninja``'s text."""
    objects: list[str] = []
    sources: list[str] = []
    libraries: list[str] = []
    for edge in edges(text):
        made = [output for output in edge.outputs if output.endswith((".o", ".obj"))]
        objects += made
        if made:
            sources += edge.explicit
        libraries += [name for name in edge.outputs if name.endswith(".so") or ".so." in name]
    codes = {code for listed in _GENCODE.findall(text) for code in listed.split(",")}
    return BuildGraph(
        objects=tuple(objects),
        cuda_objects=tuple(name for name in objects if ".cu." in name),
        libraries=tuple(dict.fromkeys(libraries)),
        sources=tuple(dict.fromkeys(sources)),
        targets=tuple(sorted({m[1] for name in objects if (m := _TARGET.search(name))})),
        codes=tuple(sorted(codes)),
    )


def edges(text: str) -> Iterator[Edge]:
    """Read the build statements of a ``build.ninja``, in order."""
    # Ninja manual, 'Lexical syntax': $ at a line's end continues it; "$ ", "$:" and "$$" are
    # escapes; outputs end at the first plain colon; |, || and |@ begin other kinds of inputs, the
    # last of which (validations) nothing waits for.
    for line in re.sub(r"\$\n[ \t]*", "", text).splitlines():
        if not line.startswith("build "):
            continue
        words, current, colon = [], "", -1
        chars = iter(line[len("build ") :])
        for char in chars:
            if char == "$":
                current += next(chars, "")
            elif char in " :":
                if current:
                    words.append(current)
                current = ""
                if char == ":" and colon < 0:
                    colon = len(words)
            else:
                current += char
        words += [current] if current else []
        rule, *inputs = words[colon:] if colon >= 0 and words[colon:] else [""]
        waited = inputs[: inputs.index("|@")] if "|@" in inputs else inputs
        first = next((i for i, word in enumerate(waited) if word.startswith("|")), None)
        yield Edge(
            outputs=tuple(word for word in words[:colon] if word != "|"),
            rule=rule,
            explicit=tuple(waited[:first]),
            inputs=tuple(word for word in waited if word not in ("|", "||")),
        )
