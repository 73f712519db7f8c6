"""What ``orchestrator.py patches`` does, without its printing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sm75 import drift, patching, proof, rebase, sdists
from sm75.errors import FetchError, PatchError, UsageError
from sm75.lockfile import ReleaseLock
from sm75.patching import Result, State
from sm75.series import load_series
from sm75.store import Store
from sm75.trees import Tree, open_tree


def check(
    root: Path, lock: ReleaseLock, store: Store, against: str | None, warn: Callable[[str], None]
) -> list[Result]:
    """How the patches of a release stand to its sdist, or to another tree.

    Args:
        root: The project's directory.
        lock: The release lock.
        store: The store.
        against: A path or a pinned release; ``None``: the lock's own sdist.
        warn: Is told what could not be looked at.

    Raises:
        PatchError: The series is not valid, or a tree is unreadable.
        UsageError: ``against`` is neither a path nor a pinned release.
        FetchError: The sdist cannot be had.
    """
    series = load_series(root / "patches" / lock.vllm)
    tree = proof.sdist(root, lock, store, against)
    if against:
        try:
            own = proof.sdist(root, lock, store, None)
        except FetchError as error:
            warn(f"without the sources of {lock.vllm} a hunk is known by its text alone: {error}")
        else:
            return drift.compare(series, open_tree(own), open_tree(tree))
    return patching.check(series, tree)


def propose(
    root: Path, store: Store, release: str, source: str, *, tree: Path | None = None
) -> tuple[rebase.Proposal, Tree]:
    """Compare the series of one release with the sources of another.

    Args:
        root: The project's directory.
        store: The store; pinned sdists are fetched when they are not there.
        release: The release that is to have a series.
        source: The release that has one.
        tree: The new release's sdist or unpacked tree; None: the pinned sdist.

    Returns:
        The proposal and the new release's tree.

    Raises:
        UsageError: A release is unknown.
        PatchError: A series or tree is not as it should be.
        FetchError: An sdist cannot be had.
    """
    if release == source:
        raise UsageError(f"{release} is to be made of itself", fix="name another release: --from")
    if not rebase.is_name(release):
        raise UsageError(f"{release!r} is no release", fix="name one such as 0.34.0")
    if not (root / "patches" / source / "series.toml").is_file():
        known = sorted(path.parent.name for path in (root / "patches").glob("[!.]*/series.toml"))
        raise UsageError(
            f"there is no series of {source}", why="there are " + ", ".join(known),
            fix="name one of those: --from",
        )  # fmt: skip
    series = load_series(root / "patches" / source)
    paths = series.paths()
    old = drift.KeptTree(open_tree(sdists.obtain(root, store, source)), paths)
    new = drift.KeptTree(open_tree(tree or sdists.obtain(root, store, release)), paths)
    return rebase.propose(series, old, new, release), new


def applies(results: list[Result]) -> bool:
    """Whether everything applies, or is applied."""
    return all(result.state in (State.APPLIES, State.APPLIED) for result in results)


def left_behind(root: Path, release: str) -> list[str]:
    """Other series that are not valid, as when a file that they take from ``release`` changed.

    Args:
        root: The project's directory.
        release: The release whose series was sealed.

    Returns:
        A message for each.
    """
    said = []
    for path in sorted((root / "patches").glob("[!.]*/series.toml")):
        if path.parent.name != release:
            try:
                load_series(path.parent)
            except PatchError as error:
                said.append(f"patches/{path.parent.name} is not valid now: {error.what}")
    return said
