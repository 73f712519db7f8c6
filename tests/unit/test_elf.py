"""ELF facts of libraries compiled here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sm75.elf import audit_abi3, declared_shim, exported_symbols, read_elf, version_key
from sm75.errors import ChannelError
from tests.unit.elfkit import DEVICE, compile_library, versioned_libc


def test_facts_of_an_aarch64_library(tmp_path: Path) -> None:
    libc = versioned_libc(tmp_path, "GLIBC_2.9")
    path = compile_library(
        tmp_path / "it.so",
        "extern void sm75_probe(void); void f(void) { sm75_probe(); }",
        str(libc),
        "-Wl,-soname,libit.so.1",
        "-Wl,--enable-new-dtags,-rpath,$ORIGIN/../lib:/opt/x",
    )
    facts = read_elf(path)
    assert facts.machine == "aarch64"
    assert facts.soname == "libit.so.1"
    assert facts.needed == ("libc.so.6",)
    assert facts.runpath == ("$ORIGIN/../lib", "/opt/x")
    assert facts.rpath == ()
    assert facts.versions == {"GLIBC": "2.9"}
    assert not facts.symbol_table
    assert facts.file_symbols == ()


def test_rpath_and_leftovers_of_the_build(tmp_path: Path) -> None:
    path = compile_library(
        tmp_path / "it.so", "int x;", "-Wl,--disable-new-dtags,-rpath,/build/lib", strip=False
    )
    facts = read_elf(path)
    assert facts.rpath == ("/build/lib",)
    assert facts.symbol_table
    assert any(name for name in facts.file_symbols if name != "crtstuff.c")


def test_debug_sections_alone_count_as_not_stripped(tmp_path: Path) -> None:
    path = compile_library(tmp_path / "it.so", "int x;", "-g", strip=False)
    strip = ["aarch64-linux-gnu-strip", "--strip-all", "--keep-section=.debug_*"]
    subprocess.run([*strip, str(path)], check=True)
    assert read_elf(path).file_symbols == ()
    assert read_elf(path).symbol_table
    subprocess.run([strip[0], str(path)], check=True)
    assert not read_elf(path).symbol_table


def test_highest_version_is_by_number_not_by_text(tmp_path: Path) -> None:
    old = versioned_libc(tmp_path, "GLIBC_2.9")
    new = compile_library(
        tmp_path / "new.so",
        "void sm75_other(void) {}",
        "-Wl,-soname,libm.so.6",
        f"-Wl,--version-script={_script(tmp_path, 'GLIBC_2.34', 'sm75_other')}",
    )
    path = compile_library(
        tmp_path / "it.so",
        "extern void sm75_probe(void), sm75_other(void);"
        "void f(void) { sm75_probe(); sm75_other(); }",
        str(old),
        str(new),
    )
    assert read_elf(path).versions == {"GLIBC": "2.34"}
    assert version_key("2.34") > version_key("2.9")


def _script(directory: Path, version: str, name: str) -> Path:
    script = directory / f"{version}.map"
    script.write_text(f"{version} {{ global: {name}; }};\n")
    return script


def test_torch_symbols_are_told_apart(tmp_path: Path) -> None:
    undefined = [
        "_ZN2at4_ops5zeros4callEv",
        "_ZNK3c1010TensorImpl5sizesEv",
        "_ZN3c10lsERSoNS_10DeviceTypeE",
        "_ZTIN5torch8autograd4NodeE",
        "_ZNSt6vectorIN2at6TensorESaIS1_EE9push_backEv",
        "_ZN3foo3barEv",
        "_ZN4data2at3getEv",
        "aoti_torch_get_numel",
        "torch_call_dispatcher",
        "cudaLaunchKernel",
    ]
    calls = "".join(f"extern void {name}(void); " for name in undefined)
    body = "".join(f"{name}(); " for name in undefined)
    defined = "void aoti_torch_mine(void) {} void _ZN2at4mineEv(void) {}"
    path = compile_library(tmp_path / "it.so", f"{calls} void f(void) {{ {body} }} {defined}")
    facts = read_elf(path)
    assert facts.torch_cxx == tuple(sorted(undefined[:5]))
    assert facts.torch_c == ("aoti_torch_get_numel", "torch_call_dispatcher")


def test_exported_and_declared_functions(tmp_path: Path) -> None:
    path = compile_library(
        tmp_path / "libtorch.so",
        "void aoti_torch_a(void) {} static void hidden(void) {} extern void torch_b(void);"
        "void f(void) { hidden(); torch_b(); }",
    )
    exported = exported_symbols(path)
    assert "aoti_torch_a" in exported
    assert not exported & {"hidden", "torch_b"}
    header = tmp_path / "shim.h"
    header.write_text(
        "AOTI_TORCH_EXPORT AOTITorchError\naoti_torch_get_dim(AtenTensorHandle t, int64_t* d);\n"
        "AOTI_TORCH_EXPORT AOTITorchError torch_call_dispatcher(\n    const char* name);\n"
        "#define aoti_torch_is_not_a_function 1\n"
    )
    assert declared_shim([header]) == {"aoti_torch_get_dim", "torch_call_dispatcher"}


def abi3_library(tmp_path: Path, call: str) -> Path:
    return compile_library(
        tmp_path / "it.abi3.so", f"extern void {call}(void); void PyInit_it(void) {{ {call}(); }}"
    )


@pytest.mark.parametrize(
    ("call", "computed", "outside", "sound"),
    [
        ("PyModule_Create2", "3.8", (), True),
        ("PyObject_GetBuffer", "3.11", (), False),
        ("_PyObject_GetDictPtr", "3.8", ("_PyObject_GetDictPtr",), False),
    ],
)
def test_stable_abi(
    tmp_path: Path, call: str, computed: str, outside: tuple[str, ...], sound: bool
) -> None:
    audit = audit_abi3(abi3_library(tmp_path, call), baseline="3.8")
    assert (audit.computed, audit.outside, audit.sound) == (computed, outside, sound)


def test_stable_abi_of_a_later_baseline(tmp_path: Path) -> None:
    path = abi3_library(tmp_path, "PyObject_GetBuffer")
    assert audit_abi3(path, baseline="3.11").sound


def test_x86_library_made_by_nvcc() -> None:
    facts = read_elf(DEVICE / "two.so")
    assert facts.machine == "x86_64"
    assert "libstdc++.so.6" in facts.needed
    assert facts.versions["GLIBC"] == "2.2.5"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = (DEVICE / "two.so").read_bytes()
    cases = {"text": b"no ELF at all", "empty": b"", "head": whole[:40], "half": whole[:9000]}
    for name, content in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        for reader in (read_elf, exported_symbols):
            with pytest.raises(ChannelError, match=f"{name} is no readable ELF file"):
                reader(path)
        with pytest.raises(ChannelError):
            audit_abi3(path, baseline="3.8")
