"""What the pinned vLLM tree itself declares: revisions, versions, architectures, extensions.

A declaration that is missing or has a form not known here is an error that names the file and what
was looked for; it is never passed over. Names of declarations:

==============================  ====================================================
``CUTLASS_REVISION`` and so on  CMake variables of the top ``CMakeLists.txt``
``TORCH_TARGET_VERSION:<ext>``  the oldest torch whose stable ABI an extension needs
``gcc``, ``gcc:cuda``           the oldest GCC; that for the external projects' sources
``external:<name>``             a source that CMake fetches, ``owner/name@revision``
``target:<name>``               an extension that CMake defines
``extension:<module>``          an extension that setup.py lists, or a Rust program
``requirement:<project>``       a version in ``requirements/``
``requires-python``             of ``pyproject.toml``
``docker:torch_cuda_arch_list`` architectures of the official images
==============================  ====================================================
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from sm75.cmakepins import EXTERNAL, MAIN, read_cmake
from sm75.errors import LockError
from sm75.lockfile import Declared
from sm75.pythonpins import FILES, RustPins, read_python, read_rust, read_version
from sm75.treefiles import TreeFiles, read_sdist

_EXTERNAL_FILE = re.compile(rf"{EXTERNAL}/[^/]+\.cmake")


@dataclass(frozen=True, kw_only=True)
class TreePins:
    """Everything that a tree declares.

    Attributes:
        version: The release it says it is.
        declared: Sorted by name; names are unique.
        rust: About the Rust frontend.
    """

    version: str
    declared: tuple[Declared, ...]
    rust: RustPins


def wanted(path: str) -> bool:
    """Whether pins are read from this file of the tree."""
    return path in (MAIN, *FILES) or _EXTERNAL_FILE.fullmatch(path) is not None


def read_pins(sdist: Path, *, cuda: str) -> TreePins:
    """Read the pins out of an sdist, which is not unpacked.

    Args:
        sdist: The ``.tar.gz``.
        cuda: Version of nvcc; some declarations depend on it.

    Raises:
        LockError: The archive is damaged, or a declaration is missing or of an unknown form.
    """
    return pins_of(read_sdist(sdist, wanted), cuda=cuda)


def pins_of(files: TreeFiles, *, cuda: str) -> TreePins:
    """Read the pins out of a tree's files.

    Args:
        files: At least those that are ``wanted``.
        cuda: Version of nvcc.

    Raises:
        LockError: A declaration is missing or of an unknown form.
    """
    declared = [*read_cmake(files, cuda), *read_python(files)]
    counts = Counter(entry.name for entry in declared)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise LockError(
            f"{files.label} declares {', '.join(repeated)} more than once",
            why="; ".join(f"{d.name} in {d.file}" for d in declared if d.name in repeated),
            fix="look at those files and teach sm75/pins.py which one counts",
        )
    return TreePins(
        version=read_version(files),
        declared=tuple(sorted(declared, key=lambda entry: entry.name)),
        rust=read_rust(files),
    )
