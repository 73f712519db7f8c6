"""What Triton's kernels take on the target, found ahead of time on a CPU.

``cli_run`` is the whole of ``verify --smem``. The modules:

* ``models``: shapes of attention layers and experts, with their sources
* ``cases``: calls of the package's own wrappers with those shapes
* ``faketorch``, ``faketriton``, ``standins``: what the wrappers run among
* ``record``: which launches the wrappers make
* ``worker``: compiles launches, in the audit's own environment
* ``audit``: trees, cache, limits, verdicts
* ``report``: table, JSON, data of the chart
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from sm75.lockfile import ReleaseLock
    from sm75.store import Store


def cli_run(
    root: Path, lock: ReleaseLock, store: Store, package: Path | None, as_json: bool
) -> int:
    """Audit the kernels of a package, or of the patched sources, and print the result.

    Args:
        root: The project's directory.
        lock: The release.
        store: Where the pinned sdist is.
        package: A built ``.conda``; None audits the sdist with the patches applied.
        as_json: Print JSON instead of a table.

    Returns:
        0 if every variant is within the limits, 1 if not.

    Raises:
        Sm75Error: The audit could not be made.
    """
    from sm75.smem.report import run_and_print

    return run_and_print(root, lock, store, package, as_json=as_json)
