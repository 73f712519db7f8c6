"""Reading build.ninja."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm75.buildgraph import load, parse
from sm75.errors import UsageError

NINJA = """\
ninja_required_version = 1.5
rule CUDA_COMPILER___moe_unscanned_
  command = nvcc $FLAGS -c $in -o $out

build cmake_object_order_depends_target__moe: phony || .
build CMakeFiles/_moe.dir/csrc/moe/topk.cu.o: CUDA_COMPILER___moe_unscanned_ $
    /src/csrc/moe/topk.cu | /src/dep$ with$ space.h || cmake_object_order_depends_target__moe
  FLAGS = -DX=1 "--generate-code=arch=compute_75,code=[sm_75]" -gencode arch=compute_80,code=sm_80
build CMakeFiles/_moe.dir/a$:b.cpp.o | implicit.o: CXX_COMPILER__moe /src/a$:b.cpp
  FLAGS = -O2
build _moe.abi3.so: CXX_MODULE_LIBRARY_LINKER___moe_ CMakeFiles/_moe.dir/csrc/moe/topk.cu.o
build all: phony _moe.abi3.so
"""


def test_objects_sources_targets_and_arches() -> None:
    graph = parse(NINJA)
    assert graph.objects == (
        "CMakeFiles/_moe.dir/csrc/moe/topk.cu.o",
        "CMakeFiles/_moe.dir/a:b.cpp.o",
        "implicit.o",
    )
    assert graph.cuda_objects == graph.objects[:1]
    assert graph.sources == ("/src/csrc/moe/topk.cu", "/src/a:b.cpp")
    assert graph.libraries == ("_moe.abi3.so",)
    assert graph.targets == ("_moe",)
    assert graph.codes == ("sm_75", "sm_80")


def test_lists_of_codes_are_taken_apart() -> None:
    assert parse("  F = --generate-code=arch=compute_75,code=[compute_75,sm_75]").codes == (
        "compute_75",
        "sm_75",
    )


def test_file_or_directory(tmp_path: Path) -> None:
    (tmp_path / "build.ninja").write_text(NINJA)
    assert load(tmp_path) == load(tmp_path / "build.ninja") == parse(NINJA)
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "absent")
