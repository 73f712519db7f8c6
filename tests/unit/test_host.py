"""What the bootstrap toolchain finds on a machine, with stand-ins for GCC on PATH."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sm75.errors import ToolchainError
from sm75.toolchain import bootstrap, host

# As Debian has it, shortened.
DISPATCHER = b"""\
#if defined(__linux__)
# if defined(__x86_64__) && defined(__LP64__)
#  include <x86_64-linux-gnu/python3.11/pyconfig.h>
# elif defined(__aarch64__) && defined(__AARCH64EL__)
#  include <aarch64-linux-gnu/python3.11/pyconfig.h>
# endif
#endif
"""


# What a compiler is made of, besides the programs on PATH.
PARTS = ("cc1plus", "cc1", "collect2", "as", "ld", "libc.so.6", "libstdc++.so", "libgcc.a",
         "libgcc_s.so", "vector", "string")  # fmt: skip


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An x86-64 machine with nothing on PATH but what a test puts there."""
    where = tmp_path / "bin"
    where.mkdir()
    monkeypatch.setenv("PATH", str(where))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return where


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def gcc(
    bin_dir: Path, version: str, *, suffix: str = "", prefix: str = "aarch64-linux-gnu-"
) -> None:
    """A compiler of that version: g++, gcc beside it, strip, and the parts it is made of."""
    parts = bin_dir.parent / f"parts{suffix}"
    parts.mkdir(exist_ok=True)
    for name in (*PARTS, "specs"):
        if not (parts / name).exists():
            (parts / name).write_text(f"{name} {version}")
    strip = program(bin_dir / f"{prefix}strip", ":")
    program(
        bin_dir / f"{prefix}g++{suffix}",
        f"""here="${{0%/*}}"
        parts="$here/../{parts.name}"
        case "$*" in
        "-dumpfullversion -dumpversion") echo {version};;
        -print-prog-name=strip) echo "$here/{strip.name}";;
        -print-prog-name=*) echo "$parts/${{1#*=}}";;
        -print-file-name=*) echo "$parts/${{1#*=}}";;
        "-### "*) read -r options < "$parts/specs"
                  printf "Target: x\\n cc1plus $options $CPATH\\n" >&2;;
        *" -M "*) printf -- "-: $parts/vector \\\\\\n $parts/string\\n";;
        esac""",
    )
    program(bin_dir / f"{prefix}gcc{suffix}", ":")


def find(target: str = "linux-aarch64") -> host.Compiler:
    return host.find_compiler(target, install=False)


def test_suitable_compiler(bin_dir: Path) -> None:
    gcc(bin_dir, "12.2.0")
    found = find()
    assert found.cxx == bin_dir / "aarch64-linux-gnu-g++"
    assert found.cc == bin_dir / "aarch64-linux-gnu-gcc"
    assert found.strip == bin_dir / "aarch64-linux-gnu-strip"
    assert (found.version, found.platform) == ("12.2.0", "linux-aarch64")
    assert find() == found


@pytest.mark.parametrize("part", PARTS)
def test_digest_is_over_the_content_of_every_part(bin_dir: Path, part: str) -> None:
    gcc(bin_dir, "12.2.0")
    before = find().digest
    changed = bin_dir.parent / "parts" / part
    changed.write_text(changed.read_text() + ".")
    assert find().digest != before


@pytest.mark.parametrize("name", ["g++", "gcc", "strip"])
def test_digest_is_over_the_programs_themselves(bin_dir: Path, name: str) -> None:
    """A wrapper in their place is another compiler."""
    gcc(bin_dir, "12.2.0")
    before = find().digest
    path = bin_dir / f"aarch64-linux-gnu-{name}"
    path.write_text(path.read_text() + "# altered\n")
    assert find().digest != before


def test_digest_is_over_the_built_in_options(bin_dir: Path) -> None:
    gcc(bin_dir, "12.2.0")
    before = find().digest
    (bin_dir.parent / "parts" / "specs").write_text("-march=armv8.2-a\n")
    assert find().digest != before


def test_the_users_environment_does_not_matter(
    bin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcc(bin_dir, "12.2.0")
    before = find().digest
    monkeypatch.setenv("CPATH", "/somewhere/include")
    assert find().digest == before


def test_relative_path(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build runs elsewhere."""
    gcc(bin_dir, "12.2.0")
    monkeypatch.chdir(bin_dir.parent)
    monkeypatch.setenv("PATH", "bin")
    assert find().cxx == bin_dir / "aarch64-linux-gnu-g++"


def test_digest_does_not_depend_on_the_place(
    bin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcc(bin_dir, "12.2.0")
    before = find()
    elsewhere = bin_dir.parent / "elsewhere"
    elsewhere.mkdir()
    other = elsewhere / "bin"
    other.mkdir()
    gcc(other, "12.2.0")
    monkeypatch.setenv("PATH", str(other))
    found = find()
    assert found.cxx != before.cxx
    assert found.digest == before.digest


def test_no_compiler(bin_dir: Path) -> None:
    with pytest.raises(ToolchainError, match="no C\\+\\+ compiler for linux-aarch64") as err:
        find()
    assert err.value.exit_code == 6
    assert "apt-get install g++-aarch64-linux-gnu" in err.value.fix
    with pytest.raises(ToolchainError) as err:
        find("linux-64")
    assert "apt-get install g++ " in err.value.fix


def test_the_native_compiler_does_not_serve_another_platform(bin_dir: Path) -> None:
    gcc(bin_dir, "12.2.0", prefix="")
    assert find("linux-64").cxx == bin_dir / "g++"
    with pytest.raises(ToolchainError, match="no C"):
        find("linux-aarch64")


@pytest.mark.parametrize("version", ["9.4.0", "11.2.1", "16.0.1", "16.1.0"])
def test_unsuitable_version(bin_dir: Path, version: str) -> None:
    gcc(bin_dir, version)
    with pytest.raises(ToolchainError, match="no suitable") as err:
        find()
    assert f"aarch64-linux-gnu-g++ is {version}" in err.value.why
    assert "11.3" in err.value.why
    assert "g++-12-aarch64-linux-gnu" in err.value.fix


@pytest.mark.parametrize("version", ["11.3.0", "11.3.1", "12.2.0", "13.3.0", "15.2.0"])
def test_bounds(bin_dir: Path, version: str) -> None:
    gcc(bin_dir, version)
    assert find().version == version


def test_a_versioned_compiler_serves_beside_an_unsuitable_one(bin_dir: Path) -> None:
    gcc(bin_dir, "16.1.0")
    gcc(bin_dir, "13.3.0", suffix="-13")
    assert find().cxx.name == "aarch64-linux-gnu-g++-13"
    assert find().cc.name == "aarch64-linux-gnu-gcc-13"


@pytest.mark.parametrize("body", ["exit 1", "echo what", "echo"])
def test_broken_compiler(bin_dir: Path, body: str) -> None:
    program(bin_dir / "aarch64-linux-gnu-g++", body)
    with pytest.raises(ToolchainError, match="no suitable") as err:
        find()
    assert "does not say its version" in err.value.why


def test_compiler_without_its_c_part(bin_dir: Path) -> None:
    gcc(bin_dir, "12.2.0")
    (bin_dir / "aarch64-linux-gnu-gcc").unlink()
    with pytest.raises(ToolchainError, match="has no gcc or strip"):
        find()


def _apt(bin_dir: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """An apt-get that notes what it is asked, and root."""
    asked = bin_dir.parent / "asked"
    program(bin_dir / "apt-get", f'echo "$*" >> {asked}\n{body}')
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return asked


def test_root_installs_a_missing_compiler(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcc(bin_dir, "12.2.0")
    cxx = bin_dir / "aarch64-linux-gnu-g++"
    hidden = cxx.rename(bin_dir.parent / "hidden")
    copy = f"{shutil.which('cp', path='/usr/bin:/bin')} {hidden} {cxx}"
    asked = _apt(bin_dir, monkeypatch, f'[ "$1" = update ] || {copy}')
    assert host.find_compiler("linux-aarch64").version == "12.2.0"
    assert asked.read_text().splitlines() == [
        "update -qq",
        "install -y -qq g++-aarch64-linux-gnu",
    ]


def test_nothing_is_installed_unasked(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _apt(bin_dir, monkeypatch, "")
    with pytest.raises(ToolchainError):
        find()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ToolchainError):
        host.find_compiler("linux-aarch64")
    assert not asked.exists()


def test_failed_installation(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _apt(bin_dir, monkeypatch, "exit 100")
    with pytest.raises(ToolchainError, match="apt-get could not install") as err:
        host.find_compiler("linux-aarch64")
    assert "100" in err.value.why


@pytest.mark.parametrize(("system", "machine"), [("linux", "riscv64"), ("darwin", "x86_64")])
def test_other_machines(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(ToolchainError, match=f"{system}/{machine}"):
        host.build_platform()


@pytest.fixture
def include(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the headers of the running Python are said to be."""
    where = tmp_path / "include" / "python3.11"
    where.mkdir(parents=True)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(where))
    monkeypatch.setattr(sysconfig, "get_config_h_filename", lambda: str(tmp_path / "config.h"))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return where


def test_headers(include: Path) -> None:
    (include / "Python.h").write_text("#define Py_PYTHON_H\n")
    (include / "pyconfig.h").write_text("#define SIZEOF_LONG 8\n")
    (include / "internal").mkdir()
    (include / "internal" / "x.h").write_text("")
    (include / "notes.txt").write_text("")
    found = host.python_headers(install=False)
    assert list(found.files) == ["Python.h", "internal/x.h", "pyconfig.h"]
    assert found.files["pyconfig.h"] == b"#define SIZEOF_LONG 8\n"
    (include / "internal" / "x.h").write_text("int x;")
    assert host.python_headers(install=False).digest != found.digest


def test_multiarch_dispatcher_is_replaced(include: Path, tmp_path: Path) -> None:
    """The package holds no directory of the machine: what the dispatcher would include is read."""
    (include / "Python.h").write_text("")
    (include / "pyconfig.h").write_bytes(DISPATCHER)
    (tmp_path / "config.h").write_text("real")
    assert host.python_headers(install=False).files["pyconfig.h"] == b"real"
    machine = include.parent / "x86_64-linux-gnu" / "python3.11" / "pyconfig.h"
    machine.parent.mkdir(parents=True)
    machine.write_text("of this machine")
    assert host.python_headers(install=False).files["pyconfig.h"] == b"of this machine"


def test_missing_headers(include: Path) -> None:
    with pytest.raises(ToolchainError, match="headers of Python") as err:
        host.python_headers(install=False)
    assert f"python3.{sys.version_info.minor}-dev" in err.value.fix
    assert str(include) in err.value.why


def test_root_installs_missing_headers(
    bin_dir: Path, include: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a new machine apt has no lists yet: they are fetched first."""
    asked = _apt(bin_dir, monkeypatch, f'[ "$1" = update ] || : > {include / "Python.h"}')
    (include / "pyconfig.h").write_text("")
    assert list(host.python_headers().files) == ["Python.h", "pyconfig.h"]
    assert asked.read_text().splitlines() == [
        "update -qq",
        f"install -y -qq python3.{sys.version_info.minor}-dev",
    ]


def test_base_python_is_no_virtual_environment() -> None:
    done = subprocess.run(
        [str(host.base_python()), "-I", "-c", "import sys; print(sys.prefix == sys.base_prefix)"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "True"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no native GCC")
def test_a_native_compiler_works_where_path_has_declared_programs_only(tmp_path: Path) -> None:
    """A native GCC looks for its assembler and linker on PATH: found by a build for linux-64."""
    compiler = host.find_compiler(host.build_platform(), install=False)
    tools, source = tmp_path / "env" / "bin", tmp_path / "x.cpp"
    tools.mkdir(parents=True)
    for name, place in compiler.programs.items():
        with bootstrap.starter(place).opener() as stream:  # type: ignore[misc]
            (tools / name).write_bytes(stream.read())
        (tools / name).chmod(0o755)
    source.write_text("#include <string>\nint main() { return std::string(3, 'a').size(); }\n")
    path = f"{tools}:{host.lay_out_tools(tmp_path / 'bin')}"
    command = [str(compiler.cxx), str(source), "-o", str(tmp_path / "x")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={"PATH": path})
    assert (done.returncode, done.stderr) == (0, "")
    assert subprocess.run([tmp_path / "x"], check=False).returncode == 3
    for name, place in compiler.programs.items():
        said = (tools / name).read_text()
        assert hashlib.sha256(place.read_bytes()).hexdigest() in said
