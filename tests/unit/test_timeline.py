"""ninja's log as a timeline."""

from __future__ import annotations

import re

import pytest

from sm75.buildgraph import edges
from sm75.report import charts
from sm75.report.timeline import Step, Timeline, parse
from tests.unit.reportkit import LOG, NINJA

GRAPH = tuple(edges(NINJA))


def made(log: str, ninja: str = NINJA) -> Timeline:
    line = parse(log, tuple(edges(ninja)))
    assert line is not None
    return line


def test_runs_stand_end_to_end_and_the_last_of_each_output_counts() -> None:
    line = made(LOG)
    assert line.runs == 2
    assert [(s.name, s.kind, s.start, s.end) for s in line.steps] == [
        ("csrc/a.cu", "CUDA", 0, 8998),
        ("csrc/c.cpp", "C++", 8999, 11998),
        ("csrc/b.cu", "CUDA", 11998, 81998),
        ("_C.abi3.so", "link", 81999, 82993),
    ]
    assert line.wall == 82_993
    assert line.work == 8998 + 2999 + 70_000 + 994


def test_a_later_run_is_told_by_its_clock_where_ends_only_grow() -> None:
    # The first run was killed after 12 s; the second's first end is later than that.
    log = LOG.replace(
        "3\t61000\t1796080224915000000\tCMakeFiles/_C.dir/csrc/b.cu.o\t3ac223197c748d9e\n", ""
    ).replace("61000\t61900\t1796080285912000000\t_C.abi3.so\t2ac223197c748d9e\n", "")
    assert made(log).runs == 2
    # Without the clock that cannot be seen.
    assert made(re.sub(r"\t\d{19}\t", "\t0\t", log)).runs == 1


def test_the_critical_path_is_the_longest_chain() -> None:
    line = made(LOG)
    assert line.path
    assert [s.name for s in line.steps if s.critical] == ["csrc/b.cu", "_C.abi3.so"]
    assert line.critical == 70_994


def test_order_only_inputs_are_waited_for_and_validations_are_not() -> None:
    log = "# ninja log v6\n0\t5\t0\tgen.h\t1\n0\t9\t0\tlint\t2\n5\t7\t0\ta.o\t3\n"
    ninja = "build gen.h: G\nbuild lint: L\nbuild a.o: C a.c || gen.h |@ lint\n"
    # gen.h then a.o take 7 ms; lint alone 9
    assert [s.name for s in made(log, ninja).steps if s.critical] == ["lint"]
    longer = log.replace("0\t5\t0\tgen.h", "0\t8\t0\tgen.h").replace("5\t7", "8\t10")
    assert [s.name for s in made(longer, ninja).steps if s.critical] == ["gen.h", "a.o"]


@pytest.mark.parametrize("ninja", ["", "build a: X b\nbuild b: X a\n"])
def test_without_a_usable_graph_there_is_no_critical_path(ninja: str) -> None:
    log = "# ninja log v5\n0\t5\t0\ta\t1\n"
    line = made(log, ninja)
    assert not line.path
    assert len(line.steps) == 1


def test_what_is_no_longer_built_is_left_out() -> None:
    assert [s.name for s in made(LOG + "1\t2\t0\told.o\t9\n").steps if s.name == "old.o"] == []


def test_a_command_with_two_outputs_is_one_step() -> None:
    log = "# ninja log v7\n0\t5\t0\ta.so\t1\n0\t5\t0\ta.lib\t1\n"
    assert len(made(log, "build a.so a.lib: L x\n").steps) == 1


def test_no_directory_of_the_machine_is_told() -> None:
    log = "# ninja log v7\n0\t5\t0\t/home/somebody/x.o\t1\n"
    assert [s.name for s in made(log, "").steps] == ["x.o"]


@pytest.mark.parametrize(
    "log",
    ["", "# ninja log v4\n0\t5\t0\ta\t1\n", "# ninja log v8\n0\t5\t0\ta\t1\n", "# ninja log v7\n",
     "# ninja log v7\nx\ty\tz\ta\t1\n", "# ninja log v7\n5\t0\t0\ta\t1\n",
     "# ninja log v7\n0\t5\n"],
)  # fmt: skip
def test_other_logs_are_none(log: str) -> None:
    assert parse(log, GRAPH) is None


def test_what_ran_at_once_lies_in_different_lanes() -> None:
    steps = (
        Step(name="a", kind="CUDA", start=0, end=10_000),
        Step(name="b", kind="CUDA", start=0, end=4_000),
        Step(name="c", kind="CUDA", start=4_000, end=9_000),
    )
    drawn = charts.gantt(Timeline(steps=steps, runs=1, path=False))
    assert drawn.lanes == 2
    assert [box.y == drawn.boxes[0].y for box in drawn.boxes] == [True, False, False]
    assert [box.x for box in drawn.boxes] == [0.0, 0.0, 400.0]
    assert [tick.label for tick in drawn.ticks] == ["0 s", "2 s", "4 s", "6 s", "8 s", "10 s"]


def test_an_empty_compile_is_drawn() -> None:
    step = Step(name="a", kind="CUDA", start=0, end=0)
    assert charts.gantt(Timeline(steps=(step,), runs=1, path=False)).lanes == 1
