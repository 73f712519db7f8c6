"""The build script of the recipe: patched tree -> extensions -> Python package.

It runs inside the environments that the recipe declares, without network, and imports nothing of
this project: it is the recipe's own, for every tool that builds recipes.

Environment it reads besides what every recipe gets (SRC_DIR, PREFIX, BUILD_PREFIX, SP_DIR, ...):

SM75_NATIVE_DIR        where CMake and ninja keep their state, so that a killed build resumes;
                       default: inside the work directory
SM75_CCACHE_DIR        the compiler cache; default: inside SM75_NATIVE_DIR
SM75_JOBS              compile jobs; default: from cores and memory
SM75_RECOMPILE         1: compile everything, and renew the compiler cache
SM75_CCACHE_REMOTE     ccache's remote_storage: a cache that several builders share
SM75_RUST              prebuilt, source or none
SM75_CRATES            with source: a directory with vendor/, every crate of rust/Cargo.lock, and
                       cargo's config.toml that names it
SM75_PTX               1: put compute_75 PTX beside the machine code, for proofs on other GPUs;
                       refused for linux-aarch64
"""

from __future__ import annotations

import ast
import base64
import csv
import email.parser
import functools
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

EXTENSIONS = ("spinloop", "fs_io_C", "cumem_allocator", "_moe_C_stable_libtorch",
              "_C_stable_libtorch")  # fmt: skip
# The sdist's inputs of CMake. A change elsewhere in the tree compiles nothing again.
NATIVE_INPUTS = ("CMakeLists.txt", "cmake", "csrc", "LICENSE")
# Libraries that CMake's find step asks for and that the kernels do not link (CUDA), or whose
# symbols are resolved by the target's own torch when it loads them: a stub with the right soname
# records the dependency, which is all that linking a shared library needs.
CUDA_STUBS = {"cublas": 13, "cublasLt": 13, "cufft": 12, "cusparse": 12, "cusolver": 12,
              "curand": 10, "nvrtc": 13, "nvJitLink": 13}  # fmt: skip
TORCH_STUBS = ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda", "torch_nvshmem",
               "torch_cuda_linalg", "torch_global_deps", "caffe2_nvrtc", "shm")  # fmt: skip
RUST_TRIPLES = {"linux-aarch64": "aarch64-unknown-linux-gnu",
                "linux-64": "x86_64-unknown-linux-gnu"}  # fmt: skip
# nvcc gives the absolute path of a source to its front ends, which hash it into the names of what
# is internal to it, and has no option against that (13.2: two directories, two names). Below
# the native directory they are told the path inside it.
FRONT_END = """\
#!/bin/sh
root=$(CDPATH= cd -- "${0%/*}/@UP@" && pwd -P)
count=$#
before=
while [ "$count" -gt 0 ]; do
  word=$1
  shift
  [ "$before" != --orig_src_path_name ] || word=${word#"$root"}
  set -- "$@" "$word"
  before=$word
  count=$((count - 1))
done
exec "$root/@REAL@" "$@"
"""
# Resident memory of one nvcc job of these sources, GiB: 2.1 at most, measured on x86-64 with nvcc
# 13.2 (benchmarks/build_time.py); plus headroom.
GIB_PER_JOB = 2.5
# ninja's report of a failed edge, and what tells that its compiler was killed: ninja's and shells'
# exit code (128 + SIGKILL), or the words of a shell, g++, nvcc or collect2.
FAILED = re.compile(r"FAILED: (?:\[code=(\d+)\] )?(\S+)")
KILLED_WORDS = re.compile(r"\bKilled\b|\bsignal 9\b")


def main() -> None:
    """Build and install; any failing step ends the script with its message."""
    check_ptx(target_platform(), os.environ.get("SM75_PTX", ""))
    src = Path(os.environ["SRC_DIR"])
    tree = src / "vllm-src"
    native = Path(os.environ.get("SM75_NATIVE_DIR") or src / "native")
    site = Path(os.environ["SP_DIR"])
    # Recipe builders set it; the linker would make a RUNPATH of it.
    os.environ.pop("LD_RUN_PATH", None)
    step("patch")
    if not (tree / ".sm75-patched").exists():
        run([sys.executable, "-m", "sm75.patching", "apply",
             "--series", str(src / "patches" / os.environ["PKG_VERSION"]), "--tree", str(tree)],
            env={**os.environ, "PYTHONPATH": str(src / "lib")})  # fmt: skip
        (tree / ".sm75-patched").touch()
    step("toolkit")
    settle(native)
    prepare_sources(tree, native)
    toolkit = Toolkit(native, target_platform())
    toolkit.prepare()
    step("configure")
    configure(native, toolkit)
    step("compile")
    compile_extensions(native, toolkit)
    check_headers(native, toolkit)
    step("install")
    install_extensions(native, toolkit, site)
    install_python(tree, site)
    install_rust(tree, native, site)
    install_metadata(tree, site, src / "lock" / "omissions.toml")


def step(name: str) -> None:
    """Say which step begins, in a form that the orchestrator reads."""
    print(f"sm75: step {name}", flush=True)


def run(
    command: list[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
) -> None:
    """Run a command; exit with its code when it fails."""
    done = subprocess.run(command, env=env, cwd=cwd, check=False)
    if done.returncode:
        sys.exit(f"sm75: {Path(command[0]).name} failed with exit code {done.returncode}")


def output(command: list[str]) -> str:
    """What a command prints; exit with its code when it fails."""
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"sm75: {Path(command[0]).name} failed with exit code {done.returncode}")
    return done.stdout.strip()


def target_platform() -> str:
    """The conda subdir that is built for."""
    return os.environ["target_platform"]  # noqa: SIM112 (conda's name)


def check_ptx(target: str, ptx: str) -> None:
    """End the script when PTX is asked for a package that a g5g could get, or is misspelt."""
    if ptx not in ("", "1"):
        sys.exit(f"sm75: SM75_PTX is {ptx!r}: it may be 1, or empty")
    if ptx and target == "linux-aarch64":
        sys.exit("sm75: SM75_PTX is for proofs on linux-64; the package for linux-aarch64 has none")


def settle(native: Path) -> None:
    """Drop CMake's state when it was made elsewhere, with another compiler or by another script.

    It holds absolute paths. What was compiled comes back from the compiler cache, which has none.
    """
    record = native / "place"
    script = content_hash(Path(__file__)).hex()
    place = "\n".join((str(native), os.environ["CC"], os.environ["CXX"], script)) + "\n"
    if record.exists() and record.read_text() == place:
        return
    drop_state(native)
    native.mkdir(parents=True, exist_ok=True)
    record.write_text(place)


def drop_state(native: Path) -> None:
    """Remove all but the compiler cache and the record of the place."""
    for path in native.glob("*"):
        if path.name in ("ccache", "place"):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def prepare_sources(tree: Path, native: Path) -> None:
    """Give the native build a copy of its inputs that outlives the work directory.

    CMake generates sources inside it, so that only what came from the tree is compared.
    """
    copy, done = native / "src", native / "src.complete"
    names = native_inputs(tree)
    wanted = files_digest(tree, names)
    if done.exists() and done.read_text() == wanted == files_digest(copy, names):
        return
    # What was configured and generated belongs to other sources.
    drop_state(native)
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, copy / name, follow_symlinks=False)
    done.write_text(wanted)


def native_inputs(tree: Path) -> list[str]:
    """Every file that CMake is given, by its path in the tree."""
    found = [path for name in NATIVE_INPUTS for path in
             (files([tree / name]) if (tree / name).is_dir() else [tree / name])]  # fmt: skip
    return [path.relative_to(tree).as_posix() for path in found]


def files_digest(root: Path, names: list[str]) -> str:
    """sha256 (hex) over some files; a missing one gives another digest."""
    digest = hashlib.sha256()
    for name in names:
        path = root / name
        digest.update(f"{name}\0".encode())
        if path.is_file():
            digest.update(content_hash(path))
    return digest.hexdigest()


def content_hash(path: Path) -> bytes:
    """sha256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").digest()


def complete(record: Path, directories: list[Path]) -> bool:
    """Whether directories are as they were when ``record`` was written, byte for byte."""
    return record.exists() and record.read_text() == tree_digest(directories)


def tree_digest(directories: list[Path]) -> str:
    """sha256 (hex) over names, link targets and contents below some directories."""
    digest = hashlib.sha256()
    for directory in directories:
        for path in sorted(directory.rglob("*")):
            digest.update(f"{path.relative_to(directory)}\0".encode())
            if path.is_symlink():
                digest.update(f"{path.readlink()}\0".encode())
            elif path.is_file():
                digest.update(content_hash(path))
    return digest.hexdigest()


class Toolkit:
    """The CUDA toolkit, torch and Python as CMake wants to find them, below the native directory.

    Everything the compilers see is addressed below this one directory, so that the compiler cache
    and the objects do not depend on where it is.
    """

    def __init__(self, native: Path, target: str) -> None:
        self.native = native
        self.target = target
        self.triplet = {"linux-aarch64": "sbsa-linux", "linux-64": "x86_64-linux"}[target]
        self.build = Path(os.environ["BUILD_PREFIX"])
        self.host = Path(os.environ["PREFIX"])
        self.cuda = native / "cuda"
        self.torch = native / "torch"
        self.shim = native / "shim"
        self.cc = os.environ["CC"]
        self.cxx = os.environ["CXX"]

    def prepare(self) -> None:
        """Lay everything out, unless that is done already."""
        for name, prefix in (("host", self.host), ("tools", self.build)):
            link(self.native / name, str(prefix))
        done, parts = self.native / "toolkit.complete", [self.cuda, self.torch, self.shim]
        if complete(done, parts):
            return
        for directory in parts:
            shutil.rmtree(directory, ignore_errors=True)
        self._cuda()
        self._torch()
        self._compilers()
        done.write_text(tree_digest(parts))

    def _cuda(self) -> None:
        include, lib = (self.cuda / "targets" / self.triplet / kind for kind in ("include", "lib"))
        nvcc = self.build / "bin"
        (self.cuda / "bin").mkdir(parents=True)
        for name in ("nvcc", "nvcc.profile", "cudafe++", "fatbinary", "ptxas", "nvlink", "bin2c",
                     "__nvcc_device_query", "crt"):  # fmt: skip
            copy(nvcc / name, self.cuda / "bin" / name)
        link(self.cuda / "nvvm" / "libdevice", "../../tools/nvvm/libdevice")
        (self.cuda / "front").mkdir()
        (self.cuda / "bin" / "cudafe++").rename(self.cuda / "front" / "cudafe++")
        link(self.cuda / "front" / "cicc", "../../tools/nvvm/bin/cicc")
        for place in ("bin/cudafe++", "nvvm/bin/cicc"):
            self._front_end(self.cuda / place)
        for prefix in (self.host, self.build):
            for kind, directory in (("include", include), ("lib", lib)):
                source = prefix / "targets" / self.triplet / kind
                if source.is_dir():
                    shutil.copytree(source, directory, symlinks=True, dirs_exist_ok=True)
        for name in ("aarch64-linux",) if self.triplet == "sbsa-linux" else ():
            link(self.cuda / "targets" / name, self.triplet)
        for kind in ("include", "lib"):
            link(self.cuda / kind, f"targets/{self.triplet}/{kind}")
        link(self.cuda / "lib64", "lib")
        (lib / "stubs").mkdir(parents=True, exist_ok=True)
        self._stub(lib / "stubs" / "libcuda.so", "libcuda.so.1")
        for name, version in CUDA_STUBS.items():
            self._stub(lib / f"lib{name}.so", f"lib{name}.so.{version}")

    def _torch(self) -> None:
        source = "../host/share/torch-dev/torch"
        (self.torch / "lib").mkdir(parents=True)
        link(self.torch / "include", f"{source}/include")
        link(self.torch / "share", f"{source}/share")
        for name in TORCH_STUBS:
            self._stub(self.torch / "lib" / f"lib{name}.so", f"lib{name}.so")
        # vLLM's CMake imports torch on the build machine for two values. The target's torch cannot
        # run there, so a module of that name gives them, read from its own source.
        real = self.host / "share" / "torch-dev" / "torch"
        flags = literal(real / "utils" / "cpp_extension.py", "COMMON_NVCC_FLAGS")
        package = self.shim / "torch"
        (package / "utils").mkdir(parents=True)
        (package / "__init__.py").write_text("from . import utils\n")
        (package / "utils" / "__init__.py").write_text(
            f"cmake_prefix_path = {str(self.torch / 'share' / 'cmake')!r}\n"
        )
        (package / "utils" / "cpp_extension.py").write_text(f"COMMON_NVCC_FLAGS = {flags!r}\n")

    def _front_end(self, path: Path) -> None:
        """Put a program in a front end's place that tells it nothing of this machine's paths."""
        path.parent.mkdir(parents=True, exist_ok=True)
        up = "/".join([".."] * (len(path.relative_to(self.native).parts) - 1))
        path.write_text(FRONT_END.replace("@UP@", up).replace("@REAL@", f"cuda/front/{path.name}"))
        path.chmod(0o755)

    def _compilers(self) -> None:
        # ccache and nvcc look for these on PATH, also where another host compiler is named.
        for name, compiler in (("gcc", self.cc), ("g++", self.cxx)):
            link(self.shim / "bin" / name, compiler)

    @functools.cached_property
    def compilers(self) -> str:
        """sha256 over every program that takes part in making an object, and its settings."""
        nvcc = [
            path
            for root in (self.cuda / "bin", self.cuda / "front", self.build / "nvvm")
            for path in files((root,))
        ]
        gcc = [self.cc, self.cxx, *(
            output([self.cxx, f"-print-prog-name={name}"]) for name in ("cc1", "cc1plus", "as")
        )]  # fmt: skip
        digest = hashlib.sha256()
        for path in (*nvcc, *(Path(shutil.which(name) or name) for name in gcc)):
            digest.update(content_hash(path))
        digest.update(output([self.cxx, "-dumpspecs"]).encode())
        driver = Path(shutil.which(self.cxx) or self.cxx)
        if driver.read_bytes()[:4] != b"\x7fELF":  # a wrapper: what it adds shows in the commands
            said = subprocess.run(
                [self.cxx, "-###", "-x", "c++", "-c", os.devnull, "-o", os.devnull],
                check=False, capture_output=True, text=True, errors="replace",
            ).stderr  # fmt: skip
            digest.update(re.sub(r"/cc\w+\.s\b", "", said).encode())
        return digest.hexdigest()

    def system_headers(self) -> list[str]:
        """Directories of the C and C++ libraries that belong to the compiler."""
        said = subprocess.run(
            [self.cxx, "-E", "-v", "-x", "c++", os.devnull],
            check=False, capture_output=True, text=True, errors="replace",
        ).stderr  # fmt: skip
        found = re.search(r"#include <\.\.\.> search starts here:\n(.*?)\nEnd of", said, re.DOTALL)
        listed = {
            os.path.realpath(line.strip()) for line in (found[1] if found else "").split("\n")
        }
        # Anybody's, and on a cross compiler those of another machine.
        listed.discard("/usr/local/include")
        if os.environ["build_platform"] != self.target:  # noqa: SIM112
            listed.discard("/usr/include")
        return sorted(listed)

    def _stub(self, path: Path, soname: str) -> None:
        if path.exists():
            return
        run([self.cc, "-x", "c", "-shared", "-nostdlib", f"-Wl,-soname,{soname}",
             "-Wl,--build-id=none", "-o", str(path), os.devnull])  # fmt: skip

    def environment(self) -> dict[str, str]:
        """The environment of CMake, ninja and the compilers."""
        env = dict(os.environ)
        # Flags of the user's or of an activation script must not change what is built.
        for name in ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDAFLAGS", "NVCC_APPEND_FLAGS",
                     "NVCC_PREPEND_FLAGS", "CMAKE_ARGS", "VLLM_CUTLASS_SRC_DIR"):  # fmt: skip
            env.pop(name, None)
        cache = os.environ.get("SM75_CCACHE_DIR") or str(self.native / "ccache")
        env |= {
            "PATH": os.pathsep.join((f"{self.cuda / 'bin'}", f"{self.shim / 'bin'}", env["PATH"])),
            "PYTHONPATH": str(self.shim),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_HOME": str(self.cuda),
            "CUDA_TOOLKIT_ROOT": str(self.cuda),
            "CUDACXX": str(self.cuda / "bin" / "nvcc"),
            "TORCH_CUDA_ARCH_LIST": "7.5",
            "SOURCE_DATE_EPOCH": "1704067200",
            "CCACHE_DIR": cache,
            "CCACHE_BASEDIR": str(self.native),
            "CCACHE_NOHASHDIR": "1",
            # Their dates differ from install to install, and nvcc and g++ only start others.
            "CCACHE_COMPILERCHECK": f"string:{self.compilers}",
            # The headers were just unpacked; their dates say nothing.
            "CCACHE_SLOPPINESS": "include_file_mtime,include_file_ctime",
            "CCACHE_MAXSIZE": "5G",
        }
        if os.environ.get("SM75_PTX"):
            # After vLLM's own --compress-mode=size: the last one counts. So one can read in a
            # library what the driver is going to compile (docs/proofs.md).
            env["NVCC_APPEND_FLAGS"] = "--compress-mode=none"
        if remote := os.environ.get("SM75_CCACHE_REMOTE"):
            env["CCACHE_REMOTE_STORAGE"] = remote
        if os.environ.get("SM75_RECOMPILE"):
            env["CCACHE_RECACHE"] = "1"
        return env


def literal(module: Path, name: str) -> list[str]:
    """The value of a literal assignment in a Python source file."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == [name]:  # fmt: skip  # noqa: E501
            return list(ast.literal_eval(node.value))
    sys.exit(f"sm75: {module} no longer assigns {name}")


def link(path: Path, target: str) -> None:
    """Make or renew a symbolic link."""
    if path.is_symlink() and str(path.readlink()) == target:
        return
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def copy(source: Path, destination: Path) -> None:
    """Copy a file or directory; one that the toolkit lacks is left out."""
    if source.is_dir():
        shutil.copytree(source, destination)
    elif source.exists():
        shutil.copy2(source, destination)


def configure(native: Path, toolkit: Toolkit) -> None:
    """Run CMake, unless its result is there."""
    if (native / "build" / "build.ninja").exists():
        return
    shutil.rmtree(native / "build", ignore_errors=True)
    processor = {"linux-aarch64": "aarch64", "linux-64": "x86_64"}[toolkit.target]
    crossing = os.environ["build_platform"] != toolkit.target  # noqa: SIM112
    headers = next((toolkit.host / "include").glob("python3.*"))
    cutlass = native / "host" / "share" / "cutlass"
    defines = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_COMPILER": toolkit.cxx,
        "CMAKE_C_COMPILER": toolkit.cc,
        # nvcc takes it for the host code alone, which launches kernels; device code has its own
        # default, -O3. It saves a tenth of the build's time (benchmarks/build_time.py).
        "CMAKE_CUDA_FLAGS_RELEASE": "-O2 -DNDEBUG",
        "CMAKE_CUDA_COMPILER": str(toolkit.cuda / "bin" / "nvcc"),
        "CMAKE_CUDA_HOST_COMPILER": toolkit.cxx,
        # One CUDA runtime in the process: the one that torch has loaded.
        "CMAKE_CUDA_RUNTIME_LIBRARY": "Shared",
        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
        "CMAKE_CUDA_COMPILER_LAUNCHER": "ccache",
        "CMAKE_SKIP_RPATH": "ON",
        "CUDAToolkit_ROOT": str(toolkit.cuda),
        "VLLM_TARGET_DEVICE": "cuda",
        "VLLM_PYTHON_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": str(native / "host" / "include" / headers.name),
        "VLLM_CUTLASS_SRC_DIR": str(cutlass),
        "CUTLASS_INCLUDE_DIR": str(cutlass / "include"),
        "CUTLASS_TOOLS_UTIL_INCLUDE_DIR": str(cutlass / "tools" / "util" / "include"),
        "FETCHCONTENT_BASE_DIR": str(native / "deps"),
        "FETCHCONTENT_FULLY_DISCONNECTED": "ON",
    }
    if os.environ.get("SM75_PTX"):
        # Beside vLLM's own -gencode for sm_75, and out of the same compilation.
        defines["CMAKE_CUDA_FLAGS"] = "--generate-code=arch=compute_75,code=compute_75"
    if crossing:
        defines |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": processor}
    run(
        ["cmake", "-G", "Ninja", "-S", str(native / "src"), "-B", str(native / "build"),
         *(f"-D{name}={value}" for name, value in defines.items())],
        env=toolkit.environment(),
    )  # fmt: skip


def jobs() -> int:
    """How many sources to compile at once: one a core, as far as the memory goes."""
    if os.environ.get("SM75_JOBS"):
        return int(os.environ["SM75_JOBS"])
    cores = int(os.environ.get("CPU_COUNT") or os.cpu_count() or 1)
    return max(1, min(cores, int(available_gib() / GIB_PER_JOB)))


def available_gib() -> float:
    """Memory that new processes may take, GiB: the machine's, or what the container leaves."""
    available = 0.0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) / 1024**2
    # A container sees its own control group (version 2) there; its page cache can be taken back.
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{n}").read_text()) for n in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        available = min(available, (limit - used + int(stat["inactive_file"])) / 1024**3)
    except (OSError, ValueError, KeyError):
        pass  # no such group, or no limit: "max"
    return available


def compile_extensions(native: Path, toolkit: Toolkit) -> None:
    """Compile; what was killed, most likely for memory, is compiled once more with nothing beside.

    Then the others go on, half as many at once.
    """
    at_once = jobs()
    while True:
        code, failed = ninja(native, toolkit, at_once, EXTENSIONS)
        if not code:
            return
        if not failed or not all(failed.values()):
            sys.exit(f"sm75: ninja failed with exit code {code}")
        for target in failed:
            print(f"sm75: alone: {target}", flush=True)
            code, again = ninja(native, toolkit, 1, (target,))
            if any(again.values()):
                sys.exit(
                    f"sm75: killed again, with nothing beside it: {target}; up to {GIB_PER_JOB} "
                    f"GiB of memory needed, {available_gib():.1f} GiB available"
                )
            if code:
                sys.exit(f"sm75: ninja failed with exit code {code}")
        at_once = max(1, at_once // 2)


def ninja(
    native: Path, toolkit: Toolkit, at_once: int, targets: Iterable[str]
) -> tuple[int, dict[str, bool]]:
    """Run ninja; its status lines carry what a progress bar needs.

    Returns:
        Its exit code, and the targets that failed, each with whether its compiler was killed.
    """
    command = ["ninja", "-C", str(native / "build"), f"-j{at_once}", *targets]
    failed: dict[str, bool] = {}
    target = ""
    with subprocess.Popen(
        command, env={**toolkit.environment(), "NINJA_STATUS": "sm75: [%f/%t] "},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if failure := FAILED.match(line):
                target = failure[2]
                failed[target] = failure[1] == "137"
            elif line.startswith(("sm75: [", "ninja: ")):
                target = ""
            elif target and KILLED_WORDS.search(line):
                failed[target] = True
    return process.returncode, failed


def check_headers(native: Path, toolkit: Toolkit) -> None:
    """End the script when a compiler read a header that nothing declares."""
    build = native / "build"
    listed = output(["ninja", "-C", str(build), "-t", "deps"])
    read = {line.strip() for line in listed.split("\n") if line.startswith(" ")}
    foreign = undeclared(
        {os.path.realpath(build / path) for path in read},
        [os.path.realpath(path) for path in (native, toolkit.host, toolkit.build)]
        + toolkit.system_headers(),
    )
    if foreign:
        sys.exit(
            "sm75: the compilers read files that no package declares:\n  "
            + "\n  ".join(foreign[:10])
            + "\n  take them away, or out of the compilers' search path"
        )
    print(f"sm75: {len(read)} headers, all declared", flush=True)


def undeclared(read: set[str], roots: list[str]) -> list[str]:
    """The files that lie below none of the directories, sorted."""
    below = tuple(root.rstrip("/") + "/" for root in roots if root)
    return sorted(path for path in read if not path.startswith(below))


def install_extensions(native: Path, toolkit: Toolkit, site: Path) -> None:
    """Install the extensions, stripped of symbols that only a debugger reads."""
    for name in EXTENSIONS:
        run(["cmake", "--install", str(native / "build"), "--prefix", str(site),
             "--component", name], env=toolkit.environment())  # fmt: skip
    for path in sorted((site / "vllm").glob("*.so")):
        run([os.environ.get("STRIP", "strip"), "--strip-unneeded", str(path)])


def install_python(tree: Path, site: Path) -> None:
    """Install vLLM's Python files and their data."""
    shutil.copytree(
        tree / "vllm", site / "vllm", dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__", "*.pyc"),
    )  # fmt: skip


def install_rust(tree: Path, native: Path, site: Path) -> None:
    """Install the Rust frontend, or say that there is none."""
    mode = os.environ["SM75_RUST"]
    if mode not in ("prebuilt", "source", "none"):
        sys.exit(f"sm75: rust_frontend may not be {mode!r}")
    binary = site / "vllm" / "vllm-rs"
    if mode == "prebuilt":
        shutil.copy2(Path(os.environ["PREFIX"]) / "share" / "vllm-rs" / "vllm-rs", binary)
        binary.chmod(0o755)
    elif mode == "source":
        step("rust")
        shutil.copy2(compile_rust(tree, native), binary)
        run([os.environ.get("STRIP", "strip"), "--strip-unneeded", str(binary)])
    print(f"sm75: Rust frontend: {mode}", flush=True)


def compile_rust(tree: Path, native: Path) -> Path:
    """Compile the Rust frontend out of the vendored crates, without network; gives the binary."""
    if not os.environ.get("SM75_CRATES"):
        sys.exit("sm75: rust_frontend 'source' needs SM75_CRATES: fetched and vendored crates")
    crates = Path(os.environ["SM75_CRATES"])
    manifest, arguments = rust_program(tree / "tools" / "build_rust.py")
    triple = RUST_TRIPLES[target_platform()]
    # Cargo goes by dates: another tree must not meet what this one compiled.
    state = native / "rust" / files_digest(tree, [
        path.relative_to(tree).as_posix() for path in files([tree / "rust"])
    ])  # fmt: skip
    home = state / "home"
    home.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(crates / "config.toml", home / "config.toml")
    run(
        ["cargo", "build", "--release", "--frozen", "--target", triple,
         "--manifest-path", str(tree / manifest), "--target-dir", str(state / "target"),
         *arguments],
        env=rust_environment(tree, crates, state, home, triple),
        # Of the directories that cargo would look for a configuration in, this has none above it.
        cwd="/",
    )  # fmt: skip
    return state / "target" / triple / "release" / "vllm-rs"


def rust_program(script: Path) -> tuple[str, list[str]]:
    """Manifest and cargo arguments of ``vllm-rs``, as vLLM's build script declares them."""
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("RustExtension"):
            continue
        said = {
            word.arg: ast.literal_eval(word.value)
            for word in node.keywords
            if word.arg in ("target", "path", "args", "features")
        }
        if said.get("target") == "vllm.vllm-rs" and "path" in said:
            features = said.get("features") or []
            more = ["--features", ",".join(features)] if features else []
            return str(said["path"]), [*map(str, said.get("args") or []), *more]
    sys.exit(f"sm75: {script} no longer declares vllm.vllm-rs")


def rust_environment(
    tree: Path, crates: Path, state: Path, home: Path, triple: str
) -> dict[str, str]:
    """The environment of cargo and of the C compiler that some crates start."""
    # What a user or an activation script has set must not change what is built.
    foreign = ("CARGO_", "RUSTC", "RUSTFLAGS", "RUSTDOCFLAGS", "CFLAGS", "CXXFLAGS", "CPPFLAGS",
               "LDFLAGS", "OPENSSL_")  # fmt: skip
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    places = {state: "/build", crates / "vendor": "/crates", tree: "/vllm"}
    flags = [f"--remap-path-prefix={place}={name}" for place, name in places.items()]
    key = triple.replace("-", "_")
    env |= {
        "CARGO_HOME": str(home),
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags),
        "CARGO_BUILD_JOBS": str(jobs()),
        "CARGO_INCREMENTAL": "0",
        f"CARGO_TARGET_{key.upper()}_LINKER": os.environ["CC"],
        f"CC_{key}": os.environ["CC"],
        f"CXX_{key}": os.environ["CXX"],
        "SOURCE_DATE_EPOCH": "1704067200",
        "VLLM_RS_BUILD_VERSION": os.environ["PKG_VERSION"],
        # vLLM's word for: no package without it.
        "VLLM_REQUIRE_RUST_FRONTEND": "1",
    }
    if "AR" in os.environ:
        env[f"AR_{key}"] = os.environ["AR"]
    build = RUST_TRIPLES[os.environ["build_platform"]]  # noqa: SIM112
    if build != triple:  # build scripts run here; CC and CXX make code for the target
        host = os.environ.get("CC_FOR_BUILD") or "cc"
        env[f"CARGO_TARGET_{build.replace('-', '_').upper()}_LINKER"] = host
        env |= {"HOST_CC": host, "HOST_CXX": os.environ.get("CXX_FOR_BUILD") or "c++"}
    return env


def install_metadata(tree: Path, site: Path, omissions: Path) -> None:
    """Write the dist-info directory, which ``importlib.metadata`` and vLLM's plugins read.

    Its requirements are those that an installation meets, so that ``pip check`` finds no fault.
    """
    text = (tree / "PKG-INFO").read_text()
    metadata = email.parser.HeaderParser().parsestr(text)
    version = metadata["Version"]
    info = site / f"vllm-{version}.dist-info"
    (info / "licenses").mkdir(parents=True)
    # Upstream pins the torch that its own wheels are built against. These kernels use torch's
    # stable ABI of 2.11, so that every later one serves.
    text = re.sub(r"(?m)^Requires-Dist: torch==\S+", "Requires-Dist: torch>=2.11", text)
    text = re.sub(r"(?m)^Requires-Dist: torchvision==\S+", "Requires-Dist: torchvision", text)
    absent = not_met(omissions)
    text = re.sub(
        r"(?m)^Requires-Dist: ([\w.-]+).*\n",
        # what an extra asks for is for its users to install
        lambda m: m[0] if "extra ==" in m[0] or normal(m[1]) not in absent else "",
        text,
    )
    (info / "METADATA").write_text(text)
    (info / "WHEEL").write_text(
        "Wheel-Version: 1.0\nGenerator: vllm-sm75\nRoot-Is-Purelib: false\n"
        f"Tag: cp311-abi3-{target_platform().replace('-', '_')}\n"
    )
    (info / "INSTALLER").write_text("conda\n")
    shutil.copy2(tree / "vllm.egg-info" / "entry_points.txt", info / "entry_points.txt")
    shutil.copy2(tree / "LICENSE", info / "licenses" / "LICENSE")
    (info / "sm75.json").write_text(
        json.dumps({"arches": ["7.5"], "rust_frontend": os.environ["SM75_RUST"]}, indent=2) + "\n"
    )
    record = io.StringIO()
    writer = csv.writer(record, lineterminator="\n")
    for path in files((site / "vllm", info)):
        data = path.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow([path.relative_to(site).as_posix(), f"sha256={digest}", len(data)])
    writer.writerow([f"{info.name}/RECORD", "", ""])
    (info / "RECORD").write_text(record.getvalue())


def not_met(omissions: Path) -> set[str]:
    """The projects that vLLM requires and an installation may lack."""
    entries = tomllib.loads(omissions.read_text(encoding="utf-8"))["omit"]
    return {
        normal(entry["project"])
        for entry in entries
        if not entry.get("provided") or entry.get("optional")
    }


def normal(project: str) -> str:
    """A project's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", project).lower()


def files(roots: Iterable[Path]) -> list[Path]:
    """All files below some directories, sorted."""
    return sorted(path for root in roots for path in root.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
