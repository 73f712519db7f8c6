"""Where the build's tools come from.

The recipe names tools as conda-forge does (cmake, ninja, compilers, cuda-nvcc, …). A provider turns
the locked tools into local channels; the build sees nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sm75.lockfile import ReleaseLock
from sm75.store import Store


@dataclass(frozen=True, kw_only=True)
class ToolSpecs:
    """What the recipe asks of a provider, as conda specs.

    Args:
        build: Tools that run on the build platform.
        host: Packages of the target platform that are compiled against.
    """

    build: tuple[str, ...]
    host: tuple[str, ...] = ()


class Provider(Protocol):
    """A source of tools."""

    @property
    def name(self) -> str:
        """How the command line and the release lock call it."""

    def describe(self) -> str:
        """Say in one line what it is and what it needs."""

    def identity(
        self, lock: ReleaseLock, build_platform: str, target_platform: str
    ) -> dict[str, str]:
        """Give everything that decides what is built, for the input hash and the provenance."""

    def rust(self, lock: ReleaseLock, build_platform: str, target_platform: str) -> str:
        """Say why the Rust frontend cannot be compiled with it; empty: it can."""

    def channels(
        self, lock: ReleaseLock, store: Store, build_platform: str, target_platform: str
    ) -> list[str]:
        """Give local channels that hold every tool; no network is used.

        Args:
            lock: The release.
            store: Where the fetch step has put the inputs.
            build_platform: Conda subdir of the machine that builds.
            target_platform: Conda subdir of the package.

        Returns:
            ``file:`` URLs, most important first.

        Raises:
            FetchError: An input is not in the store.
            ToolchainError: A tool is missing or unsuitable.
        """
