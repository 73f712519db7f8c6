"""``doctor``: rules over recorded and made-up facts, and the probing of this very machine."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from sm75.doctor import facts as probing
from sm75.doctor import rules
from sm75.doctor.facts import Facts, Gpu
from sm75.lockfile import load_target
from tests.unit.commandkit import Runner
from tests.unit.projectkit import ROOT
from tests.unit.test_contract import _FAKE, make_image

RECORDED = ROOT / "tests" / "data" / "doctor" / "g5g.xlarge"
DLAMI = load_target(ROOT, "dlami-pytorch-2.12-ubuntu24.04")


def a_g5g(**changes: Any) -> Facts:
    """A g5g that has all that it should."""
    good: dict[str, Any] = {
        "machine": "aarch64", "instance": "g5g.xlarge", "instance_source": "DMI",
        "gpus": (Gpu(name="NVIDIA T4G", capability="7.5", memory_mib=15360, driver="595.71.05"),),
        "driver": "595.71.05", "image": "DLAMI", "system": "Ubuntu",
        "torch": msgspec.structs.replace(DLAMI, python=("3.12",)), "torch_path": "/opt/pytorch",
        "compiler": "g++ 13.3.0", "cores": 4, "memory_gib": 7.6, "available_gib": 6.7,
        "disk_gib": 50.0, "glibc": "2.39",
    }  # fmt: skip
    return Facts(**(good | changes))


def line(facts: Facts, name: str) -> rules.Line:
    return next(one for one in rules.judge(facts) if one.name == name)


def torch_of(**changes: Any) -> Any:
    return msgspec.structs.replace(DLAMI, **({"python": ("3.12",)} | changes))


def test_a_good_g5g_is_ok_in_every_line() -> None:
    lines = rules.judge(a_g5g())
    assert [(one.name, one.says) for one in lines if one.status != "ok"] == []
    assert rules.exit_code(lines, strict=True) == 0
    assert [one.fix for one in lines if one.fix] == []


@pytest.mark.parametrize(
    ("changes", "name", "status", "says"),
    [
        ({"machine": "x86_64"}, "architecture", "warn", "x86_64"),
        ({"instance": "g4dn.xlarge"}, "instance", "warn", "no g5g"),
        ({"instance": "", "instance_source": "there is no DMI"}, "instance", "unknown", "no DMI"),
        ({"gpus": None, "driver": ""}, "GPU", "unknown", "no GPU"),
        ({"gpus": None}, "GPU memory", "unknown", "lists no GPU"),
        ({"gpus": (Gpu(name="A10G", capability="8.6", memory_mib=23028, driver="595.1"),)},
         "capability", "fail", "8.6"),
        ({"gpus": (Gpu(name="T4G", capability="7.5", memory_mib=8192, driver="595.1"),)},
         "GPU memory", "warn", "8,192 MiB"),
        ({"driver": "570.86.10"}, "driver", "fail", "CUDA 13.2 needs 580"),
        ({"driver": ""}, "driver", "unknown", "none"),
        ({"torch": None, "torch_why": "there is no"}, "torch", "unknown", "there is no"),
        ({"torch": torch_of(torch="2.7.0+cu128")}, "torch", "fail", "the kernels need 2.11"),
        ({"torch": torch_of(torch="odd")}, "torch", "fail", "odd"),
        ({"torch": torch_of(cuda="12.8")}, "torch", "fail", "is for CUDA 12.8"),
        ({"torch": torch_of(torch_arches=("sm_80",))}, "torch's code", "fail", "no sm_75: sm_80"),
        ({"torch": torch_of(torch_arches=())}, "torch's code", "unknown", "cannot be imported"),
        ({"torch": torch_of(python=("3.14",))}, "torch's Python", "fail", "3.14"),
        ({"nvcc": "/usr/bin/nvcc", "nvcc_machine": "x86_64"}, "nvcc", "fail", "is for x86_64"),
        ({"nvidia_repositories": ("x86_64",)}, "NVIDIA repository", "warn", "for x86_64"),
        ({"compiler": "", "compiler_why": "no C++"}, "compiler", "warn", "no C++"),
        ({"available_gib": 1.0}, "RAM", "warn", "0 compile jobs"),
        ({"memory_gib": None}, "RAM", "unknown", "meminfo"),
        ({"disk_gib": 3.0}, "disk", "warn", "3 GiB"),
        ({"glibc": "2.31"}, "glibc", "fail", "2.31"),
        ({"glibc": ""}, "glibc", "unknown", "no glibc"),
        ({"environment": {"VLLM_ATTENTION_BACKEND": "X"}}, "environment", "warn", "does nothing"),
        ({"environment": {"VLLM_FA_CMAKE_GPU_ARCHES": "75"}}, "environment", "warn", "no vLLM"),
        ({"environment": {"TORCH_CUDA_ARCH_LIST": "7.5+PTX"}}, "environment", "warn", "PTX"),
        ({"environment": {"TORCH_CUDA_ARCH_LIST": "8.0"}}, "environment", "fail", "leaves 7.5 out"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": ""}}, "environment", "fail", "hides"),
        ({"environment": {"LD_LIBRARY_PATH": "/cuda/compat"}}, "environment", "warn", "804"),
        ({"environment": {"PYTHONPATH": "/x"}}, "environment", "warn", "another torch"),
        ({"environment": {"VLLM_USE_FLASHINFER_SAMPLER": "1"}}, "environment", "warn", "for 7.5"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(changes: dict[str, Any], name: str, status: str, says: str) -> None:
    found = line(a_g5g(**changes), name)
    assert (found.status, says in found.says) == (status, True), found
    lines = rules.judge(a_g5g(**changes))
    assert rules.exit_code(lines, strict=False) == (status == "fail")
    assert rules.exit_code(lines, strict=True) == (status != "ok")
    if status == "fail":
        assert found.fix


def test_recorded_outputs_of_a_g5g(tmp_path: Path) -> None:
    """Of published formats; nobody has recorded them on a real one."""

    def ask(command: Sequence[str]) -> str:
        return (RECORDED / "nvidia-smi.csv").read_text() if command[0] == "nvidia-smi" else ""

    found = probing.collect(
        ROOT, path=make_image(tmp_path / "image", _FAKE), system=RECORDED, ask=ask,
        which=lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else None, environment={},
    )  # fmt: skip
    assert (found.instance, found.instance_source) == ("g5g.xlarge", "DMI")
    assert found.gpus == (
        Gpu(name="NVIDIA T4G", capability="7.5", memory_mib=15360, driver="595.71.05"),
    )
    assert (found.system, found.nvidia_repositories) == ("Ubuntu 24.04.3 LTS", ("sbsa",))
    assert found.memory_gib == pytest.approx(7.61, abs=0.01)
    assert found.torch is not None
    assert found.torch.torch_arches == ("sm_75", "sm_80")
    assert line(found, "capability").status == "ok"
    assert line(found, "GPU memory").says == "15,360 MiB (15.0 GiB): not 16"
    # The module says it where nvidia-smi does not.
    silent = probing.collect(
        ROOT, path=tmp_path, system=RECORDED, ask=lambda command: "", which=lambda name: None
    )
    assert (silent.gpus, silent.driver) == (None, "595.71.05")


@pytest.mark.parametrize(
    "text",
    ["", "No devices were found\n", "NVIDIA-SMI has failed because it couldn't communicate\n",
     "T4G, N/A, [N/A], 595\n", "a,b\n"],
)  # fmt: skip
def test_what_nvidia_smi_says_without_a_gpu(text: str) -> None:
    assert probing.parse_gpus(text) == ()


def test_this_machine(run: Runner, tmp_path: Path) -> None:
    """The real probing; nothing is recorded here."""
    found = probing.collect(ROOT, path=tmp_path)
    assert found.machine == platform.machine()
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.disk_gib == pytest.approx(shutil.disk_usage(ROOT).free / 2**30, rel=0.1)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert found.memory_gib == pytest.approx(pages, rel=0.05)
    assert found.glibc == platform.libc_ver()[1]
    assert found.torch is None
    ended = run("doctor", "--path", tmp_path, "--json")
    assert ended.json["exit_code"] == ended.code
    assert len(ended.json["lines"]) > 15
    text = run("doctor", "--path", tmp_path).out
    assert len(text.splitlines()) < 45, "one screen"


def test_a_program_is_read_for_its_processor(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_bytes(b"\x7fELF\x02\x01\x01" + b"\0" * 9 + b"\x02\x00\x3e\x00")
    nvcc.chmod(0o755)
    found = probing.collect(
        ROOT, path=tmp_path, ask=lambda command: "Cuda compilation tools, release 13.2, V13.2.78",
        which=lambda name: str(nvcc) if name == "nvcc" else None,
    )  # fmt: skip
    assert (found.nvcc_machine, found.nvcc_release) == ("x86_64", "13.2")
    assert probing._elf_machine(Path(os.__file__)) == ""


def test_programs_that_fail_or_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_LIMIT", 0.2)
    assert probing.run(["sleep", "5"]) == ""
    assert probing.run(["false"]) == ""
    assert probing.run(["/no/such/program"]) == ""
    assert probing.run(["echo", "x"]) == "x\n"


@pytest.mark.parametrize(
    ("answer", "instance"),
    [("g5g.metal", "g5g.metal"), ("<html>login</html>", ""), (None, "")],
)
def test_the_metadata_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str | None, instance: str
) -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if answer is None:
            raise httpx.ConnectTimeout("timed out")
        return httpx.Response(200, text="token" if request.method == "PUT" else answer)

    real = httpx.Client

    def make(**settings: Any) -> httpx.Client:
        assert settings["timeout"] == 1.0
        return real(transport=httpx.MockTransport(handle), **settings)

    monkeypatch.setattr(httpx, "Client", make)
    found = probing.collect(ROOT, path=tmp_path, system=tmp_path, imds=True)
    assert found.instance == instance
    if answer:
        assert seen[1].headers["X-aws-ec2-metadata-token"] == "token"
    seen.clear()
    probing.collect(ROOT, path=tmp_path, system=tmp_path)
    assert seen == []
