"""The bootstrap provider's channel, made of tiny wheels with the layout of the real ones."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from sm75.channel import verify_channel
from sm75.condapkg import FileSource, iter_payload, write_conda
from sm75.errors import ChannelError, FetchError, ToolchainError
from sm75.lockfile import Artifact, ReleaseLock, Rust
from sm75.progress import SilentReporter
from sm75.store import Store
from sm75.toolchain import Provider, ToolSpecs, host
from sm75.toolchain.bootstrap import COMPONENTS, Bootstrap, target_channel
from sm75.toolchain.choice import FROM_LOCK, choose
from sm75.toolchain.conda_forge import CondaForge
from tests.unit.wheelkit import make_wheel

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
CP = f"cp{sys.version_info.major}{sys.version_info.minor}"
X86, ARM, ANY = "py3-none-manylinux2014_x86_64", "py3-none-manylinux2014_aarch64", "py3-none-any"
CU = "nvidia/cu13"
# By artifact id: tag, role, and members ({0}: the wheel's name and version).
WHEELS: dict[str, tuple[str, str, dict[str, bytes]]] = {
    "cmake-linux-64": (X86, "toolchain", {
        "cmake/data/bin/cmake": b"cmake", "cmake/data/share/cmake-3.31/x.cmake": b"",
        "cmake/__init__.py": b""}),
    "ninja-linux-64": (X86, "toolchain", {"{0}.data/scripts/ninja": b"", "ninja/__init__.py": b""}),
    "ccache-linux-64": (X86, "toolchain", {
        "{0}.data/scripts/ccache": b"", "{0}.data/data/share/doc/ccache/x": b""}),
    "cuda-nvcc-linux-64": (X86, "toolchain", {
        f"{CU}/bin/nvcc": b"nvcc", f"{CU}/bin/crt/link.stub": b"", f"{CU}/include/nvcc.h": b""}),
    "cuda-nvvm-linux-64": (X86, "toolchain", {
        f"{CU}/nvvm/bin/cicc": b"cicc", f"{CU}/nvvm/libdevice/x.bc": b"", f"{CU}/x.txt": b""}),
    "cuda-cudart": (ARM, "target", {
        f"{CU}/include/cuda.h": b"cuda", f"{CU}/lib/libcudart.so.13": b"cudart"}),
    "cuda-crt": (ARM, "target", {f"{CU}/include/crt/x.h": b"crt"}),
    "cuda-cccl": (ARM, "target", {
        f"{CU}/include/cccl/x.h": b"cccl", f"{CU}/cuda_cccl/x.cmake": b""}),
    "cublas-dev": (ARM, "target", {f"{CU}/include/cublas.h": b"cublas"}),
    "torch-dev": (ARM, "target", {"torch/include/torch/x.h": b"torch"}),
    "cutlass": (ARM, "source", {"vllm/third_party/fmha_sm100/cutlass/include/x.h": b"cutlass"}),
    "vllm-rs": (ARM, "prebuilt", {"vllm/vllm-rs": b"rust"}),
    "jinja2": (ANY, "toolchain", {"jinja2/__init__.py": b""}),
    "unidiff": (ANY, "toolchain", {"unidiff/__init__.py": b""}),
    f"markupsafe-{CP}-linux-64": (f"{CP}-{CP}-manylinux2014_x86_64", "toolchain", {
        "markupsafe/__init__.py": b"", "markupsafe/_speedups.so": b""}),
    "markupsafe-cp39-linux-64": ("cp39-cp39-manylinux2014_x86_64", "toolchain", {
        "markupsafe/__init__.py": b""}),
    "cuda-cuobjdump-linux-64": (X86, "tool", {f"{CU}/bin/cuobjdump": b""}),
}  # fmt: skip
COMPILER = host.Compiler(
    platform="linux-aarch64",
    cxx=Path("/usr/bin/aarch64-linux-gnu-g++"),
    cc=Path("/usr/bin/aarch64-linux-gnu-gcc"),
    strip=Path("/a dir/strip"),
    version="12.2.0",
    digest="ab" * 32,
)
HEADERS = host.PythonHeaders(
    files={"Python.h": b"python", "internal/x.h": b""},
    version=platform.python_version(),
    digest="cd" * 32,
)


def stock(root: Path, store: Store) -> ReleaseLock:
    """Make the wheels, put them into the store and lock them."""
    artifacts = []
    for name, (tag, role, files) in WHEELS.items():
        project = name.partition("-linux")[0].partition("-cp")[0].replace("-", "_")
        members = {path.format(f"{project}-13.2.78"): data for path, data in files.items()}
        wheel = make_wheel(root / name, project=project, version="13.2.78", tag=tag, files=members)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        store.add(wheel, sha256=digest)
        artifacts.append(
            Artifact(
                id=name, project=project, version="13.2.78", filename=wheel.name, sha256=digest,
                size=wheel.stat().st_size, role=role,  # type: ignore[arg-type]
                platforms=("linux-64",) if name.endswith("-linux-64") else ("any",),
            )
        )  # fmt: skip
    rust = Rust(modes=("prebuilt", "none"), default="none", channel="1", cargo_lock_sha256="0" * 64)
    return ReleaseLock(schema=1, vllm="0", target="t", artifacts=tuple(artifacts), rust=rust)


class Bench:
    """A store with a release's wheels, and a machine whose compiler can be exchanged."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Store(root / "store")
        self.lock = stock(root / "wheels", self.store)
        self.compiler = COMPILER
        self.headers = HEADERS

    def provider(self, directory: str = "toolchain") -> Provider:
        return Bootstrap(self.root / directory, SilentReporter(), install=False)

    def channel(self, directory: str = "toolchain", target: str = "linux-aarch64") -> Path:
        (url,) = self.provider(directory).channels(self.lock, self.store, "linux-64", target)
        assert url.startswith("file:///")
        return Path(url.removeprefix("file://"))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setattr(host, "find_compiler", lambda target, *, install=True: made.compiler)
    monkeypatch.setattr(host, "python_headers", lambda *, install=True: made.headers)
    return made


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name != ".lock"
    }


def names(channel: Path) -> dict[str, set[str]]:
    """Packages by subdirectory, out of the index."""
    found = {}
    for path in channel.glob("*/repodata.json"):
        records = json.loads(path.read_text())["packages.conda"].values()
        found[path.parent.name] = {record["name"] for record in records}
    return found


def unpack(channel: Path, pattern: str, prefix: Path) -> Path:
    """Put one package's files into a prefix."""
    (package,) = channel.glob(pattern)
    for entry, content in iter_payload(package):
        path = prefix / entry.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.issym():
            path.symlink_to(entry.linkname)
        elif entry.isfile():
            path.write_bytes(content.read())
            path.chmod(entry.mode)
    return prefix


def test_channel_has_what_the_recipe_asks_for(bench: Bench) -> None:
    channel = bench.channel()
    assert verify_channel(channel) == []
    assert names(channel) == {
        "noarch": {"jinja2", "unidiff", "cutlass-headers"},
        "linux-64": {
            "cmake", "ninja", "ccache", "cuda-nvcc", "cuda-nvcc-tools", "cuda-nvvm-tools",
            "gxx_linux-aarch64", "markupsafe", "python",
        },
        "linux-aarch64": {
            "cuda-cudart-dev", "cuda-crt-dev", "cuda-cccl", "libcublas-headers", "torch-dev",
            "vllm-rs-prebuilt", "python",
        },
    }  # fmt: skip


def test_files_are_where_the_build_script_looks(bench: Bench, tmp_path: Path) -> None:
    channel = bench.channel()
    build, target = tmp_path / "build", tmp_path / "host"
    for package in channel.glob("linux-64/*.conda"):
        if not package.name.startswith("python-"):
            unpack(channel, f"linux-64/{package.name}", build)
    for package in channel.glob("linux-aarch64/*.conda"):
        unpack(channel, f"linux-aarch64/{package.name}", target)
    unpack(channel, "noarch/cutlass-headers-*.conda", target)
    for path in ("bin/cmake", "bin/ninja", "bin/ccache", "bin/nvcc", "bin/crt/link.stub",
                 "nvvm/bin/cicc", "targets/sbsa-linux/include/nvcc.h"):  # fmt: skip
        assert (build / path).is_file(), path
    sbsa = target / "targets" / "sbsa-linux"
    assert {p.name for p in (sbsa / "include").rglob("*.h")} == {"cuda.h", "x.h", "cublas.h"}
    assert (sbsa / "lib" / "libcudart.so").read_bytes() == b"cudart"
    assert (target / "share/torch-dev/torch/include/torch/x.h").is_file()
    assert (target / "share/cutlass/include/x.h").read_bytes() == b"cutlass"
    assert (target / "share/vllm-rs/vllm-rs").read_bytes() == b"rust"
    assert (target / f"include/python{MINOR}/Python.h").read_bytes() == b"python"
    assert (target / f"include/python{MINOR}/internal/x.h").is_file()


def test_same_inputs_same_bytes(bench: Bench) -> None:
    one, two = bench.channel("one"), bench.channel("two")
    assert one.name == two.name
    assert snapshot(one) == snapshot(two)
    assert len(snapshot(one)) > 20


def test_made_once(bench: Bench) -> None:
    channel = bench.channel()
    before = {p: p.stat().st_mtime_ns for p in channel.rglob("*")}
    assert bench.channel() == channel
    assert {p: p.stat().st_mtime_ns for p in channel.rglob("*")} == before


@pytest.mark.parametrize("fault", ["flipped byte", "missing package", "edited index"])
def test_a_damaged_channel_is_made_anew(bench: Bench, fault: str) -> None:
    """Nothing else checks it: neither conda nor rattler compares hashes of file: channels."""
    channel = bench.channel()
    before = snapshot(channel)
    (package,) = channel.glob("linux-64/ninja-*.conda")
    if fault == "missing package":
        package.unlink()
    else:
        path = package if fault == "flipped byte" else channel / "linux-64" / "repodata.json"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert bench.channel() == channel
    assert snapshot(channel) == before


def test_another_compiler_another_channel(bench: Bench) -> None:
    identity = bench.provider().identity(bench.lock, "linux-64", "linux-aarch64")
    channel = bench.channel()
    bench.compiler = replace(COMPILER, digest="ef" * 32)
    assert bench.channel() != channel
    changed = bench.provider().identity(bench.lock, "linux-64", "linux-aarch64")
    assert {key for key in identity if identity[key] != changed[key]} == {"compiler_digest"}
    bench.compiler = COMPILER
    bench.headers = replace(HEADERS, digest="0" * 64)
    assert bench.channel() != channel
    bench.headers = HEADERS
    assert bench.channel() == channel


def test_compiler_that_moved(bench: Bench) -> None:
    """The same bytes elsewhere build the same package, with a channel that points to them."""
    identity = bench.provider().identity(bench.lock, "linux-64", "linux-aarch64")
    channel = bench.channel()
    bench.compiler = replace(COMPILER, cxx=Path("/opt/bin/aarch64-linux-gnu-g++"))
    assert bench.provider().identity(bench.lock, "linux-64", "linux-aarch64") == identity
    assert bench.channel() != channel
    bench.compiler = COMPILER
    assert bench.channel() == channel


def test_python_acts_as_a_virtual_environment(bench: Bench, tmp_path: Path) -> None:
    prefix = unpack(bench.channel(), "linux-64/python-*.conda", tmp_path / "a prefix")
    site = prefix / "lib" / f"python{MINOR}" / "site-packages"
    (site / "only_here.py").write_text("x = 7\n")
    program = (
        "import importlib.util as u, json, only_here, sys\n"
        "print(json.dumps([sys.prefix, sys.executable, sys.version.split()[0], sys.path, "
        "bool(u.find_spec('click'))]))"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    for name in ("python", "python3", f"python{MINOR}"):
        done = subprocess.run(
            [str(prefix / "bin" / name), "-c", program],
            check=True, capture_output=True, text=True, env=clean, cwd=tmp_path,
        )  # fmt: skip
        found, executable, version, path, click = json.loads(done.stdout)
        assert found == str(prefix)
        assert Path(executable).parent == prefix / "bin"
        assert version == platform.python_version()
        assert [p for p in path if p.endswith("-packages")] == [str(site)]
        assert click is False


def test_compiler_is_handed_over_by_activation(bench: Bench, tmp_path: Path) -> None:
    prefix = unpack(bench.channel(), "linux-64/gxx_linux-aarch64-*.conda", tmp_path / "prefix")
    script = prefix / "etc/conda/activate.d/gxx_linux-aarch64.sh"
    done = subprocess.run(
        ["bash", "-c", f". {script}; echo \"$CC|$CXX|$STRIP|$CUDAHOSTCXX\""],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    cxx = COMPILER.cxx
    assert done.stdout.strip() == f"{COMPILER.cc}|{cxx}|/a dir/strip|{cxx}"


def test_native_build_has_one_python_with_headers(bench: Bench, tmp_path: Path) -> None:
    """Wheels of the target do not fit linux-64: only the adapters are looked at."""
    native = ("cuda", "cublas-dev", "torch-dev", "cutlass", "vllm-rs")
    nvcc = "cuda-nvcc-linux-64"
    kept = tuple(a for a in bench.lock.artifacts if not a.id.startswith(native) or a.id == nvcc)
    bench.lock = ReleaseLock(
        schema=1, vllm="0", target="t", artifacts=kept, rust=bench.lock.rust
    )  # fmt: skip
    channel = bench.channel(target="linux-64")
    prefix = unpack(channel, "linux-64/python-*.conda", tmp_path / "prefix")
    assert (prefix / f"include/python{MINOR}/Python.h").is_file()
    assert (prefix / "bin/python").exists()
    assert list(channel.glob("linux-64/gxx_linux-64-*.conda"))


def test_without_the_rust_binary(bench: Bench) -> None:
    """``--rust none`` does not fetch it, so it must not be asked for."""
    full = bench.channel()
    rust = bench.lock.artifact("vllm-rs")
    bench.store.get(rust).unlink()
    channel = bench.channel()
    assert channel != full
    assert "vllm-rs-prebuilt" not in names(channel)["linux-aarch64"]
    assert "torch-dev" in names(channel)["linux-aarch64"]


def test_missing_input(bench: Bench) -> None:
    bench.store.get(bench.lock.artifact("torch-dev")).unlink()
    with pytest.raises(FetchError, match="torch"):
        bench.channel()
    assert [p for p in (bench.root / "toolchain").iterdir() if p.is_dir()] == []


def test_wheel_of_another_layout(bench: Bench, tmp_path: Path) -> None:
    """A release of the tool that puts its files elsewhere is refused by name."""
    wheel = make_wheel(
        tmp_path / "new", project="ninja", version="13.2.78", tag=X86, files={"bin/ninja": b""}
    )
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    bench.store.add(wheel, sha256=digest)
    old = bench.lock.artifact("ninja-linux-64")
    from msgspec.structs import replace as changed

    new = changed(old, sha256=digest, size=wheel.stat().st_size)
    artifacts = tuple(new if a is old else a for a in bench.lock.artifacts)
    bench.lock = changed(bench.lock, artifacts=artifacts)
    with pytest.raises(ChannelError, match="ninja"):
        bench.channel()


def test_headers_of_cutlass_may_come_from_flashinfer(bench: Bench, tmp_path: Path) -> None:
    """Where vLLM's own wheel carries another revision than the release declares."""
    from msgspec.structs import replace as changed

    wheel = make_wheel(
        tmp_path / "new", project="flashinfer_python", version="13.2.78", tag=ANY,
        files={"flashinfer/data/cutlass/include/x.h": b"4.4.2"},
    )  # fmt: skip
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    bench.store.add(wheel, sha256=digest)
    old = bench.lock.artifact("cutlass")
    new = changed(
        old, project="flashinfer-python", filename=wheel.name, sha256=digest,
        size=wheel.stat().st_size,
    )  # fmt: skip
    artifacts = tuple(new if a is old else a for a in bench.lock.artifacts)
    bench.lock = changed(bench.lock, artifacts=artifacts)
    prefix = unpack(bench.channel(), "noarch/cutlass-headers-*.conda", tmp_path / "prefix")
    assert (prefix / "share/cutlass/include/x.h").read_bytes() == b"4.4.2"


def test_every_component_is_in_the_real_lock() -> None:
    """A name that no artifact has would be left out without a word."""
    from sm75.lockfile import load_release
    from tests.unit.projectkit import RELEASE, ROOT

    ids = {a.id for a in load_release(ROOT, RELEASE).artifacts}
    for build in ("linux-64", "linux-aarch64"):
        for key in set(COMPONENTS) - {"markupsafe"}:
            assert {key, f"{key}-{build}"} & ids, key
        for minor in range(11, 15):
            assert f"markupsafe-cp3{minor}-{build}" in ids


def test_target_channel_has_nothing_of_the_system(bench: Bench) -> None:
    url = target_channel(
        bench.root / "t", SilentReporter(), bench.lock, bench.store, "linux-64", "linux-aarch64",
        FROM_LOCK,
    )  # fmt: skip
    found = names(Path(url.removeprefix("file://")))
    assert found["linux-aarch64"] | found["noarch"] == set(FROM_LOCK)
    assert set().union(*found.values()) == set(FROM_LOCK)


class _Lines(SilentReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def test_choice(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "root"
    told = _Lines()
    assert choose("auto", root, bench.lock, told).name == "bootstrap"
    assert "no lock/0/toolchain.lock" in told.lines[0]
    assert choose("bootstrap", root, bench.lock, _Lines()).name == "bootstrap"
    with pytest.raises(ToolchainError, match="no lock of conda-forge's tools") as err:
        choose("conda-forge", root, bench.lock, _Lines())
    assert "--toolchain bootstrap" in err.value.fix


class _Tools(CondaForge):
    """Its locked tools as a channel, without a lock."""

    def channels(
        self, lock: ReleaseLock, store: Store, build_platform: str, target_platform: str
    ) -> list[str]:
        out = self.lock_file.parent / "forge"
        write_conda(
            out, name="ninja", version="1", build="0", subdir="linux-64",
            files={"bin/ninja": FileSource.from_bytes(b"")},
        )  # fmt: skip
        return [out.as_uri()]


def test_conda_forge_is_taken_where_it_is_locked(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sm75.toolchain.choice.CondaForge", _Tools)
    root = tmp_path / "root"
    (root / "lock" / "0").mkdir(parents=True)
    (root / "lock" / "0" / "toolchain.lock").write_text("")
    for asked in ("auto", "conda-forge"):
        told = _Lines()
        provider = choose(asked, root, bench.lock, told)
        assert provider.name == "conda-forge"
        assert len(told.lines) == 1
    first, second = provider.channels(bench.lock, bench.store, "linux-64", "linux-aarch64")
    # The lock's own headers come first: nothing of conda-forge's may take their place.
    found = names(Path(first.removeprefix("file://")))
    assert found["linux-aarch64"] | found["noarch"] == set(FROM_LOCK)
    assert second.endswith("/forge")
    assert provider.describe().endswith("lock's wheels")


def test_specs_of_conda_forge_cover_the_recipe() -> None:
    """What the recipe asks for comes from conda-forge or from the lock."""
    import yaml

    from sm75.toolchain.choice import CONDA_FORGE_BUILD, CONDA_FORGE_HOST
    from tests.unit.projectkit import ROOT

    recipe = yaml.safe_load((ROOT / "recipes" / "vllm-sm75" / "recipe.yaml").read_text())
    asked = recipe["requirements"]
    specs = ToolSpecs(build=CONDA_FORGE_BUILD, host=CONDA_FORGE_HOST)
    # what stands under a condition is for the Rust frontend from source, which no lock has yet
    always = [spec for spec in asked["build"] if isinstance(spec, str)]
    build = {spec.split()[0] for spec in always if "compiler" not in spec}
    assert build == {spec.split()[0] for spec in specs.build} - {"gxx_linux-aarch64"}
    host_names = {e if isinstance(e, str) else e["then"] for e in asked["host"]}
    assert host_names == {spec.split()[0] for spec in specs.host} | FROM_LOCK


def test_channel_for_proofs(bench: Bench, tmp_path: Path) -> None:
    """What belongs to the target is its own counterpart, below its own directory."""
    here = ("cuda-cudart", "cuda-crt", "cuda-cccl", "cublas-dev", "torch-dev")
    others = []
    for name in here:
        _, _, files = WHEELS[name]
        wheel = make_wheel(
            tmp_path / name, project=name.replace("-", "_"), version="13.2.78", tag=X86,
            files={path: data + b" x86" for path, data in files.items()},
        )  # fmt: skip
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        bench.store.add(wheel, sha256=digest)
        old = bench.lock.artifact(name)
        others += [
            msgspec.structs.replace(old, targets=("linux-aarch64",)),
            msgspec.structs.replace(
                old, id=f"{name}-for-linux-64", filename=wheel.name, sha256=digest,
                size=wheel.stat().st_size, targets=("linux-64",),
            ),
        ]  # fmt: skip
    rest = [a for a in bench.lock.artifacts if a.id not in (*here, "vllm-rs")]
    bench.lock = msgspec.structs.replace(bench.lock, artifacts=(*rest, *others))
    channel = bench.channel(target="linux-64")
    prefix = tmp_path / "prefix"
    for package in channel.glob("linux-64/*.conda"):
        if not package.name.startswith("python-"):
            unpack(channel, f"linux-64/{package.name}", prefix)
    target = prefix / "targets" / "x86_64-linux"
    assert (target / "lib" / "libcudart.so").read_bytes() == b"cudart x86"
    assert (target / "include" / "cuda.h").read_bytes() == b"cuda x86"
    assert (target / "include" / "nvcc.h").is_file()
    assert not (prefix / "targets" / "sbsa-linux").exists()
    assert names(channel)["noarch"] == {"jinja2", "unidiff", "cutlass-headers"}
