"""The channel as a whole: solved and installed offline, and refused when anything is wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sm75 import channel as channels
from sm75 import channelcheck, channeltools, closure, condapkg, fetch, recipedeps
from sm75 import install as installer
from sm75.basepython import BasePython
from sm75.build import isolation
from sm75.closurelock import load_omissions, load_runtime
from sm75.errors import ChannelError, UsageError
from sm75.install import Box
from sm75.lockfile import load_release, load_target
from sm75.progress import make_reporter
from sm75.store import Store, default_root
from tests.integration import arm64, armpython, closurekit, standin
from tests.integration.conftest import ROOT, Built

LOCK = load_release(ROOT)
STORE = Store(default_root())
CONDA_FORGE = ROOT / "tests" / "data" / "conda-forge"
WORK = ROOT / ".sm75" / "closure-test"


@pytest.fixture(scope="session")
def product(built: Built) -> Path:
    """A channel with vllm-sm75, its closure and the adapter."""
    contract = load_target(ROOT, LOCK.target)
    with make_reporter(sys.stderr) as reporter:
        fetch.fetch(closure.plan_fetch(load_runtime(ROOT, LOCK.vllm), STORE), STORE, reporter)
        where = WORK / "channel"
        closure.build(ROOT, LOCK, contract, STORE, where, reporter)
    closurekit.publish([built.package], where)
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
    return installer.box_of(load_target(ROOT, LOCK.target))


@pytest.fixture(scope="session")
def prefix(product: Path, python: Path) -> Path:
    """Everything, installed with no network in a process of its own."""
    where = WORK / "prefix"
    shutil.rmtree(where, ignore_errors=True)
    program = (
        "import sys; from pathlib import Path\n"
        "from sm75 import install, lockfile, rattler_rt\n"
        "root, channel, python, where = map(Path, sys.argv[1:])\n"
        "box = install.box_of(lockfile.load_target(root, lockfile.load_release(root).target))\n"
        "done = install.install(channel, where, python='3.11', box=box, extra_channels=[python])\n"
        "print('\\n'.join(done.packages)); rattler_rt.exit_process(0)\n"
    )
    done = subprocess.run(
        [*isolation(), sys.executable, "-c", program, str(ROOT), str(product), str(python),
         str(where)],
        check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 140
    return where


def test_package_depends_on_what_the_closure_serves(built: Built) -> None:
    """Spelled in the same way, after everything that reads and writes the specs."""
    depends = condapkg.read_info(built.package)["index"]["depends"]
    wanted = recipedeps.wanted(ROOT, LOCK, STORE.get(LOCK.artifact("vllm-sdist")))
    own = ["python >=3.11,<3.15", "dlami-torch >=2.11"]
    assert sorted(depends) == sorted([*own, *wanted])


@pytest.mark.parametrize("minor", ["3.12", "3.13"])
def test_existing_conda_forge_environment(product: Path, box: Box, minor: str) -> None:
    """python and native libraries of conda-forge, all else ours; no torch or vllm from there."""
    records = installer.solve(
        [product, CONDA_FORGE], ["vllm-sm75", f"python {minor}.*", "ca-certificates"], box
    )
    names = {r.name.normalized for r in records}
    assert not names & {"pytorch", "libtorch", "vllm", "triton"}
    theirs = {r.name.normalized for r in records if product.as_uri() not in r.url}
    assert {"python", "libgcc", "openssl"} <= theirs
    assert len(names - theirs) > 140


def test_channel_alone_lacks_python_and_says_so(product: Path, box: Box, tmp_path: Path) -> None:
    base = BasePython(ROOT, LOCK, installer.pythons(product))
    found = {gap.python: gap.missing for gap in channeltools.gaps(product, box, tmp_path, base)}
    assert set(found) == {"3.11", "3.12", "3.13"}
    for minor, missing in found.items():
        assert len(missing) == 1, missing
        assert missing[0].startswith(f"python {minor} and its libraries: 2")
        assert f"python-{minor}." in missing[0]


@pytest.mark.parametrize(
    ("fact", "value", "words"),
    [
        ("__glibc", "2.31", "this machine has glibc 2.31; vllm-sm75 needs >=2.34"),
        ("__cuda_arch", "8.0", "has a GPU of compute capability 8.0; vllm-sm75 needs >=7.5,<8"),
        ("__cuda", "12.8", "has a driver for CUDA 12.8; "),
    ],
)
def test_wrong_box(product: Path, box: Box, fact: str, value: str, words: str) -> None:
    wrong = dataclasses.replace(box, virtual={**box.virtual, fact: value})
    with pytest.raises(ChannelError) as caught:
        installer.solve([product, CONDA_FORGE], ["vllm-sm75", "python 3.12.*"], wrong)
    assert words in caught.value.what


def test_other_platform(product: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is for linux-aarch64"):
        installer.install(
            product, tmp_path / "p", python="3.12", box=Box(platform="linux-64", virtual={})
        )
    assert list(tmp_path.iterdir()) == []


def flip(where: Path) -> str:
    package = max(where.glob("linux-aarch64/numpy-*.conda"))
    data = bytearray(package.read_bytes())
    data[len(data) // 2] ^= 1
    package.unlink()
    package.write_bytes(data)
    return package.name


def remove(where: Path) -> str:
    package = max(where.glob("noarch/transformers-*.conda"))
    package.unlink()
    return package.name


def edit(where: Path) -> str:
    index = where / "noarch" / channelcheck.REPODATA
    data = json.loads(index.read_bytes())
    name = next(n for n in data["packages.conda"] if n.startswith("transformers-"))
    data["packages.conda"][name]["depends"] = []
    index.unlink()
    index.write_text(json.dumps(data))
    return str(name)


@pytest.mark.parametrize("damage", [flip, remove, edit])
def test_damaged_channel_is_refused(
    product: Path, python: Path, box: Box, tmp_path: Path, damage: object
) -> None:
    where = closurekit.copy_channel(product, tmp_path / "channel")
    assert callable(damage)
    name = damage(where)
    assert any(name in p.path for p in channelcheck.verify_channel(where))
    target = tmp_path / "prefix"
    target.mkdir()
    with pytest.raises(ChannelError) as caught:
        installer.install(where, target, python="3.11", box=box, extra_channels=[python])
    assert name in caught.value.why
    assert list(target.iterdir()) == []
    assert {p.name for p in tmp_path.iterdir()} == {"channel", "prefix"}


def test_prefix_in_use_is_left_alone(product: Path, box: Box, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError, match="is not empty"):
        installer.install(product, tmp_path, python="3.11", box=box)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_sizes(product: Path) -> None:
    totals = channeltools.totals(channeltools.sizes(product))
    for name, limit in channeltools.LIMITS.items():
        assert 0 < totals[name] < limit


def test_export_carries_all(product: Path, tmp_path: Path) -> None:
    first = channeltools.export(product, tmp_path / "a.tar")
    assert first == channeltools.export(product, tmp_path / "b.tar")
    subprocess.run(["tar", "-xf", "a.tar"], cwd=tmp_path, check=True)
    subprocess.run(
        ["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=tmp_path / "channel", check=True
    )
    assert channelcheck.verify_channel(tmp_path / "channel") == []
    assert len(channels.packages_in(tmp_path / "channel")) == len(channels.packages_in(product))


def test_installed_environment_holds_no_omission(prefix: Path) -> None:
    site = prefix / "lib" / "python3.11" / "site-packages"
    absent = load_omissions(ROOT, LOCK.vllm).absent_imports
    assert {n for n in absent if list(site.glob(f"{n}*/__init__.py"))} == set()
    assert not (site / "torch").exists()
    assert (site / "dlami_torch.pth").exists()
    scripts = (prefix / "bin" / "vllm").read_text()
    assert scripts.startswith(f"#!{prefix}/bin/python3.11\n")


# Under emulation: minutes each, more when the cores are busy.


@pytest.fixture(scope="session")
def image() -> Path:
    """Stands in for the image's environment."""
    if shutil.which(standin.GCC) is None:
        pytest.skip(f"needs {standin.GCC}")
    return standin.make(WORK / "image", STORE, LOCK)


def emulate(
    prefix: Path, image: Path, *arguments: str, accept: str = "arch"
) -> subprocess.CompletedProcess[str]:
    emulator = arm64.qemu()
    if emulator is None:
        pytest.skip("needs qemu-user")
    sysroot = WORK / "python" / "sysroot"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM"))}
    environment |= {"DLAMI_TORCH_PATH": str(image), "DLAMI_TORCH_ACCEPT": accept,
                    "HOME": str(WORK / "home"), "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    return subprocess.run(
        [emulator, "-L", str(sysroot), str(prefix / "bin" / "python3.11"), *arguments],
        check=False, capture_output=True, text=True, env=environment,
    )  # fmt: skip


def test_no_image_is_said_at_first_import(prefix: Path, tmp_path: Path) -> None:
    done = emulate(prefix, tmp_path / "none", "-c", "import torch", accept="")
    line = done.stderr.strip().splitlines()[-1]
    assert "there is no torch in" in line
    assert "Deep Learning AMI" in line


@pytest.mark.slow
def test_public_torch_is_refused_and_accepted_for_tests(prefix: Path, image: Path) -> None:
    program = "import torch; print(torch.__version__)"
    refused = emulate(prefix, image, "-c", program, accept="")
    assert "has no sm_75 code (it has sm_80" in refused.stderr.strip().splitlines()[-1]
    accepted = emulate(prefix, image, "-c", program)
    assert accepted.stdout.strip() == "2.12.0+cu130", accepted.stderr


@pytest.mark.slow
def test_vllm_imports_and_its_kernels_load(prefix: Path, image: Path) -> None:
    program = (
        "import ctypes, importlib.metadata as m, sys, torch, vllm\n"
        # of the driver, which this machine has not
        "ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)\n"
        "import vllm._C_stable_libtorch, vllm._moe_C_stable_libtorch\n"
        "names = torch._C._dispatch_get_all_op_names()\n"
        "names = [n for n in names if n.startswith(('_C::', '_moe_C::'))]\n"
        "print(m.version('torch'), vllm.__version__, len(names))\n"
    )
    driver = image / "lib/python3.11/site-packages/nvidia/cu13/lib/libcuda.so.1"
    done = emulate(prefix, image, "-c", program, str(driver))
    assert done.returncode == 0, done.stderr[-3000:]
    torch, version, operators = done.stdout.split()[-3:]
    assert (torch, version) == ("2.12.0+cu130", LOCK.vllm)
    assert int(operators) > 50


@pytest.mark.slow
def test_vllm_command(prefix: Path, image: Path) -> None:
    """It needs a device to go on, even for --version: upstream makes the parser of serve first."""
    done = emulate(prefix, image, str(prefix / "bin" / "vllm"), "--version")
    no_device = "RuntimeError: Failed to infer device type"
    assert done.stdout.strip().endswith(LOCK.vllm) or no_device in done.stderr, done.stderr[-3000:]
