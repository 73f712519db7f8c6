"""The run dependencies that the recipe lists: vLLM's own, less what the closure leaves out.

``recipe.yaml`` has one list for each release, below ``- if: vllm_version == "..."``. ``channel
lock`` writes it, ``lock --check`` and ``channel lock --check`` compare it; nobody edits it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from sm75 import closure
from sm75.atomic import write_bytes
from sm75.closurelock import Omissions, load_omissions
from sm75.closureresolve import bounded, sdist_requirements
from sm75.errors import LockError
from sm75.lockfile import ReleaseLock

RECIPE = Path("recipes", "vllm-sm75", "recipe.yaml")
_FIX = "python3 orchestrator.py channel lock"
# What follows the list of run dependencies.
_END = "  run_constraints:\n"


def wanted(root: Path, release: ReleaseLock, sdist: Path) -> tuple[str, ...]:
    """Give the list as it has to be.

    Args:
        root: The project's directory.
        release: The release; its omissions are read.
        sdist: Its sdist, whose metadata are read.

    Raises:
        LockError: There are no omissions, or the sdist has no metadata.
    """
    return specs(release, sdist, load_omissions(root, release.vllm))


def specs(release: ReleaseLock, sdist: Path, omissions: Omissions) -> tuple[str, ...]:
    """Give the list by omissions that are at hand; see :func:`wanted`."""
    return closure.run_requirements(
        bounded(sdist_requirements(sdist), release.constraints), omissions
    )


def listed(text: str, release: str) -> tuple[str, ...]:
    """Give the list that a recipe has for a release; empty where it has none.

    Args:
        text: The recipe.
        release: The vLLM release.
    """
    found = _block(release).search(text)
    return tuple(re.findall(r"(?m)^ *- (.*)$", found[1])) if found else ()


def problems(root: Path, release: ReleaseLock, sdist: Path) -> Iterator[str]:
    """Say where the recipe's list is not what it has to be, one sentence each."""
    try:
        have = listed((root / RECIPE).read_text(encoding="utf-8"), release.vllm)
        want = wanted(root, release, sdist)
    except OSError as error:
        yield f"{RECIPE}: {error.strerror}"
        return
    except LockError as error:
        yield f"run dependencies: {error.what}"
        return
    if not have:
        yield f"{RECIPE}: it lists no run dependencies of vLLM {release.vllm}; run: {_FIX}"
        return
    by_name = {spec.partition(" ")[0]: spec for spec in have}
    for spec in want:
        known = by_name.pop(spec.partition(" ")[0], None)
        if known is None:
            yield f"{RECIPE}: it does not list {spec}, which vLLM requires; run: {_FIX}"
        elif known != spec:
            yield f"{RECIPE}: it lists {known}, by vLLM's requirements {spec}; run: {_FIX}"
    for spec in by_name.values():
        yield (
            f"{RECIPE}: it lists {spec}, which vLLM does not require or omissions.toml leaves out; "
            f"run: {_FIX}"
        )
    if not by_name and set(have) == set(want) and have != want:
        yield f"{RECIPE}: the run dependencies are not in order; run: {_FIX}"


def write(root: Path, release: ReleaseLock, specs: Sequence[str]) -> bool:
    """Put a release's list into the recipe.

    Args:
        root: The project's directory.
        release: The release.
        specs: What :func:`wanted` gave.

    Returns:
        Whether the recipe changed.

    Raises:
        LockError: The recipe has no place for it.
        DiskError: It cannot be written.
    """
    path = root / RECIPE
    text = path.read_text(encoding="utf-8")
    new = with_list(text, release.vllm, specs)
    if new == text:
        return False
    write_bytes(path, new.encode())
    return True


def with_list(text: str, release: str, specs: Sequence[str]) -> str:
    """Give a recipe's text with a release's list in it.

    Args:
        text: The recipe.
        release: The vLLM release.
        specs: What :func:`wanted` gave.

    Raises:
        LockError: The recipe has no place for it.
    """
    lines = "".join(f"        - {spec}\n" for spec in specs)
    head = _head(release)
    block = _block(release)
    if block.search(text):
        return block.sub(lambda _: head + lines, text)
    if text.count(_END) == 1:
        return text.replace(_END, head + lines + _END)
    raise LockError(
        f"{RECIPE} has no place for the run dependencies",
        why=f"it should have one line '{_END.strip()}' behind them",
        fix="restore it from version control",
    )


def _head(release: str) -> str:
    return f'    - if: vllm_version == "{release}"\n      then:\n'


def _block(release: str) -> re.Pattern[str]:
    return re.compile(rf"(?m)^{re.escape(_head(release))}((?:        - .*\n)*)")
