"""Which toolchain provider a build uses."""

from __future__ import annotations

from pathlib import Path

from sm75.errors import ToolchainError
from sm75.lockfile import ReleaseLock
from sm75.progress import Reporter
from sm75.store import Store
from sm75.toolchain import Provider, ToolSpecs
from sm75.toolchain.bootstrap import Bootstrap, target_channel
from sm75.toolchain.conda_forge import CondaForge

# What the recipe asks for and conda-forge has (recipes/vllm-sm75/recipe.yaml).
CONDA_FORGE_BUILD = (
    "gxx_linux-aarch64",
    "cuda-nvcc 13.2.*",
    "cmake >=3.26.1",
    "ninja",
    "ccache",
    "python >=3.11",
    "jinja2",
    "unidiff",
)
CONDA_FORGE_HOST = ("python >=3.11", "cuda-cudart-dev 13.2.*", "cuda-cccl 13.2.*")
# What it asks for and only the lock's wheels have: the target's own torch, above all.
FROM_LOCK = frozenset(
    {"torch-dev", "cutlass-headers", "cuda-crt-dev", "libcublas-headers", "vllm-rs-prebuilt"}
)


class CondaForgeTools:
    """conda-forge's tools, and the target's headers from the lock.

    Args:
        tools: The provider of the tools.
        directory: Where the second channel is made.
        reporter: Shows progress.
    """

    name = CondaForge.name

    def __init__(self, tools: CondaForge, directory: Path, reporter: Reporter) -> None:
        self.tools = tools
        self.directory = directory
        self.reporter = reporter

    def describe(self) -> str:
        """Say in one line what it is and what it needs."""
        return f"{self.tools.describe()}; the target's headers from the lock's wheels"

    def identity(
        self, lock: ReleaseLock, build_platform: str, target_platform: str
    ) -> dict[str, str]:
        """Everything that decides what is built; the lock's artifacts are hashed elsewhere."""
        return self.tools.identity(lock, build_platform, target_platform)

    def rust(self, lock: ReleaseLock, build_platform: str, target_platform: str) -> str:
        """Why it cannot compile the Rust frontend; empty: it can."""
        return self.tools.rust(lock, build_platform, target_platform)

    def channels(
        self, lock: ReleaseLock, store: Store, build_platform: str, target_platform: str
    ) -> list[str]:
        """Give both channels; see ``CondaForge.channels`` and ``target_channel`` for the errors."""
        headers = target_channel(
            self.directory, self.reporter, lock, store, build_platform, target_platform, FROM_LOCK
        )
        return [headers, *self.tools.channels(lock, store, build_platform, target_platform)]


def choose(
    name: str, root: Path, lock: ReleaseLock, reporter: Reporter, *, install: bool = True
) -> Provider:
    """Give the provider that was asked for; ``auto`` says which one it takes, and why.

    Args:
        name: ``auto``, ``bootstrap`` or ``conda-forge``.
        root: The project's directory.
        lock: The release lock.
        reporter: Gets the line that says so.
        install: Whether a missing compiler may be installed.

    Raises:
        ToolchainError: conda-forge was asked for, and the release has no lock of its tools.
    """
    locked = root / "lock" / lock.vllm / "toolchain.lock"
    directory = root / ".sm75" / "toolchain"
    if name == "conda-forge" or (name == "auto" and locked.is_file()):
        if not locked.is_file():
            raise ToolchainError(
                f"release {lock.vllm} has no lock of conda-forge's tools",
                why=f"there is no {locked.relative_to(root)}; conda-forge was out of reach when "
                "this release was locked",
                fix="use --toolchain bootstrap",
            )
        tools = CondaForge(locked, ToolSpecs(build=CONDA_FORGE_BUILD, host=CONDA_FORGE_HOST))
        reporter.line(f"toolchain: {tools.describe()}")
        return CondaForgeTools(tools, directory, reporter)
    if name == "auto":
        reporter.line(f"toolchain: bootstrap, for there is no {locked.relative_to(root)}")
    return Bootstrap(directory, reporter, install=install)
