"""What must hold of the built package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sm75 import atomic, condapkg
from sm75.archives import walk
from sm75.build import isolation
from sm75.channelcheck import verify_channel
from sm75.store import default_root
from tests.integration import arm64
from tests.integration.conftest import ROOT, Built, orchestrate

EXTENSIONS = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "cumem_allocator",
    "spinloop",
    "fs_io_C",
)


def _verify(package: Path) -> dict[str, object]:
    done = orchestrate("verify", "--json", str(package))
    result: dict[str, object] = json.loads(done.stdout)
    assert (done.returncode == 0) is result["ok"], done.stderr
    return result


def test_every_rule_holds(built: Built) -> None:
    result = _verify(built.package)
    states = {f["rule"]: f["state"] for f in result["findings"]}  # type: ignore[attr-defined]
    assert set(states.values()) == {"ok"}, result
    libraries = {Path(name).name for name in result["extensions"]}  # type: ignore[attr-defined]
    extensions = libraries - {"vllm-rs"}
    assert extensions == {f"{name}.abi3.so" for name in EXTENSIONS}
    assert int(str(result["cubins"])) >= 60


def test_nothing_to_do_the_second_time(built: Built) -> None:
    before = built.package.stat()
    done = orchestrate("build", "--offline", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["built"] is False
    assert built.package.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.usefixtures("built")
def test_nothing_undeclared_was_started(planted: Path) -> None:
    """The package was built with undeclared programs and a header in its way: see ``planted``."""
    started = planted / "started"
    assert not started.exists(), started.read_text()


def test_channel_is_sound(built: Built) -> None:
    assert verify_channel(built.channel) == []


def test_package_says_what_it_is_made_of(built: Built) -> None:
    info = condapkg.read_info(built.package)
    extra = info["about"]["extra"]
    assert extra["rust_frontend"] == "prebuilt"
    assert extra["provenance"]["artifacts"]["vllm-sdist"]
    assert built.package.name.split("-")[-1].startswith("h" + extra["input_hash"])
    assert "dlami-torch >=2.11" in info["index"]["depends"]
    assert "__cuda_arch >=7.5,<8" in info["index"]["constrains"]


def test_python_files_are_those_of_the_official_wheel(built: Built) -> None:
    """All of the sdist's package, patched; nothing of the external projects."""
    names = {m.name.split("site-packages/")[-1] for m in walk(built.package)}
    with zipfile.ZipFile(ROOT / "tests" / "data" / "official-wheel-names.zip") as listing:
        official = set(listing.read("names.txt").decode().split("\n"))
    outside = ("vllm/third_party/", "vllm/vllm_flash_attn/", "vllm/libs/")
    missing = {
        name
        for name in official - names
        if name.startswith("vllm/") and not name.endswith(".so") and not name.startswith(outside)
    }
    assert missing == set()
    assert "vllm/vllm-rs" in names


@pytest.fixture(scope="module")
def prefix(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package alone, installed by py-rattler with no network."""
    where = tmp_path_factory.mktemp("install") / "prefix"
    program = ROOT / "tests" / "integration" / "install_alone.py"
    done = subprocess.run(
        [*isolation(), sys.executable, str(program), str(built.channel), built.package.name,
         str(where), str(built.toolchain)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return where


def test_install_puts_every_file_in_place(built: Built, prefix: Path) -> None:
    paths = condapkg.read_info(built.package)["paths"]["paths"]
    site = next(prefix.glob("lib/python3.*/site-packages"))
    missing = [
        entry["_path"]
        for entry in paths
        if not (prefix / entry["_path"]).exists()
        and not (site / entry["_path"].removeprefix("site-packages/")).exists()
    ]
    assert len(paths) > 2000
    assert missing == []


@pytest.mark.parametrize("extension", ["spinloop", "fs_io_C"])
def test_arm_python_loads(prefix: Path, extension: str) -> None:
    emulator = arm64.qemu()
    root = arm64.sysroot(ROOT / ".sm75" / "arm64")
    if emulator is None or root is None:
        pytest.skip("needs qemu-user and Debian's arm64 archive")
    library = next(prefix.glob(f"lib/python3.*/site-packages/vllm/{extension}.abi3.so"))
    program = (
        "import importlib.util as u, platform\n"
        f"s = u.spec_from_file_location('vllm.{extension}', {str(library)!r})\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        "print(platform.machine(), sorted(n for n in dir(m) if not n.startswith('__')))\n"
    )
    done = subprocess.run(
        [emulator, "-L", str(root), str(root / "usr" / "bin" / "python3.11"), "-c", program],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("aarch64 [")


def test_a_second_architecture_is_refused(built: Built, tmp_path: Path) -> None:
    """The arch list `7.5;8.0` in one object is enough for verify to fail, naming it."""
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("needs the cross compiler of a build on this machine")
    cuda = tmp_path / "cuda"
    for pattern in ("cuda-nvcc-tools", "cuda-nvvm-tools", "cuda-cudart-dev", "cuda-crt-dev"):
        (package,) = built.toolchain.glob(f"*/{pattern}-*.conda")
        for member in walk(package):
            place = cuda / member.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(member.read())
            place.chmod(0o755)
    source = tmp_path / "k.cu"
    source.write_text("__global__ void k(int* p) { *p = 1; }\n")
    library = tmp_path / "k.so"
    subprocess.run(
        [str(cuda / "bin" / "nvcc"), "-ccbin", "aarch64-linux-gnu-g++", "-shared",
         "-I", str(cuda / "targets" / "sbsa-linux" / "include"),
         "-Xcompiler", "-fPIC", "-cudart", "none", "-gencode", "arch=compute_75,code=sm_75",
         "-gencode", "arch=compute_80,code=sm_80", str(source), "-o", str(library)],
        check=True,
    )  # fmt: skip
    wrong = _with_library(built.package, library, tmp_path)
    done = orchestrate("verify", "--json", str(wrong))
    assert done.returncode == 1
    faults = [f for f in json.loads(done.stdout)["findings"] if f["state"] == "fail"]
    assert any("sm_80" in f["evidence"] for f in faults), faults


def _with_library(package: Path, library: Path, tmp_path: Path) -> Path:
    """The package with another _C_stable_libtorch, its record made right."""
    info = condapkg.read_info(package)
    files = {}
    for member in walk(package):
        data = member.path().read_bytes()
        if member.name.endswith("/_C_stable_libtorch.abi3.so"):
            data = library.read_bytes()
        files[member.name] = condapkg.FileSource.from_bytes(data)
    index = info["index"]
    with atomic.directory(tmp_path / "wrong") as scratch:
        condapkg.write_conda(
            scratch, name=index["name"], version=index["version"], build=index["build"],
            subdir=index["subdir"], files=files, depends=index["depends"], about=info["about"],
        )  # fmt: skip
    return tmp_path / "wrong" / "linux-aarch64" / package.name


def test_the_recipe_alone_gives_the_same_contents(built: Built, tmp_path: Path) -> None:
    """Another directory, no orchestrator: every file of the package is the same."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "integration" / "recipe_alone.py"),
         built.toolchain.as_uri(), str(tmp_path / "out")],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "SM75_CCACHE_DIR": str(default_root() / "ccache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    other = Path(done.stdout.split()[-1])

    def contents(package: Path) -> dict[str, str]:
        paths = condapkg.read_info(package)["paths"]["paths"]
        return {entry["_path"]: entry["sha256"] for entry in paths}

    assert contents(other) == contents(built.package)
