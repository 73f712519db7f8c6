"""The client of object stores, which only ``channel publish`` needs: obstore.

It is no part of the orchestrator's own environment. Where it is not installed, it is taken from the
package index by the hashes in ``lock/publish-tools.txt``, into a directory of its own.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from sm75.atomic import directory
from sm75.errors import ToolchainError

LIST = Path("lock") / "publish-tools.txt"


def obstore(root: Path) -> ModuleType:
    """Import obstore, installing it first where it is missing.

    Args:
        root: The project's directory.

    Raises:
        ToolchainError: It cannot be installed.
        DiskError: There is no room for it.
    """
    if importlib.util.find_spec("obstore") is None:
        sys.path.insert(0, str(_installed(root)))
        importlib.invalidate_caches()
    importlib.import_module("obstore.store")
    return importlib.import_module("obstore")


def _installed(root: Path) -> Path:
    text = (root / LIST).read_bytes()
    version = f"{sys.version_info.major}.{sys.version_info.minor}\n".encode()
    key = hashlib.sha256(version + text).hexdigest()[:12]
    place = root / ".sm75" / "publish-tools" / key
    if place.is_dir():
        return place
    with directory(place) as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps",
             "--only-binary", ":all:", "--disable-pip-version-check", "--target", str(scratch),
             "-r", str(root / LIST)],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise ToolchainError(
                f"cannot install {LIST}, which reaches object stores",
                why=said[-1] if said else f"exit code {done.returncode}",
                fix="make the package index reachable, or install obstore; or publish into a "
                "directory and copy it with a tool of your own",
            )
    return place
