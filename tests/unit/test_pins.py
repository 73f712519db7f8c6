"""Pins read out of vLLM's tree, and each reader's refusal of what it does not know."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from sm75 import fetch
from sm75.cmakescript import Word, evaluate
from sm75.errors import LockError
from sm75.lockfile import load_release
from sm75.pins import pins_of, read_pins
from sm75.progress import SilentReporter
from sm75.store import Store, default_root
from sm75.treefiles import read_sdist
from tests.unit.treekit import CMAKE, CUDA, DEEP, FILES, SETUP, pins, sdist, tree

ROOT = Path(__file__).resolve().parents[2]
MAIN = "CMakeLists.txt"
DEEP_FILE = "cmake/external_projects/deep.cmake"


def values(**changes: str | None) -> dict[str, str]:
    return {entry.name: entry.value for entry in pins(**changes).declared}


def test_all_declarations_of_a_small_tree() -> None:
    found = pins()
    assert found.version == "0.33.0"
    assert {entry.name: entry.value for entry in found.declared} == {
        "CUDA_SUPPORTED_ARCHS": "7.5;8.0",
        "CUTLASS_REVISION": "v4.7.1",
        "PYTHON_SUPPORTED_VERSIONS": "3.11;3.12",
        "TORCH_SUPPORTED_VERSION_CUDA": "2.14.0",
        "TORCH_TARGET_VERSION:_C_stable": "2.11",
        "docker:torch_cuda_arch_list": "7.5 8.0 12.0",
        "extension:vllm._C_stable": "required",
        "extension:vllm._deep_C": "optional",
        "extension:vllm.spinloop": "required",
        "extension:vllm.vllm-rs": "rust/Cargo.toml --bin vllm-rs +tls",
        "external:cutlass": "nvidia/cutlass@v4.7.1",
        "external:deep": "example.org/d/deep@abc123",
        "gcc": "11.3",
        "gcc:cuda": "13",
        "requirement:flashinfer-python": "==0.7.2",
        "requirement:torch": "==2.14.0",
        "requirement:torchaudio": "==2.11.0",
        "requirement:torchvision": "==0.29.0",
        "requirement:transformers": "<5.21.0,>=5.16.1",
        "requires-python": ">=3.11,<3.13",
        "target:_C_stable": "CUDA abi3 3",
        "target:_deep_C": "CUDA abi3 3",
        "target:spinloop": "CXX abi3 3.11",
    }
    assert [entry.name for entry in found.declared] == sorted(e.name for e in found.declared)
    assert found.rust.channel == "1.95"
    assert found.rust.git == ("zmq.rs@67dcba97559ebe8e8206dab753710d8b9cb07591",)


def test_architectures_are_those_of_the_pinned_toolkit() -> None:
    newer = {e.name: e.value for e in pins_of(tree(), cuda="13.4.10").declared}
    older = {e.name: e.value for e in pins_of(tree(), cuda="12.6").declared}
    assert newer["CUDA_SUPPORTED_ARCHS"] == "7.5;10.7"
    assert older["CUDA_SUPPORTED_ARCHS"] == "7.0;7.5"


# (file, what is changed in it, into what, what the error must name)
BROKEN = [
    (MAIN, 'set(CUTLASS_REVISION "v4.7.1")', "", "CUTLASS_REVISION"),
    (MAIN, 'set(CUTLASS_REVISION "v4.7.1")', "set(CUTLASS_REVISION a b)", "CUTLASS_REVISION"),
    (MAIN, 'set(CUTLASS_REVISION "v4.7.1")', 'set(CUTLASS_REVISION "${CUTLASS_REVISION}")',
     "CUTLASS_REVISION"),
    (MAIN, 'set(CUTLASS_REVISION "v4.7.1")',
     'if(SOMETHING)\nset(CUTLASS_REVISION v1)\nelse()\nset(CUTLASS_REVISION v2)\nendif()',
     "CUTLASS_REVISION"),
    (MAIN, "TORCH_SUPPORTED_VERSION_CUDA", "TORCH_EXPECTED", "TORCH_SUPPORTED_VERSION_CUDA"),
    (MAIN, '"7.5;8.0"', '"native"', "CUDA_SUPPORTED_ARCHS"),
    (MAIN, "set(CUDA_SUPPORTED_ARCHS", "list(APPEND CUDA_SUPPORTED_ARCHS", "CUDA_SUPPORTED_ARCHS"),
    (MAIN, '"3.11" "3.12"', '">=3.11"', "PYTHON_SUPPORTED_VERSIONS"),
    (MAIN, "VERSION_LESS", "VERSION_LESS_EQUAL", "CMAKE_CXX_COMPILER_VERSION"),
    (MAIN, 'GNU" AND CMAKE', 'GNU" OR CMAKE', "CMAKE_CXX_COMPILER_VERSION"),
    (MAIN, 'FATAL_ERROR "GCC >= 11.3', 'WARNING "GCC', "CMAKE_CXX_COMPILER_VERSION"),
    (MAIN, "USE_SABI 3)", ")", "define_extension_target"),
    (MAIN, "define_extension_target(spinloop LANGUAGE", "define_extension_target(spinloop IN",
     "define_extension_target"),
    (MAIN, "0x020B000000000000ULL", "0x020B000000000000", "TORCH_TARGET_VERSION"),
    (MAIN, "0x020B000000000000ULL", "0x020B000000000001ULL", "TORCH_TARGET_VERSION"),
    (MAIN, "target_compile_definitions(_C_stable", "target_compile_definitions(other",
     "TORCH_TARGET_VERSION"),
    (MAIN, "target_compile_definitions(_C_stable PRIVATE", "add_compile_definitions(",
     "TORCH_TARGET_VERSION"),
    (MAIN, "GIT_TAG ${CUTLASS_REVISION}", "URL_HASH SHA256=1", "GIT_TAG"),
    (MAIN, "if(VLLM_CUTLASS_SRC_DIR)", "if(SOME_CUTLASS)", "FetchContent_Declare"),
    (MAIN, "include(FetchContent)", "include(cmake/more.cmake)", "external_projects"),
    (MAIN, "include(FetchContent)", "add_subdirectory(more)", "external_projects"),
    (MAIN, "include(cmake/external_projects/deep.cmake)", "", "external_projects"),
    (MAIN, "deep.cmake)\nendif()", "deep.cmake)", "endif()"),
    (MAIN, "project(demo", "endif()\nproject(demo", "endif()"),
    (MAIN, "project(demo LANGUAGES CXX)", "project(demo LANGUAGES CXX", "CMake"),
    (MAIN, "project(demo LANGUAGES CXX)", "project(demo [==[ LANGUAGES CXX)", "CMake"),
    (DEEP_FILE, "FetchContent_Populate(", "ExternalProject_Add(", "GIT_TAG"),
    (DEEP_FILE, "FetchContent_Populate(", "git_clone(", "GIT_TAG"),
    (DEEP_FILE, "https:", "ssh:", "GIT_REPOSITORY"),
    (DEEP_FILE, 'GIT_TAG "${_TAG}"', 'GIT_TAG "${_OTHER}"', "_OTHER"),
    (DEEP_FILE, 'VLLM_TARGET_DEVICE STREQUAL "rocm"', "SOMETHING", "_TAG"),
    ("setup.py", 'name="vllm._deep_C"', 'name=f"vllm.{x}"', "ext_modules"),
    ("setup.py", 'ext_modules.append(CMakeExtension(name="vllm.spinloop"))',
     'ext_modules.extend([CMakeExtension(name="vllm.spinloop")])', "ext_modules"),
    ("setup.py", 'ext_modules.append(CMakeExtension(name="vllm.spinloop"))',
     'ext_modules += [CMakeExtension(name="vllm.spinloop")]', "ext_modules"),
    ("setup.py", "optional=True", "optional=maybe()", "ext_modules"),
    ("setup.py", "vllm._deep_C", "vllm.spinloop", "ext_modules"),
    ("setup.py", "return True", 'ext_modules.append(CMakeExtension(name="x"))', "ext_modules"),
    ("setup.py", "CMakeExtension(", "MesonExtension(", "ext_modules"),
    ("setup.py", "if _build_custom_ops():", 'print(CMakeExtension(name="vllm.new"))\nif ops():',
     "ext_modules"),
    ("setup.py", "ext_modules = []", "ext_modules = [", "Python"),
    ("pyproject.toml", "requires-python", "python-requires", "requires-python"),
    ("pyproject.toml", ">=3.11,<3.13", "about 3", "requires-python"),
    ("pyproject.toml", "[project]", "[project", "TOML"),
    ("requirements/cuda.txt", "torch==2.14.0", "torch", "torch"),
    ("requirements/cuda.txt", "torch==2.14.0", "torch==2.14.0\ntorch==2.13.0", "torch"),
    ("requirements/cuda.txt", "torch==2.14.0", "torch @ https://example.org/t.whl", "torch"),
    ("requirements/cuda.txt", "torch==2.14.0", "--pre\ntorch==2.14.0", "requirements"),
    ("requirements/cuda.txt", "flashinfer-python", "flash-infer", "flashinfer-python"),
    ("requirements/common.txt", "transformers >=", 'transformers; python_version > "3" # >=',
     "transformers"),
    ("requirements/common.txt", "transformers >= 5.16.1, < 5.21.0",
     'transformers >= 5; platform_machine == "x86_64"', "transformers"),
    ("rust-toolchain.toml", "1.95", "nightly", "channel"),
    ("rust-toolchain.toml", "[toolchain]", "[tools]", "channel"),
    ("rust/Cargo.lock", "version = 4", "version = 5", "version"),
    ("rust/Cargo.lock", "#67dcba", "#67", "git+https"),
    ("rust/Cargo.lock", "git+https", "git+ssh", "git+https"),
    ("rust/Cargo.lock", "?rev=", "?path=", "git+https"),
    ("tools/build_rust.py", "RustExtension", "RustBin", "RustExtension"),
    ("tools/build_rust.py", '"rust/Cargo.toml"', "manifest()", "RustExtension"),
    ("docker/versions.json", "TORCH_CUDA_ARCH_LIST", "ARCHES", "TORCH_CUDA_ARCH_LIST"),
    ("docker/versions.json", "7.5 8.0 12.0", "all", "TORCH_CUDA_ARCH_LIST"),
    ("docker/versions.json", "}}}", "}}", "TORCH_CUDA_ARCH_LIST"),
    ("PKG-INFO", "Version: 0", "Versions: 0", "Version"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "before", "after", "named"), BROKEN)
def test_an_unknown_form_is_refused(file: str, before: str, after: str, named: str) -> None:
    assert before in FILES[file]
    with pytest.raises(LockError) as caught:
        pins(**{file: FILES[file].replace(before, after)})
    message = str(caught.value)
    assert file in message
    assert named in message


@pytest.mark.parametrize("file", sorted(FILES))
def test_a_missing_file_is_refused(file: str) -> None:
    with pytest.raises(LockError) as caught:
        pins(**{file: None})
    assert file in str(caught.value) or "deep.cmake" in str(caught.value)


def test_an_external_file_that_is_not_included_is_refused() -> None:
    with pytest.raises(LockError, match="external_projects"):
        pins(**{"cmake/external_projects/new.cmake": DEEP})


def test_a_file_that_is_not_utf8_is_refused() -> None:
    broken = tree()
    content = {**broken.content, "setup.py": b"\xff"}
    with pytest.raises(LockError, match=r"setup\.py"):
        pins_of(type(broken)(label="demo", content=content), cuda=CUDA)


def test_what_is_declared_twice_is_refused() -> None:
    again = CMAKE.replace(
        "deep.cmake)", "deep.cmake)\n  include(cmake/external_projects/two.cmake)"
    )
    with pytest.raises(LockError, match="external:deep") as caught:
        pins(**{MAIN: again, "cmake/external_projects/two.cmake": DEEP})
    assert "two.cmake" in str(caught.value)


def test_what_follows_a_return_is_not_declared() -> None:
    ended = CMAKE + "return()\nset(CUTLASS_REVISION v9)\n"
    assert values(**{MAIN: ended})["CUTLASS_REVISION"] == "v4.7.1"


def test_an_extension_behind_an_unknown_condition_counts() -> None:
    more = SETUP + 'if arch() > 3:\n    ext_modules.append(CMakeExtension(name="vllm.new"))\n'
    assert values(**{"setup.py": more})["extension:vllm.new"] == "required"


def test_a_torch_abi_with_a_patch_version() -> None:
    patched = CMAKE.replace("0x020B000000000000ULL", "0x020B010000000000ULL")
    assert values(**{MAIN: patched})["TORCH_TARGET_VERSION:_C_stable"] == "2.11.1"


@pytest.mark.parametrize(
    ("condition", "verdict"),
    [
        ('A STREQUAL "x"', True),
        ('NOT A STREQUAL "x"', False),
        ('A STREQUAL "y" OR B', None),
        ('A STREQUAL "y" AND B', False),
        ("B AND ( C OR D )", None),
        ("V VERSION_GREATER_EQUAL 13.0", True),
        ("V VERSION_LESS 13.10", True),
        ("V VERSION_EQUAL 13.3", False),
        ("V VERSION_GREATER ${V}", False),
        ("DEFINED V AND DEFINED ENV{X}", False),
        ("DEFINED UNKNOWN", None),
        ("MY_SRC_DIR", False),
        ("EXISTS file OR TRUE", True),
        ("OFF", False),
        ("V", True),
        ('"V"', None),
        ("A MATCHES x", None),
        ("V VERSION_LESS 1 OR", None),
        ("NOT", None),
        ("( A", None),
        # AND and OR are equal; the leftmost goes first.
        ("TRUE OR FALSE AND FALSE", False),
    ],
)
def test_conditions(condition: str, verdict: bool | None) -> None:
    words = [Word(text=w.strip('"'), quoted=w.startswith('"')) for w in condition.split()]
    assert evaluate(words, {"A": "x", "V": "13.2.78"}) is verdict


def test_an_sdist_is_read_where_it_lies(tmp_path: Path) -> None:
    archive = sdist(tmp_path / "demo.tar.gz", {**FILES, "csrc/unwanted.cu": "x"})
    assert read_pins(archive, cuda=CUDA) == pins()
    assert sorted(tmp_path.iterdir()) == [archive]


def test_a_cut_sdist_is_refused(tmp_path: Path) -> None:
    archive = sdist(tmp_path / "demo.tar.gz", FILES)
    archive.write_bytes(archive.read_bytes()[:600])
    with pytest.raises(LockError, match=r"demo\.tar\.gz"):
        read_pins(archive, cuda=CUDA)


def test_an_sdist_with_a_link_or_a_file_twice_is_refused(tmp_path: Path) -> None:
    link = tarfile.TarInfo("demo-1/setup.py")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    only = sdist(tmp_path / "link.tar.gz", {}, extra=[link])
    with pytest.raises(LockError, match="no regular file"):
        read_sdist(only, lambda path: path == "setup.py")
    again = tarfile.TarInfo("demo-1/setup.py")
    twice = sdist(tmp_path / "twice.tar.gz", FILES, extra=[again])
    with pytest.raises(LockError, match="twice"):
        read_pins(twice, cuda=CUDA)


@pytest.mark.network
def test_the_pinned_tree_declares_what_the_lock_says() -> None:
    lock = load_release(ROOT, "0.33.0")
    store, artifact = Store(default_root()), lock.artifact("vllm-sdist")
    fetch.fetch(fetch.plan_artifacts([artifact], store), store, SilentReporter())
    found = read_pins(store.get(artifact), cuda="13.2.78")
    assert found.declared == lock.declared
    declared = {entry.name: entry.value for entry in found.declared}
    assert declared["CUTLASS_REVISION"] == "v4.7.1"
    assert declared["TORCH_TARGET_VERSION:_moe_C_stable_libtorch"] == "2.11"
    assert declared["external:triton_kernels"].endswith("triton-lang/triton@v3.5.1")
    files = {e.file for e in found.declared if e.name.startswith("external:")}
    assert len(files - {MAIN}) == 9
    assert found.rust.git == lock.rust.git
