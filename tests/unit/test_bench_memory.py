"""``bench --memory``: its PTX is run, instruction by instruction, on memory that is watched."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm75.bench import memory
from sm75.errors import CheckFailed, UsageError
from tests.unit.commandkit import Runner
from tests.unit.ptxkit import Gpu, translate

ROOT = Path(__file__).resolve().parents[2]
TEXT = memory.PTX.read_text()
# Two times four vectors for each of 512 threads, and some that are left over.
SIZE = 16 * (512 * 4 * 2 + 512 + 37)


def test_the_sum_is_that_of_the_row() -> None:
    row = [(i * 2_654_435_761 + 97) % 2**32 for i in range(1000)]
    assert memory.expected(1000) == sum(row) % 2**32
    assert memory.expected(4, factor=3, offset=5) == 5 + 8 + 11 + 14


@pytest.mark.parametrize("vectors", [37, 512, 512 * 4, 512 * 4 + 1, 512 * 3 + 5, SIZE // 16])
def test_read_and_copy_reach_every_word_once(vectors: int) -> None:
    gpu = Gpu(l2=4)
    bench = memory.Bench(gpu, vectors * 16, TEXT.encode())
    words = vectors * 4
    wanted = [(i * 2_654_435_761 + 97) % 2**32 for i in range(words)]
    start = bench.source // 4
    assert gpu.memory[start : start + words].tolist() == wanted
    assert bench.sum(bench.source) == sum(wanted) % 2**32
    bench.copy()
    start = bench.target // 4
    assert gpu.memory[start : start + words].tolist() == wanted
    bench.close()
    assert gpu.held == {}


def test_measure() -> None:
    gpu = Gpu()
    data = memory.measure(gpu, [SIZE], repeats=2)
    assert [one["kind"] for one in data["results"]] == ["read", "copy", "driver copy"]
    assert [one["moved_bytes"] for one in data["results"]] == [SIZE, 2 * SIZE, 2 * SIZE]
    assert all(one["gb_s"]["n"] == 2 and one["gb_s"]["median"] > 0 for one in data["results"])
    # Warm-ups and repeats of each kind.
    assert gpu.launched.count("copy") == gpu.launched.count("driver copy") == memory.WARMUPS + 2
    assert gpu.held == {}
    said = "\n".join(memory.lines(json.loads(json.dumps(data))))
    assert "read 277, copy 234, theoretical 320 GB/s" in said
    assert "not ours" in said


@pytest.mark.parametrize(
    ("was", "becomes", "says"),
    [
        # The sixteenth word is not added; the rest is not read; only the first of four is copied.
        ("add.u32 %sum, %sum, %w15;", "", "what was filled is wrong"),
        ("add.u32 %sum, %sum, %w3;", "", "what was filled is wrong"),
        ("    bra READ_ONE;\n", "", "what was filled is wrong"),
        ("    st.global.v4.u32 [%q3], {%w12, %w13, %w14, %w15};\n", "", "what was copied (copy)"),
        ("ld.global.v4.u32 {%w12, %w13, %w14, %w15}, [%p3];",
         "ld.global.v4.u32 {%w12, %w13, %w14, %w15}, [%p2];", "is wrong"),
    ],
)  # fmt: skip
def test_kernels_that_leave_work_out_are_found(was: str, becomes: str, says: str) -> None:
    assert was in TEXT
    # Both loops, where both have it.
    broken = TEXT.replace(was, becomes)
    with pytest.raises(CheckFailed) as failed:
        memory.measure(Gpu(), [SIZE], repeats=1, ptx=broken.encode())
    assert says in str(failed.value)


class Forgetful(Gpu):
    """Does nothing when it is timed, as a driver that sees no use in it."""

    def timed(self, work: Any) -> float:
        return 1e-6


class Constant(Gpu):
    """Gives the right sum, whatever is in memory."""

    def fetch(self, address: int, size: int) -> bytes:
        right = memory.expected(SIZE // 4).to_bytes(4, "little")
        return right + bytes(size - 4)


def test_work_that_is_not_done_is_found() -> None:
    with pytest.raises(CheckFailed, match="while it was timed is wrong"):
        memory.measure(Forgetful(), [SIZE], repeats=1)


def test_a_sum_that_does_not_follow_memory_is_found() -> None:
    with pytest.raises(CheckFailed, match="a changed word does not change the sum"):
        memory.measure(Constant(), [SIZE], repeats=1)


class Miscopying(Gpu):
    """The driver's copy changes a bit."""

    def copy(self, target: int, source: int, size: int) -> None:
        super().copy(target, source, size)
        self.memory[target // 4 + 5] ^= 1


def test_a_wrong_copy_of_the_driver_is_found() -> None:
    with pytest.raises(CheckFailed, match=r"what was copied \(driver copy\)"):
        memory.measure(Miscopying(), [SIZE], repeats=1)


def test_sizes_that_say_nothing() -> None:
    with pytest.raises(UsageError, match="L2 cache"):
        memory.measure(Gpu(l2=SIZE), [SIZE])
    with pytest.raises(UsageError, match="not free"):
        memory.measure(Gpu(free=SIZE), [SIZE])


def test_the_text_asks_for_little() -> None:
    """Any driver since CUDA 10.0 knows this version; sm_75 is the oldest that we are for."""
    assert re.search(r"^\.version 6\.3\n\.target sm_75\n\.address_size 64$", TEXT, re.MULTILINE)
    assert set(translate(TEXT)) == {"fill", "read", "copy"}


def test_without_a_driver(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `verify --gpu` where there is no GPU."""
    monkeypatch.setattr("sm75.bench.cuda.LIBRARY", "libcuda-that-is-nowhere.so.1")
    ended = run("bench", "--memory", "--json")
    assert ended.code == 6
    assert ended.out == ""
    assert "there is no NVIDIA driver here" in ended.err


def test_a_driver_without_a_gpu(
    run: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A library that answers as NVIDIA's does where no GPU is: CUDA_ERROR_NO_DEVICE, 100."""
    source = tmp_path / "cuda.c"
    source.write_text(
        "int cuInit(unsigned f) { return 100; }\n"
        "int cuDeviceGetCount(int *n) { *n = 0; return 100; }\n"
        'int cuGetErrorName(int c, const char **t) { *t = "CUDA_ERROR_NO_DEVICE"; return 0; }\n'
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr("sm75.bench.cuda.LIBRARY", str(library))
    ended = run("bench", "--memory")
    assert ended.code == 6
    assert "finds no GPU here" in ended.err
    assert "CUDA_ERROR_NO_DEVICE" in ended.err


def standin(home: Path, *, old: bool = False) -> str:
    """A library in the place of the driver's, which works on this machine's memory."""
    library = home / "libcuda.so.1"
    source = ROOT / "tests" / "unit" / "standinlibcuda.c"
    subprocess.run(
        ["cc", "-O2", f"-DOLD={int(old)}", "-shared", "-fPIC", "-o", library, source], check=True
    )
    return str(library)


def test_the_driver_is_called_as_it_declares(
    run: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Handles of 64 bits, structures given back, numbers of the right width: all through ctypes."""
    monkeypatch.setattr("sm75.bench.cuda.LIBRARY", standin(tmp_path))
    out = tmp_path / "result"
    line = ("bench", "--memory", "--size", "1", "--size", "2", "--repeats", "7", "--device", "1")
    ended = run(*line, "--json", "--out", out)
    assert ended.code == 0, ended.err
    data = ended.json
    assert json.loads((tmp_path / "result.json").read_text()) == data
    assert (data["gpu"], data["capability"], data["cuda"]) == ("second", "7.5", "13.2")
    # 2 x 5,001 MHz x 256 bits.
    assert data["theoretical_gb_s"] == 320.1
    assert data["used_by_others_bytes"] == 12 << 30
    assert [(one["kind"], one["bytes"] >> 20) for one in data["results"]] == [
        (kind, size) for size in (1, 2) for kind in ("read", "copy", "driver copy")
    ]
    assert all(one["gb_s"]["low"] <= one["gb_s"]["median"] for one in data["results"])
    ended = run(*line)
    assert "others hold 12.0 GiB of its memory" in ended.out
    assert "theoretical: 320.1 GB/s" in ended.out
    assert run("bench", "--memory", "--size", "1", "--device", "2").code == 6
    ended = run("bench", "--memory", "--size", "2000")
    assert ended.code == 2
    assert "3072 of 15360 MiB are" in ended.err


def test_a_gpu_that_is_too_old(
    run: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sm75.bench.cuda.LIBRARY", standin(tmp_path, old=True))
    ended = run("bench", "--memory", "--size", "1")
    assert ended.code == 6
    assert "first has compute capability 7.0" in ended.err


def test_it_runs_with_nothing_but_python() -> None:
    """No site-packages: the machine with the GPU has none of ours."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from sm75.bench import cuda, memory; "
        "cuda.LIBRARY = 'nowhere.so'; sys.exit(memory.main(['--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 6, done.stderr
    assert "there is no NVIDIA driver here" in done.stderr


def test_memory_takes_no_options_of_servers(run: Runner) -> None:
    assert run("bench", "--memory", "--concurrency", "2").code == 2
    assert run("bench", "--size", "2").code == 2
    assert run("bench", "--memory", "--dry-run", "--json").json == {
        "sizes_mib": [1024],
        "device": 0,
    }
