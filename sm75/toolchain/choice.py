"""Which toolchain provider a build uses."""

from __future__ import annotations

from pathlib import Path

from sm75.errors import ToolchainError
from sm75.lockfile import ReleaseLock
from sm75.progress import Reporter
from sm75.toolchain import Provider
from sm75.toolchain.bootstrap import Bootstrap


def choose(name: str, root: Path, lock: ReleaseLock, reporter: Reporter) -> Provider:
    """Give the provider that was asked for; ``auto`` says which one it takes, and why.

    Args:
        name: ``auto``, ``bootstrap`` or ``conda-forge``.
        root: The project's directory.
        lock: The release lock.
        reporter: Gets the line that says so.

    Raises:
        ToolchainError: conda-forge was asked for, and the release has no lock of its tools.
    """
    locked = root / "lock" / lock.vllm / "toolchain.lock"
    bootstrap = Bootstrap(root / ".sm75" / "toolchain", reporter)
    if name == "bootstrap":
        return bootstrap
    if name == "conda-forge":
        raise ToolchainError(
            f"release {lock.vllm} has no lock of conda-forge's tools",
            why=f"no {locked.relative_to(root)}: conda-forge's x86-to-Arm compiler was out of "
            "reach when this lock was made",
            fix="use --toolchain bootstrap",
        )
    reporter.line(f"toolchain: bootstrap, for there is no {locked.relative_to(root)}")
    return bootstrap
