"""Environments of pinned packages that one command needs and the orchestrator does not.

Each is made when it is first used, by the hashes of a list in ``lock/``, under ``.sm75``.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from sm75.atomic import disk_errors
from sm75.errors import ToolchainError


def ensure(root: Path, listed: Path, home: Path, *, purpose: str, fix: str) -> Path:
    """Make an environment if it is not there, or was made of another list.

    Args:
        root: The project's directory.
        listed: The list, relative to it.
        home: The environment, relative to it.
        purpose: What it is for, for the message.
        fix: What else a user can do, for the message.

    Returns:
        The environment's Python.

    Raises:
        ToolchainError: It cannot be made.
        DiskError: There is no room for it.
    """
    place = root / home
    marker = _marker(root, listed, home)
    python = place / "bin" / "python"
    with disk_errors(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{place}.lock"):
            if not marker.exists():
                shutil.rmtree(place, ignore_errors=True)
                for what, command in (
                    ("make an environment", [sys.executable, "-I", "-m", "venv", str(place)]),
                    (
                        f"install {listed}",
                        [str(python), "-I", "-m", "pip", "install", "--quiet", "--require-hashes",
                         "--only-binary", ":all:", "--no-deps", "--disable-pip-version-check",
                         "-r", str(root / listed)],
                    ),
                ):  # fmt: skip
                    _run(command, f"cannot {what} for {purpose}", fix)
                marker.touch()
    return python


def present(root: Path, listed: Path, home: Path) -> bool:
    """Whether the environment of this list is there."""
    return _marker(root, listed, home).exists()


def _marker(root: Path, listed: Path, home: Path) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}\n".encode()
    digest = hashlib.sha256(version + (root / listed).read_bytes()).hexdigest()
    return root / home / f"{digest[:12]}.done"


def _run(command: list[str], wrong: str, fix: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ToolchainError(
            wrong,
            why=said[-1] if said else f"exit code {done.returncode}",
            fix=f"make the package index reachable (PIP_INDEX_URL, PIP_FIND_LINKS), {fix}",
        )
