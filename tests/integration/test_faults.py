"""Faults during a build: a clear message, its exit code, and nothing touched."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest

from tests.integration.conftest import ROOT, Built, orchestrate


@pytest.fixture
def checkout(built: Built, tmp_path: Path) -> Path:
    """The project as a user has it, with the toolchain channel ready and no package."""
    where = tmp_path / "project"
    ignored = shutil.ignore_patterns(".git", ".sm75", "channel", ".venv", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, where, ignore=ignored)
    shutil.copytree(
        ROOT / ".sm75" / "toolchain", where / ".sm75" / "toolchain", copy_function=os.link
    )
    return where


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 32 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(where)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("this machine allows no tmpfs mount")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=False)


def test_unknown_release() -> None:
    done = orchestrate("build", "--release", "9.9.9")
    assert done.returncode == 3
    assert "9.9.9" in done.stderr
    assert "0.33.0" in done.stderr


def test_no_compiler(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    done = orchestrate("build", "--offline", root=checkout, env={"PATH": str(tmp_path / "bin")})
    assert done.returncode == 6
    assert "apt-get install g++" in done.stderr
    assert not (checkout / "channel").exists()


def test_patch_that_does_not_fit(checkout: Path) -> None:
    """Sealed, so that the hashes agree; refused by its place."""
    patch = checkout / "patches" / "0.33.0" / "0001-cmake-turing-only.patch"
    patch.write_text(patch.read_text().replace("@@ -40,2 +40,3 @@", "@@ -41,2 +41,3 @@"))
    assert orchestrate("patches", "seal", root=checkout).returncode == 0
    done = orchestrate("build", "--offline", root=checkout)
    assert done.returncode in (5, 7)
    assert "0001-cmake-turing-only.patch" in done.stderr
    assert not (checkout / "channel").exists()


def test_unsealed_patch(checkout: Path) -> None:
    patch = checkout / "patches" / "0.33.0" / "0001-cmake-turing-only.patch"
    patch.write_text(patch.read_text() + "\n")
    done = orchestrate("build", "--offline", root=checkout)
    assert done.returncode in (3, 5)
    assert "0001-cmake-turing-only.patch" in done.stderr


def test_two_builds_at_once(checkout: Path) -> None:
    with filelock.FileLock(checkout / ".sm75" / "build.lock"):
        done = orchestrate("build", "--offline", "--no-wait", root=checkout)
    assert done.returncode == 10
    assert "another build" in done.stderr


def test_full_disk(checkout: Path, small_disk: Path) -> None:
    shutil.rmtree(checkout / ".sm75")
    (checkout / ".sm75").symlink_to(small_disk)
    done = orchestrate("build", "--offline", root=checkout)
    assert done.returncode == 9, done.stderr
    assert "space" in done.stderr
    assert not (checkout / "channel").exists()


def _left(marker: str) -> list[str]:
    """Command lines of processes that mention ``marker``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in line:
            found.append(line)
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted(checkout: Path, how: signal.Signals) -> None:
    """Compilers go with the orchestrator, however it goes; the channel stays as it was."""
    running = subprocess.Popen(
        [sys.executable, str(checkout / "orchestrator.py"), "build", "--offline", "--recompile"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    assert running.stdout is not None
    seen = ""
    for line in running.stdout:
        seen += line
        if line.startswith("build: compile"):
            break
    time.sleep(2)
    assert len(_left(str(checkout))) > 1, seen
    running.send_signal(how)
    rest = running.stdout.read()
    code = running.wait(timeout=30)
    assert code == (130 if how != signal.SIGKILL else -signal.SIGKILL), rest
    if how != signal.SIGKILL:
        assert "the same command resumes" in rest
    deadline = time.monotonic() + 20
    while _left(str(checkout)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _left(str(checkout)) == []
    assert not (checkout / "channel").exists()
