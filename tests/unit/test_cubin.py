"""Device code, read from real fat binaries (tests/data/device)."""

from __future__ import annotations

import platform
import stat
import zipfile
from pathlib import Path

import pytest

from sm75 import cubin
from sm75.cubin import DeviceCode, disagreement, list_with_cuobjdump, read_device_code, runs_on
from sm75.errors import ChannelError, ToolchainError
from tests.unit.elfkit import DEVICE, compile_library, with_device_code

FILES = sorted(path for path in DEVICE.iterdir() if (DEVICE / f"{path.name}.txt").exists())


def listing(path: Path) -> list[tuple[str, str]]:
    return [(code.kind, code.arch) for code in read_device_code(path)]


def test_architectures_kinds_and_suffixes_are_read() -> None:
    assert listing(DEVICE / "many.fatbin") == [
        ("sass", "sm_75"),
        ("ptx", "sm_75"),
        ("sass", "sm_80"),
        ("sass", "sm_90a"),
        ("sass", "sm_100f"),
        ("ptx", "sm_120"),
    ]
    assert listing(DEVICE / "lto.fatbin") == [("ltoir", "sm_75")]
    assert listing(DEVICE / "sm75.cubin") == [("sass", "sm_75")]


@pytest.mark.parametrize("name", ["two.so", "relocatable.so"])
def test_each_source_of_a_library_is_a_container(name: str) -> None:
    codes = read_device_code(DEVICE / name)
    assert [(code.kind, code.arch, code.container) for code in codes] == [
        ("sass", "sm_75", 0),
        ("sass", "sm_75", 1),
    ]


def test_files_without_device_code(tmp_path: Path) -> None:
    assert read_device_code(DEVICE / "README.md") == ()
    (tmp_path / "short").write_bytes(b"\x7fEL")
    assert read_device_code(tmp_path / "short") == ()
    assert read_device_code(compile_library(tmp_path / "host.so")) == ()


def test_device_code_inside_an_aarch64_library(tmp_path: Path) -> None:
    source = with_device_code("sm75.fatbin", "sm80.fatbin")
    codes = read_device_code(compile_library(tmp_path / "it.so", source))
    assert [(c.kind, c.arch, c.container) for c in codes] == [
        ("sass", "sm_75", 0),
        ("sass", "sm_80", 1),
        ("ptx", "sm_80", 1),
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_headers_agree_with_what_cuobjdump_printed(path: Path) -> None:
    printed = (DEVICE / f"{path.name}.txt").read_text()
    assert not disagreement(read_device_code(path), tuple(cubin._parse_listing(printed)))


def test_disagreement_is_told() -> None:
    ours = (DeviceCode(kind="sass", arch="sm_75"), DeviceCode(kind="ptx", arch="sm_80"))
    told = disagreement(ours, ours[:1] * 2)
    assert told == (
        "ptx sm_80: 1 in the headers, 0 in cuobjdump's list, "
        "sass sm_75: 1 in the headers, 2 in cuobjdump's list"
    )


def test_payloads_are_unpacked() -> None:
    packed = list(cubin.payloads(DEVICE / "many.fatbin"))
    assert [piece[:4] for piece in packed[:1]] == [b"\x7fELF"]
    assert b".target sm_75" in packed[1]
    assert b".target sm_75" in list(cubin.payloads(DEVICE / "plain.fatbin"))[1]
    assert list(cubin.payloads(DEVICE / "sm75.cubin")) == [(DEVICE / "sm75.cubin").read_bytes()]


@pytest.mark.parametrize(
    ("offset", "value"),
    [(4, 9), (8, 0xFF), (16 + 4, 1), (16 + 8, 0xFF), (16 + 16, 0xFF)],
    ids=["version", "size", "header of entry", "size of entry", "packed size"],
)
def test_damaged_fat_binaries_are_refused(tmp_path: Path, offset: int, value: int) -> None:
    data = bytearray((DEVICE / "sm75.fatbin").read_bytes())
    data[offset] = value
    data[offset + 1] = value
    (tmp_path / "bad.fatbin").write_bytes(data)
    with pytest.raises(ChannelError, match=r"bad\.fatbin holds a damaged fat binary"):
        read_device_code(tmp_path / "bad.fatbin")


def test_cut_off_and_trailing_bytes_are_refused(tmp_path: Path) -> None:
    data = (DEVICE / "sm75.fatbin").read_bytes()
    for number, content in enumerate([data[:-8], data + b"junk" * 8, data[:16]]):
        path = tmp_path / f"{number}.fatbin"
        path.write_bytes(content)
        with pytest.raises(ChannelError):
            read_device_code(path)
    (tmp_path / "cut.so").write_bytes((DEVICE / "two.so").read_bytes()[:9000])
    with pytest.raises(ChannelError, match="damaged ELF"):
        read_device_code(tmp_path / "cut.so")


def test_damaged_payload_is_refused(tmp_path: Path) -> None:
    data = bytearray((DEVICE / "sm75.fatbin").read_bytes())
    data[16 + 64 + 8 : 16 + 64 + 200] = b"\xff" * 192
    (tmp_path / "bad.fatbin").write_bytes(data)
    with pytest.raises(ChannelError, match="damaged device code"):
        list(cubin.payloads(tmp_path / "bad.fatbin"))


@pytest.mark.parametrize(
    ("kind", "arch", "expected"),
    [
        ("sass", "sm_75", True),
        ("sass", "sm_70", True),
        ("sass", "sm_80", False),
        ("sass", "sm_61", False),
        ("ptx", "sm_75", True),
        ("ptx", "sm_52", True),
        ("ptx", "sm_80", False),
        ("ptx", "sm_90a", False),
        ("sass", "sm_100f", False),
        ("ltoir", "sm_75", False),
        ("unknown", "sm_75", False),
    ],
)
def test_what_runs_on_turing(kind: cubin.Kind, arch: str, expected: bool) -> None:
    assert runs_on(DeviceCode(kind=kind, arch=arch)) is expected


def test_suffixed_code_runs_where_it_says() -> None:
    assert runs_on(DeviceCode(kind="sass", arch="sm_90a"), "sm_90")
    assert not runs_on(DeviceCode(kind="ptx", arch="sm_90a"), "sm_100")
    assert runs_on(DeviceCode(kind="sass", arch="sm_100f"), "sm_103")
    assert not runs_on(DeviceCode(kind="ptx", arch="sm_100f"), "sm_120")


def fake_tool(tmp_path: Path, script: str) -> Path:
    tool = tmp_path / "cuobjdump"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return tool


def test_cuobjdump_failures_are_told(tmp_path: Path) -> None:
    path = DEVICE / "sm75.fatbin"
    none = fake_tool(tmp_path, "echo 'cuobjdump info: does not contain device code' >&2; exit 255")
    assert list_with_cuobjdump(none, path) == ()
    broken = fake_tool(tmp_path, "echo 'fatal: no memory' >&2; exit 1")
    with pytest.raises(ToolchainError, match="exit code 1"):
        list_with_cuobjdump(broken, path)
    babbling = fake_tool(tmp_path, "echo 'Cubin 1: x.sm_75.cubin'")
    with pytest.raises(ToolchainError, match="does not know"):
        list_with_cuobjdump(babbling, path)
    with pytest.raises(ToolchainError, match="cannot run"):
        list_with_cuobjdump(tmp_path / "missing", path)


@pytest.mark.network
def test_the_pinned_cuobjdump_agrees(tmp_path: Path) -> None:
    """The wheel's one file is enough: it runs with no other CUDA tool and no CUDA library."""
    tool = pinned_cuobjdump(tmp_path)
    for path in FILES:
        assert not disagreement(read_device_code(path), list_with_cuobjdump(tool, path)), path.name
    spaced = tmp_path / "a name with spaces.so"
    source = with_device_code("many.fatbin", "sm75.fatbin")
    compile_library(tmp_path / "plain.so", source).rename(spaced)
    listed = list_with_cuobjdump(tool, spaced)
    assert len(listed) == 7
    assert not disagreement(read_device_code(spaced), listed)


def pinned_cuobjdump(directory: Path) -> Path:
    """Fetch cuobjdump for this machine."""
    from sm75.fetch import fetch, plan_artifacts
    from sm75.lockfile import Artifact
    from sm75.progress import SilentReporter
    from sm75.store import Store

    machine = platform.machine()
    pins = {
        "x86_64": ("394087411405b846bf43aa52ca2ff603bbe18b3b8a1257cda0903e23c17bdbf3", 343822),
        "aarch64": ("c985f2ac62cc6b41cb3c612c4b8d117f4c30ff5c1a2f9e23ca3350e0090a85b6", 318983),
    }
    if machine not in pins:
        pytest.skip(f"there is no cuobjdump wheel for {machine}")
    sha256, size = pins[machine]
    name = f"manylinux2014_{machine}.manylinux_2_17_{machine}"
    artifact = Artifact(
        id="cuobjdump",
        project="nvidia-cuda-cuobjdump",
        version="13.2.78",
        filename=f"nvidia_cuda_cuobjdump-13.2.78-py3-none-{name}.whl",
        sha256=sha256,
        size=size,
        role="tool",
        platforms=("any",),
    )
    store = Store(directory / "store")
    fetch(plan_artifacts([artifact], store), store, SilentReporter())
    with zipfile.ZipFile(store.get(artifact)) as wheel:
        tool = Path(wheel.extract(cubin.CUOBJDUMP_MEMBER, directory / "tool"))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return tool
