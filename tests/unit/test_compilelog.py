"""Progress out of a build's log; the lines are those of real builds, without their paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm75.compilelog import DEFAULT_SECONDS, CompileLog, read_weights
from tests.unit.projectkit import OVERLAY

# rattler-build, the build script, CMake, then ninja 1.13 with the build script's NINJA_STATUS.
LOG = """\
Starting build of 1 outputs
   - gxx_linux-aarch64
│ ninja             ┆ 1.13.0  ┆ h3bdf2ad_0              ┆ 5e5b86e6e70858a2 ┆ 174.57 KiB │
✔ Successfully updated the build environment
+ python $RECIPE_DIR/build.py
sm75: step patch
6 patches and 10 overlay files applied
sm75: step toolkit
sm75: step configure
-- The CXX compiler identification is GNU 12.2.0
CMake Warning at torch/share/cmake/Caffe2/FindCUDAToolkit.cmake:957 (message):
  Could not find librt library, needed by CUDA::cudart_static
sm75: step compile
ninja: Entering directory `build'
sm75: [1/82] Building CXX object CMakeFiles/spinloop.dir/csrc/spinloop.cpp.o
sm75: [2/82] Linking CXX shared module spinloop.abi3.so
sm75: [3/82] Building CUDA object CMakeFiles/_C_stable_libtorch.dir/csrc/layernorm_kernels.cu.o
../src/csrc/layernorm_kernels.cu(116): warning #1444-D: variable "std::is_pod_v" was deprecated
    static_assert(std::is_pod_v<_f16Vec<scalar_t, width>>);
sm75: [4/82] Building CUDA object CMakeFiles/_C_stable_libtorch.dir/sm75/scaled_mm_Epilogue.cu.o
sm75: [82/82] Linking CUDA shared module _C_stable_libtorch.abi3.so
sm75: step install
"""


def _fed(text: str, log: CompileLog) -> list[tuple[str, float]]:
    return [ended for line in text.splitlines() if (ended := log.feed(line))]


def test_a_build() -> None:
    log = CompileLog(weights={"csrc/layernorm_kernels.cu": 71.5})
    assert _fed(LOG, log) == [
        ("csrc/spinloop.cpp", DEFAULT_SECONDS),
        ("spinloop.abi3.so", 1.0),
        ("csrc/layernorm_kernels.cu", 71.5),
        ("sm75/scaled_mm_Epilogue.cu", DEFAULT_SECONDS),
        ("_C_stable_libtorch.abi3.so", 1.0),
    ]
    assert log.step == "install"
    assert (log.done, log.total) == (82, 82)
    assert log.compiled == [
        "csrc/spinloop.cpp", "csrc/layernorm_kernels.cu", "sm75/scaled_mm_Epilogue.cu"
    ]  # fmt: skip
    assert (log.failed, log.exit_code) == ("", None)


def test_steps_as_they_begin() -> None:
    log = CompileLog()
    seen: list[str] = []
    for line in LOG.splitlines():
        log.feed(line)
        if not seen or seen[-1] != log.step:
            seen.append(log.step)
    assert seen == ["", "patch", "toolkit", "configure", "compile", "install"]


@pytest.mark.parametrize(
    ("line", "name", "code"),
    [
        # ninja 1.13, which says the code, and 1.11, which does not
        ("FAILED: [code=1] CMakeFiles/x.dir/csrc/a.cu.o ", "CMakeFiles/x.dir/csrc/a.cu.o", 1),
        ("FAILED: [code=137] CMakeFiles/x.dir/csrc/a.cu.o ", "CMakeFiles/x.dir/csrc/a.cu.o", 137),
        ("FAILED: CMakeFiles/x.dir/csrc/a.cu.o ", "CMakeFiles/x.dir/csrc/a.cu.o", None),
        ("FAILED: [code=1] spinloop.abi3.so ", "spinloop.abi3.so", 1),
    ],
)
def test_failure(line: str, name: str, code: int | None) -> None:
    log = CompileLog()
    assert log.feed(line) is None
    assert (log.failed, log.exit_code) == (name, code)


def test_the_first_failure_counts() -> None:
    """Those after it are of jobs that ran beside it."""
    log = CompileLog()
    log.feed("FAILED: [code=137] a.o ")
    log.feed("FAILED: [code=1] b.o ")
    assert (log.failed, log.exit_code) == ("a.o", 137)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[1/2] Building CXX object CMakeFiles/x.dir/a.cpp.o",  # not of our ninja
        "x sm75: step compile",
        "sm75: Rust frontend: prebuilt",
        "this FAILED: no",
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    log = CompileLog()
    assert log.feed(line) is None
    assert log == CompileLog()


def test_estimate() -> None:
    """Known sources at their weight, the others at the mean; a resumed build in proportion."""
    log = CompileLog(weights={"a.cu": 100.0, "b.cu": 50.0})
    log.total = 12
    assert log.estimate() == 150.0 + 10 * DEFAULT_SECONDS
    log.total = 1
    assert log.estimate() == 75.0
    assert CompileLog(total=4).estimate() == 4 * DEFAULT_SECONDS


def test_weights(tmp_path: Path) -> None:
    listed = tmp_path / "slowest.txt"
    listed.write_text("# longest first\n\n312 csrc/a.cu\n7.5 csrc/with space.cu\n")
    assert read_weights(listed) == {"csrc/a.cu": 312.0, "csrc/with space.cu": 7.5}


def test_the_shipped_list_can_be_read_and_is_sorted() -> None:
    weights = list(read_weights(OVERLAY / "cmake" / "sm75" / "slowest.txt").values())
    assert weights == sorted(weights, reverse=True)
