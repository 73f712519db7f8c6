"""The overlay's CMake functions, run by a real CMake over targets that no compiler sees."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.projectkit import OVERLAY, ROOT

CMAKE = shutil.which("cmake")
NINJA = shutil.which("ninja")
pytestmark = pytest.mark.skipif(CMAKE is None, reason="needs cmake on PATH")

MODULE = OVERLAY / "cmake" / "sm75" / "sm75.cmake"
TARGETS = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "cumem_allocator", "spinloop", "fs_io_C")
EPILOGUES = ("ScaledEpilogue", "ScaledEpilogueBias", "ScaledEpilogueBiasAzp",
             "ScaledEpilogueBiasAzpToken")  # fmt: skip


def cmake(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(CMAKE), *arguments], cwd=cwd, check=False, capture_output=True, text=True
    )


def script(tmp_path: Path, lang: str, archs: str, body: str) -> list[str]:
    """Lines that a script prints as ``status`` messages."""
    file = tmp_path / "script.cmake"
    file.write_text(
        f'set(VLLM_GPU_LANG "{lang}")\nset(CUDA_ARCHS "{archs}")\ninclude("{MODULE}")\n{body}\n'
    )
    done = cmake("-P", str(file), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("-- ") for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("lang", "archs", "expected"),
    [
        ("CUDA", "7.5", "TRUE"),
        ("CUDA", "7.5+PTX", "TRUE"),
        ("CUDA", "7.5;8.0", "FALSE"),
        ("CUDA", "8.0;7.5", "FALSE"),
        ("CUDA", "7.5;8.6+PTX", "FALSE"),
        ("CUDA", "7.5;9.0a", "FALSE"),
        # Versions, not decimal fractions.
        ("CUDA", "7.5;10.0", "FALSE"),
        ("CUDA", "12.1f", "FALSE"),
        ("CUDA", "7.0", "FALSE"),
        ("CUDA", "7.0;7.5", "FALSE"),
        ("CUDA", "", "FALSE"),
        ("HIP", "7.5", "FALSE"),
        ("", "7.5", "FALSE"),
    ],
)
def test_turing_only(tmp_path: Path, lang: str, archs: str, expected: str) -> None:
    body = 'sm75_only(only)\nmessage(STATUS "${only}")'
    assert script(tmp_path, lang, archs, body) == [expected]


SOURCES = """
set(sources "upstream.cu")
sm75_scaled_mm_sources(sources)
message(STATUS "${sources}")
"""


def test_int8_sources(tmp_path: Path) -> None:
    (line,) = script(tmp_path, "CUDA", "7.5", SOURCES)
    sources = [OVERLAY / source for source in line.split(";")]
    assert all(source.is_file() for source in sources)
    # Each epilogue is defined once, and all of them are.
    instance = re.compile(r"^SM75_SCALED_MM\((\w+)\)$", re.MULTILINE)
    defined = [name for source in sources for name in instance.findall(source.read_text())]
    assert sorted(defined) == sorted(EPILOGUES)


@pytest.mark.parametrize(("lang", "archs"), [("CUDA", "7.5;8.0"), ("HIP", "7.5")])
def test_int8_sources_of_others_stay(tmp_path: Path, lang: str, archs: str) -> None:
    assert script(tmp_path, lang, archs, SOURCES) == ["upstream.cu"]


SLOWEST = """\
# longest first
90 csrc/slow.cu
60 sm75/generated.cu
30 csrc/moe/marlin.cu
20 csrc/slower_than_fast.cpp
"""
# Interface libraries carry sources and are compiled by nobody; what CMake refuses on them is noted
# down instead.
PROJECT = """\
cmake_minimum_required(VERSION 3.20)
project(stand_in LANGUAGES NONE)
set(result_file "${CMAKE_BINARY_DIR}/result.txt")
file(WRITE "${result_file}" "")
function(target_include_directories target)
  file(APPEND "${result_file}" "include ${target} ${ARGN}\\n")
endfunction()
function(target_link_options target)
  file(APPEND "${result_file}" "options ${target} ${ARGN}\\n")
endfunction()
set(VLLM_GPU_LANG "@LANG@")
set(CUDA_ARCHS "@ARCHS@")
set(CUDAToolkit_INCLUDE_DIRS "/cuda/include")
include("${CMAKE_SOURCE_DIR}/cmake/sm75/sm75.cmake")
add_library(_C_stable_libtorch INTERFACE csrc/fast.cu csrc/slower_than_fast.cpp csrc/last.cu
            "${CMAKE_BINARY_DIR}/sm75/generated.cu" "${CMAKE_SOURCE_DIR}/csrc/slow.cu" csrc/x.h)
add_library(_moe_C_stable_libtorch INTERFACE csrc/moe/a.cu csrc/moe/marlin.cu)
add_library(cumem_allocator INTERFACE csrc/cumem.cpp)
add_library(spinloop INTERFACE csrc/spinloop.cpp)
@LAST@
foreach(target IN ITEMS cumem_allocator spinloop fs_io_C)
  if(TARGET ${target})
    set_property(TARGET ${target} PROPERTY LINK_LIBRARIES
                 torch "$<BUILD_INTERFACE:c10>" Python::SABIModule CUDA::cuda_driver CUDA::cudart)
  endif()
endforeach()
sm75_finish(only)
file(APPEND "${result_file}" "only ${only}\\n")
foreach(target IN ITEMS @TARGETS@)
  get_target_property(sources ${target} SOURCES)
  file(APPEND "${result_file}" "sources ${target} ${sources}\\n")
  foreach(source IN LISTS sources)
    get_source_file_property(flags "${source}" COMPILE_OPTIONS)
    file(APPEND "${result_file}" "flags ${source} ${flags}\\n")
  endforeach()
  get_target_property(libraries ${target} LINK_LIBRARIES)
  file(APPEND "${result_file}" "libraries ${target} ${libraries}\\n")
endforeach()
"""
LAST = "add_library(fs_io_C INTERFACE csrc/fs_io.cpp)"


class Configured:
    """A project after its configuration."""

    def __init__(self, tmp_path: Path, *, lang: str = "CUDA", archs: str = "7.5",
                 last: str = LAST) -> None:  # fmt: skip
        self.root = tmp_path / "tree"
        self.build = self.root / "out"
        sm75 = self.root / "cmake" / "sm75"
        sm75.mkdir(parents=True)
        shutil.copy(MODULE, sm75)
        (sm75 / "slowest.txt").write_text(SLOWEST)
        for name in ("fast.cu", "slower_than_fast.cpp", "last.cu", "slow.cu", "x.h", "moe/a.cu",
                     "moe/marlin.cu", "cumem.cpp", "spinloop.cpp", "fs_io.cpp"):  # fmt: skip
            path = self.root / "csrc" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        (self.build / "sm75").mkdir(parents=True)
        (self.build / "sm75" / "generated.cu").touch()
        text = PROJECT
        for key, value in {
            "LANG": lang, "ARCHS": archs, "LAST": last, "TARGETS": " ".join(TARGETS)
        }.items():  # fmt: skip
            text = text.replace(f"@{key}@", value)
        (self.root / "CMakeLists.txt").write_text(text)
        generator = ["-G", "Ninja"] if NINJA else []
        self.done = cmake(*generator, "-S", ".", "-B", "out", cwd=self.root)

    def lines(self, kind: str) -> dict[str, list[str]]:
        """Values by subject, of one kind of line."""
        assert self.done.returncode == 0, self.done.stderr
        found: dict[str, list[str]] = {}
        for line in (self.build / "result.txt").read_text().splitlines():
            which, subject, *rest = line.split(" ", 2)
            if which == kind:
                found[subject] = rest[0].split(";") if rest else []
        return found

    def short(self, name: str) -> str:
        """A source without the directories of this run."""
        return name.replace(f"{self.build}/", "").replace(f"{self.root}/", "")


def test_slowest_sources_come_first(tmp_path: Path) -> None:
    project = Configured(tmp_path)
    sources = {
        target: [project.short(name) for name in names]
        for target, names in project.lines("sources").items()
    }
    assert sources == {
        "_C_stable_libtorch": [
            "csrc/slow.cu", "sm75/generated.cu", "csrc/slower_than_fast.cpp",
            "csrc/fast.cu", "csrc/last.cu", "csrc/x.h",
        ],
        "_moe_C_stable_libtorch": ["csrc/moe/marlin.cu", "csrc/moe/a.cu"],
        "cumem_allocator": ["csrc/cumem.cpp"],
        "spinloop": ["csrc/spinloop.cpp"],
        "fs_io_C": ["csrc/fs_io.cpp"],
    }  # fmt: skip
    assert project.lines("only") == {"TRUE": []}
    assert "Turing only" in project.done.stdout


def test_random_seeds_name_no_directory(tmp_path: Path) -> None:
    """Two objects of one source in two targets differ; two runs do not."""
    project = Configured(tmp_path)
    flags = {project.short(k): v for k, v in project.lines("flags").items()}
    assert flags["csrc/slow.cu"] == ["-frandom-seed=_C_stable_libtorch/csrc/slow.cu"]
    assert flags["sm75/generated.cu"] == ["-frandom-seed=_C_stable_libtorch/sm75/generated.cu"]
    assert flags["csrc/fs_io.cpp"] == ["-frandom-seed=fs_io_C/csrc/fs_io.cpp"]
    assert flags["csrc/x.h"] == ["NOTFOUND"]
    assert str(tmp_path) not in repr(flags)


def test_extensions_without_torch_do_not_link_it(tmp_path: Path) -> None:
    project = Configured(tmp_path)
    libraries = project.lines("libraries")
    for target in ("cumem_allocator", "spinloop", "fs_io_C"):
        assert libraries[target] == ["Python::SABIModule", "CUDA::cuda_driver"]
    assert project.lines("include") == {"cumem_allocator": ["PRIVATE", "/cuda/include"]}
    assert project.lines("options") == {
        target: ["PRIVATE", "LINKER:--no-as-needed"]
        for target in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "cumem_allocator")
    }


@pytest.mark.parametrize(("lang", "archs"), [("CUDA", "7.5;8.0"), ("HIP", "7.5"), ("CUDA", "")])
def test_other_builds_stay_as_they_are(tmp_path: Path, lang: str, archs: str) -> None:
    project = Configured(tmp_path, lang=lang, archs=archs)
    assert project.lines("only") == {"FALSE": []}
    first = [project.short(name) for name in project.lines("sources")["_C_stable_libtorch"]]
    assert first[0] == "csrc/fast.cu"
    assert {flag for flags in project.lines("flags").values() for flag in flags} == {"NOTFOUND"}
    assert "torch" in project.lines("libraries")["spinloop"]
    assert project.lines("options") == {}
    assert "Turing" not in project.done.stdout


def test_a_missing_extension_ends_the_configuration(tmp_path: Path) -> None:
    project = Configured(tmp_path, last="")
    assert project.done.returncode != 0
    assert "extension fs_io_C is not declared" in " ".join(project.done.stderr.split())
    assert "Warning" not in project.done.stderr


KNOWN = ROOT / "patches" / "0.28.0" / "overlay" / "cmake" / "sm75" / "known.cmake"
REFUSING = """\
cmake_minimum_required(VERSION 3.20)
project(stand_in LANGUAGES NONE)
set(VLLM_GPU_LANG "CUDA")
set(CUDA_ARCHS "@ARCHS@")
include("@MODULE@")
include("@KNOWN@")
add_custom_target(hipify_all)
add_library(spinloop INTERFACE)
@LAST@
sm75_refuse_unknown()
return()
include(cmake/external_projects/flashmla.cmake)
@PROJECT@
"""


@pytest.mark.parametrize(
    ("last", "project", "archs", "fault"),
    [
        ("", "", "7.5", ""),
        ("add_library(_new_C OBJECT CMakeLists.txt)", "", "7.5", "extension _new_C is unknown"),
        ("add_library(dummy INTERFACE)", "", "7.5", ""),
        ("add_library(_new_C OBJECT CMakeLists.txt)", "", "8.0", ""),
        ("", "include(cmake/external_projects/new.cmake)", "7.5", "external project new is"),
        ("", "  include(${X}/cmake/external_projects/new.cmake)", "7.5", "project new is unknown"),
        ("", "# include(cmake/external_projects/new.cmake)", "7.5", ""),
        ("", "include(cmake/external_projects/new.cmake)", "7.5;8.0", ""),
    ],
)
def test_what_is_not_known_is_refused(
    tmp_path: Path, last: str, project: str, archs: str, fault: str
) -> None:
    """Of 0.28.0's overlay; 0.33.0's has no such check."""
    text = REFUSING
    for key, value in {"LAST": last, "PROJECT": project, "ARCHS": archs, "MODULE": str(MODULE),
                       "KNOWN": str(KNOWN)}.items():  # fmt: skip
        text = text.replace(f"@{key}@", value)
    (tmp_path / "CMakeLists.txt").write_text(text)
    generator = ["-G", "Ninja"] if NINJA else []
    done = cmake(*generator, "-S", ".", "-B", "out", cwd=tmp_path)
    said = " ".join(done.stderr.split())
    # CMake itself refuses an object library without a language, but later.
    assert ("this vLLM release needs a look" in said) is bool(fault), said
    assert fault in said


def test_it_is_not_missed_in_another_build(tmp_path: Path) -> None:
    project = Configured(tmp_path, archs="8.0", last="")
    assert "is not declared" not in project.done.stderr
