"""The environment that kernels are compiled in: the target's Triton, and nothing else.

Triton is no part of the orchestrator's own environment: it is 200 MB, and its version is the
target's, not ours. The list is ``lock/audit-tools.txt``, pinned by hash for both build platforms
and Python 3.10 to 3.14.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from sm75 import privateenv
from sm75.errors import ToolchainError

LIST = Path("lock") / "audit-tools.txt"


def pinned_triton(root: Path) -> str:
    """The version of Triton in the pinned list."""
    for line in (root / LIST).read_text(encoding="utf-8").splitlines():
        if line.startswith("triton=="):
            return line.removeprefix("triton==").split()[0]
    raise ToolchainError(
        f"{LIST} pins no triton", why="the audit compiles with it", fix="restore the file"
    )


def ensure(root: Path) -> Path:
    """Make the audit's environment if it is not there.

    Args:
        root: The project's directory. ``SM75_AUDIT_PYTHON`` names a Python that has the pinned
            Triton already, for machines that get it another way.

    Returns:
        The environment's Python.

    Raises:
        ToolchainError: It cannot be made, or the named Python has another Triton.
    """
    wanted = pinned_triton(root)
    if given := os.environ.get("SM75_AUDIT_PYTHON"):
        _check(Path(given), wanted)
        return Path(given)
    return privateenv.ensure(
        root, LIST, Path(".sm75") / "audit-venv", purpose="the audit of shared memory",
        fix="or name a Python that has this Triton in SM75_AUDIT_PYTHON",
    )  # fmt: skip


def _check(python: Path, wanted: str) -> None:
    code = "import importlib.metadata as m; print(m.version('triton'))"
    try:
        done = subprocess.run(
            [str(python), "-c", code], check=False, capture_output=True, text=True
        )
    except OSError as error:
        raise ToolchainError(
            f"{python} cannot be run", why=str(error), fix="unset SM75_AUDIT_PYTHON"
        ) from error
    found = done.stdout.strip() or "none"
    if found != wanted:
        raise ToolchainError(
            f"{python} has Triton {found}, the target's torch carries {wanted}",
            why="another version allocates shared memory differently",
            fix=f"install triton=={wanted} there, or unset SM75_AUDIT_PYTHON",
        )
