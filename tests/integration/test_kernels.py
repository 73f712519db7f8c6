"""The real package of kernels, read by the real nvdisasm, where both are at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm75 import proof
from sm75.aot import check, files, lower, pack, sass, tools
from sm75.aot.files import MODULE
from sm75.lockfile import load_release

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> list[str]:
    found = tools.disassembler(ROOT)
    if not found:
        pytest.skip("no nvdisasm: `kernels build` brings it")
    return found


@pytest.fixture(scope="module")
def package() -> Path:
    found = proof.kernels_in(ROOT / "channel", load_release(ROOT).vllm)
    if found is None:
        pytest.skip("the channel has no package of kernels")
    return found


def test_every_figure_of_the_index_is_in_the_machine_code(tool: list[str], package: Path) -> None:
    """ptxas -v printed registers and spills when they were compiled; here they are counted."""
    made = check.check(package, disassembler=tool)
    states = {finding.rule.removeprefix("kernels: "): finding for finding in made.findings}
    for rule in ("files", "architecture", "index", "shared memory", "spills"):
        assert states[rule].state == "ok", states[rule].evidence
    assert len(made.kernels) == len(files.load(package).index.variants)
    attention = [one for one in made.kernels if one.kernel == "kernel_unified_attention"]
    assert attention
    assert min(one.hmma or 0 for one in attention) >= 16
    assert max(one.shared for one in made.kernels) <= lower.SHARED_LIMIT


def test_one_digit_of_the_index_is_missed_by_no_rule(
    tool: list[str], package: Path, tmp_path: Path
) -> None:
    loaded = files.load(package)
    index = json.loads(loaded.raw)
    place = next(i for i, one in enumerate(index["variants"]) if one["spills"] and one["mma"])
    # one variant is enough: a second's code takes as long to read
    index["variants"] = [index["variants"][place]]
    home = tmp_path / MODULE
    home.mkdir()
    (home / pack.CUBINS).write_bytes(loaded.code["cubin"])
    (home / pack.PTX).write_bytes(loaded.code["ptx"])
    for name, rules in {"mma": ["index"], "registers": ["index"], "spills": ["index"]}.items():
        changed = json.loads(json.dumps(index))
        changed["variants"][0][name] += 1
        (home / pack.INDEX).write_text(json.dumps(changed))
        made = check.check(home, disassembler=tool)
        failed = [f.rule.removeprefix("kernels: ") for f in made.findings if f.state == "fail"]
        assert failed == rules, name
    # half of what the launch asks for: the code reaches further
    index["variants"][0]["shared"] //= 2
    (home / pack.INDEX).write_text(json.dumps(index))
    made = check.check(home, disassembler=tool)
    assert [f.rule for f in made.findings if f.state == "fail"] == ["kernels: shared memory"]


def test_machine_code_without_tensor_cores_has_none(tool: list[str]) -> None:
    data = (ROOT / "tests" / "data" / "device" / "sm75.cubin").read_bytes()
    assert sass.disassemble(tool, data) == sass.Counts(hmma=0, spills=0, reach=-1)
