"""The product's channel for the tests: vllm-sm75, its closure and the adapter."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sm75 import channel, closure, condapkg
from sm75.archives import walk
from sm75.closurelock import load_omissions
from sm75.closureresolve import sdist_requirements
from sm75.condapkg import FileSource
from sm75.lockfile import ReleaseLock
from sm75.store import Store


def requirements(root: Path, lock: ReleaseLock, store: Store) -> tuple[str, ...]:
    """The run dependencies that the recipe is to list."""
    sdist = store.get(lock.artifact("vllm-sdist"))
    return closure.run_requirements(sdist_requirements(sdist), load_omissions(root, lock.vllm))


def with_requirements(package: Path, requirements: tuple[str, ...], out: Path) -> Path:
    """The built package, with those dependencies in place of what its recipe says.

    The tests hold for the closure whatever the recipe lists at the moment; that it lists these is
    a test of its own.
    """
    info = condapkg.read_info(package)
    index = info["index"]
    own = [d for d in index["depends"] if d.split()[0] in ("python", "dlami-torch")]
    files = {m.name: FileSource.from_bytes(m.path().read_bytes()) for m in walk(package)}
    return condapkg.write_conda(
        out, name=index["name"], version=index["version"], build=index["build"],
        subdir=index["subdir"], files=files, depends=[*own, *requirements],
        constrains=index["constrains"], noarch="python", compiled=True, about=info["about"],
        entry_points=info["link"]["noarch"]["entry_points"], license=index["license"],
    )  # fmt: skip


def copy_channel(source: Path, target: Path) -> Path:
    """A copy to damage; the files that are not damaged are links."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def publish(packages: list[Path], where: Path) -> None:
    """Publish, over what a former run left."""
    channel.publish(packages, where, replace=True)
