"""The product's channel, and what is installed from it: fixtures of the tests of the closure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sm75 import channel, closure, fetch
from sm75 import install as installer
from sm75.build import isolation
from sm75.closurelock import load_runtime
from sm75.install import Box
from sm75.lockfile import load_release, load_target
from sm75.progress import make_reporter
from sm75.store import Store, default_root
from tests.integration import arm64, armpython, standin, standindriver
from tests.integration.emulation import Emulated

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".sm75" / "closure-test"
LOCK = load_release(ROOT)
STORE = Store(default_root())

# Installs with no network, in a process of its own: ROOT CHANNEL CHANNEL-WITH-PYTHON PREFIX.
_INSTALL = """\
import sys
from pathlib import Path
from sm75 import install, lockfile, rattler_rt
root, channel, python, where = map(Path, sys.argv[1:])
box = install.box_of(lockfile.load_target(root, lockfile.load_release(root).target))
done = install.install(
    channel, where, python="3.11", box=box, extra_channels=[python], specs=(install.NAME, "pip")
)
print("\\n".join(done.packages))
rattler_rt.exit_process(0)
"""


@pytest.fixture(scope="session")
def product(built_package: Path) -> Path:
    """A channel with vllm-sm75, its closure and the adapter."""
    contract = load_target(ROOT, LOCK.target)
    with make_reporter(sys.stderr) as reporter:
        fetch.fetch(closure.plan_fetch(load_runtime(ROOT, LOCK.vllm), STORE), STORE, reporter)
        where = WORK / "channel"
        closure.build(ROOT, LOCK, contract, STORE, where, reporter)
    channel.publish([built_package], where, replace=True)
    return where


@pytest.fixture(scope="session")
def python() -> Path:
    """A channel with an aarch64 python 3.11; not the product's."""
    made = armpython.make(WORK / "python")
    if made is None:
        pytest.skip("needs Debian's arm64 archive and patchelf")
    return made


@pytest.fixture(scope="session")
def box() -> Box:
    """The target, as an image builder sees it."""
    return installer.box_of(load_target(ROOT, LOCK.target))


@pytest.fixture(scope="session")
def prefix(product: Path, python: Path) -> Path:
    """Everything, installed with no network in a process of its own."""
    where = WORK / "prefix"
    shutil.rmtree(where, ignore_errors=True)
    done = subprocess.run(
        [*isolation(), sys.executable, "-c", _INSTALL, str(ROOT), str(product), str(python),
         str(where)],
        check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 140
    return where


@pytest.fixture(scope="session")
def emulated(prefix: Path) -> Emulated:
    """The installed environment, as it runs on an aarch64 machine."""
    emulator = arm64.qemu()
    if emulator is None:
        pytest.skip("needs qemu-user")
    home = WORK / "home"
    shutil.rmtree(home, ignore_errors=True)
    return Emulated(qemu=emulator, sysroot=WORK / "python" / "sysroot", prefix=prefix, home=home)


@pytest.fixture(scope="session")
def image() -> Path:
    """Stands in for the image's environment."""
    if shutil.which(standin.GCC) is None:
        pytest.skip(f"needs {standin.GCC}")
    return standin.make(WORK / "image", STORE, LOCK)


@pytest.fixture(scope="session")
def driver() -> Path:
    """Stands in for NVIDIA's driver and a T4G."""
    if shutil.which(standindriver.GCC) is None:
        pytest.skip(f"needs {standindriver.GCC}")
    return standindriver.make(WORK / "driver")


def copy_channel(source: Path, target: Path) -> Path:
    """A copy to damage; the files that are not damaged are links."""
    shutil.copytree(source, target, copy_function=os.link)
    return target
