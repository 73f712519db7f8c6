"""The sm_75 PTX of the attention kernels, run on whatever NVIDIA GPU is there.

``prepare`` records, compiles and packs where there is no GPU; ``runner`` runs the bundle where
there is one, and compares with ``reference``. Both make the calls of ``trials``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from sm75.lockfile import ReleaseLock
    from sm75.store import Store


def cli_run(
    root: Path,
    lock: ReleaseLock,
    store: Store,
    package: Path | None,
    bundle: Path | None,
    result: Path | None,
    as_json: bool,
) -> int:
    """The whole of ``verify --gpu``; see :func:`sm75.gpu.report.run_and_print`."""
    from sm75.gpu.report import run_and_print

    return run_and_print(root, lock, store, package, bundle=bundle, result=result, as_json=as_json)
