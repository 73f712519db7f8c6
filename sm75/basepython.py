"""python and its native libraries for the channel, from conda-forge, where it can be reached.

``lock/<release>/python-<minor>.lock`` (pixi's format) pins them; without them the channel needs
another one that has a python.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import rattler

from sm75.lockfile import ReleaseLock
from sm75.progress import Reporter
from sm75.store import Store
from sm75.toolchain import ToolSpecs
from sm75.toolchain.conda_forge import CondaForge, Payload
from sm75.words import counted

_PLATFORM = "linux-aarch64"


class BasePython:
    """The locked packages of some Python minors.

    Args:
        root: The project's directory.
        release: The release.
        minors: Python minors; those without a lock are passed over.
        config: rattler configuration; default: the user's own.
        cache_dir: Where channel indexes are cached; default: rattler's own place.
    """

    def __init__(
        self, root: Path, release: ReleaseLock, minors: Sequence[str], *,
        config: rattler.Config | None = None, cache_dir: Path | None = None,
    ) -> None:  # fmt: skip
        self._providers: dict[str, CondaForge] = {}
        for minor in minors:
            path = root / "lock" / release.vllm / f"python-{minor}.lock"
            specs = ToolSpecs(build=(), host=(f"python {minor}.*", "ca-certificates"))
            if path.exists() or config is not None:
                self._providers[minor] = CondaForge(path, specs, config=config, cache_dir=cache_dir)

    def payloads(self, minor: str) -> list[Payload]:
        """The locked packages of one minor; empty when it has no lock.

        Raises:
            LockError: The lock is malformed.
        """
        provider = self._providers.get(minor)
        return provider.payloads(_PLATFORM, _PLATFORM) if provider else []

    def resolve(self) -> None:
        """Solve anew and write the locks.

        Raises:
            ToolchainError: conda-forge cannot be read or lacks something; the locks stay.
        """
        for provider in self._providers.values():
            provider.resolve((), _PLATFORM)

    def mirror(self, store: Store, reporter: Reporter) -> str:
        """Fetch what the store lacks, when conda-forge answers.

        Returns:
            Empty when the store has all; else why not, in one line.

        Raises:
            FetchError: A package is not the locked one.
            DiskError: The disk is full.
        """
        for provider in self._providers.values():
            if not provider.missing(store, _PLATFORM, _PLATFORM):
                continue
            if reason := provider.reachable():
                return reason
            provider.mirror(store, _PLATFORM, _PLATFORM, reporter)
        return ""

    def packages(self, store: Store) -> list[Path]:
        """The files of those minors that the store has completely."""
        found: dict[str, Path] = {}
        for minor in self._providers:
            payloads = self.payloads(minor)
            if all(store.sound(p.sha256, p.filename, p.size) for p in payloads):
                found |= {
                    f"{p.subdir}/{p.filename}": store.path(p.sha256, p.filename) for p in payloads
                }
        return [found[name] for name in sorted(found)]

    def describe(self, minor: str) -> str:
        """Say exactly what one minor needs of conda-forge."""
        payloads = self.payloads(minor)
        if not payloads:
            return f"python {minor} and its libraries, from conda-forge (no lock of them)"
        size = sum(p.size for p in payloads) / 1e6
        names = ", ".join(sorted(p.filename for p in payloads))
        return (
            f"python {minor} and its libraries: {counted(len(payloads), 'file')} of conda-forge, "
            f"{size:.1f} MB: {names}"
        )
