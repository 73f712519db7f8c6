"""The real package, built once for all integration tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

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


@pytest.fixture(scope="session")
def built() -> Built:
    """Build the package of the default release; takes minutes when the caches are cold."""
    # Its progress goes to the terminal: a cold build is long.
    fetched = subprocess.run([sys.executable, str(ROOT / "orchestrator.py"), "fetch"], check=False)
    assert fetched.returncode == 0
    done = subprocess.run(
        [sys.executable, str(ROOT / "orchestrator.py"), "build", "--offline", "--json"],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, "the build failed; its message is above"
    package = Path(json.loads(done.stdout)["package"])
    made = subprocess.run(
        [sys.executable, str(ROOT / "orchestrator.py"), "toolchain"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    toolchain = Path(made.stdout.split()[-1].removeprefix("file://"))
    return Built(package=package, channel=package.parents[1], toolchain=toolchain)


@pytest.fixture(scope="session")
def built_package(built: Built) -> Path:
    """Its file."""
    return built.package
