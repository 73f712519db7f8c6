"""The modules to audit, taken out of a package or of the pinned sdist."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from sm75 import archives, patching
from sm75.errors import UsageError
from sm75.series import Series, load_series
from sm75.smem.cases import all_cases
from sm75.smem.record import modules
from sm75.smem.standins import ALWAYS_REAL


def wanted_files() -> set[str]:
    """Paths that the audit may import, relative to the tree (a module, or a package's init)."""
    names = [*modules(all_cases()), *ALWAYS_REAL]
    stems = [name.replace(".", "/") for name in names]
    return {f"{stem}.py" for stem in stems} | {f"{stem}/__init__.py" for stem in stems}


def unpack(source: Path, into: Path, files: Iterable[str]) -> int:
    """Copy the named files out of a package, sdist or directory; returns how many were there.

    The place of ``vllm/`` inside differs (site-packages, the sdist's top); it is found by name.
    """
    wanted = set(files)

    def inside(name: str) -> str:
        # "site-packages/vllm/…", "vllm-0.33.0/vllm/…": the "vllm/" whose remainder is wanted.
        parts = name.split("/")
        for at, part in enumerate(parts):
            if part == "vllm" and "/".join(parts[at:]) in wanted:
                return "/".join(parts[at:])
        return ""

    count = 0
    for member in archives.walk(source, want=lambda name: bool(inside(name))):
        target = into / inside(member.name)
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(member.read())
        count += 1
    if not count:
        raise UsageError(
            f"{source.name} holds no vLLM modules", fix="give a vllm-sm75 package or a vLLM sdist"
        )
    return count


def python_series(directory: Path) -> Series:
    """The part of a series that changes Python files of the package."""
    series = load_series(directory)
    return dataclasses.replace(
        series,
        patches=tuple(
            p for p in series.patches if all(d.path.startswith("vllm/") for d in p.diffs)
        ),
        overlays=tuple(o for o in series.overlays if o.dest.startswith("vllm/")),
    )


def from_sdist(sdist: Path, into: Path, *, series: Series | None) -> None:
    """Unpack the sdist's modules, and apply our patches if a series is given.

    Raises:
        PatchError: A patch does not apply.
    """
    files = wanted_files()
    if series is not None:
        files |= series.paths()
    unpack(sdist, into, files)
    if series is not None:
        patching.apply(series, into)


def from_package(package: Path, into: Path) -> None:
    """Unpack the modules of a built package (or of a directory it was installed into)."""
    unpack(package, into, wanted_files())
