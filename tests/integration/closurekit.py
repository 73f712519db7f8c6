"""The product's channel for the tests: a copy to damage, and publishing over a former run's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sm75 import channel


def copy_channel(source: Path, target: Path) -> Path:
    """A copy to damage; the files that are not damaged are links."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def publish(packages: list[Path], where: Path) -> None:
    """Publish, over what a former run left."""
    channel.publish(packages, where, replace=True)
