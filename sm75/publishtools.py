"""The clients that only ``channel publish`` needs: obstore (object stores), oras (OCI registries).

They are no part of the orchestrator's own environment. One that is not installed is taken from the
package index by the hashes in ``lock/publish-tools.txt``, into an environment of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from sm75 import privateenv

LIST = Path("lock") / "publish-tools.txt"


def client(root: Path, *names: str) -> ModuleType:
    """Import modules of a client, installing it first where it is missing.

    Args:
        root: The project's directory.
        names: The client's name, then its modules that are used.

    Returns:
        The client.

    Raises:
        ToolchainError: It cannot be installed.
        DiskError: There is no room for it.
    """
    if importlib.util.find_spec(names[0]) is None:
        python = privateenv.ensure(
            root, LIST, Path(".sm75") / "publish-venv", purpose="channel publish",
            fix=f"or install {names[0]}; or publish into a directory and copy it with a tool of "
            "your own",
        )  # fmt: skip
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        # Last: what the orchestrator has itself stays what it is.
        sys.path.append(str(python.parents[1] / "lib" / version / "site-packages"))
        importlib.invalidate_caches()
    for name in names[1:]:
        importlib.import_module(name)
    return importlib.import_module(names[0])
