"""The project itself as a subject: modules by path, and a copy that a test may change."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
RELEASE = "0.33.0"
PATCHES = Path("patches") / RELEASE
OVERLAY = ROOT / PATCHES / "overlay"


def load(path: Path) -> ModuleType:
    """Import a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_project(where: Path) -> Path:
    """What the input hash is made of, copied; returns its root."""
    ignored = shutil.ignore_patterns("__pycache__")
    for part in (PATCHES, Path("recipes"), Path("lock"), Path("sm75")):
        shutil.copytree(ROOT / part, where / part, ignore=ignored)
    return where
