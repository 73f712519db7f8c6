"""`inspect`: the verdict on real and on made libraries."""

from __future__ import annotations

import dataclasses
import io
import json
import platform
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from sm75 import inspection
from sm75.aot import files, pack
from sm75.errors import ChannelError, UsageError
from sm75.inspection import LibraryReport, Report, inspect, judge, summarize, table, to_json
from tests.unit import test_aot
from tests.unit.commandkit import Runner
from tests.unit.elfkit import (
    DATA,
    DEVICE,
    MODULE,
    compile_library,
    library_bytes,
    package,
    versioned_libc,
    with_device_code,
)
from tests.unit.test_cubin import pinned_cuobjdump

WHEEL = "vllm-0.33.0-cp38-abi3-manylinux_2_28_aarch64.whl"


@dataclass(frozen=True, kw_only=True)
class Contract:
    name: str = "dlami"
    glibc: str = "2.34"
    python: tuple[str, ...] = ("3.12",)


def official() -> Report:
    """Facts that inspect read out of the official wheel (tests/data/device/README.md)."""
    return msgspec.json.decode((DATA / "wheel-0.33.0-aarch64.json").read_bytes(), type=Report)


def test_the_official_wheel_is_unusable_and_every_library_says_why() -> None:
    libraries = [judge(library, Contract()) for library in official().libraries]
    verdicts = {lib.name.removeprefix("vllm/"): lib for lib in libraries}
    assert {name for name, lib in verdicts.items() if lib.usable} == {
        "cumem_allocator.abi3.so",
        "fs_io_C.abi3.so",
        "spinloop.abi3.so",
        "third_party/deep_gemm/_C_extension.abi3.so",
        "vllm-rs",
    }
    assert verdicts["vllm_flash_attn/_vllm_fa3_C.abi3.so"].reasons == (
        "no sm_75 SASS and no PTX <= 7.5: it has SASS for sm_90a",
    )
    assert verdicts["_moe_C_stable_libtorch.abi3.so"].reasons[0] == (
        "no sm_75 SASS and no PTX <= 7.5: it has SASS for sm_80, sm_87, sm_89, sm_90, sm_100,"
        " sm_110, sm_120, sm_120f and PTX for sm_80"
    )
    assert summarize(libraries, Contract(name="g5g-2.12")) == (
        "unusable on g5g (g5g-2.12), because: no sm_75 SASS and no PTX <= 7.5 in 9 of 14 libraries"
    )


@pytest.mark.network
def test_the_official_wheel_itself_gives_those_facts(tmp_path: Path) -> None:
    """Reads the real wheel (333 MB, kept in the store) with both readings of its device code."""
    from sm75.fetch import fetch, plan_artifacts
    from sm75.lockfile import Artifact
    from sm75.progress import SilentReporter
    from sm75.store import Store, default_root

    artifact = Artifact(
        id="vllm-wheel",
        project="vllm",
        version="0.33.0",
        filename=WHEEL,
        sha256="e9e404f52c8494b69bd83fe99fe7ecfa9f6b89fbd156d2a9639c24ea41d6d606",
        size=333472621,
        role="prebuilt",
        platforms=("any",),
    )
    store = Store(default_root())
    fetch(plan_artifacts([artifact], store), store, SilentReporter())
    report = inspect(store.get(artifact), contract=Contract(), cuobjdump=pinned_cuobjdump(tmp_path))
    assert report.cuobjdump == "agrees"
    assert report.usable is False
    assert [facts(library) for library in report.libraries] == [
        facts(library) for library in official().libraries
    ]


def facts(library: LibraryReport) -> object:
    assert library.elf is not None
    elf = msgspec.structs.replace(
        library.elf, torch_c=library.elf.torch_c[:2], file_symbols=library.elf.file_symbols[:2]
    )
    return msgspec.structs.replace(library, elf=elf, usable=None, reasons=())


def one(path: Path, contract: Contract | None = None) -> LibraryReport:
    (library,) = inspect(path, contract=contract or Contract()).libraries
    return library


@pytest.mark.parametrize(
    ("fatbins", "usable", "reason"),
    [
        ((), True, "no device code"),
        (("sm75.fatbin",), True, ""),
        (("many.fatbin",), True, ""),
        (("sm80.fatbin",), False, "no sm_75 SASS and no PTX <= 7.5: it has SASS for sm_80 and PTX"),
        (("lto.fatbin",), False, "no sm_75 SASS and no PTX <= 7.5: it has no SASS and ltoir sm_75"),
        (("sm75.fatbin", "sm80.fatbin"), True, "1 of its 2 compiled sources has no code"),
    ],
)
def test_device_code_decides(
    tmp_path: Path, fatbins: tuple[str, ...], usable: bool, reason: str
) -> None:
    library = one(compile_library(tmp_path / "it.so", MODULE + with_device_code(*fatbins)))
    assert library.usable is usable
    assert "; ".join(library.reasons).startswith(reason)
    assert bool(library.reasons) is bool(reason)


@pytest.mark.parametrize("where", ["library", "directory"])
def test_what_has_no_device_code_needs_no_build(run: Runner, tmp_path: Path, where: str) -> None:
    """A library of this very system, as a person might name one."""
    libc = next(Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines()
                if re.search(r"/libc\.so\.6$|/libc-2\.\d+\.so$", line))  # fmt: skip
    if where == "directory":
        shutil.copy(libc, tmp_path)
    ended = run("inspect", tmp_path if where == "directory" else libc)
    machine = {"x86_64": 1, "aarch64": 0}[platform.machine()]
    said = f"no device code: code for the processor alone ({platform.machine()})"
    assert said in ended.out
    assert "orchestrator.py build" not in ended.out + ended.err
    if machine:
        assert ended.code == 1
        assert "next: there is nothing to build for the GPU; take it for aarch64" in ended.err


def test_the_advice_is_for_what_was_inspected(run: Runner, tmp_path: Path) -> None:
    data = library_bytes(MODULE + with_device_code("sm80.fatbin"))
    for name, says in (("vllm/_C.abi3.so", "orchestrator.py build"),
                       ("other/_C.abi3.so", "this project builds vLLM alone")):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir()
        path.write_bytes(data)
        ended = run("inspect", path.parent)
        assert ended.code == 1
        assert says in ended.err.splitlines()[-1]


def test_ptx_alone_is_usable_and_said(tmp_path: Path) -> None:
    library = one(compile_library(tmp_path / "it.so", with_device_code("plain.fatbin")))
    ptx_only = msgspec.structs.replace(library, sass={}, ptx={"sm_52": 1})
    (remark,) = judge(ptx_only, Contract()).reasons
    assert remark == "no sm_75 SASS, but the driver can run: it has no SASS and PTX for sm_52"


def test_the_machine_decides(tmp_path: Path) -> None:
    library = one(DEVICE / "two.so")
    assert library.usable is False
    assert library.reasons == ("it is built for x86_64, the machine is aarch64",)
    assert one(DEVICE / "sm75.cubin").usable


@pytest.mark.parametrize(("glibc", "usable"), [("2.34", False), ("2.35", True), ("2.39", True)])
def test_glibc_decides(tmp_path: Path, glibc: str, usable: bool) -> None:
    call = "extern void sm75_probe(void); void f(void) { sm75_probe(); }"
    path = compile_library(tmp_path / "it.so", call, str(versioned_libc(tmp_path, "GLIBC_2.35")))
    library = one(path, Contract(glibc=glibc))
    assert library.usable is usable
    if not usable:
        assert library.reasons == ("it needs glibc 2.35, the target has 2.34",)


def test_torch_and_python_decide(tmp_path: Path) -> None:
    def reasons(call: str, python: tuple[str, ...] = ("3.12",)) -> tuple[str, ...]:
        source = f"extern void {call}(void); void f(void) {{ {call}(); }}"
        path = compile_library(tmp_path / "it.abi3.so", source)
        return one(path, Contract(python=python)).reasons

    assert reasons("_ZN2at4mineEv") == (
        "it is tied to one build of torch by 1 C++ symbol (_ZN2at4mineEv)",
    )
    assert reasons("_PyObject_GetDictPtr")[0].endswith("the stable ABI: _PyObject_GetDictPtr")
    needs = "it needs Python 3.11, the target has 3.10"
    assert reasons("PyObject_GetBuffer", ("3.12", "3.10")) == (needs,)
    assert reasons("PyObject_GetBuffer", ("3.12",)) == ("no device code",)
    assert reasons("PyObject_GetBuffer", ()) == ("no device code",)


def test_wheel_tar_directory_and_conda_give_one_verdict(tmp_path: Path) -> None:
    data = library_bytes(MODULE + with_device_code("sm80.fatbin"))
    conda = package(tmp_path, {"vllm/_C_stable_libtorch.abi3.so": data})
    wheel = tmp_path / "it-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/_C_stable_libtorch.abi3.so", data)
        archive.writestr("vllm/x.py", "\x7fELF")
    tree = tmp_path / "tree"
    zipfile.ZipFile(wheel).extractall(tree)
    for source, count in ((conda, 5), (wheel, 1), (tree, 1)):
        report = inspect(source, contract=Contract())
        assert len(report.libraries) == count
        bad = [library for library in report.libraries if not library.usable]
        assert [library.sass for library in bad] == [{"sm_80": 1}]
        assert report.usable is False


def test_without_a_contract_there_is_no_verdict() -> None:
    report = inspect(DEVICE / "two.so")
    assert report.usable is None
    assert report.libraries[0].usable is None
    assert report.summary == "1 library; no target given, so no verdict"


def test_cuobjdump_that_disagrees_is_told(tmp_path: Path) -> None:
    tool = tmp_path / "cuobjdump"
    tool.write_text("#!/bin/sh\necho 'ELF file    1: lib.1.sm_80.cubin'\n")
    tool.chmod(0o755)
    report = inspect(DEVICE / "sm75.fatbin", cuobjdump=tool)
    assert "sass sm_75: 1 in the headers, 0 in cuobjdump's list" in report.cuobjdump


def test_json_and_table_say_the_same(tmp_path: Path) -> None:
    report = inspect(DEVICE, contract=Contract())
    assert msgspec.convert(json.loads(json.dumps(to_json(report))), Report) == report
    out = io.StringIO()
    Console(file=out, width=200).print(table(report))
    for library in report.libraries:
        assert library.name in out.getvalue()
    assert report.summary not in out.getvalue()


def kernels(where: Path, cubin: bytes, ptx: str = ".version 6.4\n.target sm_75\n") -> Path:
    """Kernels compiled ahead of time: two variants with one piece of code."""
    made = [
        dataclasses.replace(one, cubin=cubin, ptx=ptx, entry="scale") for one in test_aot.variants()
    ]
    pack.write(where / files.MODULE, made, {"vllm": "0.33.0"}, {})
    return where


def test_kernels_that_are_packed_as_data_are_judged(tmp_path: Path) -> None:
    data = (DEVICE / "sm75.cubin").read_bytes()
    home = kernels(tmp_path / "site-packages", data)
    wheel = tmp_path / "k-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted((home / files.MODULE).iterdir()):
            archive.write(path, f"x/{files.MODULE}/{path.name}")
    for source in (home, wheel):
        library = one(source)
        assert library.name.endswith("vllm_sm75_kernels/cubins.bin")
        assert (library.sass, library.ptx) == ({"sm_75": 1}, {"sm_75": 1})
        assert library.usable
        assert library.reasons == ()
    # e_flags: the architecture is the second byte in files of this ABI
    place = 49 if data[8] >= 8 else 48
    newer = data[:place] + bytes([80]) + data[place + 1 :]
    library = one(kernels(tmp_path / "other", newer))
    assert not library.usable
    assert library.reasons[0].startswith("no sm_75 SASS and no PTX <= 7.5: it has SASS for sm_80")
    (home / files.MODULE / pack.CUBINS).write_bytes(b"")
    with pytest.raises(ChannelError, match="not what the index was made with"):
        one(home)
    with pytest.raises(ChannelError, match="names no target"):
        one(kernels(tmp_path / "third", data, "no PTX"))


@pytest.mark.parametrize(("name", "code"), [("sm75.cubin", 0), ("two.so", 1)])
def test_the_command_says_its_verdict_once(run: Runner, name: str, code: int) -> None:
    ended = run("inspect", DEVICE / name)
    assert ended.code == code
    verdict = "usable on g5g" if code == 0 else "unusable on g5g"
    assert ended.out.count(verdict) == 1
    assert [line for line in ended.out.splitlines() if line.startswith(verdict)]
    assert "on g5g" not in ended.err
    (library,) = run("inspect", DEVICE / name, "--json").json["libraries"]
    assert library["usable"] is (code == 0)


def test_markup_in_names_is_printed_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a[bold]b.so"
    path.write_bytes((DEVICE / "two.so").read_bytes())
    out = io.StringIO()
    Console(file=out, width=200).print(table(inspect(path)))
    assert "a[bold]b.so" in out.getvalue()


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no"):
        inspect(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no library to inspect"):
        inspect(tmp_path / "empty")
    (tmp_path / "cut.so").write_bytes((DEVICE / "two.so").read_bytes()[:9000])
    with pytest.raises(ChannelError, match=r"cut\.so"):
        inspect(tmp_path / "cut.so")


def test_contracts_of_the_lock_fit() -> None:
    """A TargetContract of the lock has the fields a verdict needs."""
    from sm75.lockfile import TargetContract

    fields = {field.name for field in msgspec.structs.fields(TargetContract)}
    assert {"name", "glibc", "python"} <= fields
    assert inspection.GPU == "sm_75"
