"""benchmarks/host_memory: real checkpoints, hard limits, and a page that is of the evidence."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cgroup, checkpoint, host_memory
from tests.unit.projectkit import ROOT

SHAPES = {"a": (300, 70), "b": (20_000,), "c": (3, 5, 7), "d": (20_000,)}
limited = pytest.mark.skipif(
    not cgroup.usable(), reason="this machine lends no control groups with a memory limit"
)


def command(directory: Path, strategy: str = "plain") -> list[str]:
    """The reader with a small buffer, as a small limit asks for."""
    return [sys.executable, str(host_memory.READER), strategy, str(directory),
            "--staging", str(1 << 20)]  # fmt: skip


def read(directory: Path) -> dict[str, Any]:
    done = subprocess.run(command(directory), check=True, capture_output=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_checkpoint_is_what_the_format_says(tmp_path: Path, shards: int) -> None:
    paths = checkpoint.write(tmp_path, SHAPES, shards=shards)
    assert len(paths) == shards
    found: dict[str, tuple[int, ...]] = {}
    for path in paths:
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        assert length % 8 == 0
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        end = 0
        for name, entry in header.items():
            assert entry["dtype"] == "BF16"
            assert entry["data_offsets"] == [end, end + 2 * prod(entry["shape"])]
            end = entry["data_offsets"][1]
            found[name] = tuple(entry["shape"])
        assert len(data) == 8 + length + end
    assert found == SHAPES
    (one,) = read(tmp_path)["passes"]
    assert one["sums_agree"] is True
    assert one["bytes"] == checkpoint.size(SHAPES)
    assert one["tensors"] == len(SHAPES)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    made = [checkpoint.write(tmp_path / str(n), SHAPES, seed=n // 2)[0] for n in (2, 3, 4)]
    first, same, other = (path.read_bytes() for path in made)
    assert first == same != other


def test_a_changed_byte_is_seen(tmp_path: Path) -> None:
    (path,) = checkpoint.write(tmp_path, SHAPES)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = read(tmp_path)
    assert result["passes"][0]["sums_agree"] is False
    assert host_memory.verdict(0, 0, result) == "failed"


def test_shapes_are_those_of_the_model() -> None:
    shapes = checkpoint.gemma4_e2b()
    assert abs(checkpoint.size(shapes) / 2**30 - 9.5) < 0.01
    largest = max(shapes, key=lambda name: prod(shapes[name]))
    assert largest.endswith("embed_tokens_per_layer.weight")
    assert checkpoint.size({largest: shapes[largest]}) / 2**30 == 4.375
    parts = checkpoint.split(shapes, 4)
    assert [name for part in parts for name in part] == list(shapes)


def test_a_sparse_file_takes_no_room(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write_sparse(path, 1 << 30)
    assert path.stat().st_size > 1 << 30
    assert path.stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize(
    ("code", "killed", "result", "word"),
    [
        (0, 0, {"passes": [{"sums_agree": True}]}, "read"),
        (0, 0, {"passes": [{"sums_agree": None}]}, "read"),
        (0, 0, {"passes": [{"sums_agree": True}, {"sums_agree": False}]}, "failed"),
        (0, 0, {"error": "unable to mmap"}, "refused"),
        (-9, 1, {}, "killed"),
        (1, 0, {}, "failed"),
        (-9, 0, {}, "failed"),
    ],
)
def test_verdict(code: int, killed: int, result: dict[str, Any], word: str) -> None:
    assert host_memory.verdict(code, killed, result) == word


@limited
def test_a_file_larger_than_the_limit_is_read(tmp_path: Path) -> None:
    (path,) = checkpoint.write(tmp_path, {"a": (24, 1 << 20), "b": (24, 1 << 20)})
    host_memory.drop(path)
    limit = 64 << 20
    with cgroup.Group(limit) as group:
        ended = group.run(command(tmp_path), timeout=300)
    result = json.loads(ended.out)
    assert (ended.code, ended.killed) == (0, 0)
    assert result["passes"][0]["sums_agree"] is True
    assert result["passes"][0]["bytes"] == 96 << 20
    assert ended.peak <= limit
    assert not group.path.exists()


@limited
def test_the_limit_is_hard() -> None:
    with cgroup.Group(64 << 20) as group:
        ended = group.run([sys.executable, "-c", "bytearray(96 << 20)"], timeout=300)
    assert ended.code == -9
    assert ended.killed == 1
    assert host_memory.verdict(ended.code, ended.killed, {}) == "killed"


def evidence() -> dict[str, Any]:
    (path,) = (ROOT / "docs" / "evidence").glob("host-memory-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_page_is_of_the_evidence() -> None:
    assert host_memory.table(evidence()) in (ROOT / "docs" / "g5g.md").read_text()


def test_the_evidence_is_complete() -> None:
    found = evidence()
    runs = [run for run in found["runs"] if "sparse_files" not in run]
    assert [(run["strategy"], run["limit"]) for run in runs] == [
        (run.strategy, run.limit) for run in host_memory.RUNS
    ]
    assert found["machine"]["swap"] == 0
    for run in runs:
        assert all(one["bytes"] == found["checkpoint_bytes"] for one in run.get("passes", []))
        assert run["group_peak_bytes"] <= run["limit"]
    assert {run["ended"] for run in runs if run["strategy"] in ("eager", "keep")} == {"killed"}
