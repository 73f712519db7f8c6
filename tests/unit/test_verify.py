"""`verify`: a sound package keeps every rule; each rule is broken once and seen to fail."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import struct
from pathlib import Path

import msgspec
import pytest
import zstandard
from rich.console import Console

from sm75 import cubin
from sm75.buildgraph import BuildGraph, parse
from sm75.errors import ChannelError, CheckFailed, UsageError
from sm75.rules import DEVICE_EXTENSIONS, FORBIDDEN, HOST_EXTENSIONS
from sm75.verify import Finding, Policy, Verification, require, table, to_json, verify
from tests.unit.elfkit import (
    DEVICE,
    MODULE,
    SITE,
    compile_library,
    extension,
    library_bytes,
    package,
    versioned_libc,
    with_device_code,
)
from tests.unit.test_cubin import pinned_cuobjdump

SHIM = frozenset({"aoti_torch_get_dim", "torch_call_dispatcher"})
POLICY = Policy(version="0.33.0", shim=SHIM)
CORE = "vllm/_C_stable_libtorch.abi3.so"


def ninja(
    targets: tuple[str, ...] = (*DEVICE_EXTENSIONS, *HOST_EXTENSIONS), code: str = "sm_75"
) -> str:
    """A build.ninja as CMake writes it for our build."""
    lines = []
    for target in targets:
        source, rule = ("a.cu", "CUDA") if target in DEVICE_EXTENSIONS else ("a.cpp", "CXX")
        made = f"CMakeFiles/{target}.dir/csrc/{source}.o"
        lines += [
            f"build {made}: {rule}_COMPILER__{target} /s/flash-attn-work/vllm/csrc/{source}",
            f'  FLAGS = "--generate-code=arch=compute_75,code=[{code}]"' if rule == "CUDA" else "",
            f"build {target}.abi3.so: CXX_MODULE_LIBRARY_LINKER__{target} {made}",
        ]
    return "\n".join(lines) + "\n"


GRAPH = parse(ninja())


def failed(result: Verification) -> dict[str, str]:
    return {f.rule: f.evidence for f in result.findings if f.state == "fail"}


def check(path: Path, policy: Policy = POLICY, graph: BuildGraph | None = GRAPH) -> dict[str, str]:
    return failed(verify(path, policy, graph=graph))


def test_a_sound_package_keeps_every_rule(tmp_path: Path) -> None:
    calls = "extern void aoti_torch_get_dim(void); void g(void) { aoti_torch_get_dim(); }"
    source = MODULE + with_device_code("sm75.fatbin", "sm75.fatbin") + calls
    path = package(tmp_path, {CORE: library_bytes(source)})
    result = verify(path, POLICY, graph=GRAPH)
    assert {f.rule: f.state for f in result.findings if f.state != "ok"} == {
        "cuobjdump agrees": "not checked"
    }, failed(result)
    assert result.ok
    assert result.cubins == 3
    assert result.extensions[f"{SITE}/{CORE}"] == 2
    evidence = {f.rule: f.evidence for f in result.findings}
    assert evidence["SASS"] == "sm_75 only: 3 cubins"
    assert evidence["no foreign kernels"] == "none in 5 objects, 2 of them CUDA"
    assert evidence["torch C shim"] == "1 function, all declared"
    assert evidence["Rust frontend"] == "none; vllm-rs absent"
    require(result)


def test_what_could_not_be_checked_is_said(tmp_path: Path) -> None:
    result = verify(package(tmp_path), Policy(version="0.33.0"))
    assert [f.rule for f in result.findings if f.state == "not checked"] == [
        "cuobjdump agrees",
        "torch C shim",
        "no foreign kernels",
        "build targets",
        "build arches",
    ]
    assert result.ok


def test_identity(tmp_path: Path) -> None:
    path = package(tmp_path, name="vllm", version="0.32.0")
    assert check(path) == {
        "identity": "name is 'vllm', not 'vllm-sm75'; version is '0.32.0', not '0.33.0'"
    }


def test_extensions(tmp_path: Path) -> None:
    changes = {
        "vllm/spinloop.abi3.so": None,
        "vllm/_flashmla_C.abi3.so": extension("_flashmla_C"),
        "other/stray.so": extension("stray"),
    }
    assert check(package(tmp_path, changes)) == {
        "extensions": "spinloop is missing; _flashmla_C should not be there;"
        f" {SITE}/other/stray.so should not be there"
    }


def test_machine(tmp_path: Path) -> None:
    changes = {"vllm/spinloop.abi3.so": (DEVICE / "two.so").read_bytes()}
    assert "built for x86_64" in check(package(tmp_path, changes))["machine"]


@pytest.mark.parametrize(
    ("fatbins", "evidence"),
    [
        ((), "has no code for sm_75"),
        (("sm75.fatbin", "many.fatbin"), "has code for sm_80, sm_90a, sm_100f"),
        (("sm80.fatbin",), "has code for sm_80"),
        (("sm75.fatbin", "lto.fatbin"), "1 compiled sources have none for sm_75"),
    ],
)
def test_sass(tmp_path: Path, fatbins: tuple[str, ...], evidence: str) -> None:
    """The arch list 7.5;8.0 is the second case: sm_75 is there, and something else too."""
    data = library_bytes(MODULE + with_device_code(*fatbins))
    assert evidence in check(package(tmp_path, {CORE: data}))["SASS"]


@pytest.mark.parametrize(
    ("name", "evidence"), [("plain", "has ptx sm_75 ×1"), ("lto", "has ltoir sm_75 ×1")]
)
def test_ptx(tmp_path: Path, name: str, evidence: str) -> None:
    data = library_bytes(MODULE + with_device_code("sm75.fatbin", f"{name}.fatbin"))
    assert evidence in check(package(tmp_path, {CORE: data}))["no PTX"]


def test_second_reading(tmp_path: Path) -> None:
    tool = tmp_path / "cuobjdump"
    tool.write_text("#!/bin/sh\necho 'ELF file    1: lib.1.sm_80.cubin'\n")
    tool.chmod(0o755)
    result = verify(package(tmp_path), POLICY, graph=GRAPH, cuobjdump=tool)
    assert (
        "sass sm_80: 0 in the headers, 1 in cuobjdump's list" in failed(result)["cuobjdump agrees"]
    )


@pytest.mark.network
def test_second_reading_by_the_pinned_tool(tmp_path: Path) -> None:
    tool = pinned_cuobjdump(tmp_path)
    result = verify(package(tmp_path), POLICY, graph=GRAPH, cuobjdump=tool)
    (finding,) = [f for f in result.findings if f.rule == "cuobjdump agrees"]
    assert finding == Finding(
        rule="cuobjdump agrees", state="ok", evidence="2 entries in both readings"
    )


@pytest.mark.parametrize(
    ("soname", "version", "evidence"),
    [
        ("libc.so.6", "GLIBC_2.35", "needs GLIBC 2.35, the ceiling is 2.34"),
        ("libstdc++.so.6", "GLIBCXX_3.4.30", "needs GLIBCXX 3.4.30, the ceiling is 3.4.29"),
        ("libstdc++.so.6", "CXXABI_1.3.14", "needs CXXABI 1.3.14, the ceiling is 1.3.13"),
        ("libc.so.6", "GLIBC_2.34", ""),
    ],
)
def test_ceilings(tmp_path: Path, soname: str, version: str, evidence: str) -> None:
    stub = versioned_libc(tmp_path, version, soname)
    call = "extern void sm75_probe(void); void g(void) { sm75_probe(); }"
    data = compile_library(tmp_path / "x.so", MODULE + call, str(stub)).read_bytes()
    broken = check(package(tmp_path, {"vllm/spinloop.abi3.so": data}))
    assert evidence in broken.get("glibc and libstdc++", "")
    assert bool(broken) is bool(evidence)


def test_needed(tmp_path: Path) -> None:
    stub = versioned_libc(tmp_path, "SM75_1", "libcublas.so.13")
    call = "extern void sm75_probe(void); void g(void) { sm75_probe(); }"
    data = compile_library(tmp_path / "x.so", MODULE + call, str(stub)).read_bytes()
    broken = check(package(tmp_path, {"vllm/spinloop.abi3.so": data}))
    assert broken == {"needed libraries": f"{SITE}/vllm/spinloop.abi3.so needs libcublas.so.13"}


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("$ORIGIN", True),
        ("$ORIGIN/../torch/lib", True),
        ("/usr/lib/torch", False),
        ("$ORIGIN/../lib:/usr/lib", False),
        ("$ORIGINAL/lib", False),
        ("lib", False),
    ],
)
@pytest.mark.parametrize("dtags", ["--enable-new-dtags", "--disable-new-dtags"])
def test_runpath(tmp_path: Path, path: str, kept: bool, dtags: str) -> None:
    data = library_bytes(MODULE, f"-Wl,{dtags},-rpath,{path}")
    broken = check(package(tmp_path, {"vllm/spinloop.abi3.so": data}))
    assert ("run path" not in broken) is kept


def test_build_path_in_a_library(tmp_path: Path) -> None:
    where = 'const char *where = "/home/me/b/csrc/spin.cpp";'
    data = library_bytes(MODULE + where)
    assert check(package(tmp_path, {"vllm/spinloop.abi3.so": data})) == {
        "no build path": f"{SITE}/vllm/spinloop.abi3.so holds /home/me/b/csrc/spin.cpp"
    }


def fat_binary(payload: bytes) -> bytes:
    """A fat binary of one compressed sm_75 entry, like nvcc --compress-mode=size makes them."""
    packed = zstandard.compress(payload)
    stored = packed + b"\0" * (-len(packed) % 8)
    entry = struct.pack(
        "<HHIQIIHHIIIQQQ",
        *(2, 0x101, 64, len(stored), len(packed), 0, 8, 1, 75, 0, 0, 0x8011, 0, len(payload)),
    )
    return cubin.MAGIC + struct.pack("<HHQ", 1, 16, len(entry + stored)) + entry + stored


def test_build_path_in_compressed_device_code(tmp_path: Path) -> None:
    """A path inside a zstd frame cannot be seen in the file's bytes, and is found all the same."""
    # long enough for zstd to code its literals, so that no text of it shows
    text = " ".join(str(number**3) for number in range(2000)).encode()
    fat = fat_binary(b"\x7fELF" + text + b"\0/opt/kernels/scale.cu\0")
    assert b"kernels" not in fat
    (tmp_path / "x.fatbin").write_bytes(fat)
    data = compile_library(
        tmp_path / "x.so", MODULE + with_device_code(str(tmp_path / "x.fatbin"))
    ).read_bytes()
    broken = check(package(tmp_path, {CORE: data}))
    assert broken == {"no build path": f"{SITE}/{CORE} holds /opt/kernels/scale.cu"}


def test_build_path_of_this_build_anywhere(tmp_path: Path) -> None:
    policy = dataclasses.replace(POLICY, build_paths=("/usr/elsewhere/b1",))
    changes: dict[str, bytes | None] = {
        "vllm/x.py": b"x" * (5 << 20) + b"'/usr/elsewhere/b1/src'",
        "vllm/y.py": b"'/usr/elsewhere'",
    }
    recipe = {"recipe/rendered_recipe.yaml": b"dir: /usr/elsewhere/b1/work"}
    evidence = check(package(tmp_path, changes, extra_info=recipe), policy)["no build path"]
    assert evidence == (
        "info/recipe/rendered_recipe.yaml holds /usr/elsewhere/b1;"
        f" {SITE}/vllm/x.py holds /usr/elsewhere/b1"
    )


def test_build_path_in_dist_info(tmp_path: Path) -> None:
    changes = {"vllm-0.33.0.dist-info/direct_url.json": b'{"url": "file:///home/me/src"}'}
    evidence = check(package(tmp_path, changes))["no build path"]
    assert evidence.endswith('direct_url.json holds /home/me/src"}')


def test_placeholders_are_fine_only_where_conda_replaces_them(tmp_path: Path) -> None:
    prefix = "/x/host_env_placehold_placehold_placehold"
    script = f"#!{prefix}/bin/python\n".encode()
    declared = package(tmp_path / "a", {"run": script}, placeholder={"run": prefix})
    assert check(declared) == {}
    undeclared = package(tmp_path / "b", {"run": script})
    assert "placehold" in check(undeclared)["no build path"]


def test_stripped(tmp_path: Path) -> None:
    data = library_bytes(MODULE, strip=False)
    evidence = check(package(tmp_path, {"vllm/spinloop.abi3.so": data}))["stripped"]
    assert evidence.startswith(f"{SITE}/vllm/spinloop.abi3.so has a symbol table naming ")


@pytest.mark.parametrize(
    ("call", "evidence"),
    [
        ("_PyObject_GetDictPtr", "uses _PyObject_GetDictPtr, not in the stable ABI"),
        ("PyType_GetModuleByDef", "needs Python 3.13, the oldest target has 3.11"),
        ("PyObject_GetBuffer", ""),
    ],
)
def test_abi3(tmp_path: Path, call: str, evidence: str) -> None:
    data = library_bytes(MODULE + f"extern void {call}(void); void g(void) {{ {call}(); }}")
    broken = check(package(tmp_path, {"vllm/spinloop.abi3.so": data}))
    assert evidence in broken.get("abi3", "")
    assert bool(broken) is bool(evidence)


def test_torch_cxx_symbols(tmp_path: Path) -> None:
    call = "extern void _ZN3c105ErrorC1Ev(void); void g(void) { _ZN3c105ErrorC1Ev(); }"
    broken = check(package(tmp_path, {"vllm/spinloop.abi3.so": library_bytes(MODULE + call)}))
    assert broken == {
        "no torch C++ symbols": f"{SITE}/vllm/spinloop.abi3.so needs 1 (_ZN3c105ErrorC1Ev, …)"
    }


def test_torch_c_symbols(tmp_path: Path) -> None:
    call = "extern void aoti_torch_new_in_2_99(void); void g(void) { aoti_torch_new_in_2_99(); }"
    broken = check(package(tmp_path, {"vllm/spinloop.abi3.so": library_bytes(MODULE + call)}))
    assert broken == {"torch C shim": "aoti_torch_new_in_2_99 is not declared by the oldest torch"}


@pytest.mark.parametrize(
    ("file", "content", "evidence"),
    [
        ("METADATA", None, "there is no vllm-*.dist-info/METADATA"),
        ("METADATA", b"Name: vllm\nVersion: 0.33.1\n", "METADATA says vllm 0.33.1"),
        ("METADATA", b"Name: other\nVersion: 0.33.0\n", "METADATA says other 0.33.0"),
        ("METADATA", b"Name: vllm\nVersion: x.y\n", "METADATA says vllm x.y"),
        ("entry_points.txt", None, "entry point vllm is missing"),
        ("entry_points.txt", b"[console_scripts]\nvllm = a:b\n", "entry point vllm is a:b"),
        ("entry_points.txt", b"vllm = no section\n", "entry point vllm is unreadable"),
    ],
)
def test_dist_info(tmp_path: Path, file: str, content: bytes | None, evidence: str) -> None:
    broken = check(package(tmp_path, {f"vllm-0.33.0.dist-info/{file}": content}))
    assert list(broken) == ["dist-info"]
    assert evidence in broken["dist-info"]


def test_command(tmp_path: Path) -> None:
    assert check(package(tmp_path / "a", command=False)) == {
        "command": "nothing puts vllm into bin/: neither a file nor link.json"
    }
    entry = "vllm=vllm.entrypoints.cli.main:main"
    link = json.dumps({"noarch": {"type": "python", "entry_points": [entry]}}).encode()
    linked = package(tmp_path / "b", command=False, extra_info={"link.json": link})
    assert check(linked) == {}


def test_rust_frontend(tmp_path: Path) -> None:
    binary = {"vllm/vllm-rs": extension("vllm-rs")}
    assert check(package(tmp_path / "a", binary, rust="prebuilt")) == {}
    assert check(package(tmp_path / "b", binary, rust="source")) == {}
    assert check(package(tmp_path / "c", binary, rust="none")) == {
        "Rust frontend": "mode none, but vllm-rs is there"
    }
    assert check(package(tmp_path / "d", rust="source")) == {
        "Rust frontend": "mode source, but vllm-rs is missing"
    }
    assert check(package(tmp_path / "e", rust=""))["Rust frontend"] == (
        "about.json's extra.rust_frontend is '', not one of source, prebuilt, none"
    )


def test_a_published_rust_binary_is_kept_as_it_is(tmp_path: Path) -> None:
    """Stripping it would change the hash it is pinned by; one built here has no such excuse."""
    where = 'const char *where = "/workspace/rust/main.rs";'
    binary = {"vllm/vllm-rs": library_bytes(where, strip=False)}
    assert check(package(tmp_path / "a", binary, rust="prebuilt")) == {}
    assert check(package(tmp_path / "b", binary, rust="source")).keys() == {
        "no build path",
        "stripped",
    }


@pytest.mark.parametrize(
    "target",
    [
        "_vllm_fa2_C",
        "_vllm_fa3_C",
        "_flashmla_C",
        "_flashkda_C",
        "_deep_gemm_C",
        "_deepselect_C",
        "_fmha_sm100_C",
        "_qutlass_C",
        "tml_fa4",
    ],
)
def test_foreign_kernels_in_the_build(tmp_path: Path, target: str) -> None:
    graph = parse(ninja((*DEVICE_EXTENSIONS, *HOST_EXTENSIONS, target)))
    broken = check(package(tmp_path), graph=graph)
    assert broken["no foreign kernels"].startswith(f"CMakeFiles/{target}.dir/csrc/a.cpp.o")
    assert broken["build targets"] == f"target {target} should not be built"


def test_foreign_source_in_an_own_target(tmp_path: Path) -> None:
    made = "CMakeFiles/_C_stable_libtorch.dir/csrc/qutlass_registration.cpp.o"
    graph = parse(ninja() + f"build {made}: CXX /s/csrc/qutlass_registration.cpp\n")
    broken = check(package(tmp_path), graph=graph)
    assert broken == {"no foreign kernels": f"{made}; /s/csrc/qutlass_registration.cpp"}


def test_unknown_target_in_the_build(tmp_path: Path) -> None:
    graph = parse(ninja((*DEVICE_EXTENSIONS, *HOST_EXTENSIONS, "_new_C")))
    assert check(package(tmp_path), graph=graph) == {
        "build targets": "target _new_C should not be built"
    }


def test_build_arches(tmp_path: Path) -> None:
    two = parse(ninja(code="sm_75,sm_80,compute_80"))
    assert check(package(tmp_path), graph=two) == {
        "build arches": "it asks for compute_80; it asks for sm_80"
    }
    broken = check(package(tmp_path), graph=parse(""))
    assert broken == {
        "build targets": "it compiles nothing",
        "build arches": "it never asks for sm_75",
    }


def test_our_own_sources_are_not_taken_for_foreign_ones() -> None:
    """Names of vLLM 0.33.0 sources that come near a forbidden one."""
    ours = [
        "csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu",
        "csrc/fused_kimi_k3_mla_key_concat_kv_cache_kernel.cu",
        "csrc/attention/merge_attn_states.cu",
        "csrc/nvfp4_ds_mla_cache_kernels.cu",
        "csrc/quantization/w8a8/cutlass/scaled_mm_c2x_sm75.cu",
    ]
    pattern = re.compile("|".join(FORBIDDEN), re.IGNORECASE)
    assert [name for name in ours if pattern.search(name)] == []


def test_failures_end_the_command_with_1(tmp_path: Path) -> None:
    result = verify(package(tmp_path, rust=""), POLICY, graph=GRAPH)
    assert not result.ok
    with pytest.raises(CheckFailed, match="breaks 1 of 20 rules") as caught:
        require(result)
    assert caught.value.exit_code == 1
    assert "Rust frontend" in caught.value.why


def test_json_and_table(tmp_path: Path) -> None:
    result = verify(package(tmp_path, rust=""), POLICY, graph=GRAPH)
    assert msgspec.convert(json.loads(json.dumps(to_json(result))), Verification) == result
    out = io.StringIO()
    Console(file=out, width=200).print(table(result))
    for finding in result.findings:
        assert finding.rule in out.getvalue()
    assert "fail" in out.getvalue()


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no"):
        verify(tmp_path / "absent.conda", POLICY)
    (tmp_path / "bad.conda").write_bytes(b"PK nonsense")
    with pytest.raises(ChannelError, match=r"bad\.conda"):
        verify(tmp_path / "bad.conda", POLICY)
    whole = package(tmp_path).read_bytes()
    (tmp_path / "cut.conda").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ChannelError, match=r"cut\.conda"):
        verify(tmp_path / "cut.conda", POLICY)


PROOF = dataclasses.replace(POLICY, ptx=True)


@pytest.mark.parametrize(
    ("fatbins", "broken"),
    [
        (("plain.fatbin",), {}),
        (("plain.fatbin", "sm75.fatbin"), {"PTX": "1 compiled sources have none for compute_75"}),
        (("plain.fatbin", "ptx"), {"SASS": "1 compiled sources have none for sm_75"}),
        (("plain.fatbin", "many.fatbin"), {"SASS": "has code for sm_80", "PTX": "has ptx"}),
    ],
)
def test_a_package_for_proofs_needs_both(
    tmp_path: Path, fatbins: tuple[str, ...], broken: dict[str, str]
) -> None:
    """Machine code and PTX in each compiled source."""
    (tmp_path / "ptx").write_bytes(ptx_alone())
    data = library_bytes(
        MODULE + with_device_code(*(str(tmp_path / f) if f == "ptx" else f for f in fatbins))
    )
    both = library_bytes(MODULE + with_device_code("plain.fatbin"))
    path = package(tmp_path, {CORE: data, "vllm/_moe_C_stable_libtorch.abi3.so": both})
    found = check(path, PROOF, parse(ninja(code="sm_75,compute_75")))
    assert found.keys() == broken.keys()
    for rule, evidence in broken.items():
        assert evidence in found[rule]


def test_the_build_for_proofs_must_ask_for_both(tmp_path: Path) -> None:
    path = package(tmp_path)
    assert check(path, PROOF)["build arches"] == "it never asks for compute_75"
    found = check(path, POLICY, parse(ninja(code="sm_75,compute_75")))
    assert found == {"build arches": "it asks for compute_75"}


def ptx_alone() -> bytes:
    """A fat binary without its machine code."""
    data = (DEVICE / "plain.fatbin").read_bytes()
    entries, at = b"", 16
    while at < len(data):
        kind, _, head, payload = struct.unpack_from("<HHIQ", data, at)
        entries += data[at : at + head + payload] if kind == 1 else b""
        at += head + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
