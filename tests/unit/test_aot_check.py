"""The rules for kernels that were compiled ahead of time: each is broken once and says so.

The machine code is a real cubin; what a disassembler says of it is printed by a script. The real
nvdisasm reads the real package in ``tests/integration/test_kernels.py``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sm75 import verify
from sm75.aot import beside, check, files, pack, plan, sass, spills
from sm75.cli import building
from sm75.condapkg import FileSource, write_conda
from sm75.errors import ChannelError, ToolchainError, UsageError
from sm75.rules import Finding
from sm75.smem.audit import Explained
from tests.unit import reportkit, test_aot
from tests.unit.commandkit import Runner, take_for_project
from tests.unit.elfkit import DEVICE, library_bytes
from tests.unit.elfkit import MODULE as MODULE_C
from tests.unit.projectkit import ROOT

CUBIN = (DEVICE / "sm75.cubin").read_bytes()
MODULE = "vllm.v1.attention.ops.m"
# The helper has the dot, the kernel calls it; as vLLM's attention does since 0.33.
SOURCE = b"""
@triton.jit
def product(a, b):
    return tl.dot(a, b)


@triton.jit
def kernel_unified_attention(a, b):
    return product(a, b)


@triton.jit
def reduce_segments(a):
    return tl.sum(a)


def tl_dot_of_the_host(a):
    return kernel_unified_attention[1](a)
"""
# As nvdisasm 12.4 prints them: three products, 4 + 8 + 16 bytes spilled, shared up to 0x2ff0.
SASS = """
        /*0000*/               @P0 STS [R10.X4], R9 ;
        /*0010*/                   STS.128 [R10+0x2ff0], R12 ;
        /*0020*/                   LDS.U.64 R12, [R4.X8+UR4+0x600] ;
        /*0030*/                   LDSM.16.M88.4 R12, [R4+-0x7000] ;
        /*0040*/                   HMMA.1688.F32 R4, R12, R8, R4 ;
        /*0050*/                   HMMA.1688.F32 R4, R12, R8, R4 ;
        /*0060*/               @!P1 HMMA.1688.F16 R4, R12, R8, R4 ;
        /*0070*/                   HMMA.16816.F32 R4, R12, R8, R4 ;
        /*0080*/                   STL [R1], R9 ;
        /*0090*/               @P0 STL.64 [R1+0x8], R10 ;
        /*00a0*/                   STL.128 [R1+0x10], R12 ;
        /*00b0*/                   LDL.128 R12, [R1+0x10] ;
        /*00c0*/                   LDG.E.128.SYS R12, [R2+0xfff0] ;
        /*00d0*/                   EXIT ;
"""


def compiled(**changes: Any) -> list[pack.Compiled]:
    """A variant of attention and one of the reduction, as the script counts them."""
    attention, reduction = plan.plan(
        [test_aot.launch(), test_aot.launch("reduce_segments", HEAD_SIZE=512)],
        msgspec.structs.replace(test_aot.MANIFEST, tuning=()),
    )
    # those of scale.cu
    passed = (("q", "*fp16"), ("a", "fp32"), ("n", "i32"))
    attention, reduction = (
        dataclasses.replace(one, parameters=passed) for one in (attention, reduction)
    )
    made = pack.Compiled(
        wanted=attention, entry="scale", ptx="ptx", cubin=CUBIN, shared=0x3000, extra=0,
        registers=8, spills=28, mma=3,
    )  # fmt: skip
    return [
        dataclasses.replace(made, **changes),
        dataclasses.replace(made, wanted=reduction, **changes),
    ]


@pytest.fixture(autouse=True)
def explained(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        Explained(kernel=name, parameters={"HEAD_SIZE_PADDED": 512}, most=28, why="a test")
        for name in ("kernel_unified_attention", "reduce_segments")
    ]
    monkeypatch.setattr(spills, "EXPLAINED", tuple(entries))


@pytest.fixture
def tool(tmp_path: Path) -> list[str]:
    return says(tmp_path, SASS)


def says(where: Path, text: str, code: int = 0) -> list[str]:
    """A disassembler that says this of a cubin, and refuses anything else."""
    (where / "said.txt").write_text(text)
    script = where / "disassembler.sh"
    script.write_text(
        f'[ "$(head -c 4 "$2" | tail -c 3)" = ELF ] || exit 9\n'
        f"cat {shlex.quote(str(where))}/said.txt\nexit {code}\n"
    )
    return ["sh", str(script), "-c"]


def site(where: Path, made: list[pack.Compiled] | None = None, source: bytes = SOURCE) -> Path:
    """A site-packages with the kernels and the vllm that they are of."""
    home = where / "site-packages"
    path = home / f"{MODULE.replace('.', '/')}.py"
    path.parent.mkdir(parents=True)
    path.write_bytes(source)
    pack.write(
        home / files.MODULE, compiled() if made is None else made, {"vllm": "0.33.0"},
        {MODULE: hashlib.sha256(SOURCE).hexdigest()},
    )  # fmt: skip
    return home


def found(home: Path, tool: list[str]) -> dict[str, Finding]:
    made = check.check(home, disassembler=tool, beside=home)
    return {finding.rule.removeprefix("kernels: "): finding for finding in made.findings}


def broken(home: Path, tool: list[str]) -> dict[str, str]:
    return {k: f.evidence for k, f in found(home, tool).items() if f.state != "ok"}


def change(home: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = home / files.MODULE / pack.INDEX
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))


def test_all_is_well(tmp_path: Path, tool: list[str]) -> None:
    made = check.check(home := site(tmp_path), disassembler=tool, beside=home)
    assert [f.state for f in made.findings] == ["ok"] * 7
    attention = next(k for k in made.kernels if k.kernel == "kernel_unified_attention")
    assert (attention.hmma, attention.spills, attention.shared, attention.registers) == (
        3, 28, 0x3000, 8,
    )  # fmt: skip
    evidence = found(home, tool)["tensor cores"].evidence
    assert evidence == "3 to 3 HMMA.1688 in each of the 1 variant whose kernel has a dot"


def test_what_is_counted_in_sass() -> None:
    assert sass.count(SASS) == sass.Counts(hmma=3, spills=28, reach=0x2FF0)
    assert sass.count("STL.U8 [R1], R2 ;\n STL.S16 [R1], R2 ;\n STLX R2 ;").spills == 3
    assert sass.count("HMMA.1688.F32 R1;").reach == -1
    assert sass.count("LDS R1, [R2] ;").reach == 0
    assert sass.count("ATOMS.ADD R1, [0x40], R3 ;").reach == 0x40


def test_a_dot_without_tensor_cores(tmp_path: Path) -> None:
    text = SASS.replace("HMMA.1688", "FFMA")
    said = broken(site(tmp_path, compiled(mma=0)), says(tmp_path, text))
    assert list(said) == ["tensor cores"]
    assert said["tensor cores"].startswith("kernel_unified_attention (")
    assert said["tensor cores"].endswith("has a dot and no HMMA.1688")


def test_another_architecture(tmp_path: Path, tool: list[str]) -> None:
    # e_flags of the file header: the architecture is its second byte in files of this ABI
    place = 49 if CUBIN[8] >= 8 else 48
    other = CUBIN[:place] + bytes([80]) + CUBIN[place + 1 :]
    said = broken(site(tmp_path, compiled(cubin=other)), tool)
    assert list(said) == ["architecture"]
    assert "is for sm_80" in said["architecture"]


@pytest.mark.parametrize(
    ("shared", "said"),
    [(65_537, "takes 65537 bytes, a block has 65536"), (-1, "takes -1 bytes"),
     (0x2FF0, "asks for 12272 bytes, its code reaches to byte 12272")],
)  # fmt: skip
def test_shared_memory(tmp_path: Path, tool: list[str], shared: int, said: str) -> None:
    faults = broken(site(tmp_path, compiled(shared=shared)), tool)
    assert list(faults) == ["shared memory"]
    assert said in faults["shared memory"]


def test_the_most_a_block_has_is_allowed(tmp_path: Path, tool: list[str]) -> None:
    assert broken(site(tmp_path, compiled(shared=65_536)), tool) == {}


def test_a_spill_that_nothing_explains(
    tmp_path: Path, tool: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = site(tmp_path)
    first, second = spills.EXPLAINED
    for less in ({"most": 27}, {"parameters": {"HEAD_SIZE_PADDED": 256}}, {"kernel": "x"}):
        entries = (msgspec.structs.replace(first, **less), second)
        monkeypatch.setattr(spills, "EXPLAINED", entries)
        said = broken(home, tool)
        assert list(said) == ["spills"]
        assert "spills 28 bytes a thread, unexplained" in said["spills"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"registers": 9}, "the index says 9 registers, its code has 8"),
     ({"spills": 0}, "the index says 0 bytes spilled, its code has 28"),
     ({"mma": 4}, "the index says 4 HMMA, its code has 3")],
)  # fmt: skip
def test_an_index_that_says_other_than_the_code(
    tmp_path: Path, tool: list[str], changes: dict[str, int], said: str
) -> None:
    faults = broken(site(tmp_path, compiled(**changes)), tool)
    assert list(faults) == ["index"]
    assert said in faults["index"]


@pytest.mark.parametrize(
    ("parameters", "extra"),
    [([], 0), ([["q", "*fp16"]], 0), ([["q", "*fp16"], ["a", "i64"], ["n", "i32"]], 0),
     ([["q", "*fp16"], ["a", "fp32"], ["n", "i32"]], 1)],
)  # fmt: skip
def test_other_parameters_than_the_code_has(
    tmp_path: Path, tool: list[str], parameters: list[list[str]], extra: int
) -> None:
    """The driver would read addresses that nobody passed."""
    home = site(tmp_path)
    change(home, lambda i: i["variants"][0].update(parameters=parameters, extra=extra))
    said = broken(home, tool)
    assert list(said) == ["index"]
    assert "has other parameters than its code" in said["index"]


@pytest.mark.parametrize("changes", [{"parameters": [["q", "x9"]]}, {"extra": -1}, {"extra": 1e9}])
def test_parameters_that_no_launcher_knows(tmp_path: Path, changes: dict[str, Any]) -> None:
    home = site(tmp_path)
    change(home, lambda index: index["variants"][0].update(changes))
    with pytest.raises(ChannelError, match="is damaged"):
        check.check(home)


def _flip(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


@pytest.mark.parametrize("name", [pack.CUBINS, pack.PTX])
@pytest.mark.parametrize("damage", [lambda d: d[:-3], lambda d: d + b"x", _flip, lambda d: b""])
def test_damaged_files(
    tmp_path: Path, tool: list[str], name: str, damage: Callable[[bytes], bytes]
) -> None:
    home = site(tmp_path, compiled(ptx="".join(f"{n}, " for n in range(999))))
    path = home / files.MODULE / name
    before = path.read_bytes()
    assert len(before) > 201
    path.write_bytes(damage(before))
    assert name in broken(home, tool)["files"]


def test_bytes_that_no_piece_is_made_of(tmp_path: Path, tool: list[str]) -> None:
    home = site(tmp_path)
    path = home / files.MODULE / pack.CUBINS
    path.write_bytes(path.read_bytes() + b"x")
    change(home, lambda index: index["files"]["cubin"].update(size=path.stat().st_size))
    assert broken(home, tool) == {"files": "cubins.bin is not what the index was made with"}


def _outside(index: dict[str, Any]) -> None:
    index["files"]["cubin"]["name"] = "../../etc/passwd"


def _cut(index: dict[str, Any]) -> None:
    for fact in index["variants"]:
        fact["cubin"][1] -= 1


def _before(index: dict[str, Any]) -> None:
    for fact in index["variants"]:
        fact["cubin"] = [-5, 2, hashlib.sha256(b"").hexdigest()]


def _entry(index: dict[str, Any]) -> None:
    index["variants"][0]["entry"] = "another"


def _none(index: dict[str, Any]) -> None:
    index["variants"] = []


@pytest.mark.parametrize(
    ("edit", "said"),
    [(_outside, "the index names '../../etc/passwd' as the file of cubin, not cubins.bin"),
     (_cut, "not what the index was made with"), (_before, "cut off"),
     (_entry, "its code has no entry 'another'"), (_none, "it has no variant")],
)  # fmt: skip
def test_an_index_that_lies_of_the_files(
    tmp_path: Path, tool: list[str], edit: Callable[[dict[str, Any]], None], said: str
) -> None:
    home = site(tmp_path)
    change(home, edit)
    assert said in broken(home, tool)["files"]


def _pieces(home: Path, packed: bytes) -> None:
    """Put packed code in the place of every variant's, with the hashes that belong to it."""
    digest = hashlib.sha256(packed).hexdigest()
    (home / files.MODULE / pack.CUBINS).write_bytes(packed)

    def edit(index: dict[str, Any]) -> None:
        index["files"]["cubin"] |= {"size": len(packed), "sha256": digest}
        for fact in index["variants"]:
            fact["cubin"] = [0, len(packed), digest]

    change(home, edit)


@pytest.mark.parametrize(
    ("packed", "said"),
    [(b"no zlib", "cannot be unpacked"),
     (zlib.compress(CUBIN)[:-9], "cut off"),
     (zlib.compress(CUBIN) + b"more", "cut off"),
     (zlib.compress(bytes(40 << 20)), "longer than any kernel"),
     (zlib.compress(b""), "no machine code of a GPU"),
     (zlib.compress(b"\x7fELF"), "no machine code of a GPU"),
     (zlib.compress((DEVICE / "two.so").read_bytes()), "no machine code of a GPU"),
     (zlib.compress(CUBIN[:100]), "damaged"), (zlib.compress(CUBIN[:-300]), "damaged")],
    ids=["no zlib", "cut", "more", "bomb", "empty", "magic", "library", "header", "half"],
)  # fmt: skip
def test_packed_code_that_is_none(
    tmp_path: Path, tool: list[str], packed: bytes, said: str
) -> None:
    home = site(tmp_path)
    _pieces(home, packed)
    faults = broken(home, tool)
    assert said in faults["files"]
    # what cannot be read has no tensor cores
    assert "no code to count in" in faults["tensor cores"]


def test_no_byte_of_a_cubin_can_end_it(tmp_path: Path) -> None:
    """Headers with each byte turned over: read, or refused in words."""
    for place in (*range(64), *range(len(CUBIN) - 700, len(CUBIN), 3)):
        for value in (0, 0xFF, CUBIN[place] ^ 1):
            try:
                sass.read(CUBIN[:place] + bytes([value]) + CUBIN[place + 1 :])
            except ChannelError:
                continue


def test_a_full_temporary_directory_is_said() -> None:
    """A limit on the size of files: EFBIG, which is one of a disk's errors here."""
    source = (
        "import resource, sys; from sm75.aot import sass; from sm75.errors import DiskError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: sass.read(sys.stdin.buffer.read())\n"
        "except DiskError as error: print(error.what)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], input=CUBIN, capture_output=True, cwd=ROOT, check=False
    )
    assert done.stdout.startswith(b"cannot write"), done.stderr


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "[" * 100_000, '{"schema": 1}', b"\xff\xfe".decode("latin-1"),
     '{"schema": "1", "about": {}, "sources": {}, "files": {}, "kernels": {}, "variants": []}',
     '{"schema": 2, "about": {}, "sources": {}, "files": {}, "kernels": {}, "variants": []}',
     '{"schema": 1, "about": {}, "sources": {}, "files": {}, "kernels": {}, "variants": []}',
     '{"schema": 1, "about": {}, "sources": {}, "files": {}, "kernels": {}, "variants": [7]}'],
)  # fmt: skip
def test_an_index_that_is_none(tmp_path: Path, text: str, run: Runner) -> None:
    home = site(tmp_path)
    (home / files.MODULE / pack.INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(ChannelError, match=r"index\.json of site-packages is damaged"):
        check.check(home)
    for command in (("kernels", "show"), ("verify",)):
        ended = run(*command, home)
        assert (ended.code, "index.json of site-packages is damaged" in ended.err) == (8, True)


def test_a_variant_of_a_kernel_that_is_not_described(tmp_path: Path) -> None:
    home = site(tmp_path)
    change(home, lambda index: index["kernels"].pop("reduce_segments"))
    with pytest.raises(ChannelError, match="is damaged"):
        check.check(home)


def test_missing_files(tmp_path: Path) -> None:
    home = site(tmp_path)
    (home / files.MODULE / pack.PTX).unlink()
    with pytest.raises(ChannelError, match=r"has no ptx\.bin"):
        check.check(home)
    with pytest.raises(UsageError, match="there are no kernels"):
        check.check(tmp_path)


def test_other_sources_than_the_vllm_beside_it(tmp_path: Path, tool: list[str]) -> None:
    said = broken(site(tmp_path, source=SOURCE + b"\n"), tool)
    assert list(said) == ["sources"]
    assert "made of another vllm.v1.attention.ops.m" in said["sources"]
    home = site(tmp_path / "two")
    (home / f"{MODULE.replace('.', '/')}.py").unlink()
    said = broken(home, tool)
    assert said["sources"] == f"site-packages has no {MODULE}"
    assert "not at hand" in said["tensor cores"]
    change(home, lambda index: index["sources"].update({"../../../etc/passwd": "0"}))
    assert "has no ../../../etc/passwd" in broken(home, tool)["sources"]


def test_which_kernels_have_dots() -> None:
    assert beside.with_dots([SOURCE]) == {"product", "kernel_unified_attention"}
    assert beside.with_dots([b"@triton.jit\ndef k(a):\n  return tl.dot_scaled(a)\n"]) == {"k"}
    assert beside.with_dots([b"def k(:", b"def k(a):\n  return tl.dot(a)\n"]) == set()


def test_without_a_disassembler_nothing_is_counted(tmp_path: Path) -> None:
    home = site(tmp_path, compiled(mma=99, spills=99))
    made = check.check(home, beside=home)
    states = {f.rule: f.state for f in made.findings if f.state != "ok"}
    assert states == dict.fromkeys(("kernels: tensor cores", "kernels: spills"), "not checked")
    assert {k.hmma for k in made.kernels} == {k.spills for k in made.kernels} == {None}


@pytest.mark.parametrize(("text", "code"), [("", 0), ("no code", 0), (SASS, 3)])
def test_a_disassembler_that_fails_counts_nothing(tmp_path: Path, text: str, code: int) -> None:
    tool = says(tmp_path, text, code)
    with pytest.raises(ToolchainError, match="nvdisasm does not print a cubin"):
        sass.disassemble(tool, CUBIN)
    faults = broken(site(tmp_path), tool)
    assert "no code to count in" in faults["tensor cores"]
    with pytest.raises(ToolchainError, match="cannot run"):
        sass.disassemble([str(tmp_path / "none")], CUBIN)


def conda(where: Path, home: Path) -> Path:
    """The kernels of a site-packages as a package."""
    listed = {
        f"site-packages/{path.relative_to(home)}": FileSource.from_bytes(path.read_bytes())
        for path in sorted((home / files.MODULE).iterdir())
    }
    return write_conda(
        where, name="vllm-sm75-kernels", version="0.33.0", build="h0_0", subdir="noarch",
        noarch="python", files=listed, license="Apache-2.0", depends=[],
    )  # fmt: skip


def test_a_package_says_the_same_as_its_files(tmp_path: Path, tool: list[str]) -> None:
    home = site(tmp_path)
    made = check.check(conda(tmp_path / "c", home), disassembler=tool, beside=home)
    assert made.kernels == check.check(home, disassembler=tool, beside=home).kernels
    assert [f.state for f in made.findings] == ["ok"] * 7


def test_the_command(
    tmp_path: Path, tool: list[str], run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sm75.aot import tools

    monkeypatch.setattr(tools, "disassembler", lambda root: tool)
    home = site(tmp_path)
    good = run("verify", home, "--json")
    assert good.code == 0
    assert len(good.json["kernels"]) == 2
    assert {k["hmma"] for k in good.json["kernels"]} == {3}
    assert run("verify", conda(tmp_path / "c", home), "--json").code == 0
    shown = run("kernels", "show", conda(tmp_path / "c", home))
    assert shown.code == 0
    assert "12288" in shown.out
    change(home, lambda index: index["variants"][0].update(mma=4))
    bad = run("verify", home)
    assert bad.code == 1
    assert "the index says 4 HMMA, its code has 3" in bad.err


def test_the_channels_package_is_checked_with_vllm(
    tmp_path: Path, tool: list[str], run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sm75 import channel as channels
    from sm75.aot import tools

    monkeypatch.setattr(tools, "disassembler", lambda root: tool)
    (tmp_path / "project").mkdir()
    root = reportkit.project(tmp_path / "project")
    take_for_project(monkeypatch, root)
    made = [
        reportkit.package(tmp_path / "made", library_bytes(MODULE_C)),
        conda(tmp_path / "made", home := site(tmp_path)),
    ]
    channel = tmp_path / "channel"
    channels.publish(made[:1], channel)
    arguments = ("verify", "--channel", channel, "--store", tmp_path / "store", "--json")
    without = run(*arguments).json
    assert without["kernels"] == []
    assert not [f for f in without["findings"] if f["rule"].startswith("kernels:")]
    channels.publish(made[1:], channel)
    given = run(*arguments).json
    states = {f["rule"]: f["state"] for f in given["findings"] if f["rule"].startswith("kernels:")}
    # the small package of vllm has not the kernels' sources
    assert {rule for rule, state in states.items() if state == "fail"} == {"kernels: sources"}
    assert len(states) == 7
    assert len(given["kernels"]) == 2
    # kernels from elsewhere, in the place of the channel's
    change(home, lambda index: index["variants"][0].update(registers=9))
    other = run(*arguments, "--kernels", home).json
    assert [f["state"] for f in other["findings"] if f["rule"] == "kernels: index"] == ["fail"]


@pytest.mark.parametrize("rows", [True, False])
def test_hundreds_of_rows_only_for_who_asks(
    tmp_path: Path, tool: list[str], rows: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    home = site(tmp_path)
    result = verify.of_kernels("k", check.check(home, disassembler=tool, beside=home))
    building._say(result, as_json=False, rows=rows)
    said = capsys.readouterr().out
    assert ("kernel_unified_attention" in said, "tensor cores" in said) == (rows, True)
