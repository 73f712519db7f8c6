"""What the device tests are made of, as far as that needs no GPU."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from sm75.cubin import read_device_code
from tests.device.compare import judge
from tests.device.engine import row
from tests.device.fatbins import lower
from tests.device.pictures import BOI, EOI, IMAGE, folded
from tests.device.run import faults, kernels

PTX = b"//\n.version 9.2\n.target sm_75\n.address_size 64\n.visible .entry k() {ret;}\n\0"


def fatbin(*texts: bytes) -> bytes:
    """A fat binary of PTX entries for sm_75, not compressed."""
    entries = b"".join(
        struct.pack("<HHIQIIHHIIIQQQ", 1, 257, 64, len(text), 0, 64, 2, 9, 75, 0, 0, 17, 0, 0)
        + text
        for text in texts
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_only_the_version_changes(tmp_path: Path) -> None:
    path = tmp_path / "it.fatbin"
    before = fatbin(PTX, PTX)
    path.write_bytes(before)
    assert lower(path, (9, 0)) == 2
    after = path.read_bytes()
    assert after.count(b".version 9.0\n") == 2
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert sorted(changed) == [(2, 0), (2, 0), (ord("2"), ord("0")), (ord("2"), ord("0"))]
    assert {(code.kind, code.arch) for code in read_device_code(path)} == {("ptx", "sm_75")}


def test_a_new_driver_takes_it_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "it.fatbin"
    path.write_bytes(fatbin(PTX))
    assert lower(path, (9, 2)) == 1
    assert path.read_bytes() == fatbin(PTX)


def test_compressed_ptx_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it.fatbin"
    path.write_bytes(fatbin(b"\x28\xb5\x2f\xfd" * 8))
    with pytest.raises(ValueError, match="no plain text; build with --ptx"):
        lower(path, (9, 0))


def test_verdict() -> None:
    verdict = judge([[0.0, 0.01], [0.0, 0.2]], 0.1, [[-1.0, -2.0]], [[-1.0, -2.5]])
    assert (verdict.tokens, verdict.best, verdict.deficit, verdict.unsound) == (4, 2, 0.2, 1)
    assert verdict.logprob == 0.5
    assert not verdict.sound
    assert judge([[0.0, 0.09]], 0.1).sound
    assert not judge([[math.nan]], 0.1).sound
    assert not judge([], 0.1).sound


def test_triton_kernels_by_the_target_of_their_ptx(tmp_path: Path) -> None:
    for name, target in (("a", "sm_75"), ("b", "sm_90a"), ("c", "sm_75")):
        (tmp_path / name).mkdir()
        facts = {"name": "attention", "shared": 65536, "num_warps": 8, "arch": "sm75"}
        (tmp_path / name / "attention.json").write_text(json.dumps(facts))
        (tmp_path / name / "attention.ptx").write_text(f".version 8.7\n.target {target}\n")
        (tmp_path / name / "__grp__attention.json").write_text('{"child_paths": {}}')
    assert kernels(tmp_path) == [
        {"name": "attention", "target": "sm_75", "shared": 65536, "warps": 8, "variants": 2},
        {"name": "attention", "target": "sm_90a", "shared": 65536, "warps": 8, "variants": 1},
    ]


def test_faults() -> None:
    run = {"tokens": 4, "unsound": 0, "sound": True}
    kernel = {"name": "kernel_attention", "target": "sm_75", "shared": 65536}
    good = {"runs": {"single": run}, "kernels": [kernel]}
    assert faults({"cases": {"x": good}}) == []
    for change, said in (
        ({"error": "exit code 1"}, "exit code 1"),
        ({"runs": {"single": {**run, "unsound": 1, "sound": False}}}, "1 of 4 tokens"),
        ({"runs": {"prefixes cached": {**run, "cached_tokens": 0}}}, "nothing was remembered"),
        ({"kernels": [{**kernel, "target": "sm_90a"}]}, "is for sm_90a"),
        ({"kernels": [{**kernel, "shared": 65540}]}, "with 65540 bytes"),
        ({"kernels": []}, "no attention kernel"),
    ):
        (fault,) = faults({"cases": {"x": {**good, **change}}})
        assert said in fault


@pytest.mark.parametrize(("name", "wanted"), [("health-random", 1), ("health-sane", 0)])
def test_faults_of_health_on_the_device(name: str, wanted: int) -> None:
    kernel = {"name": "kernel_attention", "target": "sm_75", "shared": 65536}
    good = {"exit_codes": [wanted] * 3, "kernels": [kernel]}
    assert faults({"cases": {name: good}}) == []
    for codes in ([wanted, 1 - wanted], [11], []):
        (fault,) = faults({"cases": {name: {**good, "exit_codes": codes}}})
        assert f"not {wanted}" in fault


def test_an_image_is_a_single_token_in_what_the_engine_is_given() -> None:
    image = [BOI, IMAGE, IMAGE, IMAGE, EOI]
    assert folded([2, 20, *image, *image, 21, *image]) == [2, 20, IMAGE, IMAGE, 21, IMAGE]
    assert folded([2, 20, 21]) == [2, 20, 21]


def test_another_prompt_than_was_meant_is_an_error() -> None:
    made = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-1.0)}])
    output = SimpleNamespace(outputs=[made], prompt_token_ids=[2, 3], num_cached_tokens=None)
    assert row({"prompt": [2, 3]}, output) == {
        "prompt": [2, 3], "tokens": [7], "logprobs": [-1.0], "cached": 0
    }  # fmt: skip
    with pytest.raises(ValueError, match="a prompt of 3 tokens became one of 2"):
        row({"prompt": [2, 3, 4]}, output)
