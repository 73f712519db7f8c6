"""The recipe's build script, as far as it needs no compiler."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from sm75.series import load_series
from tests.unit.projectkit import RELEASE, ROOT, load

OMISSIONS = ROOT / "lock" / RELEASE / "omissions.toml"
script = load(ROOT / "recipes" / "vllm-sm75" / "build.py")


@pytest.fixture
def machine_tools(tmp_path: Path) -> Path:
    """What the build's PATH has."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "bash", "env", "rm"):
        (tools / name).symlink_to(shutil.which(name) or "")
    return tools


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 16 cores; the test writes what it says of its memory."""
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(script, "Path", lambda _: meminfo)
    monkeypatch.delenv("SM75_JOBS", raising=False)
    monkeypatch.setenv("CPU_COUNT", "16")
    return meminfo


def memory(meminfo: Path, gib: float) -> None:
    kib = int(gib * 1024**2)
    meminfo.write_text(f"MemTotal:       999999999 kB\nMemAvailable:   {kib} kB\nBuffers: 1 kB\n")


@pytest.mark.parametrize(
    ("gib", "expected"), [(0.5, 1), (2.4, 1), (5.1, 2), (7.6, 3), (39.9, 15), (500, 16)]
)
def test_jobs_by_memory(machine: Path, gib: float, expected: int) -> None:
    memory(machine, gib)
    assert script.jobs() == expected


def test_jobs_by_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(machine, 500)
    monkeypatch.setenv("CPU_COUNT", "3")
    assert script.jobs() == 3
    monkeypatch.delenv("CPU_COUNT")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert script.jobs() == 1


def test_jobs_as_asked(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(machine, 0.1)
    monkeypatch.setenv("SM75_JOBS", "7")
    assert script.jobs() == 7
    monkeypatch.setenv("SM75_JOBS", "")
    assert script.jobs() == 1


@pytest.mark.parametrize("place", ["bin/cudafe++", "nvvm/bin/cicc"])
def test_front_ends_are_not_told_where_a_source_lies(
    tmp_path: Path, machine_tools: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Two directories, one name of what is internal to a source."""
    for name in ("BUILD_PREFIX", "PREFIX", "CC", "CXX"):
        monkeypatch.setenv(name, str(tmp_path / name))
    told = []
    for name in ("one", "another place"):
        native = tmp_path / name
        kit = script.Toolkit(native, "linux-aarch64")
        real = kit.cuda / "front" / Path(place).name
        real.parent.mkdir(parents=True)
        real.write_text("#!/bin/sh\nprintf '<%s>' \"$@\"\nexit 7\n")
        real.chmod(0o755)
        kit._front_end(kit.cuda / place)
        source = f"{native}/src/a b.cu"
        words = ["--orig_src_path_name", source, "-o", source, "", "*", "--orig_src_path_name"]
        done = subprocess.run(
            [str(kit.cuda / place), *words, "/usr/include/x"], check=False, capture_output=True,
            text=True, env={"PATH": str(machine_tools)},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (7, "")
        assert f"<-o><{source}><><*>" in done.stdout
        told.append(done.stdout.replace(source, "SOURCE"))
    assert told[0] == told[1]
    assert told[0].startswith("<--orig_src_path_name></src/a b.cu><-o>")
    # What lies elsewhere is told as it is.
    assert told[0].endswith("<--orig_src_path_name></usr/include/x>")


def test_literal(tmp_path: Path) -> None:
    """Read out of the source: the target's torch cannot be imported here."""
    module = tmp_path / "cpp_extension.py"
    module.write_text(
        "import nowhere\nOTHER = call()\nA = B = ['no']\n"
        "COMMON_NVCC_FLAGS = [\n    '-D__CUDA_NO_HALF_OPERATORS__',\n    '--expt-x',\n]\n"
        "def f():\n    INNER = ['x']\n"
    )
    found = script.literal(module, "COMMON_NVCC_FLAGS")
    assert found == ["-D__CUDA_NO_HALF_OPERATORS__", "--expt-x"]
    with pytest.raises(SystemExit, match=r"cpp_extension\.py no longer assigns GONE"):
        script.literal(module, "GONE")
    with pytest.raises(SystemExit, match="no longer assigns INNER"):
        script.literal(module, "INNER")


def test_link(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "link"
    script.link(place, "one")
    assert os.readlink(place) == "one"  # noqa: PTH115 (the text, not a path)
    inode = place.lstat().st_ino
    script.link(place, "one")
    assert place.lstat().st_ino == inode
    script.link(place, "two")
    assert os.readlink(place) == "two"  # noqa: PTH115
    file = tmp_path / "file"
    file.write_text("x")
    script.link(file, "three")
    assert os.readlink(file) == "three"  # noqa: PTH115


def test_copy_leaves_out_what_is_not_there(tmp_path: Path) -> None:
    script.copy(tmp_path / "no", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    script.copy(tmp_path / "d", tmp_path / "out")
    script.copy(tmp_path / "d" / "f", tmp_path / "g")
    assert (tmp_path / "out" / "f").read_text() == (tmp_path / "g").read_text() == "x"


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A native directory with the state of a build in it."""
    monkeypatch.setenv("CC", "/usr/bin/gcc")
    monkeypatch.setenv("CXX", "/usr/bin/g++")
    where = tmp_path / "native"
    script.settle(where)
    for name in ("build/build.ninja", "src/a.cu", "ccache/0/x", "toolkit.complete"):
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_text("x")
    (where / "host").symlink_to("/nowhere")
    return where


def kept(native: Path) -> list[str]:
    return sorted(path.name for path in native.iterdir())


def test_state_stays_where_nothing_moved(native: Path) -> None:
    before = kept(native)
    script.settle(native)
    assert kept(native) == before


def test_moved_checkout(native: Path) -> None:
    """CMake's files hold the old path; the compiler cache does not."""
    moved = native.rename(native.with_name("elsewhere"))
    script.settle(moved)
    assert kept(moved) == ["ccache", "place"]
    script.settle(moved)


def test_moved_compiler(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/opt/bin/g++")
    script.settle(native)
    assert kept(native) == ["ccache", "place"]


def test_another_build_script(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was edited for a while must leave nothing behind."""
    copy = native.parent / "build.py"
    copy.write_bytes(Path(str(script.__file__)).read_bytes() + b"\n")
    monkeypatch.setattr(script, "__file__", str(copy))
    script.settle(native)
    assert kept(native) == ["ccache", "place"]


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Path, Path]:
    """A tree, and the native directory after CMake has generated a source and been run."""
    tree, native = tmp_path / "tree", tmp_path / "native"
    for name in ("CMakeLists.txt", "cmake/utils.cmake", "csrc/moe/a.cu", "LICENSE", "setup.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    script.prepare_sources(tree, native)
    (native / "src" / "csrc" / "moe" / "kernel_selector.h").write_text("generated")
    (native / "build").mkdir()
    (native / "build" / "build.ninja").write_text("")
    (native / "ccache").mkdir()
    (native / "place").write_text("here")
    return tree, native


def test_generated_sources_stay(prepared: tuple[Path, Path]) -> None:
    """A killed build resumes, and a build of another Python file compiles nothing."""
    tree, native = prepared
    (tree / "setup.py").write_text("changed; no input of CMake")
    before = {p: p.stat().st_mtime_ns for p in native.rglob("*")}
    script.prepare_sources(tree, native)
    assert {p: p.stat().st_mtime_ns for p in native.rglob("*")} == before
    assert not (native / "src" / "setup.py").exists()


@pytest.mark.parametrize("where", ["tree", "copy", "new", "gone", "record"])
def test_other_sources_are_configured_anew(prepared: tuple[Path, Path], where: str) -> None:
    """What was generated and configured belongs to the sources it was made of."""
    tree, native = prepared
    if where == "tree":
        (tree / "csrc" / "moe" / "a.cu").write_text("changed")
    elif where == "copy":
        (native / "src" / "csrc" / "moe" / "a.cu").write_text("changed")
    elif where == "new":
        (tree / "csrc" / "b.cu").write_text("new")
    elif where == "gone":
        (native / "src" / "cmake" / "utils.cmake").unlink()
    else:
        (native / "src.complete").unlink()
    script.prepare_sources(tree, native)
    assert kept(native) == ["ccache", "place", "src", "src.complete"]
    names = script.native_inputs(tree)
    copied = [p.relative_to(native / "src").as_posix() for p in script.files([native / "src"])]
    assert copied == sorted(names)
    assert script.files_digest(tree, names) == script.files_digest(native / "src", names)


def test_what_was_laid_out_is_checked_before_it_is_used_again(tmp_path: Path) -> None:
    tree, record = tmp_path / "tree", tmp_path / "record"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "ptxas").write_bytes(b"program")
    (tree / "lib").symlink_to("bin")
    assert not script.complete(record, [tree])
    record.write_text(script.tree_digest([tree]))
    assert script.complete(record, [tree])
    (tree / "bin" / "ptxas").write_bytes(b"Program")
    assert not script.complete(record, [tree])
    (tree / "bin" / "ptxas").write_bytes(b"program")
    assert script.complete(record, [tree])
    (tree / "lib").unlink()
    (tree / "lib").symlink_to("elsewhere")
    assert not script.complete(record, [tree])
    shutil.rmtree(tree)
    assert not script.complete(record, [tree])


@pytest.mark.parametrize(
    "changed", ["cuda/bin/ptxas", "cuda/front/cudafe++", "build/nvvm/bin/cicc", "cc1plus", "g++"]
)
def test_compiler_cache_is_keyed_by_what_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """nvcc and g++ only start other programs: their own versions say little."""
    program = """#!/bin/sh
here="${0%/*}"
case "$1" in
-print-prog-name=*) echo "$here/${1#*=}";;
-dumpspecs) echo specs;;
esac
"""
    for name in ("cuda/bin/nvcc", "cuda/bin/ptxas", "cuda/front/cudafe++", "build/nvvm/bin/cicc",
                 "cc1", "cc1plus", "as", "g++", "gcc"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(program)
        path.chmod(0o755)
    for name, value in (("BUILD_PREFIX", "build"), ("PREFIX", "host"), ("CC", "gcc"),
                        ("CXX", "g++")):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path / value))
    before = script.Toolkit(tmp_path, "linux-aarch64").environment()["CCACHE_COMPILERCHECK"]
    assert before.startswith("string:")
    again = script.Toolkit(tmp_path, "linux-aarch64").environment()["CCACHE_COMPILERCHECK"]
    assert again == before
    (tmp_path / changed).write_text(program + "# altered\n")
    after = script.Toolkit(tmp_path, "linux-aarch64").environment()["CCACHE_COMPILERCHECK"]
    assert after != before


# Trimmed from the sdist of 0.33.0.
PKG_INFO = """\
Metadata-Version: 2.4
Name: vllm
Version: 0.33.0
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Dist: regex
Requires-Dist: torch==2.14.0
Requires-Dist: torchaudio==2.11.0
Requires-Dist: torchvision==0.29.0
Requires-Dist: torchcodec>=0.14
Requires-Dist: PyNvVideoCodec==2.0.4
Requires-Dist: nvidia-cutlass-dsl[cu13]==4.8.0
Requires-Dist: tokenspeed-mla==2.0.3; platform_system == "Linux"
Requires-Dist: fastsafetensors>=0.3.3
Provides-Extra: fastsafetensors
Requires-Dist: fastsafetensors>=0.3.3; extra == "fastsafetensors"
Requires-Dist: zentorch==2.14.0.1; extra == "zen"
Provides-Extra: zen

vLLM is fast with torch.compile, and with torch==2.14.0.
"""
ENTRY_POINTS = """\
[console_scripts]
vllm = vllm.entrypoints.cli.main:main

[vllm.general_plugins]
lora_hf_hub_resolver = vllm.plugins.lora_resolvers.hf:register
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A small tree, installed."""
    tree, site = tmp_path / "tree", tmp_path / "site"
    for path, text in {
        "PKG-INFO": PKG_INFO,
        "LICENSE": "Apache",
        "vllm.egg-info/entry_points.txt": ENTRY_POINTS,
        "vllm/__init__.py": "x = 1\n",
        "vllm/with, comma.json": "{}",
        "vllm/deep/__init__.py": "",
        "vllm/__pycache__/x.pyc": "",
        "vllm/deep/y.pyc": "",
    }.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "spinloop.abi3.so").write_bytes(b"\x7fELF")
    monkeypatch.setenv("target_platform", "linux-aarch64")
    monkeypatch.setenv("SM75_RUST", "prebuilt")
    script.install_python(tree, site)
    script.install_metadata(tree, site, OMISSIONS)
    return SimpleNamespace(tree=tree, site=site, info=site / "vllm-0.33.0.dist-info")


def test_python_files_without_caches(installed: SimpleNamespace) -> None:
    found = {p.relative_to(installed.site).as_posix() for p in installed.site.rglob("*.*")}
    assert {"vllm/__init__.py", "vllm/with, comma.json", "vllm/spinloop.abi3.so"} <= found
    assert not any("pyc" in name for name in found)


def test_requirements_are_those_that_an_installation_meets(installed: SimpleNamespace) -> None:
    """Any torch of the stable ABI, and none of what the lock leaves out, but for extras."""
    dist = importlib.metadata.Distribution.at(installed.info)
    assert dist.version == "0.33.0"
    assert dist.requires == [
        "regex",
        "torch>=2.11",
        "torchvision",
        'fastsafetensors>=0.3.3; extra == "fastsafetensors"',
        'zentorch==2.14.0.1; extra == "zen"',
    ]
    assert dist.metadata["License-Expression"] == "Apache-2.0"
    text = (installed.info / "METADATA").read_text()
    assert text.partition("\n\n")[2] == PKG_INFO.partition("\n\n")[2]


def test_entry_points_are_kept(installed: SimpleNamespace) -> None:
    dist = importlib.metadata.Distribution.at(installed.info)
    assert {(e.group, e.name) for e in dist.entry_points} == {
        ("console_scripts", "vllm"),
        ("vllm.general_plugins", "lora_hf_hub_resolver"),
    }
    assert (installed.info / "entry_points.txt").read_text() == ENTRY_POINTS


def test_record_lists_every_file_with_its_hash(installed: SimpleNamespace) -> None:
    with (installed.info / "RECORD").open(newline="") as handle:
        rows = {name: (digest, size) for name, digest, size in csv.reader(handle)}
    there = {
        p.relative_to(installed.site).as_posix() for p in installed.site.rglob("*") if p.is_file()
    }
    assert set(rows) == there
    own = f"{installed.info.name}/RECORD"
    assert rows.pop(own) == ("", "")
    for name, (digest, size) in rows.items():
        data = (installed.site / name).read_bytes()
        raw = base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "==")
        assert raw == hashlib.sha256(data).digest(), name
        assert int(size) == len(data)
        assert not digest.endswith("=")


def test_other_files_of_the_metadata(installed: SimpleNamespace) -> None:
    assert "Tag: cp311-abi3-linux_aarch64\n" in (installed.info / "WHEEL").read_text()
    assert "Root-Is-Purelib: false\n" in (installed.info / "WHEEL").read_text()
    assert (installed.info / "INSTALLER").read_text() == "conda\n"
    assert (installed.info / "licenses" / "LICENSE").read_text() == "Apache"
    assert json.loads((installed.info / "sm75.json").read_text()) == {
        "arches": ["7.5"],
        "rust_frontend": "prebuilt",
    }


def test_metadata_does_not_depend_on_when(installed: SimpleNamespace, tmp_path: Path) -> None:
    again = tmp_path / "again"
    (again / "vllm").mkdir(parents=True)
    (again / "vllm" / "spinloop.abi3.so").write_bytes(b"\x7fELF")
    script.install_python(installed.tree, again)
    script.install_metadata(installed.tree, again, OMISSIONS)
    for path in installed.info.rglob("*"):
        if path.is_file():
            other = again / path.relative_to(installed.site)
            assert other.read_bytes() == path.read_bytes(), path.name


def test_rust_frontend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site, prefix = tmp_path / "site", tmp_path / "prefix"
    (site / "vllm").mkdir(parents=True)
    (prefix / "share" / "vllm-rs").mkdir(parents=True)
    (prefix / "share" / "vllm-rs" / "vllm-rs").write_bytes(b"rust")
    monkeypatch.setenv("PREFIX", str(prefix))
    monkeypatch.setenv("SM75_RUST", "none")
    script.install_rust(tmp_path, tmp_path, site)
    assert list((site / "vllm").iterdir()) == []
    monkeypatch.setenv("SM75_RUST", "prebuilt")
    script.install_rust(tmp_path, tmp_path, site)
    assert (site / "vllm" / "vllm-rs").stat().st_mode & 0o777 == 0o755
    assert capsys.readouterr().out.splitlines() == [
        "sm75: Rust frontend: none",
        "sm75: Rust frontend: prebuilt",
    ]
    monkeypatch.setenv("SM75_RUST", "source")
    monkeypatch.delenv("SM75_CRATES", raising=False)
    with pytest.raises(SystemExit, match="needs SM75_CRATES"):
        script.install_rust(tmp_path, tmp_path, site)
    monkeypatch.setenv("SM75_RUST", "sauce")
    with pytest.raises(SystemExit, match="sauce"):
        script.install_rust(tmp_path, tmp_path, site)


def test_half_a_copy_is_made_anew(tmp_path: Path) -> None:
    """Of a run that was killed while it copied."""
    tree, native = tmp_path / "tree", tmp_path / "native"
    for path in ("CMakeLists.txt", "cmake/x.cmake", "csrc/a.cu", "LICENSE", "vllm/__init__.py"):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(path)
    (native / "src").mkdir(parents=True)
    (native / "src" / "half").touch()
    script.prepare_sources(tree, native)
    found = {
        p.relative_to(native / "src").as_posix() for p in native.rglob("src/**/*") if p.is_file()
    }
    assert found == {"CMakeLists.txt", "cmake/x.cmake", "csrc/a.cu", "LICENSE"}


def test_a_failed_command_names_itself(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="sm75: false failed with exit code 1"):
        script.run(["/bin/false"])
    script.step("compile")
    assert capfd.readouterr().out == "sm75: step compile\n"


@pytest.mark.parametrize(
    ("target", "ptx", "said"),
    [
        ("linux-aarch64", "1", "the package for linux-aarch64 has none"),
        ("linux-64", "yes", "SM75_PTX is 'yes'"),
        ("linux-64", "1", ""),
        ("linux-aarch64", "", ""),
    ],
)
def test_ptx_is_for_proofs_only(target: str, ptx: str, said: str) -> None:
    if not said:
        script.check_ptx(target, ptx)
        return
    with pytest.raises(SystemExit, match=said):
        script.check_ptx(target, ptx)


def test_patches_of_its_own_release_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe brings along those of all releases, with the files that one takes from another."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        commands.append(command)
        raise SystemExit

    (tmp_path / "vllm-src").mkdir()
    monkeypatch.setattr(script, "run", run)
    for name, value in {"SRC_DIR": str(tmp_path), "SP_DIR": "", "PKG_VERSION": RELEASE,
                        "target_platform": "linux-aarch64"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        script.main()
    (command,) = commands
    given = command[command.index("--series") + 1]
    assert Path(given) == tmp_path / "patches" / RELEASE
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    assert load_series(Path(given)).release == RELEASE
    assert load_series(tmp_path / "patches" / "0.28.0").release == "0.28.0"
