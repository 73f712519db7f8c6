"""What the bootstrap toolchain takes from the system: the C++ compiler and a Python.

They cannot be pinned by hash in a lock, so they are identified by content: ``digest`` goes into
the input hash of the build.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from sm75.atomic import disk_errors
from sm75.errors import ToolchainError

# vLLM refuses GCC < 11.3 (its CMakeLists.txt); nvcc 13.2 accepts up to GCC 15
# (https://docs.nvidia.com/cuda/cuda-installation-guide-linux/, host compiler table).
GCC_MIN = Version("11.3")
GCC_BELOW = Version("16")

# What recipe builders, CMake and nvcc start by name (found by taking all away and looking).
HOST_TOOLS = ("bash", "sh", "env", "rm")
TRIPLETS = {"linux-64": "x86_64-linux-gnu", "linux-aarch64": "aarch64-linux-gnu"}
_MACHINES = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}

# Seconds after which a compiler that is asked for its version has hung.
_PROBE_LIMIT = 120.0
# The programs that g++ runs, and the libraries that decide which symbols the result needs.
_PROGRAMS = ("cc1plus", "cc1", "collect2", "as", "ld")
# What GCC and CMake start by name where they know of no place for it.
_BY_NAME = ("as", "ld", "ar", "ranlib", "nm", "objcopy")
_LIBRARIES = ("libc.so.6", "libstdc++.so", "libgcc.a", "libgcc_s.so")
# What the sources include of the system, by way of these: the digest covers all that they lead to.
_PROBE = "#include <bits/stdc++.h>\n" + "".join(
    f"#include <{name}.h>\n" for name in ("unistd", "fcntl", "dlfcn", "pthread", "sys/mman",
                                          "sys/stat", "sys/types")
)  # fmt: skip


def build_platform() -> str:
    """The conda subdir of this machine.

    Raises:
        ToolchainError: It is neither x86-64 nor aarch64 Linux.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _MACHINES:
        raise ToolchainError(
            f"cannot build on {sys.platform}/{machine}",
            why="the build runs on x86-64 or aarch64 Linux",
            fix="use such a machine, or a container or virtual machine of that kind",
        )
    return _MACHINES[machine]


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """A GCC for the target platform.

    Attributes:
        platform: The platform it compiles for.
        cxx: Path of g++.
        cc: Path of gcc.
        strip: Path of strip.
        version: GCC's version.
        digest: sha256 over the compiler proper, assembler, linker, libc and libstdc++ it uses.
        programs: What it looks for on PATH, where a native GCC has no directory for it.
    """

    platform: str
    cxx: Path
    cc: Path
    strip: Path
    version: str
    digest: str
    programs: Mapping[str, Path] = field(default_factory=dict)


def find_compiler(target: str, *, install: bool = True) -> Compiler:
    """Find a suitable GCC for a platform, or install Debian's when that is allowed.

    Args:
        target: ``linux-64`` or ``linux-aarch64``.
        install: Whether a missing one may be installed (needs root and apt).

    Raises:
        ToolchainError: There is none, or only an unsuitable one.
    """
    found = _candidates(target)
    if not found and install and _may_install():
        _apt_install(_apt_package(target))
        found = _candidates(target)
    if not found:
        raise ToolchainError(
            f"no C++ compiler for {target}",
            why=f"neither {TRIPLETS[target]}-g++ nor a versioned one is on PATH",
            fix=f"sudo apt-get install {_apt_package(target)}   (or build with pixi)",
        )
    refused = []
    for cxx in found:
        version = _version(cxx)
        if version is None:
            refused.append(f"{cxx} does not say its version")
            continue
        if not GCC_MIN <= version < GCC_BELOW:
            refused.append(f"{cxx.name} is {version}")
            continue
        return _describe(target, cxx, str(version))
    raise ToolchainError(
        f"no suitable C++ compiler for {target}",
        why=f"{', '.join(refused)}; GCC >= {GCC_MIN} and < {GCC_BELOW} is needed",
        fix=f"install one of them, for instance: sudo apt-get install {_apt_package(target, 12)}"
        "   (or build with pixi)",
    )


def build_environment() -> dict[str, str]:
    """The environment in which compilers are probed; the build's own, but for PATH.

    Nothing of the user's is in it: CPATH, GCC_EXEC_PREFIX and their like change what is built.
    """
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


def lay_out_tools(directory: Path) -> str:
    """Make a directory with the few programs of this machine that a build may start by name.

    All others come from the recipe's environments, or are named by their whole path (the compiler
    by ``CC`` and ``CXX``).

    Args:
        directory: Where; made anew.

    Returns:
        The build's PATH.

    Raises:
        ToolchainError: One is missing.
        DiskError: It cannot be written.
    """
    with disk_errors(directory):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for name in HOST_TOOLS:
            found = shutil.which(name, path="/usr/bin:/bin")
            if found is None:
                raise ToolchainError(f"{name} is neither in /usr/bin nor in /bin", fix="install it")
            (directory / name).symlink_to(found)
    return str(directory)


def _version(cxx: Path) -> Version | None:
    """GCC's version; ``None`` when the program does not run or says something else."""
    try:
        return Version(_output([str(cxx), "-dumpfullversion", "-dumpversion"]).strip())
    except (ToolchainError, InvalidVersion):
        return None


def _candidates(target: str) -> list[Path]:
    native = target == build_platform()
    names = [f"{TRIPLETS[target]}-g++", *(["g++"] if native else [])]
    names += [f"{TRIPLETS[target]}-g++-{major}" for major in range(15, 10, -1)]
    paths = [shutil.which(name) for name in names]
    return [Path(path).absolute() for path in paths if path]


def _apt_package(target: str, major: int | None = None) -> str:
    name = f"g++-{major}" if major else "g++"
    return name if target == build_platform() else f"{name}-{TRIPLETS[target].replace('_', '-')}"


def _apt_install(package: str) -> None:
    """Install a package of Debian's or Ubuntu's; a new machine has no lists yet.

    Raises:
        ToolchainError: That failed.
    """
    try:
        for command in (["update", "-qq"], ["install", "-y", "-qq", package]):
            subprocess.run(
                ["apt-get", *command], check=True, stdout=subprocess.DEVNULL,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )  # fmt: skip
    except subprocess.CalledProcessError as err:
        raise ToolchainError(
            f"apt-get could not install {package}",
            why=f"exit code {err.returncode}",
            fix=f"install it by hand: sudo apt-get install {package}",
        ) from err


def _may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _describe(target: str, cxx: Path, version: str) -> Compiler:
    name = cxx.name
    cc = cxx.with_name(name.replace("g++", "gcc"))
    strip = _output([str(cxx), "-print-prog-name=strip"]).strip()
    strip_path = Path(shutil.which(strip) or shutil.which(f"{TRIPLETS[target]}-strip") or strip)
    if not cc.exists() or not strip_path.exists():
        raise ToolchainError(
            f"{cxx} has no gcc or strip beside it",
            why=f"looked for {cc} and {strip_path}",
            fix=f"sudo apt-get install {_apt_package(target)}",
        )
    return Compiler(
        platform=target, cxx=cxx, cc=cc, strip=strip_path, version=version,
        digest=_digest(cxx, cc, strip_path, version), programs=_by_name(cxx),
    )  # fmt: skip


def _by_name(cxx: Path) -> dict[str, Path]:
    found = {}
    for name in _BY_NAME:
        told = _output([str(cxx), f"-print-prog-name={name}"]).strip()
        place = None if "/" in told else shutil.which(told, path=build_environment()["PATH"])
        if place is not None:
            found[name] = Path(place)
    return found


def _digest(cxx: Path, cc: Path, strip: Path, version: str) -> str:
    """Hash the compiler: its programs, what they run, libraries, headers, built-in options."""
    digest = hashlib.sha256(version.encode())
    parts = {"g++": cxx, "gcc": cc, "strip": strip}
    for flag, names in (("prog", _PROGRAMS), ("file", _LIBRARIES)):
        for name in names:
            told = _output([str(cxx), f"-print-{flag}-name={name}"]).strip()
            parts[name] = Path(told if "/" in told else shutil.which(told) or told)
    for name, path in parts.items():
        digest.update(f"{name}\0".encode())
        _update(digest, path)
    # A wrapper or a specs file shows in the commands that would be run.
    nothing = ["-x", "c++", os.devnull, "-o", os.devnull]
    commands = _output([str(cxx), "-###", "-shared", "-fPIC", *nothing], errors=True)
    for line in commands.splitlines():
        if line.startswith(" "):
            digest.update(re.sub(r"/cc\w+\.(s|o|res)\b", "", line).encode())
    included = _output([str(cxx), "-std=c++20", "-M", "-x", "c++", "-"], text=_PROBE)
    for path in sorted(Path(word) for word in included.replace("\\\n", " ").split()[1:]):
        _update(digest, path)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, path: Path) -> None:
    if path.is_file():
        with path.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())


@dataclass(frozen=True, kw_only=True)
class PythonHeaders:
    """The headers of the running Python, enough for extensions of the stable ABI.

    Attributes:
        files: Header files by path below ``include/pythonX.Y``.
        version: Full version.
        digest: sha256 over names and contents.
    """

    files: dict[str, bytes]
    version: str
    digest: str


def python_headers(*, install: bool = True) -> PythonHeaders:
    """Read the C headers of the running Python.

    The extensions use the limited API, so that the headers of any CPython >= 3.11 do, also those of
    another 64-bit Linux: pyconfig.h differs there in nothing that the limited API shows.

    Raises:
        ToolchainError: They are not installed.
    """
    include = Path(sysconfig.get_path("include"))
    # That of this very version: python3-dev has the system's default one's.
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    if not (include / "Python.h").is_file() and install and _may_install():
        _apt_install(package)
    if not (include / "Python.h").is_file():
        raise ToolchainError(
            f"the headers of Python {platform.python_version()} are missing",
            why=f"no {include / 'Python.h'}",
            fix=f"sudo apt-get install {package}   (or build with pixi)",
        )
    files = {
        path.relative_to(include).as_posix(): path.read_bytes()
        for path in sorted(include.rglob("*.h"))
    }
    # Debian and Ubuntu keep pyconfig.h by machine and put a dispatcher in its place.
    if re.search(rb"#\s*include\s*<[a-z0-9_]+-linux-gnu/", files.get("pyconfig.h", b"")):
        real = Path(sysconfig.get_config_h_filename())
        machine = include.parent / TRIPLETS[build_platform()] / include.name / "pyconfig.h"
        files["pyconfig.h"] = (machine if machine.is_file() else real).read_bytes()
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return PythonHeaders(files=files, version=platform.python_version(), digest=digest.hexdigest())


def base_python() -> Path:
    """The interpreter itself, not that of a virtual environment made from it."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def _output(command: list[str], *, text: str = "", errors: bool = False) -> str:
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, input=text, errors="replace",
            env=build_environment(), timeout=_PROBE_LIMIT,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as err:
        raise ToolchainError(
            f"{command[0]} does not work",
            why=f"{' '.join(command[1:3])}: {err}",
            fix="repair it, or take it out of PATH",
        ) from err
    return done.stderr if errors else done.stdout
