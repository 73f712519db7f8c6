"""The recipe as py-rattler-build renders it, and the process that builds it."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rattler_build

from sm75 import recipedeps, worker
from sm75.channel import index
from sm75.worker import Job
from tests.unit.projectkit import RELEASE, ROOT

RECIPE = ROOT / "recipes" / "vllm-sm75" / "recipe.yaml"
HASH = "0123456789ab"
HOST = {
    "python", "torch-dev", "cutlass-headers", "cuda-cudart-dev", "cuda-crt-dev", "cuda-cccl",
    "libcublas-headers",
}  # fmt: skip


def job(build_platform: str = "linux-64", **changes: Any) -> Job:
    values: dict[str, Any] = {
        "recipe": str(RECIPE),
        "variants": {
            "vllm_version": RELEASE,
            "vllm_sdist": f"vllm-{RELEASE}.tar.gz",
            "vllm_sdist_sha256": "0" * 64,
            "rust_frontend": "prebuilt",
        },
        "build_platform": build_platform,
        "target_platform": "linux-aarch64",
        "channels": ["file:///nowhere"],
        "output": "/nowhere/out",
    }
    return Job(**{**values, **changes})


class Renderer:
    """Runs the worker up to the point where it would build."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.variants: list[Any] = []
        self.settings: dict[str, Any] = {}

        def run_build(variant: Any, **settings: Any) -> Any:
            self.variants.append(variant)
            self.settings = settings
            return type("Result", (), {"packages": ["/nowhere/x.conda"]})

        monkeypatch.setattr(rattler_build.render.RenderedVariant, "run_build", run_build)
        monkeypatch.setenv("SM75_INPUT_HASH", HASH)

    def render(self, wanted: Job) -> dict[str, Any]:
        worker.work(wanted)
        recipe: dict[str, Any] = self.variants[-1].recipe.to_dict()
        return recipe


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch) -> Renderer:
    return Renderer(monkeypatch)


@pytest.mark.parametrize("build_platform", ["linux-64", "linux-aarch64"])
def test_recipe(
    renderer: Renderer, capsys: pytest.CaptureFixture[str], build_platform: str
) -> None:
    """Crossing from x86-64, and natively on Arm: only the platform that builds differs."""
    recipe = renderer.render(job(build_platform))
    assert json.loads(capsys.readouterr().out) == {"package": "/nowhere/x.conda"}
    used = renderer.variants[0].variant
    assert used["host_platform"] == used["target_platform"] == "linux-aarch64"
    assert used["build_platform"] == build_platform
    assert recipe["package"] == {"name": "vllm-sm75", "version": RELEASE}
    asked = recipe["requirements"]
    assert set(asked["build"]) == {
        "gxx_linux-aarch64", "cuda-nvcc", "cmake", "ninja", "ccache", "python", "jinja2", "unidiff"
    }  # fmt: skip
    assert set(asked["host"]) == HOST | {"vllm-rs-prebuilt"}
    # as they are written: what a recipe library makes of a spec must be what the closure serves
    listed = recipedeps.listed(RECIPE.read_text(), RELEASE)
    assert len(listed) > 60
    assert asked["run"] == ["python >=3.11,<3.15", "dlami-torch >=2.11", *listed]
    assert asked["run_constraints"] == [
        "vllm <0a0", "pytorch <0a0", "__cuda >=13", "__cuda_arch >=7.5,<8", "__glibc >=2.34"
    ]  # fmt: skip
    assert recipe["build"]["python"] == {
        "entry_points": ["vllm = vllm.entrypoints.cli.main:main"],
        "version_independent": True,
    }
    assert recipe["build"]["dynamic_linking"] == {"binary_relocation": False}


def test_native_and_crossing_differ_in_nothing_else(renderer: Renderer) -> None:
    assert renderer.render(job("linux-64")) == renderer.render(job("linux-aarch64"))


def test_build_string_is_the_input_hash(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = renderer.render(job())
    assert recipe["build"]["string"] == f"h{HASH}_0"
    assert recipe["extra"] == {"rust_frontend": "prebuilt", "input_hash": HASH}
    monkeypatch.delenv("SM75_INPUT_HASH")
    assert renderer.render(job())["build"]["string"] == "hlocal_0"


def test_sources_are_local_and_the_sdist_is_pinned(renderer: Renderer) -> None:
    sources = renderer.render(job())["source"]
    assert all("url" not in source and "git" not in source for source in sources)
    assert sources[0]["path"] == f"../../.sm75/sources/vllm-{RELEASE}.tar.gz"
    assert sources[0]["sha256"] == "0" * 64
    assert (sources[1]["path"], sources[1]["target_directory"]) == ("../../patches", "patches")
    assert sources[3]["path"] == f"../../lock/{RELEASE}/omissions.toml"


def test_without_rust(renderer: Renderer) -> None:
    variants = {**job().variants, "rust_frontend": "none"}
    recipe = renderer.render(job(variants=variants))
    assert set(recipe["requirements"]["host"]) == HOST
    assert recipe["build"]["script"]["env"]["SM75_RUST"] == "none"


def test_how_it_is_built(renderer: Renderer) -> None:
    renderer.render(job())
    settings = renderer.settings
    assert settings["channels"] == ["file:///nowhere"]
    assert settings["output_dir"] == "/nowhere/out"
    # A build identifier would put the time into the work directory's name, and into objects.
    assert settings["no_build_id"] is True


def test_a_recipe_that_ignores_the_host_platform_is_refused(
    renderer: Renderer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It would be solved for this machine, without a word."""
    text = RECIPE.read_text()
    other = tmp_path / "recipe.yaml"
    other.write_text(text.replace("use_keys: [host_platform, build_platform]", "use_keys: []"))
    assert other.read_text() != text
    worker.work(job(recipe=str(other)))
    assert "host_platform" in json.loads(capsys.readouterr().out)["error"]
    assert renderer.variants == []


def _imports(path: Path) -> Iterator[str]:
    """Modules of this project that a file imports, as file names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sm75"):
            if node.module == "sm75":
                yield from (f"{alias.name}.py" for alias in node.names)
            else:
                yield node.module.removeprefix("sm75.") + ".py"
        elif isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("sm75.") + ".py" for a in node.names if "sm75." in a.name
            )


def test_the_recipe_takes_all_that_the_patcher_imports(renderer: Renderer) -> None:
    """Inside the recipe's environment there is nothing else of this project."""
    shipped = set(renderer.render(job())["source"][2]["filter"])
    needed, todo = {"__init__.py"}, ["patching.py"]
    while todo:
        name = todo.pop()
        if name not in needed:
            needed.add(name)
            todo += _imports(ROOT / "sm75" / name)
    assert shipped == needed


SMALL = """\
schema_version: 1
package: {{name: small, version: "1"}}
build:
  string: h0_0
  variant: {{use_keys: [host_platform, build_platform]}}
  script: [{script}]
requirements:
  build: [{build}]
about: {{license: MIT, summary: small}}
"""


@contextmanager
def process(tmp_path: Path, script: str, build: str = "") -> Iterator[subprocess.Popen[str]]:
    """The worker at a small recipe; its standard input stays open."""
    recipe = tmp_path / "recipe" / "recipe.yaml"
    recipe.parent.mkdir()
    recipe.write_text(SMALL.format(script=json.dumps(script), build=build))
    channel = tmp_path / "channel"
    channel.mkdir()
    index(channel, subdirs=["linux-64", "linux-aarch64"])
    running = subprocess.Popen(
        [sys.executable, "-m", "sm75.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT),
            "RATTLER_CACHE_DIR": str(tmp_path / "cache"),
        },
    )  # fmt: skip
    assert running.stdin is not None
    todo = job(
        recipe=str(recipe), variants={}, channels=[channel.as_uri()], output=str(tmp_path / "out")
    )
    running.stdin.write(msgspec.json.encode(todo).decode() + "\n")
    running.stdin.flush()
    try:
        yield running
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        for stream in (running.stdin, running.stdout):
            if stream:
                stream.close()


def _events(running: subprocess.Popen[str], until: str = "\0") -> list[dict[str, str]]:
    """What it says, to the end or to a line with that text."""
    assert running.stdout is not None
    events = []
    for line in running.stdout:
        events.append(json.loads(line) if line.startswith("{") else {"log": line})
        if until in line:
            break
    return events


def test_a_build_to_its_end(tmp_path: Path) -> None:
    with process(tmp_path, 'mkdir -p "$PREFIX/share" && echo sm75: here > "$PREFIX/share/x"') as p:
        events = _events(p)
        assert p.wait() == 0
    package = Path(events[-1]["package"])
    assert package.name == "small-1-h0_0.conda"
    assert package.parent == tmp_path / "out" / "linux-aarch64"
    assert package.is_file()


def test_a_failed_script(tmp_path: Path) -> None:
    with process(tmp_path, "echo sm75: step patch; exit 3") as p:
        events = _events(p)
        assert p.wait() == 1
    assert {"log": "sm75: step patch"} in events
    assert events[-1]["error"]


def test_a_tool_that_no_channel_has(tmp_path: Path) -> None:
    with process(tmp_path, "true", build="no-such-tool") as p:
        events = _events(p)
        assert p.wait() == 1
    assert events[-1]["error"] == "PyRattlerBuildError: Failed to resolve dependencies"
    # py-rattler-build says no more than that; what was asked for is in the log.
    assert {"log": "   - no-such-tool"} in events


def _session(leader: int) -> list[str]:
    """Command lines of the processes of a session that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if int(session) == leader and state != "Z":
            found.append(line.strip())
    return found


def test_everything_ends_with_the_parent(tmp_path: Path) -> None:
    """The pipe closes when the orchestrator is gone, whatever ended it."""
    with process(tmp_path, "echo sm75: started; sleep 321") as p:
        seen = _events(p, until="sm75: started")
        assert any(line.startswith("sleep 321") for line in _session(p.pid)), seen
        assert p.stdin is not None
        p.stdin.close()
        assert p.wait(timeout=60) == -signal.SIGKILL
        deadline = time.monotonic() + 60
        while _session(p.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _session(p.pid) == []


def test_package_for_proofs_has_another_name(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM75_PTX", "1")
    recipe = renderer.render(job(target_platform="linux-64", variants={**job().variants, "rust_frontend": "none"}))  # fmt: skip  # noqa: E501
    assert recipe["package"]["name"] == "vllm-sm75-ptx"
    assert "gxx_linux-64" in recipe["requirements"]["build"]
