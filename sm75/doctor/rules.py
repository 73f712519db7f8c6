"""What the facts mean for vllm-sm75: one line each, with the fix as a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from sm75.adapter import FLOOR
from sm75.doctor.facts import Facts
from sm75.words import counted

Status = Literal["ok", "warn", "fail", "unknown"]

# A T4G's memory: 15,360 MiB (nvidia-smi); AWS's pages say 16 GB.
T4G_MIB = 15_360
# Lowest driver branch by CUDA major (https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/,
# minor version compatibility).
_DRIVERS = {11: 450, 12: 525, 13: 580}
# As recipes/vllm-sm75/build.py plans: RAM for one compile job, in GiB.
_JOB_GIB = 2.5
# Free space in GiB: build directories and store take 6 (measured); weights come to it.
_DISK_GIB = 10.0
_GLIBC = Version("2.34")
_PYTHONS = ("3.11", "3.12", "3.13")
_BUILD = "python3 orchestrator.py build"
_IMAGE = "use AWS's ARM64 Deep Learning AMI with PyTorch 2.11 or newer"
# Variables that nothing reads.
_DEAD = {
    "VLLM_ATTENTION_BACKEND": "use vllm serve --attention-backend",
    "VLLM_FA_CMAKE_GPU_ARCHES": "no vLLM from 0.27.1 to 0.33.0 reads it",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: ``unknown``: it could not be seen.
        says: What was found.
        fix: A command or an action; empty where none is needed.
    """

    name: str
    status: Status
    says: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {"name": self.name, "status": self.status, "says": self.says, "fix": self.fix}


def judge(facts: Facts) -> list[Line]:
    """All lines, in the order in which they are read."""
    return [line for rule in _RULES for line in rule(facts)]


def exit_code(lines: list[Line], *, strict: bool) -> int:
    """0, or 1 where something fails; with ``strict`` also where it warns or is unknown."""
    bad = ("fail", "warn", "unknown") if strict else ("fail",)
    return int(any(line.status in bad for line in lines))


def _architecture(facts: Facts) -> Iterator[Line]:
    if facts.machine == "aarch64":
        yield Line(name="architecture", status="ok", says="aarch64")
        return
    yield Line(
        name="architecture", status="warn",
        says=f"{facts.machine}: it can build for a g5g, not serve on one",
        fix="serve on a g5g instance",
    )  # fmt: skip


def _instance(facts: Facts) -> Iterator[Line]:
    if not facts.instance:
        fix = "" if "metadata" in facts.instance_source else "on EC2: doctor --imds"
        yield Line(name="instance", status="unknown", says=facts.instance_source, fix=fix)
        return
    good = facts.instance.startswith("g5g.")
    says = f"{facts.instance} ({facts.instance_source})"
    yield Line(
        name="instance", status="ok" if good else "warn",
        says=says if good else f"{says}: no g5g", fix="" if good else "use a g5g instance",
    )  # fmt: skip


def _gpu(facts: Facts) -> Iterator[Line]:
    if not facts.gpus:
        says = f"driver {facts.driver}, but nvidia-smi lists no GPU" if facts.driver else (
            "no GPU and no driver are to be seen")  # fmt: skip
        fix = "nvidia-smi" if facts.driver else ""
        for name in ("GPU", "capability", "GPU memory"):
            yield Line(name=name, status="unknown", says=says, fix=fix)
        return
    yield Line(name="GPU", status="ok", says=", ".join(gpu.name for gpu in facts.gpus))
    others = sorted({gpu.capability for gpu in facts.gpus} - {"7.5"})
    if others:
        yield Line(
            name="capability", status="fail", says=f"{', '.join(others)}; the package is for 7.5",
            fix="use a g5g instance; for this GPU the official vLLM wheel is right",
        )  # fmt: skip
    else:
        yield Line(name="capability", status="ok", says="7.5")
    least = min(gpu.memory_mib for gpu in facts.gpus)
    gib = f"{least:,} MiB ({least / 1024:.1f} GiB)"
    if least < T4G_MIB:
        yield Line(name="GPU memory", status="warn", says=f"{gib}; a T4G has {T4G_MIB:,}")
    else:
        extra = ": not 16" if least == T4G_MIB else ""
        yield Line(name="GPU memory", status="ok", says=gib + extra)


def _driver(facts: Facts) -> Iterator[Line]:
    if not facts.driver:
        yield Line(name="driver", status="unknown", says="none is loaded")
        return
    cuda = facts.torch.cuda if facts.torch else ""
    major = cuda.partition(".")[0]
    least = _DRIVERS.get(int(major)) if major.isdigit() else None
    if least is None:
        yield Line(name="driver", status="unknown", says=f"{facts.driver}; torch's CUDA is unknown")
    elif int(facts.driver.partition(".")[0]) < least:
        yield Line(
            name="driver", status="fail",
            says=f"{facts.driver}; torch's CUDA {cuda} needs {least} or newer",
            fix=f"update the driver, or {_IMAGE}",
        )  # fmt: skip
    else:
        yield Line(name="driver", status="ok", says=f"{facts.driver}, enough for CUDA {cuda}")


def _torch(facts: Facts) -> Iterator[Line]:
    seen = facts.system or "unknown system"
    yield Line(name="image", status="ok" if facts.image else "unknown",
               says=facts.image or f"no release of a DLAMI; {seen}")  # fmt: skip
    torch = facts.torch
    if torch is None:
        yield Line(
            name="torch", status="unknown", says=facts.torch_why,
            fix="on a g5g: " + _IMAGE + "; elsewhere: doctor --path DIR",
        )  # fmt: skip
        return
    try:
        old = Version(torch.torch).release < FLOOR.release
    except InvalidVersion:
        old = True
    if old:
        yield Line(name="torch", status="fail", says=f"{torch.torch}; the kernels need {FLOOR}",
                   fix=_IMAGE)  # fmt: skip
    elif torch.cuda.partition(".")[0] != "13":
        yield Line(name="torch", status="fail", fix=_IMAGE,
                   says=f"{torch.torch} is for CUDA {torch.cuda}; ours for 13")  # fmt: skip
    else:
        yield Line(name="torch", status="ok", says=f"{torch.torch} in {facts.torch_path}")
    if not torch.torch_arches:
        yield Line(name="torch's code", status="unknown", says="torch cannot be imported",
                   fix=f"{facts.torch_path}/bin/python3 -c 'import torch'")  # fmt: skip
    elif "sm_75" in torch.torch_arches:
        yield Line(name="torch's code", status="ok", says=" ".join(torch.torch_arches))
    else:
        yield Line(name="torch's code", status="fail", fix=_IMAGE,
                   says=f"no sm_75: {' '.join(torch.torch_arches)}")  # fmt: skip
    minor = ", ".join(torch.python)
    good = bool(torch.python) and set(torch.python) <= set(_PYTHONS)
    yield Line(
        name="torch's Python", status="ok" if good else "fail" if minor else "unknown",
        says=minor or "not to be seen",
        fix="" if good or not minor else f"the channel serves {', '.join(_PYTHONS)}",
    )  # fmt: skip


def _tools(facts: Facts) -> Iterator[Line]:
    if not facts.nvcc:
        yield Line(
            name="nvcc", status="ok", says="none, and none is needed: builds bring their own"
        )
    elif facts.nvcc_machine and facts.nvcc_machine != facts.machine:
        yield Line(
            name="nvcc", status="fail",
            says=f"{facts.nvcc} is for {facts.nvcc_machine}, this machine is {facts.machine}",
            fix="take it out of PATH; NVIDIA's repository for a g5g is sbsa, not x86_64",
        )  # fmt: skip
    else:
        says = f"{facts.nvcc_release or 'version unknown'}, {facts.nvcc}"
        yield Line(name="nvcc", status="ok", says=f"{says}; builds bring their own")
    wrong = {"aarch64": "x86_64", "x86_64": "sbsa"}.get(facts.machine)
    if wrong in facts.nvidia_repositories:
        yield Line(
            name="NVIDIA repository", status="warn", says=f"that for {wrong} is set up",
            fix="grep -rl compute/cuda/repos /etc/apt /etc/yum.repos.d, and remove it",
        )  # fmt: skip
    yield Line(
        name="compiler", status="ok" if facts.compiler else "warn",
        says=facts.compiler or f"{facts.compiler_why}; needed to build only",
        fix="" if facts.compiler else _BUILD + " (as root it installs one)",
    )  # fmt: skip
    rust = f"{facts.rustc}; " if facts.rustc else "none; "
    yield Line(name="rustc", status="ok", says=rust + "the frontend is taken prebuilt")


def _resources(facts: Facts) -> Iterator[Line]:
    if facts.memory_gib is None or facts.available_gib is None:
        yield Line(name="RAM", status="unknown", says="/proc/meminfo cannot be read")
    else:
        jobs = min(facts.cores, int(facts.available_gib / _JOB_GIB))
        says = (f"{facts.memory_gib:.1f} GiB, {facts.available_gib:.1f} available: "
                f"{counted(jobs, 'compile job')} on {counted(facts.cores, 'core')}")  # fmt: skip
        enough = jobs >= 1
        yield Line(name="RAM", status="ok" if enough else "warn", says=says,
                   fix="" if enough else "free some, or add swap")  # fmt: skip
    if facts.disk_gib is None:
        yield Line(name="disk", status="unknown", says="cannot be asked")
    else:
        enough = facts.disk_gib >= _DISK_GIB
        yield Line(name="disk", status="ok" if enough else "warn",
                   says=f"{facts.disk_gib:.0f} GiB free",
                   fix="" if enough else f"have {_DISK_GIB:.0f} GiB: df -h .")  # fmt: skip


def _system(facts: Facts) -> Iterator[Line]:
    try:
        old = Version(facts.glibc) < _GLIBC
    except InvalidVersion:
        yield Line(name="glibc", status="unknown", says="this is no glibc system")
    else:
        yield Line(name="glibc", status="fail" if old else "ok", says=facts.glibc,
                   fix=f"use a system with glibc {_GLIBC} or newer" if old else "")  # fmt: skip
    says = ", ".join(facts.clients) or "none; python3 orchestrator.py install needs none"
    yield Line(name="conda clients", status="ok", says=says)


def _environment(facts: Facts) -> Iterator[Line]:
    found = False
    for name, status, says in variables(facts.environment):
        found = True
        yield Line(name="environment", status=status, says=f"{name}: {says}", fix=f"unset {name}")
    if not found:
        yield Line(name="environment", status="ok", says="no variable that does nothing or hurts")


def variables(environment: Mapping[str, str]) -> Iterator[tuple[str, Status, str]]:
    """Variables that do nothing or hurt: name, how bad, and why."""
    for name, instead in _DEAD.items():
        if name in environment:
            yield name, "warn", f"does nothing; {instead}"
    arches = environment.get("TORCH_CUDA_ARCH_LIST", "")
    if "+PTX" in arches:
        yield (
            "TORCH_CUDA_ARCH_LIST",
            "warn",
            f"{arches}: PTX is for newer GPUs, a T4G never uses it",
        )
    if arches and "7.5" not in arches and "Turing" not in arches:
        yield "TORCH_CUDA_ARCH_LIST", "fail", f"{arches} leaves 7.5 out"
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        yield "CUDA_VISIBLE_DEVICES", "fail", "it hides every GPU"
    if "/compat" in environment.get("LD_LIBRARY_PATH", ""):
        yield "LD_LIBRARY_PATH", "warn", "has a CUDA compat directory (Error 804)"
    if environment.get("VLLM_USE_FLASHINFER_SAMPLER") == "1":
        yield (
            "VLLM_USE_FLASHINFER_SAMPLER",
            "warn",
            "asks for FlashInfer, which has nothing for 7.5",
        )
    if environment.get("PYTHONPATH"):
        yield "PYTHONPATH", "warn", "may put another torch before the image's"


_RULES: tuple[Callable[[Facts], Iterator[Line]], ...] = (
    _architecture, _instance, _gpu, _driver, _torch, _tools, _resources, _system, _environment,
)  # fmt: skip
