"""The sdists of vLLM releases that patches are compared with.

A release with a lock is pinned there; the others in ``lock/sdists.toml``::

    schema = 1

    [[sdist]]
    release = "0.28.0"
    sha256 = "…"
    size = 39991441        # bytes
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from sm75 import fetch
from sm75.errors import LockError, UsageError
from sm75.lockfile import Artifact, Sha256, Size, Text, known_releases, load_release
from sm75.progress import SilentReporter
from sm75.store import Store

SCHEMA = 1
_NAME = "lock/sdists.toml"


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Common settings."""


class Pin(_Record, frozen=True, kw_only=True):
    """One sdist: release, sha256 (hex) and size in bytes."""

    release: Text
    sha256: Sha256
    size: Size


class _Pins(_Record, frozen=True, kw_only=True):
    schema: int
    sdist: tuple[Pin, ...]


def pinned(root: Path) -> dict[str, Pin]:
    """Every release whose sdist is pinned, in a lock or in ``lock/sdists.toml``.

    Args:
        root: The project's directory.

    Raises:
        LockError: A lock or the list is malformed, or they disagree.
    """
    pins = {pin.release: pin for pin in _listed(root)}
    for release in known_releases(root):
        sdist = load_release(root, release).artifact("vllm-sdist")
        pin = Pin(release=release, sha256=sdist.sha256, size=sdist.size)
        if pins.setdefault(release, pin) != pin:
            raise LockError(
                f"{_NAME} pins another sdist of {release} than its lock",
                fix=f"take {release} out of {_NAME}",
            )
    return pins


def _listed(root: Path) -> tuple[Pin, ...]:
    path = root / _NAME
    if not path.exists():
        return ()
    try:
        pins = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Pins)
    except (OSError, ValueError, RecursionError) as error:
        raise LockError(
            f"{path} cannot be read", why=str(error), fix=f"restore it: git checkout -- {_NAME}"
        ) from error
    names = [pin.release for pin in pins.sdist]
    if pins.schema != SCHEMA or len(names) != len(set(names)):
        raise LockError(
            f"{path} is not valid",
            why=f"it must have schema {SCHEMA} and name each release once",
            fix=f"restore it: git checkout -- {_NAME}",
        )
    return pins.sdist


def obtain(root: Path, store: Store, release: str) -> Path:
    """Give a release's sdist, fetching it first when the store lacks it.

    Args:
        root: The project's directory.
        store: The store.
        release: The release.

    Raises:
        UsageError: It is not pinned.
        FetchError: It cannot be had.
    """
    pins = pinned(root)
    if release not in pins:
        raise UsageError(
            f"no sdist of vLLM {release} is pinned",
            why="pinned are: " + ", ".join(pins),
            fix=f"name an sdist or an unpacked tree, or pin it in {_NAME}",
        )
    return fetch.obtain(artifact(pins[release]), store, SilentReporter())


def artifact(pin: Pin) -> Artifact:
    """A pin as the fetch step knows files."""
    return Artifact(
        id="vllm-sdist",
        project="vllm",
        version=pin.release,
        filename=f"vllm-{pin.release}.tar.gz",
        sha256=pin.sha256,
        size=pin.size,
        role="source",
        platforms=("any",),
    )
