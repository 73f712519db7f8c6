"""The orchestrator's own environment, from a list of one tiny wheel and without a network."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.projectkit import ROOT
from tests.unit.wheelkit import make_wheel

START = """\
import sys
from pathlib import Path
ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
import own_venv
own_venv.ensure(ROOT, dev="--dev" in sys.argv)
import demo
print(sys.prefix, demo.x, *sys.argv[1:], sep="|")
"""


class Checkout:
    """A project whose tools are one wheel, and a Python that has none."""

    def __init__(self, root: Path) -> None:
        self.root = root / "a checkout"
        self.wheels = root / "wheels"
        (self.root / "lock").mkdir(parents=True)
        (self.root / "start.py").write_text(START)
        shutil.copy(ROOT / "sm75" / "venv.py", self.root / "own_venv.py")
        self.home = self.root / ".venv"
        self.fresh = root / "fresh" / "bin" / "python"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(root / "fresh")], check=True
        )
        self.pin("tools", "demo")

    def pin(self, name: str, project: str, *, sha256: str = "") -> None:
        """Write a list of one wheel."""
        wheel = make_wheel(self.wheels, project=project, files={f"{project}.py": b"x = 1\n"})
        digest = sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest()
        (self.root / "lock" / f"{name}.txt").write_text(
            f"{project}==1.2.0 \\\n    --hash=sha256:{digest}\n"
        )

    def popen(
        self, *arguments: str, python: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.root),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_FIND_LINKS": str(self.wheels),
        }
        return subprocess.Popen(
            [str(python or self.fresh), str(self.root / "start.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, **(env or {})},
        )

    def start(
        self, *arguments: str, python: Path | None = None, env: dict[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Start it; returns exit code, output and errors."""
        process = self.popen(*arguments, python=python, env=env)
        out, err = process.communicate()
        return process.returncode, out, err

    def state(self) -> dict[Path, int]:
        """Dates of what the environment is made of; caches of bytecode are not."""
        return {
            p: p.stat().st_mtime_ns
            for p in self.home.rglob("*")
            if p.is_file() and "__pycache__" not in p.parts
        }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Made by the first of two starts at once; the other waits for it."""
    checkout = Checkout(tmp_path_factory.mktemp("venv"))
    processes = [checkout.popen("x y", str(n)) for n in range(2)]
    ended = [process.communicate() for process in processes]
    assert [p.returncode for p in processes] == [0, 0], ended
    assert [out for out, _ in ended] == [f"{checkout.home}|1|x y|{n}\n" for n in range(2)]
    said = "".join(err for _, err in ended)
    assert said.count("making .venv") == said.count("installing tools.txt") == 1
    return checkout


def test_second_start_does_nothing(made: Checkout) -> None:
    before = made.state()
    for python in (made.fresh, made.home / "bin" / "python"):
        assert made.start(python=python) == (0, f"{made.home}|1\n", "")
    assert made.state() == before
    assert [p.name for p in made.home.glob("*.done")] != []


def test_a_checkout_that_nobody_may_write_to_starts(made: Checkout) -> None:
    """As a service's user in root's checkout, once root has started it."""
    own = made.root / ".sm75"
    own.rename(made.root / "aside")
    own.symlink_to("/proc/nothing/here")
    try:
        assert made.start(python=made.fresh) == (0, f"{made.home}|1\n", "")
    finally:
        own.unlink()
        (made.root / "aside").rename(own)


def test_wrong_hash_is_refused_and_a_right_one_resumes(made: Checkout) -> None:
    before = (made.root / "lock" / "tools.txt").read_bytes()
    made.pin("tools", "second_demo", sha256="0" * 64)
    try:
        code, out, err = made.start(python=made.home / "bin" / "python")
        assert (code, out) == (6, "")
        assert "error: cannot install tools.txt" in err
        assert "THESE PACKAGES DO NOT MATCH THE HASHES" in err
        assert "Traceback" not in err
        assert list(made.home.rglob("second_demo.py")) == []
        made.pin("tools", "second_demo")
        code, _, err = made.start(python=made.home / "bin" / "python")
        assert (code, err) == (0, "installing tools.txt\n")
        assert list(made.home.rglob("second_demo.py")) != []
    finally:
        (made.root / "lock" / "tools.txt").write_bytes(before)
    assert made.start() == (0, f"{made.home}|1\n", "")


def test_unhashed_tool_is_refused(made: Checkout) -> None:
    before = (made.root / "lock" / "tools.txt").read_bytes()
    made.pin("tools", "third")
    (made.root / "lock" / "tools.txt").write_text("third==1.2.0\n")
    try:
        code, _, err = made.start(python=made.home / "bin" / "python")
        assert code == 6
        assert "hash" in err.lower()
    finally:
        (made.root / "lock" / "tools.txt").write_bytes(before)


def test_unreachable_index(made: Checkout, tmp_path: Path) -> None:
    made.pin("dev-tools", "devdemo")
    code, _, err = made.start("--dev", env={"PIP_FIND_LINKS": str(tmp_path)})
    assert code == 6
    assert "cannot install dev-tools.txt" in err
    assert "PIP_INDEX_URL" in err
    assert "Traceback" not in err
    code, out, err = made.start("--dev")
    assert (code, out) == (0, f"{made.home}|1|--dev\n")
    assert "making" not in err
    assert list(made.home.rglob("devdemo.py"))


@pytest.mark.parametrize(
    "setting",
    ["PIP_TARGET=elsewhere", "PIP_PREFIX=elsewhere", "PIP_ROOT=elsewhere", "PIP_USER=1",
     "PIP_DRY_RUN=1", "PIP_REQUIREMENT=other.txt", "PIP_CONSTRAINT=other.txt",
     "PIP_NO_BINARY=:all:", "PYTHONPATH=elsewhere", "PYTHONNOUSERSITE=1"],
)  # fmt: skip
def test_settings_of_pip_that_would_change_what_is_installed(made: Checkout, setting: str) -> None:
    for marker in made.home.glob("*.done"):
        marker.unlink()
    name, value = setting.split("=")
    if value == "elsewhere":
        value = str(made.root / value)
    assert made.start(env={name: value})[:2] == (0, f"{made.home}|1\n")
    assert not (made.root / "elsewhere").exists()


def test_configuration_of_pip_that_sends_it_elsewhere(made: Checkout, tmp_path: Path) -> None:
    for marker in made.home.glob("*.done"):
        marker.unlink()
    (tmp_path / "pip.conf").write_text(f"[install]\ntarget = {tmp_path / 'elsewhere'}\n")
    code, _, err = made.start(env={"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")})
    assert code == 6
    assert "somewhere else" in err
    assert "pip config list" in err
    assert list(made.home.glob("*.done")) == []
    assert made.start()[:2] == (0, f"{made.home}|1\n")


def test_tool_of_another_system(made: Checkout) -> None:
    """The list is for every system; what a marker leaves out is not missed."""
    path = made.root / "lock" / "tools.txt"
    before = path.read_bytes()
    path.write_bytes(
        before
        + b'colorama==0.4.6 ; sys_platform == "win32" \\\n    --hash=sha256:'
        + b"0" * 64
        + b"\n"
    )
    try:
        assert made.start()[:2] == (0, f"{made.home}|1\n")
    finally:
        path.write_bytes(before)
    assert made.start()[:2] == (0, f"{made.home}|1\n")


def test_modules_on_the_users_path_shadow_nothing(made: Checkout, tmp_path: Path) -> None:
    (tmp_path / "demo.py").write_text("x = 'theirs'\n")
    assert made.start(env={"PYTHONPATH": str(tmp_path)})[:2] == (0, f"{made.home}|1\n")


def test_half_an_environment_is_made_anew(made: Checkout) -> None:
    """Killed before the list was installed: the marker is missing."""
    for marker in made.home.glob("*.done"):
        marker.unlink()
    for package in made.home.glob("lib/python*/site-packages/*"):
        if package.is_dir():
            shutil.rmtree(package)
    code, out, err = made.start()
    assert (code, out) == (0, f"{made.home}|1\n")
    assert "making .venv" in err


def _call(checkout: Path, python: str, before: str) -> tuple[int, str]:
    """``ensure`` after some lines of Python; exit code and errors."""
    program = (
        f"{before}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
        f"from sm75 import venv\nvenv.ensure(Path({str(checkout)!r}))\nprint('ready')\n"
    )
    done = subprocess.run([python, "-c", program], check=False, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_python_that_has_the_tools_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    assert _call(tmp_path, sys.executable, "") == (0, "ready\n")
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


def test_too_old_a_python(tmp_path: Path) -> None:
    old = "import sys\nsys.version_info = (3, 10, 4, 'final', 0)\nsys.version = '3.10.4 (main)'"
    code, said = _call(tmp_path, sys.executable, old)
    assert code == 6
    assert "Python 3.10.4 is too old" in said
    assert "3.11" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["orchestrator.py", "sm75/__init__.py", "sm75/venv.py"])
def test_an_old_python_can_read_what_tells_it_so(name: str) -> None:
    ast.parse((ROOT / name).read_text(), feature_version=(3, 8))


class _Base:
    """A Python without tools whose ``-m venv`` fails."""

    def __init__(self, tmp_path: Path, body: str) -> None:
        self.root = tmp_path / "root"
        (self.root / "lock").mkdir(parents=True)
        (self.root / "lock" / "tools.txt").write_text("")
        self.python = tmp_path / "python"
        self.python.write_text(f"#!/bin/sh\n{body}\n")
        self.python.chmod(0o755)

    def ensure(self) -> tuple[int, str]:
        before = (
            f"import sys, importlib.util\nsys._base_executable = {str(self.python)!r}\n"
            "importlib.util.find_spec = lambda name: None"
        )
        return _call(self.root, sys.executable, before)


def test_no_venv_module(tmp_path: Path) -> None:
    """As Debian's Python without python3-venv."""
    base = _Base(
        tmp_path, 'mkdir -p "$3/bin"; echo "ensurepip is not"; echo "available" >&2; exit 1'
    )
    code, said = base.ensure()
    assert code == 6
    assert "cannot make a virtual environment" in said
    assert "why:  available" in said
    assert "python3-venv" in said
    assert not (base.root / ".venv").exists()


def test_a_venv_module_that_says_nothing(tmp_path: Path) -> None:
    code, said = _Base(tmp_path, "exit 3").ensure()
    assert code == 6
    assert "exit code 3" in said


def test_unwritable_checkout(tmp_path: Path) -> None:
    base = _Base(tmp_path, "exit 3")
    (base.root / ".sm75").symlink_to("/proc/nothing/here")
    code, said = base.ensure()
    assert code == 9
    assert "cannot write" in said
    assert "Traceback" not in said
