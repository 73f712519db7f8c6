"""A compiler that is killed for memory: tried again alone, then a message with figures.

The recipe's own functions run a real ninja over compilers that end as the real ones do.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from sm75.build import _explain
from sm75.compilelog import CompileLog
from sm75.errors import BuildError
from tests.unit.projectkit import ROOT, load

script = load(ROOT / "recipes" / "vllm-sm75" / "build.py")
SOURCES = "abcde"
OBJECT = "CMakeFiles/_C.dir/csrc/{}.cu.o"
# A compiler's driver. `deaths` holds how often the process that does the work is still to die.
DRIVER = """\
echo "$2 $(ls running | wc -l)" >> started
touch running/$$
trap 'rm -f running/$$' EXIT
left=$(cat deaths/$2 2> deaths/none || echo 0)
if [ "$left" -gt 0 ]; then
  echo $((left - 1)) > deaths/$2
  sh -c 'kill -9 $$'
  {end}
fi
[ -e broken/$2 ] && {{ echo "$2.cu(1): error: identifier undefined"; exit 2; }}
[ -e slow/$2 ] && sleep 0.5
touch $1
"""
# How drivers report it: words on standard error, exit code.
ENDS = {
    "nvcc": "echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\" >&2; exit 9",
    "ptxas": "echo \"nvcc error   : 'ptxas' died due to signal 9 (Kill signal)\" >&2; exit 9",
    "g++": "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
    "sh": "echo Killed >&2; exit 137",
}


class Project:
    """A few sources, a ninja project in the place where CMake makes one, fake compilers."""

    def __init__(self, native: Path, end: str) -> None:
        self.native = native
        self.build = native / "build"
        for name in ("running", "deaths", "broken", "slow", *(OBJECT.format("x"),)):
            (self.build / name).parent.mkdir(parents=True, exist_ok=True)
            if "/" not in name:
                (self.build / name).mkdir()
        (self.build / "driver.sh").write_text(DRIVER.format(end=end))
        rules = "rule cc\n  command = sh driver.sh $out $name\n"
        rules += "  description = Building CUDA object $out\n"
        for name in SOURCES:
            rules += f"build {OBJECT.format(name)}: cc\n  name = {name}\n"
        objects = " ".join(OBJECT.format(name) for name in SOURCES)
        (self.build / "build.ninja").write_text(f"{rules}build all: phony {objects}\n")

    def dies(self, name: str, times: int) -> None:
        (self.build / "deaths" / name).write_text(f"{times}\n")

    def started(self) -> list[str]:
        return [line.split()[0] for line in self.lines()]

    def lines(self) -> list[str]:
        return (self.build / "started").read_text().splitlines()

    def compile(self) -> None:
        toolkit = SimpleNamespace(environment=lambda: dict(os.environ))
        script.compile_extensions(self.native, toolkit)


@pytest.fixture(params=ENDS)
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Project:
    monkeypatch.setattr(script, "EXTENSIONS", ("all",))
    monkeypatch.setenv("SM75_JOBS", "3")
    return Project(tmp_path, ENDS[request.param])


def follow(text: str) -> CompileLog:
    log = CompileLog()
    for line in text.splitlines():
        log.feed(line)
    return log


def test_once_killed_is_compiled_alone_and_the_build_goes_on(
    project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    project.dies("b", 1)
    for name in "abc":
        (project.build / "slow" / name).touch()
    project.compile()
    said = capfd.readouterr().out
    assert f"sm75: alone: {OBJECT.format('b')}\n" in said
    assert project.started().count("b") == 2
    # Nothing ran beside the second try, then one at a time instead of three; what had been
    # compiled was not compiled again.
    assert project.lines()[3:] == ["b 0", "d 0", "e 0"]
    assert len(project.lines()) == 6
    log = follow(said)
    assert log.alone == ["csrc/b.cu"]
    assert sorted(log.compiled) == [f"csrc/{name}.cu" for name in SOURCES]
    assert (log.failed, log.exit_code, log.memory) == ("", None, "")


def test_all_that_were_killed_get_their_second_try(project: Project) -> None:
    for name in "abc":
        project.dies(name, 1)
    project.compile()
    assert sorted(project.started()) == [*"aabbccde"]


def test_killed_twice_names_the_source_and_the_memory(
    project: Project, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    project.dies("b", 99)
    monkeypatch.setattr(script, "available_gib", lambda: 0.75)
    with pytest.raises(SystemExit) as ended:
        project.compile()
    assert project.started().count("b") == 2
    # As the orchestrator reads it: the script's output, then what Python says at its exit.
    text = f"sm75: step compile\n{capfd.readouterr().out}{ended.value.code}\n"
    log = follow(text)
    with pytest.raises(BuildError) as caught:
        _explain("Script failed", deque(text.splitlines()), log, Path("logs/x.log"))
    assert "csrc/b.cu" in caught.value.what
    assert "twice" in caught.value.what
    assert f"up to {script.GIB_PER_JOB} GiB of memory needed, 0.8 GiB available" in caught.value.why
    assert "logs/x.log" in caught.value.why
    assert "resumes" in caught.value.fix
    assert "--jobs" not in caught.value.fix
    assert caught.value.exit_code == 7
    # More memory, the same command: it resumes.
    project.dies("b", 0)
    project.compile()
    assert sorted(set(project.started())) == [*SOURCES]


def test_a_mistake_is_not_tried_again(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    (project.build / "broken" / "b").touch()
    with pytest.raises(SystemExit, match="sm75: ninja failed with exit code"):
        project.compile()
    assert project.started().count("b") == 1
    assert "alone" not in capfd.readouterr().out


def test_a_mistake_beside_a_killed_compiler_is_the_error(project: Project) -> None:
    project.dies("a", 1)
    (project.build / "broken" / "b").touch()
    with pytest.raises(SystemExit, match="sm75: ninja failed with exit code"):
        project.compile()
    assert project.started().count("b") == 1


def test_a_later_fault_is_not_blamed_on_what_was_killed_first(
    project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    project.dies("b", 1)
    project.compile()
    text = f"sm75: step compile\n{capfd.readouterr().out}sm75: step install\nerror\n"
    with pytest.raises(BuildError, match="the step 'install' failed"):
        _explain("Script failed", deque(text.splitlines()), follow(text), Path("x.log"))


def test_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 GiB free, a control group with 4 GiB of which 1 is page cache."""
    gib = 1024**3
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable: {64 * 1024**2} kB\n")
    monkeypatch.setattr(script, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    assert script.available_gib() == 64
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text(f"{2 * gib}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {gib}\n")
    assert script.available_gib() == 64
    (group / "memory.max").write_text(f"{4 * gib}\n")
    assert script.available_gib() == 3
    monkeypatch.delenv("SM75_JOBS", raising=False)
    monkeypatch.setenv("CPU_COUNT", "16")
    assert script.jobs() == 1
