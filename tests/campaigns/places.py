"""The places in which the jobs of ``tests.campaigns.jobs`` run, and what is in them afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec

from sm75 import closurelock, lockcheck
from sm75.atomic import TMP_PREFIX
from sm75.channelcheck import verify_channel
from sm75.store import Store
from tests.campaigns.jobs import RELEASE
from tests.unit.badserver import BadServer
from tests.unit.fetchkit import noise, offer, sdist, thin_artifact, wheel_bytes
from tests.unit.lockkit import EXTENSIONS, World
from tests.unit.projectkit import ROOT, copy_project
from tests.unit.wheelkit import make_wheel

# What of a place is the result; all else may be made again.
RESULTS = {
    "fetch": ("store/sha256",),
    "lock": ("project/lock", "project/recipes"),
    "channel": ("channel",),
    "build": ("channel",),
}
# Files beside results that say nothing about them: locks, and the store's own notes.
_ASIDE = (".lock", ".checked")
# Of a killed run, and passed over by everything: a note that was being written, some hundred bytes;
# a publication's scratch directory, of links, which the next publication removes.
_LEFT_NOTE = f"{TMP_PREFIX}.checked."
_LEFT_SCRATCH = f"channel/{TMP_PREFIX}"
RECIPE = """\
schema_version: 1
package: {name: vllm-sm75, version: "${{ vllm_version }}"}
source:
  - path: ../../.sm75/sources/${{ vllm_sdist }}
    sha256: ${{ vllm_sdist_sha256 }}
    target_directory: vllm-src
build:
  number: 0
  string: h${{ env.get("SM75_INPUT_HASH", default="local") }}_0
  variant: {use_keys: [host_platform, build_platform]}
  script:
    content: ['PYTHON -S "$RECIPE_DIR/small.py"']
    env:
      SM75_NATIVE_DIR: ${{ env.get("SM75_NATIVE_DIR", default="") }}
      SM75_JOBS: ${{ env.get("SM75_JOBS", default="") }}
  dynamic_linking: {binary_relocation: false}
about: {license: MIT, summary: a stand-in}
"""
# The steps of the recipe's own script that need no CUDA, over twenty small C files.
SCRIPT = """\
import importlib.util, os, shutil, sys, types
from pathlib import Path
sys.dont_write_bytecode = True  # the recipe is copied into the package
spec = importlib.util.spec_from_file_location("script", Path(os.environ["RECIPE_DIR"]) / "build.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
script.EXTENSIONS = ("small.so",)
src, native = Path(os.environ["SRC_DIR"]), Path(os.environ["SM75_NATIVE_DIR"])
os.environ.update(CC="/usr/bin/gcc", CXX="/usr/bin/g++", PATH="/usr/bin:/bin")
script.step("patch")
script.step("toolkit")
script.settle(native)
script.prepare_sources(src / "vllm-src", native)
script.step("configure")
build = native / "build"
if not (build / "build.ninja").exists():
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir()
    text = "rule cc\\n  command = sleep 0.03; gcc -O2 -fPIC -c $in -o $out\\n"
    text += "  description = Building C object $out\\n"
    text += "rule ld\\n  command = gcc -shared -s -Wl,--build-id=none $in -o $out\\n"
    text += "  description = Linking C shared library $out\\n"
    names = sorted(p.stem for p in (native / "src" / "csrc").glob("*.c"))
    for name in names:
        text += f"build {name}.c.o: cc ../src/csrc/{name}.c\\n"
    text += "build small.so: ld " + " ".join(f"{name}.c.o" for name in names) + "\\n"
    (build / "new").write_text(text)
    (build / "new").rename(build / "build.ninja")
script.step("compile")
script.compile_extensions(native, types.SimpleNamespace(environment=lambda: dict(os.environ)))
script.step("install")
site = Path(os.environ["PREFIX"]) / "lib" / "small"
site.mkdir(parents=True)
shutil.copy2(build / "small.so", site / "small.so")
shutil.copytree(src / "vllm-src" / "vllm", site / "vllm")
"""


class SlowServer(BadServer):
    """Large answers take a while, so that there is a middle of a transfer to be killed in."""

    def send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        body: bytes = b"",
    ) -> None:
        super().send(handler, status, headers, body[:1024])
        with contextlib.suppress(OSError):
            for start in range(1024, len(body), 1 << 16):
                time.sleep(0.005)
                handler.wfile.write(body[start : min(len(body), start + (1 << 16))])
            handler.wfile.flush()


class Place:
    """One job, its template and its index.

    Attributes:
        job: The job's name.
        url: The index.
        scratch: A directory for what a campaign needs besides.
        reference: The result of an undisturbed run.
        seconds: How long one took last time it was measured, less Python's start.
        steps: How many steps of it change the disk.
    """

    def __init__(self, job: str, work: Path, server: SlowServer) -> None:
        self.job = job
        self.url = server.url
        self.scratch = self._work = work / job
        self._template = self._work / "template"
        self._template.mkdir(parents=True)
        {"fetch": _fetch, "lock": _lock, "channel": _channel, "build": _build}[job](
            self._template, server
        )
        self._number = 0
        with self.fresh() as place:
            self.seconds = self.measure(place)
            self.reference = self.result(place)
        with self.fresh() as place:
            self.steps = int(self.must(place, "--count").stdout.split()[-1])
            differing = self.differing(place)
            assert not differing, f"{job} itself is not reproducible: {differing}"

    @contextlib.contextmanager
    def fresh(self, under: Path | None = None) -> Iterator[Path]:
        """A copy of the template, in a directory of another name each time."""
        self._number += 1
        place = (under or self._work) / f"trial-{self._number}"
        shutil.copytree(self._template, place, symlinks=True)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def start(self, place: Path, *more: str) -> subprocess.Popen[str]:
        """Start the job; its output goes to pipes."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.campaigns.jobs", self.job, str(place), self.url,
             *more],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def measure(self, place: Path) -> float:
        """Run the job and give the seconds it took, less those of Python's start."""
        process = self.start(place)
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return time.monotonic() - began

    def run(self, place: Path, *more: str) -> subprocess.CompletedProcess[str]:
        """Run the job to its end."""
        process = self.start(place, *more)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def must(self, place: Path, *more: str) -> subprocess.CompletedProcess[str]:
        """Run the job; it must succeed."""
        done = self.run(place, *more)
        assert done.returncode == 0, f"{self.job}: exit code {done.returncode}\n{done.stderr}"
        return done

    def result(self, place: Path) -> dict[str, str]:
        """sha256 by path of everything that is a result, leftovers included."""
        found = {}
        for part in RESULTS[self.job]:
            for path in sorted((place / part).rglob("*")):
                if path.is_file() and not (path.name in _ASIDE or path.name.startswith(_LEFT_NOTE)):
                    found[path.relative_to(place).as_posix()] = _sha256(path)
        return found

    def differing(self, place: Path) -> list[str]:
        """Paths whose bytes are not those of the undisturbed run, or that only one has."""
        now = self.result(place)
        names = sorted(now.keys() | self.reference.keys())
        return [
            name for name in names
            if now.get(name) != self.reference.get(name) and not name.startswith(_LEFT_SCRATCH)
        ]  # fmt: skip

    def before(self) -> dict[str, str]:
        """The same of the template: what there was before the job."""
        return self.result(self._template)

    def faults(self, place: Path) -> list[str]:
        """What is wrong after a run that did not end: a file that is neither old nor new.

        Temporary names, and packages that no index names yet, are not wrong.
        """
        old = self.before()
        wrong = []
        for name, digest in self.result(place).items():
            if TMP_PREFIX in name or digest in (old.get(name), self.reference.get(name)):
                continue
            wrong.append(f"{name} is neither the old nor the new one")
        wrong += [f"{name} is gone" for name in old if name in self.reference
                  and not (place / name).exists()]  # fmt: skip
        if self.job in ("channel", "build") and (place / "channel").exists():
            for index in (place / "channel").glob("*/repodata.json"):
                records = msgspec.json.decode(index.read_bytes())["packages.conda"]
                wrong += [
                    f"{name} is in the index and not in the channel"
                    for name, record in records.items()
                    if not (index.parent / name).exists()
                    or _sha256(index.parent / name) != record["sha256"]
                ]
        return wrong

    def problems(self, place: Path) -> list[str]:
        """What the channel's own check finds in the finished result."""
        if self.job not in ("channel", "build"):
            return []
        return [str(problem) for problem in verify_channel(place / "channel")]


@contextlib.contextmanager
def places(jobs: list[str]) -> Iterator[list[Place]]:
    """Make the places of some jobs; they are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="sm75-campaign-") as work:
        made = []
        with contextlib.ExitStack() as stack:
            for job in jobs:
                server = stack.enter_context(SlowServer())
                made.append(Place(job, Path(work), server))
            yield made


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fetch(template: Path, server: SlowServer) -> None:
    big = noise(6_000_000, 1)
    artifacts = [sdist(big, "big"), sdist(noise(300_000, 2), "small")]
    offer(server, artifacts[0], big)
    offer(server, artifacts[1], noise(300_000, 2))
    wheel = wheel_bytes({
        "demo/a-rs": noise(900_000, 3), "other/b": noise(2_000_000, 4), "demo/c": noise(200_000, 5)
    })  # fmt: skip
    thin = thin_artifact(wheel, ("demo/**",), template / "work")
    shutil.rmtree(template / "work")
    offer(server, thin, wheel)
    (template / "artifacts.json").write_bytes(msgspec.json.encode([*artifacts, thin]))


def _lock(template: Path, server: SlowServer) -> None:
    """The project has a lock already, of older files."""
    world = World(template, server)
    newer = [n for n in server.files if "13.2.86" in n or "13.2.2" in n or "3.0.4" in n]
    hidden = {name: server.files.pop(name) for name in newer}
    before = lockcheck.EXTENSIONS
    vars(lockcheck)["EXTENSIONS"] = EXTENSIONS
    try:
        world.lock(RELEASE)
    finally:
        vars(lockcheck)["EXTENSIONS"] = before
    server.files |= hidden
    for name in ("store", "wheels", "project/.sm75"):
        shutil.rmtree(template / name, ignore_errors=True)


def _wheels(template: Path, projects: dict[str, str], size: int) -> None:
    """Write runtime.lock and put its wheels into the store."""
    store = Store(template / "store")
    packages = []
    for project, version in projects.items():
        wheel = make_wheel(
            template / "wheels", project=project, version=version,
            files={f"{project}/data": noise(size, len(project + version)),
                   f"{project}/__init__.py": version.encode()},
        )  # fmt: skip
        digest, length = _sha256(wheel), wheel.stat().st_size
        store.add(wheel, sha256=digest, size=length, filename=wheel.name)
        packages.append(closurelock.Package(
            project=project, version=version, filename=wheel.name, sha256=digest, size=length,
            python=("3.12",), license="MIT",
        ))  # fmt: skip
    lock = closurelock.RuntimeLock(
        schema=1, vllm=RELEASE, platform="linux-aarch64", glibc="2.34", python=("3.12",),
        requirements=tuple(projects), packages=tuple(packages),
    )  # fmt: skip
    path = template / "project" / "lock" / RELEASE / closurelock.RUNTIME
    path.write_text(closurelock.dump_runtime(lock))
    shutil.rmtree(template / "wheels")


def _channel(template: Path, server: SlowServer) -> None:
    """An older closure is published: one package stays, one is replaced, one is withdrawn."""
    from sm75.progress import PlainReporter
    from tests.campaigns.jobs import run_channel

    root = copy_project(template / "project")
    shutil.copy2(ROOT / "LICENSE", root / "LICENSE")  # the adapter's
    _wheels(template, {"alpha": "1.0", "beta": "1.0", "gamma": "1.0"}, 50_000)
    run_channel(template, server.url, PlainReporter(io.StringIO()))
    _wheels(template, {"alpha": "1.0", "beta": "2.0", "delta": "1.0", "epsilon": "1.0"}, 400_000)


def _build(template: Path, server: SlowServer) -> None:
    root = copy_project(template / "project")
    recipe = root / "recipes" / "vllm-sm75"
    (recipe / "recipe.yaml").write_text(RECIPE.replace("PYTHON", str(_python())))
    (recipe / "small.py").write_text(SCRIPT)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        members = {f"csrc/f{n:02}.c": f"int f{n}(int x) {{ return x + {n}; }}\n" for n in range(20)}
        members |= {"CMakeLists.txt": "x\n", "cmake/x.cmake": "x\n", "LICENSE": "MIT\n"}
        members |= {f"vllm/m{n}.py": f"x = {n}\n" * 50 for n in range(40)}
        for name, text in members.items():
            info = tarfile.TarInfo(f"vllm-{RELEASE}/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    data = out.getvalue()
    artifact = sdist(
        data, "vllm", id="vllm-sdist", version=RELEASE, filename=f"vllm-{RELEASE}.tar.gz"
    )
    given = template / artifact.filename
    given.write_bytes(data)
    Store(template / "store").add(given, sha256=artifact.sha256, size=len(data))
    given.unlink()
    (template / "sdist.json").write_bytes(msgspec.json.encode(artifact))


def _python() -> Path:
    """The interpreter behind any virtual environment."""
    return Path(os.path.realpath(sys.executable))
