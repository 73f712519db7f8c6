"""The real package, built once for all integration tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm75.store import default_root

# Fixtures of the closure's tests.
from tests.integration.closurekit import (  # noqa: F401
    box,
    driver,
    emulated,
    image,
    prefix,
    product,
    python,
)

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here builds or checks the real package."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)


def orchestrate(
    *arguments: str, root: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does; what it prints is kept."""
    return subprocess.run(
        [sys.executable, str(root / "orchestrator.py"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
    )


@dataclass(frozen=True, kw_only=True)
class Built:
    """The package under test."""

    package: Path
    channel: Path
    toolchain: Path


# Programs that a build starts, or might.
UNDECLARED = ("cmake", "ninja", "ccache", "nvcc", "ptxas", "cicc", "cudafe++", "python", "rm", "ar",
              "as", "ld", "git", "sccache", "patchelf", "cargo", "rustc")  # fmt: skip


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undeclared programs, each of which says that it was started, and an undeclared header."""
    place = tmp_path_factory.mktemp("planted")
    for name in ("bin", "include", "home"):
        (place / name).mkdir()
    for name in UNDECLARED:
        program = place / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} >>"{place}/started"\nexit 1\n')
        program.chmod(0o755)
    # The kernels include it.
    (place / "include" / "cuda_fp16.h").write_text("#error an undeclared header was read\n")
    (place / "home" / ".ccache").mkdir()
    (place / "home" / ".ccache" / "ccache.conf").write_text("disable = true\n")
    return place


def hostile(planted: Path) -> dict[str, str]:
    """An environment that offers them in every way compilers know."""
    include = str(planted / "include")
    return {
        **os.environ,
        "PATH": f"{planted / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CPATH": include,
        "C_INCLUDE_PATH": include,
        "CPLUS_INCLUDE_PATH": include,
        "CXXFLAGS": f"-I{include}",
        "CUDAFLAGS": f"-I{include}",
        "NVCC_PREPEND_FLAGS": f"-I{include}",
        "CCACHE_DISABLE": "1",
        "HOME": str(planted / "home"),
    }


@pytest.fixture(scope="session")
def built(planted: Path) -> Built:
    """Build the package of the default release; takes minutes when the caches are cold."""
    # Its progress goes to the terminal: a cold build is long.
    fetched = subprocess.run([sys.executable, str(ROOT / "orchestrator.py"), "fetch"], check=False)
    assert fetched.returncode == 0
    # On a new machine it also installs the compiler, which --offline does not.
    made = subprocess.run(
        [sys.executable, str(ROOT / "orchestrator.py"), "toolchain"],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert made.returncode == 0
    toolchain = Path(made.stdout.split()[-1].removeprefix("file://"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "orchestrator.py"), "build", "--offline", "--json",
         "--store", str(default_root())],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        env=hostile(planted),
    )  # fmt: skip
    assert done.returncode == 0, "the build failed; its message is above"
    package = Path(json.loads(done.stdout)["package"])
    return Built(package=package, channel=package.parents[1], toolchain=toolchain)


@pytest.fixture(scope="session")
def built_package(built: Built) -> Path:
    """Its file."""
    return built.package
