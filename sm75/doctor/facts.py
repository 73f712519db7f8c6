"""What a machine is, as far as it can be seen without changing anything.

``None`` or an empty text: could not be seen.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from sm75 import contract
from sm75.errors import ToolchainError, UsageError
from sm75.lockfile import G5G, TargetContract
from sm75.toolchain.host import find_compiler

# Seconds for a program that is asked for its version.
_LIMIT = 30.0
# EC2's metadata service, version 2 (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/
# instancedata-data-retrieval.html); the time limit for each request, in seconds.
_IMDS, _IMDS_LIMIT = "http://169.254.169.254/latest", 1.0
_QUERY = "name,compute_cap,memory.total,driver_version"
_CLIENTS = ("conda", "mamba", "micromamba", "pixi")
# e_machine of ELF files, by what platform.machine() says (elf(5), /usr/include/elf.h).
_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
# Where the DLAMI says what it is. Not seen on a real one yet.
_DLAMI = ("opt/aws/dlami/info/release_version", "opt/aws/dlami/info/dlami_release")

Run = Callable[[Sequence[str]], str]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as nvidia-smi lists it.

    Attributes:
        name: Its name.
        capability: Its compute capability.
        memory_mib: Its memory.
        driver: The driver's version.
    """

    name: str
    capability: str
    memory_mib: int
    driver: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that the rules look at.

    Attributes:
        machine: As ``uname -m`` says.
        instance: EC2 instance type, and how it is known.
        gpus: Those that nvidia-smi lists; ``None``: there is no nvidia-smi, or it failed.
        driver: The driver's version, of the kernel module where nvidia-smi is silent.
        image: The DLAMI's own words of its release.
        system: The distribution's name.
        torch: The image's torch; ``None``: there is none.
        torch_why: Why there is none, or why it could not be imported.
        nvcc: Path of nvcc on PATH.
        nvcc_machine: The processor that it is for.
        nvcc_release: The CUDA release that it says.
        nvidia_repositories: The architectures of NVIDIA's package repositories that are set up.
        compiler: The compiler for the g5g that a build would take.
        compiler_why: Why there is none.
        rustc: Version of rustc on PATH.
        cores: Processors.
        memory_gib, available_gib: RAM.
        disk_gib: Free where the project lies.
        glibc: Its version.
        clients: conda clients on PATH.
        environment: Variables of the process.
    """

    machine: str
    instance: str = ""
    instance_source: str = ""
    gpus: tuple[Gpu, ...] | None = None
    driver: str = ""
    image: str = ""
    system: str = ""
    torch: TargetContract | None = None
    torch_path: str = ""
    torch_why: str = ""
    nvcc: str = ""
    nvcc_machine: str = ""
    nvcc_release: str = ""
    nvidia_repositories: tuple[str, ...] = ()
    compiler: str = ""
    compiler_why: str = ""
    rustc: str = ""
    cores: int = 0
    memory_gib: float | None = None
    available_gib: float | None = None
    disk_gib: float | None = None
    glibc: str = ""
    clients: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def run(command: Sequence[str]) -> str:
    """Standard output of a program; empty when it is not there, fails or hangs."""
    try:
        done = subprocess.run(
            list(command), check=False, capture_output=True, text=True, timeout=_LIMIT
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return done.stdout if not done.returncode else ""


def collect(
    project: Path,
    *,
    path: Path,
    imds: bool = False,
    system: Path = Path("/"),
    ask: Run = run,
    which: Callable[[str], str | None] = shutil.which,
    environment: Mapping[str, str] | None = None,
) -> Facts:
    """Look at this machine. Nothing is written; the network is used with ``imds`` only.

    Args:
        project: The project's directory.
        path: The environment that has the image's torch.
        imds: Whether EC2's metadata service may be asked.
        system: The root of the file system; tests bring recorded ones.
        ask: Runs a program.
        which: Finds a program.
        environment: Variables; default: the process's.
    """
    instance, source = _instance(system, imds=imds)
    gpus = list_gpus(ask) if which("nvidia-smi") else None
    torch, torch_why = _torch(path)
    nvcc = which("nvcc") or ""
    compiler, compiler_why = _compiler()
    memory = meminfo(system)
    return Facts(
        machine=platform.machine(),
        instance=instance,
        instance_source=source,
        gpus=gpus,
        driver=gpus[0].driver if gpus else _module(system),
        image=next((text for name in _DLAMI if (text := _read(system / name))), ""),
        system=_os_name(system),
        torch=torch,
        torch_path=str(path),
        torch_why=torch_why,
        nvcc=nvcc,
        nvcc_machine=_elf_machine(Path(nvcc)) if nvcc else "",
        nvcc_release=_first(r"release ([\d.]+)", ask([nvcc, "--version"])) if nvcc else "",
        nvidia_repositories=_repositories(system),
        compiler=compiler,
        compiler_why=compiler_why,
        rustc=_first(r"rustc ([\d.]+)", ask(["rustc", "--version"])) if which("rustc") else "",
        cores=len(os.sched_getaffinity(0)),
        memory_gib=memory.get("MemTotal"),
        available_gib=memory.get("MemAvailable"),
        disk_gib=_free(project),
        glibc=(os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ").strip(),
        clients=tuple(name for name in _CLIENTS if which(name)),
        environment=dict(os.environ if environment is None else environment),
    )


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Read nvidia-smi's ``--format=csv,noheader,nounits``; lines that are none are skipped."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and re.fullmatch(r"\d+\.\d+", parts[1]) and parts[2].isdigit():
            found.append(
                Gpu(name=parts[0], capability=parts[1], memory_mib=int(parts[2]), driver=parts[3])
            )
    return tuple(found)


def list_gpus(ask: Run = run) -> tuple[Gpu, ...] | None:
    """The GPUs that nvidia-smi lists; nothing where it fails or is not there."""
    text = ask(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
    return parse_gpus(text) or None


def _instance(system: Path, *, imds: bool) -> tuple[str, str]:
    vendor = _read(system / "sys/class/dmi/id/sys_vendor")
    product = _read(system / "sys/class/dmi/id/product_name")
    if vendor == "Amazon EC2" and product:
        return product, "DMI"
    if imds:
        try:
            with httpx.Client(timeout=_IMDS_LIMIT, trust_env=False) as client:
                lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
                token = client.put(f"{_IMDS}/api/token", headers=lifetime).raise_for_status().text
                header = {"X-aws-ec2-metadata-token": token}
                answer = client.get(f"{_IMDS}/meta-data/instance-type", headers=header)
                found = answer.raise_for_status().text.strip()
        except httpx.HTTPError:
            return "", "neither DMI nor the metadata service says it"
        # Anything may answer at that address where there is no EC2.
        if re.fullmatch(r"[a-z][a-z0-9-]*\.[a-z0-9-]+", found):
            return found, "metadata service"
    if vendor or product:
        return "", f"DMI says {' '.join((vendor, product)).strip()}: no EC2"
    return "", "there is no DMI"


def _torch(path: Path) -> tuple[TargetContract | None, str]:
    try:
        found = contract.probe(path)
    except UsageError as error:
        return None, error.what + (f" ({error.why})" if error.why else "")
    return found, ""


def _compiler() -> tuple[str, str]:
    try:
        found = find_compiler(G5G, install=False)
    except ToolchainError as error:
        return "", error.what
    return f"{found.cxx.name} {found.version}", ""


def _elf_machine(path: Path) -> str:
    """The processor that a program is for; empty for a script."""
    try:
        with path.open("rb") as stream:
            head = stream.read(20)
    except OSError:
        return ""
    if head[:4] != b"\x7fELF" or len(head) < 20:
        return ""
    number = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    return _ELF_MACHINES.get(number, f"ELF machine {number}")


def _repositories(system: Path) -> tuple[str, ...]:
    found: set[str] = set()
    for pattern in ("etc/apt/sources.list", "etc/apt/sources.list.d/*", "etc/yum.repos.d/*"):
        for path in system.glob(pattern):
            found |= set(re.findall(r"/compute/cuda/repos/[\w.]+/([\w]+)", _read(path)))
    return tuple(sorted(found))


def meminfo(system: Path = Path("/")) -> dict[str, float]:
    """/proc/meminfo, in GiB; empty where there is none."""
    rows = re.findall(r"(?m)^(\w+):\s+(\d+) kB", _read(system / "proc/meminfo"))
    return {name: int(value) / 2**20 for name, value in rows}


def _module(system: Path) -> str:
    text = _read(system / "proc/driver/nvidia/version")
    return _first(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)


def _os_name(system: Path) -> str:
    return _first(r'(?m)^PRETTY_NAME="?([^"\n]+)', _read(system / "etc/os-release"))


def _free(path: Path) -> float | None:
    try:
        return shutil.disk_usage(path).free / 2**30
    except OSError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1].strip() if found else ""
