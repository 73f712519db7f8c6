"""What kernels are compiled ahead of time with: Triton 3.2's environment and the pinned ptxas."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from sm75 import atomic, privateenv
from sm75.aot.lower import Tools
from sm75.errors import ToolchainError
from sm75.lockfile import ReleaseLock
from sm75.store import Store
from sm75.toolchain.host import build_platform

LIST = Path("lock") / "kernel-tools.txt"
VENV = Path(".sm75") / "kernel-venv"
# Where the members are in NVIDIA's wheel and in Triton's.
_PTXAS = "nvidia/cu13/bin/ptxas"
_DISASSEMBLER = Path("triton") / "backends" / "nvidia" / "bin" / "nvdisasm"
PLATFORM = "linux-64"
HOME = Path(".sm75") / "kernel-venv"
DOWNLOAD = "253 MB"
"""The wheels of ``LIST``, by their sizes on the package index."""
_LESS = "or build without them: python3 orchestrator.py build --no-kernels"


def pinned_triton(root: Path) -> str:
    """The version of Triton in the pinned list."""
    for line in (root / LIST).read_text(encoding="utf-8").splitlines():
        if line.startswith("triton=="):
            return line.removeprefix("triton==").split()[0]
    raise ToolchainError(f"{LIST} pins no triton", fix="restore the file")


def check_machine() -> None:
    """Refuse a machine that Triton 3.2 has no wheel for.

    Raises:
        ToolchainError: It is no x86-64.
    """
    if build_platform() != PLATFORM:
        raise ToolchainError(
            f"the attention kernels are compiled on {PLATFORM}, this is {build_platform()}",
            why="Triton 3.2, the last that uses Turing's tensor cores, has wheels for x86-64 only; "
            "without the package vllm works, and attention does without tensor cores",
            fix="build the package on any x86-64 machine (python3 orchestrator.py kernels build), "
            "and take it from there: python3 orchestrator.py kernels add FILE --sha256 HASH",
        )


def installed(root: Path) -> bool:
    """Whether Triton 3.2's environment is there, so that nothing is downloaded."""
    return privateenv.present(root, LIST, HOME)


def missing() -> ToolchainError:
    """The error that the environment is not there and may not be made."""
    return ToolchainError(
        "the compiler of the attention kernels is not here", why="--offline fetches nothing",
        fix=f"python3 orchestrator.py kernels build ({DOWNLOAD}), once with a network; {_LESS}",
    )  # fmt: skip


def ensure(root: Path, lock: ReleaseLock, store: Store) -> Tools:
    """Make what is missing.

    Args:
        root: The project's directory.
        lock: The release lock, which pins ptxas.
        store: Where NVIDIA's wheel is.

    Raises:
        ToolchainError: This is no x86-64, or the environment cannot be made.
        FetchError: The store lacks the wheel.
    """
    check_machine()
    python = privateenv.ensure(
        root, LIST, VENV,
        purpose="compiling attention kernels (253 MB are downloaded)",
        fix="or build without them: python3 orchestrator.py build --no-kernels",
    )  # fmt: skip
    artifact = lock.artifact(f"cuda-nvcc-{PLATFORM}")
    ptxas = root / ".sm75" / "tools" / f"ptxas-{artifact.stored_sha256[:16]}"
    with zipfile.ZipFile(store.get(artifact)) as wheel:
        content = wheel.read(_PTXAS)
    # What was unpacked before is used only if it is still what the lock pins.
    if not ptxas.is_file() or ptxas.read_bytes() != content:
        atomic.write_bytes(ptxas, content, mode=0o755)
    return Tools(
        python=python, ptxas=ptxas, disassembler=disassembler(root), triton=pinned_triton(root),
        toolkit=artifact.version,
    )  # fmt: skip


def disassembler(root: Path) -> list[str]:
    """The command that prints a cubin named last, if its environment was made; else empty.

    Args:
        root: The project's directory.
    """
    for packages in sorted((root / VENV / "lib").glob("python3.*/site-packages")):
        if os.access(packages / _DISASSEMBLER, os.X_OK):
            return [str(packages / _DISASSEMBLER), "-c"]
    return []
