"""A small tree that declares all that vLLM does, to be broken piece by piece."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from sm75.pins import TreePins, pins_of
from sm75.treefiles import TreeFiles

CUDA = "13.2.78"
CMAKE = """\
cmake_minimum_required(VERSION 3.26)
project(demo LANGUAGES CXX)
# set(CUTLASS_REVISION "v0.0.0") in a comment
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS "11.3")
  message(FATAL_ERROR "GCC >= 11.3, found ${CMAKE_CXX_COMPILER_VERSION} (\\"set(X\\")")
endif()
set(VLLM_TARGET_DEVICE "cuda" CACHE STRING "device")
include(${CMAKE_CURRENT_LIST_DIR}/cmake/utils.cmake)
include(FetchContent)
set(PYTHON_SUPPORTED_VERSIONS "3.11" "3.12")
set(TORCH_SUPPORTED_VERSION_CUDA "2.14.0")
if(DEFINED CMAKE_CUDA_COMPILER_VERSION AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.4)
  set(CUDA_SUPPORTED_ARCHS "7.5;10.7")
elseif(DEFINED CMAKE_CUDA_COMPILER_VERSION AND
       CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
  set(CUDA_SUPPORTED_ARCHS "7.5;8.0")
else()
  set(CUDA_SUPPORTED_ARCHS "7.0;7.5")
endif()
define_extension_target(spinloop LANGUAGE CXX SOURCES a.cpp USE_SABI 3.11)
if (NOT VLLM_TARGET_DEVICE STREQUAL "cuda" AND NOT VLLM_TARGET_DEVICE STREQUAL "rocm")
  include(${CMAKE_CURRENT_LIST_DIR}/cmake/cpu_extension.cmake)
  return()
endif()
if(VLLM_GPU_LANG STREQUAL "HIP")
  define_extension_target(_C LANGUAGE ${VLLM_GPU_LANG} SOURCES b.cu)
endif()
set(CUTLASS_REVISION "v4.7.1")
if(VLLM_CUTLASS_SRC_DIR)
  FetchContent_Declare(cutlass SOURCE_DIR ${VLLM_CUTLASS_SRC_DIR})
else()
  FetchContent_Declare(
    cutlass
    GIT_REPOSITORY https://github.com/nvidia/cutlass.git
    # in step with the line above
    GIT_TAG ${CUTLASS_REVISION}
  )
endif()
define_extension_target(_C_stable LANGUAGE ${VLLM_GPU_LANG} SOURCES c.cu USE_SABI 3)
target_compile_definitions(_C_stable PRIVATE TORCH_TARGET_VERSION=0x020B000000000000ULL)
if (VLLM_GPU_LANG STREQUAL "CUDA"
    AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU"
    AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS "13")
  message(FATAL_ERROR "GCC >= 13")
endif()
if(VLLM_GPU_LANG STREQUAL "CUDA")
  include(cmake/external_projects/deep.cmake)
endif()
"""
DEEP = """\
if (DEFINED ENV{DEEP_SRC_DIR})
  set(DEEP_SRC_DIR $ENV{DEEP_SRC_DIR})
endif()
if(VLLM_TARGET_DEVICE STREQUAL "rocm")
  set(_TAG "of-rocm")
else()
  set(_TAG "abc123")
endif()
FetchContent_Populate(
  deep
  GIT_REPOSITORY "https://example.org/d/deep.git"
  GIT_TAG "${_TAG}"
)
cuda_archs_loose_intersection(DEEP_ARCHS "9.0a" "${CUDA_ARCHS}")
if(DEEP_ARCHS)
  define_extension_target(_deep_C LANGUAGE ${VLLM_GPU_LANG} SOURCES d.cu USE_SABI 3)
endif()
"""
SETUP = """\
def _is_cuda():
    return True

ext_modules = []
if _is_cuda() or _is_hip():
    ext_modules.append(CMakeExtension(name="vllm.spinloop"))
if _is_hip():
    ext_modules.append(CMakeExtension(name="vllm._rocm_C"))
if _is_cuda() and CUDA_HOME:
    ext_modules.append(CMakeExtension(name="vllm._deep_C", optional=True))
if _build_custom_ops():
    if not _is_hip():
        ext_modules.append(CMakeExtension(name="vllm._C_stable"))
if _no_device():
    ext_modules = []
"""
CARGO = """\
version = 4

[[package]]
name = "own"
version = "1.0.0"

[[package]]
name = "serde"
version = "1.0.0"
source = "registry+https://example.org/index"

[[package]]
name = "zmq"
version = "0.1.0"
source = "git+https://example.org/z/zmq.rs?rev=67dcba97559ebe8e8206dab753710d8b9cb07591#67dcba97559ebe8e8206dab753710d8b9cb07591"
"""
FILES = {
    "CMakeLists.txt": CMAKE,
    "cmake/external_projects/deep.cmake": DEEP,
    "setup.py": SETUP,
    "pyproject.toml": '[project]\nname = "vllm"\nrequires-python = ">=3.11,<3.13"\n',
    "requirements/cuda.txt": "-r common.txt\n--extra-index-url https://example.org/\n"
    "torch==2.14.0 # the one\ntorchvision==0.29.0\ntorchaudio==2.11.0\nflashinfer-python==0.7.2\n",
    "requirements/common.txt": "# common\n\ntransformers >= 5.16.1, < 5.21.0\n"
    'protobuf==1; platform_machine == "s390x"\nfastapi[standard] >= 0.133\n',
    "rust-toolchain.toml": '[toolchain]\nchannel = "1.95"\n',
    "rust/Cargo.lock": CARGO,
    "tools/build_rust.py": "def rust_extensions():\n    return [RustExtension(\n"
    '        target="vllm.vllm-rs", path="rust/Cargo.toml", args=["--bin", "vllm-rs"],\n'
    '        features=["tls"], binding=Binding.Exec)]\n',
    "docker/versions.json": '{"variable": {"TORCH_CUDA_ARCH_LIST": {"default": "7.5 8.0 12.0"}}}',
    "PKG-INFO": "Metadata-Version: 2.4\nName: vllm\nVersion: 0.33.0\n",
}


def tree(**changes: str | None) -> TreeFiles:
    """The tree with files replaced or, by ``None``, taken away; names are paths."""
    files: dict[str, str | None] = {**FILES, **changes}
    return TreeFiles(
        label="demo",
        content={path: text.encode() for path, text in files.items() if text is not None},
    )


def pins(**changes: str | None) -> TreePins:
    """The pins of such a tree."""
    return pins_of(tree(**changes), cuda=CUDA)


def sdist(
    path: Path, files: Mapping[str, str], *, extra: list[tarfile.TarInfo] | None = None
) -> Path:
    """Write files as an sdist with the top folder ``demo-1``."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"demo-1/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
        for member in extra or []:
            archive.addfile(member)
    return path
