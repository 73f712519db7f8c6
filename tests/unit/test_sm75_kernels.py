"""The launcher of kernels that were compiled ahead of time: what reaches the driver, what the JIT.

Packages here are written by ``sm75.aot.pack``, read by the overlay, and launched into a libcuda
that remembers its arguments; nothing of the overlay is replaced.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sm75.aot import pack
from sm75.aot.plan import Wanted
from tests.unit.standinlaunch import StandIn

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = ROOT / "patches" / "0.33.0" / "overlay" / "vllm" / "sm75"
SOURCE = "attention_source_of_the_test"


class Tensor:
    """An address, a type and a shape."""

    def __init__(self, address: int, kind: str = "float16", rows: int = 1) -> None:
        self.address, self.dtype, self.shape = address, f"torch.{kind}", (rows,)

    def data_ptr(self) -> int:
        return self.address


class Jit:
    """A kernel of Triton's: remembers what it was launched with."""

    def __init__(self, name: str, *arg_names: str) -> None:
        self.__name__, self.arg_names = name, list(arg_names)
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **named: self.calls.append((grid, given, named))


SIZES = {"*fp16": 8, "*i32": 8, "i64": 8, "fp32": 4, "i32": 4}


def attention(*, queries: int = 0, block_q: int = 2, tile: int = 32, shared: int = 40_000,
              warps: int = 4, entry: str = "attend") -> pack.Compiled:  # fmt: skip
    """A variant of a kernel with parameters of all sizes, so that padding shows."""
    parameters = (
        ("query_ptr", "*fp16"), ("scale", "fp32"), ("num_seqs", "i32"), ("odd", "i32"),
        ("stride", "i64"), ("lengths", "*i32"),
    )  # fmt: skip
    launch = {"BLOCK_M": 8 * block_q, "BLOCK_Q": block_q, "TILE_SIZE": tile}
    wanted = Wanted(
        kernel="kernel_unified_attention", module="m", constants={"HEAD_SIZE": 512, **launch},
        names=("HEAD_SIZE",), tensors={"query_ptr": "float16", "sinks": None, "lengths": "int32"},
        parameters=parameters, aligned=("query_ptr", "stride"), launch=launch, warps=warps,
        queries=queries,
    )  # fmt: skip
    return compiled(wanted, entry, shared)


def compiled(wanted: Wanted, entry: str, shared: int) -> pack.Compiled:
    sizes = [SIZES[kind] for _, kind in wanted.parameters] + [8, 8]
    image = f"entry {entry} " + " ".join(map(str, sizes))
    return pack.Compiled(
        wanted=wanted, entry=entry, ptx=image.replace(" ", " ptx_", 1), cubin=image.encode(),
        shared=shared, extra=2, registers=1, spills=0, mma=1,
    )  # fmt: skip


def reduction(tile: int) -> pack.Compiled:
    wanted = Wanted(
        kernel="reduce_segments", module="m", constants={"TILE_SIZE": tile},
        names=("TILE_SIZE",), tensors={"out": "float16"}, parameters=(("out", "*fp16"),),
        aligned=(), launch={}, warps=4,
    )  # fmt: skip
    return compiled(wanted, f"reduce_{tile}", 0)


def arguments(**changes: Any) -> dict[str, Any]:
    """As a wrapper passes them, in another order than the kernel's, with the JIT's own blocks."""
    return {
        "lengths": Tensor(0x7F0000000100, "int32"), "sinks": None, "HEAD_SIZE": 512,
        "BLOCK_M": 16, "BLOCK_Q": 2, "TILE_SIZE": 16, "num_warps": 8, "odd": -7, "stride": 1 << 40,
        "num_seqs": 3, "scale": 0.5, "query_ptr": Tensor(0x7F1234567890, rows=11),
    } | changes  # fmt: skip


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def world(
    libcuda: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[types.SimpleNamespace]:
    """A vLLM that is the overlay alone, a torch that knows device and stream, our libcuda."""
    made = types.SimpleNamespace(
        device=0, stream=0xABCDEF012345, lines=[], cuda=libcuda, home=tmp_path
    )

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            made.lines.append(f"{record.levelname}: {record.getMessage()}")

    logger = logging.Logger("vllm", logging.INFO)
    logger.addHandler(Handler())
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__path__": []},
        "vllm.sm75": {"__path__": [str(OVERLAY)]},
        "vllm.logger": {"init_logger": lambda _: logger},
        "torch": {
            "cuda": types.SimpleNamespace(current_device=lambda: made.device),
            "_C": types.SimpleNamespace(_cuda_getCurrentRawStream=lambda _: made.stream),
        },
    }
    for name, names in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm.sm75.kernels", "vllm.sm75.kernel_files"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    load = ctypes.CDLL

    def find(name: str) -> ctypes.CDLL:
        assert name == "libcuda.so.1"
        return load(str(libcuda.path))

    monkeypatch.setattr(ctypes, "CDLL", find)
    monkeypatch.delenv("SM75_KERNELS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    libcuda.forget()
    made.kernels = importlib.import_module("vllm.sm75.kernels")
    yield made
    for name in ("vllm.sm75.kernels", "vllm.sm75.kernel_files", "vllm_sm75_kernels", SOURCE):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def install(world: Any, *variants: pack.Compiled, source: str = "A = 1\n") -> Path:
    """The package, made of the source that is installed."""
    import hashlib

    (world.home / f"{SOURCE}.py").write_text("A = 1\n")
    home: Path = world.home / "vllm_sm75_kernels"
    digest = hashlib.sha256(source.encode()).hexdigest()
    pack.write(home, variants, {}, {SOURCE: digest})
    importlib.invalidate_caches()
    return home


def launch(world: Any, jit: Any, grid: Any = (5, 2), session: Any = None, **changes: Any) -> None:
    (session or world.kernels.session())(jit)[grid](**arguments(**changes))


def test_the_driver_gets_what_the_kernel_takes(world: Any) -> None:
    """Each parameter's bytes, the grid for the variant's own blocks, shared bytes and stream."""
    install(world, attention(block_q=4, shared=50_000, warps=8))
    jit = Jit("kernel_unified_attention")
    launch(world, jit, grid=(5, 2, 16))
    (seen,) = world.cuda.seen
    assert not jit.calls
    assert seen.values == struct.pack(
        "<QfiiqQQQ", 0x7F1234567890, 0.5, 3, -7, 1 << 40, 0x7F0000000100, 0, 0
    )
    # 11 query tokens by 4, and a partial block for each of 3 requests; the rest is the wrapper's.
    assert seen.grid == (11 // 4 + 3, 2, 16)
    assert (seen.block, seen.shared, seen.entry) == ((256, 1, 1), 50_000, "attend")
    assert (seen.stream, seen.device) == (0xABCDEF012345, 0)


def test_each_device_loads_once(world: Any) -> None:
    install(world, attention())
    for device in (0, 1, 0, 1):
        world.device = device
        world.cuda.library.cuCtxSetCurrent(None)  # torch would set it; we must not count on it
        launch(world, Jit("kernel_unified_attention"))
    assert [one.device for one in world.cuda.seen] == [0, 1, 0, 1]
    assert world.cuda.loads == 2


@pytest.mark.parametrize(
    "changes",
    [{"query_ptr": Tensor(0x7F1234567898, rows=11)}, {"stride": 1001}],
    ids=["address", "stride"],
)
def test_what_is_not_aligned_goes_to_the_jit(world: Any, changes: dict[str, Any]) -> None:
    install(world, attention())
    jit = Jit("kernel_unified_attention")
    for _ in range(3):
        launch(world, jit, **changes)
    assert not world.cuda.seen
    grid, given, named = jit.calls[0]
    assert len(jit.calls) == 3
    assert (grid, given) == ((5, 2), ())
    told = arguments(**changes)
    for name in ("lengths", "query_ptr"):
        assert named.pop(name).address == told.pop(name).address
    assert named == told
    assert sum("no multiple of 16" in line for line in world.lines) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"HEAD_SIZE": 96},
        {"sinks": Tensor(0x7F0000000200)},
        {"query_ptr": Tensor(0x7F1234567890, "bfloat16", rows=11)},
        {"lengths": 5},
    ],
    ids=["constant", "a tensor more", "type", "a number"],
)
def test_what_is_not_known_goes_to_the_jit_and_is_said_once(
    world: Any, changes: dict[str, Any]
) -> None:
    install(world, attention())
    jit = Jit("kernel_unified_attention")
    for _ in range(3):
        launch(world, jit, **changes)
    launch(world, jit)
    assert len(jit.calls) == 3
    assert jit.calls[0][2]["TILE_SIZE"] == 16  # the JIT's own
    assert len(world.cuda.seen) == 1
    assert sum("no such variant" in line for line in world.lines) == 1


def test_what_the_wrapper_leaves_to_a_default_goes_to_the_jit(world: Any) -> None:
    install(world, attention())
    jit = Jit("kernel_unified_attention")
    given = arguments()
    del given["sinks"]
    world.kernels.session()(jit)[(5, 2)](**given)
    other = Jit("another_kernel")
    world.kernels.session()(other)[(5, 2)](a=1)
    assert (len(jit.calls), len(other.calls)) == (1, 1)


def test_positional_arguments_are_taken_by_name(world: Any) -> None:
    install(world, reduction(16))
    jit = Jit("reduce_segments", "out", "TILE_SIZE")
    world.kernels.session()(jit)[(3,)](Tensor(0x1000), TILE_SIZE=16)
    world.kernels.session()(jit)[(3,)](Tensor(0x1000), 999)
    (seen,) = world.cuda.seen
    assert seen.values == struct.pack("<QQQ", 0x1000, 0, 0)
    assert seen.grid == (3, 1, 1)
    assert [given for _, given, _ in jit.calls] == [jit.calls[0][1]]
    assert jit.calls[0][1][1] == 999


def test_the_reduction_takes_attentions_tile(world: Any) -> None:
    """Segments are cut by tiles: another tile there would be another sum."""
    install(world, attention(tile=64), reduction(64), reduction(16))
    session = world.kernels.session()
    launch(world, Jit("kernel_unified_attention"), session=session)
    reduce = Jit("reduce_segments")
    session(reduce)[(4, 8)](out=Tensor(0x1000), TILE_SIZE=16)
    # A call whose attention the JIT did keeps the JIT's tile.
    session = world.kernels.session()
    launch(world, Jit("kernel_unified_attention"), session=session, HEAD_SIZE=96)
    session(reduce)[(4, 8)](out=Tensor(0x1000), TILE_SIZE=16)
    assert [one.entry for one in world.cuda.seen] == ["attend", "reduce_64", "reduce_16"]


def test_a_reduction_by_the_jit_is_told_attentions_tile(world: Any) -> None:
    install(world, attention(tile=64))
    session = world.kernels.session()
    launch(world, Jit("kernel_unified_attention"), session=session)
    reduce = Jit("reduce_segments")
    session(reduce)[(4, 8)](out=Tensor(0x1000), TILE_SIZE=16)
    assert reduce.calls[0][2]["TILE_SIZE"] == 64


def test_the_batch_chooses_among_variants(world: Any) -> None:
    install(world, attention(), attention(queries=16, block_q=8, entry="many"))
    for rows, requests in ((3, 3), (47, 3), (48, 3), (4096, 2)):
        launch(world, Jit("kernel_unified_attention"), num_seqs=requests,
               query_ptr=Tensor(0x1000, rows=rows))  # fmt: skip
    assert [one.entry for one in world.cuda.seen] == ["attend", "attend", "many", "many"]


def test_a_variant_for_many_queries_serves_few_where_it_is_alone(world: Any) -> None:
    """What is not proved is not packed, and may be the one for few."""
    install(world, attention(queries=16), attention(queries=64, entry="more"))
    launch(world, Jit("kernel_unified_attention"))
    assert [one.entry for one in world.cuda.seen] == ["attend"]


def test_switched_off(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(world, attention())
    monkeypatch.setenv("SM75_KERNELS", "off")
    jit = Jit("kernel_unified_attention")
    assert world.kernels.session()(jit) is jit
    assert world.kernels.prepare(512, 8, 8) == 0
    (line,) = world.lines
    assert line.endswith("SM75_KERNELS=off, Triton compiles the attention kernels.")


def test_ptx_for_other_devices(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    home = install(world, attention())
    index = home / "index.json"
    index.write_text(index.read_text().replace('"entry": "attend"', '"entry": "ptx_attend"'))
    monkeypatch.setenv("SM75_KERNELS", "ptx")
    launch(world, Jit("kernel_unified_attention"))
    assert [one.entry for one in world.cuda.seen] == ["ptx_attend"]
    assert "(PTX)" in world.lines[0]


def test_a_wrong_switch_is_refused(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM75_KERNELS", "fast")
    with pytest.raises(ValueError, match="SM75_KERNELS is 'fast': it can be on, off or ptx"):
        world.kernels.session()


def _nothing(home: Path) -> None:
    for path in home.iterdir():
        path.unlink()
    home.rmdir()


def _cut(home: Path) -> None:
    (home / "index.json").write_text((home / "index.json").read_text()[:-30])


def _schema(home: Path) -> None:
    text = (home / "index.json").read_text()
    (home / "index.json").write_text(text.replace('"schema": 1', '"schema": 2'))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_nothing, "the package vllm-sm75-kernels is not installed"),
        (_cut, "JSONDecodeError"),
        (_schema, "its schema is 2, this vLLM reads 1"),
    ],
)
def test_without_a_package_the_jit_does_it_and_the_log_says_why(
    world: Any, damage: Any, said: str
) -> None:
    damage(install(world, attention()))
    importlib.invalidate_caches()
    jit = Jit("kernel_unified_attention")
    for _ in range(2):
        assert world.kernels.session()(jit) is jit
    (line,) = world.lines
    assert line.startswith("WARNING: Compute capability 7.5: attention without tensor cores, for")
    assert said in line


def test_kernels_of_other_sources_are_not_used(world: Any) -> None:
    install(world, attention(), source="A = 2\n")
    jit = Jit("kernel_unified_attention")
    assert world.kernels.session()(jit) is jit
    assert f"its kernels were made of another {SOURCE}" in world.lines[0]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damaged_code_is_never_loaded(world: Any) -> None:
    """At the start the JIT takes over; a file that is damaged later is an error."""
    home = install(world, attention())
    made = world.kernels.launcher()
    _flip(home / "cubins.bin")
    files = importlib.import_module("vllm.sm75.kernel_files")
    with pytest.raises(files.Unusable, match=r"cubins\.bin is damaged"):
        made.prepare(lambda _: True)
    world.kernels.launcher.cache_clear()
    world.kernels._make.cache_clear()
    jit = Jit("kernel_unified_attention")
    assert world.kernels.session()(jit) is jit
    assert "cubins.bin is damaged" in world.lines[-1]
    assert world.cuda.loads == 0


def test_the_other_file_may_be_damaged(world: Any) -> None:
    home = install(world, attention())
    _flip(home / "ptx.bin")
    launch(world, Jit("kernel_unified_attention"))
    assert len(world.cuda.seen) == 1


def test_a_lost_context_is_made_and_the_launch_repeated(world: Any) -> None:
    install(world, attention())
    launch(world, Jit("kernel_unified_attention"))
    asked = world.cuda.retained
    world.cuda.library.cuCtxSetCurrent(None)
    launch(world, Jit("kernel_unified_attention"))
    assert len(world.cuda.seen) == 2
    assert world.cuda.retained == asked + 1
    # What the driver refuses for good has not run: the JIT does it, and all that follows.
    for code, times in ((201, 2), (1, 1)):
        world.kernels.launcher.cache_clear()
        world.kernels._make.cache_clear()
        world.lines.clear()
        world.cuda.fail(code, times)
        session, jit = world.kernels.session(), Jit("kernel_unified_attention")
        launch(world, jit, session=session)
        launch(world, jit, session=session)
        launch(world, jit)
        assert [(grid, named["TILE_SIZE"]) for grid, _, named in jit.calls] == [((5, 2), 16)] * 3
        (line,) = [line for line in world.lines if line.startswith("WARNING")]
        assert "attention without tensor cores, for launching attend: CUDA_ERROR_INVALID" in line
    assert len(world.cuda.seen) == 2


DAMAGE: list[tuple[Any, ...]] = [
    (),
    *((name,) for name in ("schema", "sources", "files", "kernels", "variants")),
    ("files", "cubin"), ("files", "cubin", "name"), ("files", "cubin", "sha256"),
    ("kernels", "kernel_unified_attention"),
    ("kernels", "kernel_unified_attention", "constants"), ("variants", 0),
    *(("variants", 0, name) for name in (
        "kernel", "key", "launch", "queries", "warps", "shared", "entry", "extra", "parameters",
        "aligned", "cubin")),
    ("variants", 0, "cubin", 0), ("variants", 0, "cubin", 1), ("variants", 0, "cubin", 2),
    ("variants", 0, "parameters", 0), ("sources", SOURCE),
]  # fmt: skip
VALUES: list[Any] = [
    None, [], {}, "", -1, 10**30, 1.5, "../x", "a\0b", [[1]], {"x": 1}, "..",
]  # fmt: skip


@pytest.mark.parametrize("place", DAMAGE, ids=str)
def test_whatever_the_index_says_the_server_starts(world: Any, place: tuple[Any, ...]) -> None:
    """Each value of another kind is used rightly, or the JIT does it and one line says so."""
    import json

    home = install(world, attention())
    good = (home / "index.json").read_text()
    for value in VALUES:
        index = json.loads(good)
        if place:
            inner = index
            for step in place[:-1]:
                inner = inner[step]
            inner[place[-1]] = value
        else:
            index = value
        (home / "index.json").write_text(json.dumps(index))
        world.kernels.launcher.cache_clear()
        world.kernels._make.cache_clear()
        world.lines.clear()
        jit = Jit("kernel_unified_attention")
        world.kernels.prepare(512, 8, 8)
        launch(world, jit)
        # To the driver, with what it takes; or to the JIT.
        assert len(jit.calls) + len(world.cuda.seen) == 1, value
        warned = [line for line in world.lines if line.startswith("WARNING")]
        assert len(world.lines) <= 2, value
        assert len(warned) <= 1, value
        world.cuda.forget()


@pytest.mark.parametrize("source", ["no.such.module", "sys", "..", "os.path", "vllm", ""])
def test_sources_that_are_nowhere(world: Any, source: str) -> None:
    import json

    home = install(world, attention())
    index = json.loads((home / "index.json").read_text())
    index["sources"][source] = "0" * 64
    (home / "index.json").write_text(json.dumps(index))
    jit = Jit("kernel_unified_attention")
    assert world.kernels.session()(jit) is jit
    (line,) = world.lines
    assert line.startswith("WARNING: Compute capability 7.5: attention without tensor cores")


def test_an_index_of_brackets(world: Any) -> None:
    home = install(world, attention())
    (home / "index.json").write_text("[" * 200_000)
    jit = Jit("kernel_unified_attention")
    assert world.kernels.session()(jit) is jit
    assert "RecursionError" in world.lines[0]


def test_code_that_the_driver_refuses_is_left_to_the_jit_as_the_model_is_built(world: Any) -> None:
    one = attention(entry="another")  # the code has the entry "attend"
    image = attention().cubin
    made = pack.Compiled(**{**one.__dict__, "cubin": image})
    object.__setattr__(made.wanted, "names", ("HEAD_SIZE", "num_query_heads"))
    object.__setattr__(made.wanted, "constants", {**made.wanted.constants, "num_query_heads": 8})
    install(world, made)
    assert world.kernels.prepare(512, 8, 8) == 0
    assert world.kernels.prepare(512, 8, 8) == 0
    jit = Jit("kernel_unified_attention")
    assert world.kernels.session()(jit) is jit
    assert [line for line in world.lines if "looking for another" in line] == world.lines[1:]


def test_more_than_48_kib_is_asked_for(world: Any) -> None:
    """The stand-in refuses a launch of more that was not allowed, as the driver does."""
    install(world, attention(shared=65_536))
    launch(world, Jit("kernel_unified_attention"))
    assert world.cuda.seen[0].shared == 65_536


def test_prepare_loads_what_a_layer_can_launch(world: Any) -> None:
    variants = [attention(), attention(queries=16, entry="many")]
    for one in variants:
        names = ("HEAD_SIZE", "num_query_heads", "num_queries_per_kv")
        object.__setattr__(one.wanted, "names", names)
        heads = {"num_query_heads": 8, "num_queries_per_kv": 8}
        object.__setattr__(one.wanted, "constants", {**one.wanted.constants, **heads})
    install(world, *variants)
    assert world.kernels.prepare(512, 16, 8) == 0
    assert world.kernels.prepare(512, 8, 2) == 0
    assert world.cuda.loads == 0
    assert world.kernels.prepare(512, 8, 8) == 2
    assert world.cuda.loads == 2
    launch(world, Jit("kernel_unified_attention"), num_query_heads=8, num_queries_per_kv=8)
    assert world.cuda.loads == 2


def test_threads_have_their_own_parameters(world: Any) -> None:
    """Eight threads, one variant: every launch carries its own numbers together."""
    install(world, attention())
    each, threads, faults = 50, 8, []

    def work(number: int) -> None:
        try:
            for step in range(each):
                mark = number * each + step
                launch(
                    world, Jit("kernel_unified_attention"), odd=mark, stride=mark * 16,
                    lengths=Tensor(mark * 64, "int32"),
                )  # fmt: skip
        except Exception as error:
            faults.append(error)

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert not faults
    found = []
    for seen in world.cuda.seen:
        _, _, _, mark, stride, address, *_ = struct.unpack("<QfiiqQQQ", seen.values)
        assert (stride, address) == (mark * 16, mark * 64)
        found.append(mark)
    assert sorted(found) == list(range(threads * each))
    assert world.cuda.loads == 1


def test_threads_that_come_together_share_one_launcher(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(world, attention())
    read, together = world.kernels.installed, threading.Barrier(8)

    def slowly() -> Any:
        time.sleep(0.1)
        return read()

    monkeypatch.setattr(world.kernels, "installed", slowly)
    found = []

    def come() -> None:
        together.wait()
        found.append(world.kernels.launcher())

    running = [threading.Thread(target=come) for _ in range(8)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert len(set(map(id, found))) == 1
    assert len(world.lines) == 1


OFF_TURING = """
import sys
from pathlib import Path
from sm75.smem import standins
standins.install(Path(sys.argv[1]), ("vllm.sm75", "vllm.sm75.attention", "vllm.sm75.kernels",
    "vllm.sm75.kernel_files"), (int(sys.argv[2]), int(sys.argv[3])), compiler=False)
from vllm.sm75 import attention
kernel = object()
taken = attention.kernels()(kernel)
attention.check_layer(8, 1, 512, (-1, -1), "auto") if sys.argv[2] == "8" else None
print(taken is kernel, "vllm.sm75.kernels" in sys.modules)
"""


@pytest.mark.parametrize(("capability", "loaded"), [(("8", "0"), False), (("7", "5"), True)])
def test_off_turing_it_is_never_imported(capability: tuple[str, str], loaded: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFF_TURING, str(OVERLAY.parents[1]), *capability],
        check=True, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    # Without a package the kernel is its own site on both.
    assert done.stdout.split() == ["True", str(loaded)]


def test_the_index_is_what_the_overlay_reads(world: Any) -> None:
    """Schema and names of the two sides, which share no code."""
    files: Mapping[str, Any] = vars(importlib.import_module("vllm.sm75.kernel_files"))
    from sm75.aot import files as aot_files

    assert (files["SCHEMA"], files["INDEX"]) == (pack.SCHEMA, pack.INDEX)
    assert files["PACKAGE"] == aot_files.MODULE
