"""Kernels ahead of time: what is rewritten, refused, planned, packed and counted as proved."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sm75.aot import manifest, pack, plan, proofs, sources
from sm75.aot.adapt import adapt
from sm75.aot.manifest import Kernel, Manifest, Tuning
from sm75.errors import BuildError, UsageError

ROOT = Path(__file__).resolve().parents[2]
LANGUAGE = ("constexpr", "load", "int32", "int64", "dot", "float16")


def kernel(body: str, parameters: str = "a, b, c, d, e") -> str:
    return f"@triton.jit\ndef kernel({parameters}):\n    {body}\n"


EXPRESSIONS = (
    "a and b and c",
    "a or b or c or d",
    "a and b or c and d and e",
    "not (a and b and c) or d or e",
    "(a or b or c) and (c or d or e) and not a",
    "a if b and c and d else (e or a or b)",
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_boolean_operators_of_two_mean_the_same(expression: str) -> None:
    """The same value, and the same operands looked at, for every combination."""
    source = kernel(f"return {expression}")
    adapted, changed = adapt(source, "m", LANGUAGE)
    assert changed
    tree = ast.parse(adapted)
    assert all(len(n.values) == 2 for n in ast.walk(tree) if isinstance(n, ast.BoolOp))
    looked: list[str] = []

    class Value:
        def __init__(self, name: str, truth: bool) -> None:
            self.name, self.truth = name, truth

        def __bool__(self) -> bool:
            looked.append(self.name)
            return self.truth

    results = []
    for text in (source, adapted):
        space: dict[str, Any] = {"triton": SimpleNamespace(jit=lambda function: function)}
        exec(text, space)  # noqa: S102
        found = []
        for truths in itertools.product((False, True), repeat=5):
            looked.clear()
            values = [Value(n, t) for n, t in zip("abcde", truths, strict=True)]
            made = space["kernel"](*values)
            name = made.name if isinstance(made, Value) else made
            found.append((name, tuple(looked)))
        results.append(found)
    assert results[0] == results[1]


def test_annotations_that_are_no_types_are_dropped() -> None:
    source = kernel(
        "pass",
        "a: int | None, b: Optional[int], c: float | None, d: tl.int64, E: tl.constexpr",
    )
    adapted, changed = adapt(source, "m", LANGUAGE)
    assert "def kernel(a, b, c, d: tl.int64, E: tl.constexpr)" in adapted
    assert len(changed) == 3


def test_only_kernels_are_changed_and_dead_names_may_stand() -> None:
    source = (
        "def helper(*args: list, **more):\n    return [x for x in args if x and more and x]\n\n"
        "@triton.jit(do_not_specialize=[0])\n"
        "def kernel(USE: tl.constexpr):\n    if USE:\n        tl.make_tensor_descriptor()\n"
    )
    adapted, changed = adapt(source, "m", LANGUAGE)
    assert ast.dump(ast.parse(adapted)) == ast.dump(ast.parse(source))
    assert changed == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (kernel("pass", "a: list"), "a is annotated list"),
        (kernel("pass", "a: int32"), "a is annotated int32"),
        (kernel("pass", "a: int"), "a is annotated int"),
        (kernel("pass", "a: tl.tensor"), "a is annotated tl.tensor"),
        (kernel("pass", "a: int | str"), "a is annotated int | str"),
        (kernel("pass", "*a"), "it takes any number of arguments"),
        (kernel("pass", "**a"), "it takes any number of arguments"),
        (kernel("x: tl.tensor = 1"), "annotated tl.tensor"),
        (kernel("with a:\n        pass"), "a With statement"),
        (kernel("del a"), "a Delete statement"),
        (kernel("x = [b for b in a]"), "a ListComp"),
        (kernel("x = lambda: a"), "a Lambda"),
        (kernel("x = tl.gather(a)"), "tl.gather, which Triton 3.2 has not"),
        (kernel("raise a"), "a Raise statement"),
    ],
)
def test_what_is_not_known_is_refused(source: str, said: str) -> None:
    with pytest.raises(BuildError) as error:
        adapt(source, "some.module", LANGUAGE)
    assert "some.module" in str(error.value)
    assert said in str(error.value.why)
    assert "line" in str(error.value.why)


def test_the_committed_manifest_is_read() -> None:
    found = manifest.load(ROOT)
    assert {one.name for one in found.kernel} == {
        "kernel_unified_attention", "reduce_segments", "_fwd_kernel",
    }  # fmt: skip
    assert found.named("nothing") is None
    for row in found.tuning:
        assert row.block_m >= plan.LEAST_ROWS
        assert row.tile >= plan.LEAST_ROWS
        assert row.warps in (4, 8)
    # Every head with a row for many queries has one for few.
    rows = {(one.head, one.split, one.cache, one.queries) for one in found.tuning}
    assert all((head, split, cache, 0) in rows for head, split, cache, _ in rows)


def _manifest(tmp_path: Path, old: str, new: str) -> Path:
    text = (ROOT / manifest.FILE).read_text()
    assert old in text
    path = tmp_path / manifest.FILE
    path.parent.mkdir(parents=True)
    path.write_text(text.replace(old, new, 1))
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema = 1", "schema = 2", "is of schema 2"),
        ("warps = 4", 'warps = "4"', "cannot read"),
        ("warps = 4", "warps = 4\nspeed = 1", "cannot read"),
        ('cache = "int8"', 'cache = "int4"', "cannot read"),
        ("split = true", "split = false", "two rows of tuning"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        manifest.load(_manifest(tmp_path, old, new))


MANIFEST = Manifest(
    schema=1, left=(),
    kernel=(
        Kernel(name="kernel_unified_attention", module="m",
               chosen=("BLOCK_M", "BLOCK_Q", "TILE_SIZE"), floats=()),
        Kernel(name="reduce_segments", module="m", chosen=(), floats=()),
        Kernel(name="_fwd_kernel", module="e", chosen=(), floats=()),
    ),
    tuning=(
        Tuning(head=512, split=True, block_m=16, tile=64, warps=8),
        Tuning(head=512, split=False, block_m=16, tile=32, warps=4),
        Tuning(head=512, split=False, queries=16, block_m=64, tile=32, warps=8),
        Tuning(head=512, split=False, cache="int8", block_m=16, tile=16, warps=2),
    ),
)  # fmt: skip


def launch(kernel: str = "kernel_unified_attention", **constants: Any) -> dict[str, Any]:
    made = {
        "num_queries_per_kv": 8, "HEAD_SIZE_PADDED": 512, "IS_3D": False, "KV_QUANT_MODE": 0,
        "BLOCK_M": 16, "BLOCK_Q": 2, "TILE_SIZE": 16,
    } | constants  # fmt: skip
    return {
        "kernel": kernel, "constants": made, "tensors": {"q": "float16", "sinks": None},
        "parameters": [["q", "*fp16"]], "aligned": ["q"], "num_warps": 3,
    }  # fmt: skip


def planned(*launches: dict[str, Any]) -> list[Any]:
    return [(dict(one.launch), one.warps, one.queries) for one in plan.plan(launches, MANIFEST)]


def test_blocks_are_those_of_the_table() -> None:
    assert planned(launch()) == [
        ({"BLOCK_M": 16, "BLOCK_Q": 2, "TILE_SIZE": 32}, 4, 0),
        ({"BLOCK_M": 64, "BLOCK_Q": 8, "TILE_SIZE": 32}, 8, 16),
    ]
    (one,) = plan.plan([launch(IS_3D=True)], MANIFEST)
    assert one.constants["TILE_SIZE"] == 64
    assert "TILE_SIZE" not in one.names
    assert "HEAD_SIZE_PADDED" in one.names
    assert one.request()["constants"]["sinks"] is None


def test_a_block_holds_a_whole_group() -> None:
    """More queries a KV head than rows: the rows grow, by powers of two."""
    assert planned(launch(num_queries_per_kv=24, IS_3D=True)) == [
        ({"BLOCK_M": 32, "BLOCK_Q": 1, "TILE_SIZE": 64}, 8, 0)
    ]
    assert planned(launch(num_queries_per_kv=5, IS_3D=True))[0][0]["BLOCK_Q"] == 3


def test_int8_has_rows_of_its_own_and_no_row_is_the_jits_choice() -> None:
    assert planned(launch(KV_QUANT_MODE=2)) == [
        ({"BLOCK_M": 16, "BLOCK_Q": 2, "TILE_SIZE": 16}, 2, 0)
    ]
    kinds: tuple[dict[str, Any], ...] = (
        {"KV_QUANT_MODE": 2, "IS_3D": True},
        {"HEAD_SIZE_PADDED": 64},
    )
    for changes in kinds:
        assert planned(launch(**changes)) == [
            ({"BLOCK_M": 16, "BLOCK_Q": 2, "TILE_SIZE": 16}, 3, 0)
        ]


def test_the_reduction_is_made_for_every_tile_that_attention_may_take() -> None:
    found = plan.plan([launch("reduce_segments", TILE_SIZE=128)], MANIFEST)
    # 64 of the table, halved where a block does not fit, and the JIT's own.
    assert sorted(one.constants["TILE_SIZE"] for one in found) == [16, 32, 64, 128]
    assert all("TILE_SIZE" in one.names and not one.launch for one in found)


def test_each_variant_once_and_in_an_order_of_its_own() -> None:
    launches = [launch(), launch(IS_3D=True), launch("_fwd_kernel"), launch("not in the manifest")]
    found = plan.plan(launches, MANIFEST)
    assert plan.plan([*reversed(launches), *launches], MANIFEST) == found
    assert len({one.identity for one in found}) == len(found) == 4


def test_half_a_tile_until_there_is_none() -> None:
    (one,) = plan.plan([launch(IS_3D=True)], MANIFEST)
    tiles = []
    smaller: plan.Wanted | None = one
    while smaller is not None:
        assert smaller.constants["TILE_SIZE"] == smaller.launch["TILE_SIZE"]
        tiles.append(smaller.launch["TILE_SIZE"])
        smaller = smaller.smaller()
    assert tiles == [64, 32, 16]
    (fixed,) = plan.plan([launch("_fwd_kernel")], MANIFEST)
    assert fixed.smaller() is None


def compiled(wanted: plan.Wanted, ptx: str = "ptx", cubin: bytes = b"cubin") -> pack.Compiled:
    return pack.Compiled(
        wanted=wanted, entry="k", ptx=ptx, cubin=cubin, shared=1, extra=0, registers=2, spills=3,
        mma=4,
    )  # fmt: skip


def variants() -> list[pack.Compiled]:
    found = plan.plan([launch(), launch(IS_3D=True)], MANIFEST)
    return [compiled(one, f"ptx {n}", b"the same" * 9) for n, one in enumerate(found)]


def test_the_same_variants_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pack.write(tmp_path / name, variants(), {"vllm": "0"}, {"m": "0" * 64})
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["__init__.py", "cubins.bin", "index.json", "ptx.bin"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_equal_code_is_kept_once(tmp_path: Path) -> None:
    pack.write(tmp_path, variants(), {}, {})
    index = json.loads((tmp_path / "index.json").read_text())
    assert {tuple(one["cubin"]) for one in index["variants"]} == {
        (0, index["files"]["cubin"]["size"], index["variants"][0]["cubin"][2])
    }
    assert zlib.decompress((tmp_path / "cubins.bin").read_bytes()) == b"the same" * 9
    data = (tmp_path / "ptx.bin").read_bytes()
    texts = [
        zlib.decompress(data[offset : offset + size])
        for offset, size, _ in (one["ptx"] for one in index["variants"])
    ]
    assert texts == [b"ptx 0", b"ptx 1", b"ptx 2"]


def test_a_key_is_constants_then_types_of_all_variants(tmp_path: Path) -> None:
    """A tensor that is a number in another variant is told from one that is None."""
    (one,) = plan.plan([launch(IS_3D=True)], MANIFEST)
    other = dataclasses.replace(
        one, tensors={"q": "int8", "scale": "float32"},
        parameters=(*one.parameters, ("sinks", "i32")),
    )  # fmt: skip
    pack.write(tmp_path, [compiled(one), compiled(other)], {}, {})
    index = json.loads((tmp_path / "index.json").read_text())
    known = index["kernels"]["kernel_unified_attention"]
    assert known["tensors"] == ["q", "sinks", "scale"]
    first, second = (fact["key"] for fact in index["variants"])
    assert first[: len(known["constants"])] == [8, 512, True, 0]
    assert first[-3:] == ["float16", None, None]
    assert second[-3:] == ["int8", "", "float32"]
    changed = dataclasses.replace(other, names=one.names[1:])
    with pytest.raises(ValueError, match="different constants"):
        pack.write(tmp_path, [compiled(one), compiled(changed)], {}, {})


def result(*kernels: str, passed: bool = True, error: float | None = 0.5) -> dict[str, Any]:
    return {"kernels": list(kernels), "passed": passed, "max_error": error}


def report(*results: dict[str, Any]) -> dict[str, Any]:
    return {"gpu": "G", "date": "2026-01-02T03:04:05", "results": [*results, {"passed": True}]}


def test_proofs_are_gathered_by_kernel() -> None:
    found = proofs.gather(
        report(result("a", "a", "b"), result("a", error=0.7), result("b", passed=False, error=None))
    )
    assert found["a"] == proofs.Proof(trials=2, max_error=0.7, gpu="G", date="2026-01-02")
    assert (found["b"].trials, found["b"].wrong, found["b"].max_error) == (2, 1, 0.5)


def test_wrong_and_unknown_kernels_are_never_packed(tmp_path: Path) -> None:
    made = variants()
    names = [proofs.digest(one.ptx) for one in made]
    (tmp_path / proofs.FILE.parent).mkdir(parents=True)
    assert proofs.load(tmp_path) == {}
    proofs.merge(tmp_path, [report(result(names[0])), report(result(names[1], passed=False))])
    assert proofs.sort(made, proofs.load(tmp_path)) == ([made[0]], [made[2]], [made[1]])
    # The newest result counts, and the order of the file is that of the names.
    count = proofs.merge(tmp_path, [report(result(names[1])), report(result(names[2]))])
    assert count == 3
    assert proofs.sort(made, proofs.load(tmp_path)) == (made, [], [])
    text = (tmp_path / proofs.FILE).read_text()
    assert [line[1:65] for line in text.splitlines()[1:-1]] == sorted(names)
    (tmp_path / proofs.FILE).write_text(text[:-9])
    with pytest.raises(UsageError, match="cannot read"):
        proofs.load(tmp_path)


def test_the_committed_proofs_are_those_of_the_committed_evidence() -> None:
    evidence = json.loads(
        (ROOT / "docs" / "evidence" / "attention-h200-2026-12-01.json").read_bytes()
    )
    known = proofs.load(ROOT)
    assert proofs.gather(evidence).items() <= known.items()
    assert not [name for name, proof in known.items() if proof.wrong]


def test_changed_kernels_are_noticed(tmp_path: Path) -> None:
    """A comment or another wrapper is no change; a kernel's line, or a module that is gone, is."""
    for name in sources.MODULES:
        path = tmp_path / "tree" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n" + kernel("return a  # first") + "def wrapper():\n    pass\n")
    tree = tmp_path / "tree"
    (tmp_path / sources.FILE.parent).mkdir(parents=True)
    assert "not those that were proved" in sources.note(tmp_path, tree)
    sources.save(tmp_path, tree)
    text = path.read_text()
    path.write_text(text.replace("# first", "# other").replace("pass", "return 1"))
    assert sources.note(tmp_path, tree) == "the attention kernels are those that were proved"
    path.write_text(text.replace("return a", "return b"))
    assert sources.note(tmp_path, tree).startswith(f"the kernels of {sources.MODULES[-1]} are not")
    path.unlink()
    assert sources.note(tmp_path, tree).startswith(f"the kernels of {sources.MODULES[-1]} are not")
