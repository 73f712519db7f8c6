"""A build uses declared programs and headers only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sm75.errors import ToolchainError
from sm75.toolchain import host
from tests.unit.projectkit import ROOT, load

script = load(ROOT / "recipes" / "vllm-sm75" / "build.py")
NINJA = """\
rule cxx
  command = {cxx} {flags} -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
build it.o: cxx ../src/it.cpp
"""


def test_only_declared_programs_are_on_path(tmp_path: Path) -> None:
    path = host.lay_out_tools(tmp_path / "bin")
    assert sorted(p.name for p in Path(path).iterdir()) == sorted(host.HOST_TOOLS)
    assert shutil.which("bash", path=path)
    assert not shutil.which("gcc", path=path)
    (tmp_path / "bin" / "planted").write_text("")
    host.lay_out_tools(tmp_path / "bin")
    assert not (tmp_path / "bin" / "planted").exists()


def test_a_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "HOST_TOOLS", ("no-such-program",))
    with pytest.raises(ToolchainError, match="no-such-program is neither in"):
        host.lay_out_tools(tmp_path / "bin")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A real ninja and a real compiler below a native directory."""
    cxx = shutil.which("aarch64-linux-gnu-g++") or shutil.which("g++")
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if not cxx or not ninja:
        pytest.skip("no C++ compiler or no ninja")
    native = tmp_path / "native"
    for name in ("build", "src", "host/include", "env/include"):
        (native / name).mkdir(parents=True)
    (native / "host" / "include" / "declared.h").write_text("")
    monkeypatch.setenv("PATH", f"{Path(ninja).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("build_platform", "linux-64")
    toolkit = script.Toolkit.__new__(script.Toolkit)
    toolkit.target = "linux-aarch64" if "aarch64" in Path(cxx).name else "linux-64"
    toolkit.host, toolkit.build = native / "host", native / "env"
    toolkit.cxx = cxx

    def compile(source: str, *flags: str) -> None:
        (native / "src" / "it.cpp").write_text(source)
        text = NINJA.format(cxx=cxx, flags=" ".join(("-I../host/include", *flags)))
        (native / "build" / "build.ninja").write_text(text)
        subprocess.run([ninja, "-C", str(native / "build")], check=True, capture_output=True)

    return SimpleNamespace(native=native, toolkit=toolkit, compile=compile)


def test_declared_headers_and_the_compilers_own_pass(
    project: SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    project.compile("#include <declared.h>\n#include <vector>\n#include <stdint.h>\n")
    script.check_headers(project.native, project.toolkit)
    said = capfd.readouterr().out
    assert "headers, all declared" in said
    assert int(said.split("sm75: ")[1].split()[0]) > 20


def test_a_planted_header_is_refused(project: SimpleNamespace, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "undeclared.h").write_text("")
    project.compile("#include <undeclared.h>\n", f"-I{planted}")
    with pytest.raises(SystemExit) as caught:
        script.check_headers(project.native, project.toolkit)
    assert str(planted / "undeclared.h") in str(caught.value)


def test_a_link_inside_does_not_hide_what_is_outside(
    project: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "outside.h").write_text("")
    (project.native / "src" / "inside.h").symlink_to(tmp_path / "outside.h")
    project.compile('#include "inside.h"\n')
    with pytest.raises(SystemExit, match=r"outside\.h"):
        script.check_headers(project.native, project.toolkit)


def test_a_cross_compiler_may_not_read_this_machines_headers(project: SimpleNamespace) -> None:
    own = project.toolkit.system_headers()
    assert own
    assert "/usr/local/include" not in own
    crossing = project.toolkit.target != "linux-64"
    assert ("/usr/include" in own) is not crossing


def test_a_name_that_begins_alike_is_not_below() -> None:
    assert script.undeclared({"/a/b/c.h", "/a/bc.h"}, ["/a/b", ""]) == ["/a/bc.h"]
