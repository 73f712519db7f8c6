"""What does not fit, with the sum, and whose fault it is: the model's or a flag's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sm75.errors import CheckFailed, UsageError
from sm75.serve import misfit, shape
from tests.unit import servekit
from tests.unit.test_serve_plan import planned

MODELS = {
    "e2b": servekit.E2B, "llama1": servekit.LLAMA1, "llama8": servekit.LLAMA8,
    "llama70": servekit.LLAMA70, "odd": {
        **servekit.LLAMA8, "num_attention_heads": 33, "num_key_value_heads": 3,
        "max_position_embeddings": 10_000_000},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("models")
    return {name: servekit.model(top / name, config) for name, config in MODELS.items()}


def refused(model: Path, flags: str, **more: Any) -> CheckFailed:
    with pytest.raises(CheckFailed) as caught:
        planned(model, *flags.split(), **more)
    return caught.value


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1].replace(",", ""))


def test_two_cards_with_the_sum(models: dict[str, Path]) -> None:
    """15,316 MiB of weights in halves; what is left is what a start with two would have."""
    no = refused(models["llama8"], "")
    assert no.what == "the model does not fit the card"
    assert "on 2 GPUs (g5g.16xlarge or g5g.metal): weights 7,658 MiB a GPU of 15,360" in no.why
    assert "which have 2 GPUs: -- --tensor-parallel-size 2" in no.fix
    two = planned(models["llama8"], "-tp", "2")
    left = number(r"a GPU of 15,360, ([\d,]+) are left for the KV cache", no.why)
    assert left == round(two.budget.cache / 2**20)
    assert number(r"KV cache, ([\d,]+) tokens", no.why) == two.length


def test_more_cards_than_a_g5g_has(models: dict[str, Path]) -> None:
    no = refused(models["llama70"], "")
    assert "weights 67,284 MiB a GPU of 15,360, 53,465 are missing: does not fit" in no.why
    assert "on 16 GPUs (no g5g has so many): weights 8,410 MiB a GPU" in no.why
    assert "it would take 16 GPUs, and no g5g has more than 2" in no.fix
    assert "--tensor-parallel-size" not in no.fix
    assert refused(models["llama70"], "-tp 2").what == "the model does not fit 2 cards"
    assert "on 2 GPUs" not in refused(models["llama70"], "-tp 2").why


def test_heads_that_two_cards_cannot_share(models: dict[str, Path]) -> None:
    no = refused(models["odd"], "")
    assert "not possible: 33 attention heads cannot be divided by 2" in no.why
    assert "on 3 GPUs (no g5g has so many)" in no.why
    three = planned(models["odd"], "-tp", "3")
    left = number(r"a GPU of 15,360, ([\d,]+) are left for the KV cache", no.why)
    assert left == round(three.budget.cache / 2**20)
    assert number(r"KV cache, ([\d,]+) tokens", no.why) == three.length
    assert "--tensor-parallel-size" not in no.fix


@pytest.mark.parametrize(("cards", "says"), [(1, ""), (2, ""), (8, ""), (16, ""), (32, ""),
    (3, "32 attention heads"), (64, "32 attention heads")])  # fmt: skip
def test_how_vllm_cuts_heads(cards: int, says: str) -> None:
    """8 KV heads for 16 cards are repeated."""
    assert misfit.cut(shape.parse(servekit.LLAMA8), cards).startswith(says)
    assert bool(misfit.cut(shape.parse(servekit.LLAMA8), cards)) == bool(says)


def test_kv_heads_are_cut_as_well() -> None:
    found = shape.parse({**servekit.LLAMA8, "num_attention_heads": 12, "num_key_value_heads": 3})
    assert misfit.cut(found, 2) == "3 KV heads cannot be divided by 2, nor 2 by them"
    assert not misfit.cut(found, 6)


def test_a_cut_that_vllm_refuses(models: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="--tensor-parallel-size 3 cannot work") as caught:
        planned(models["llama8"], "-tp", "3")
    assert "32 attention heads cannot be divided by 3" in caught.value.why
    assert caught.value.fix == "-- --tensor-parallel-size 2"


@pytest.mark.parametrize(
    ("name", "flags", "flag", "bound"),
    [
        ("e2b", "--gpu-memory-utilization 0.1", "--gpu-memory-utilization", "least"),
        ("e2b", "--gpu-memory-utilization 0.1 --port 9", "--gpu-memory-utilization", "least"),
        ("e2b", "--max-num-seqs 2000", "--max-num-seqs", "most"),
        ("e2b", "--max-num-seqs 5000", "--max-num-seqs", "most"),
        ("llama1", "--max-num-seqs 2048 --max-num-batched-tokens 200k",
         "--max-num-batched-tokens", "most"),
    ],
)  # fmt: skip
def test_the_flag_is_blamed_and_the_value_fits(
    models: dict[str, Path], name: str, flags: str, flag: str, bound: str
) -> None:
    no = refused(models[name], flags)
    assert no.what.startswith(flag + " ")
    assert "the model does not fit" not in no.what
    for pattern in (rf"-- {flag} ([\d.]+)", rf"at {bound} ([\d.]+)"):
        assert planned(models[name], flag, f"{number(pattern, no.fix):g}").length
    edge = number(rf"at {bound} ([\d.]+)", no.fix)
    step = 0.01 if "utilization" in flag else 1
    beyond = edge - step if bound == "least" else edge + step
    others = flags.split()
    others[others.index(flag) + 1] = f"{beyond:.15g}"
    refused(models[name], " ".join(others))


def test_vllms_own_rule_for_sequences(models: dict[str, Path]) -> None:
    """vllm/config/scheduler.py:331; 2,048 tokens a step are its default on such cards."""
    no = refused(models["llama1"], "--max-num-seqs 2049")
    assert no.what == "--max-num-seqs 2049 cannot be"
    assert "(2048) must be greater than or equal to max_num_seqs (2049)" in no.why
    wide = planned(models["llama1"], "--max-num-seqs", "2049", "--max-num-batched-tokens", "4096")
    assert wide.settings.seqs == 2049


def test_two_flags_together(models: dict[str, Path]) -> None:
    no = refused(models["e2b"], "--gpu-memory-utilization 0.5 --max-num-seqs 2000")
    assert no.what == (
        "--gpu-memory-utilization 0.5 and --max-num-seqs 2000 leave the model no room; without, it "
        "fits"
    )
    assert no.fix.startswith("-- --gpu-memory-utilization 0.95 --max-num-seqs 64; ")


def test_a_share_below_the_weights_is_refused_with_a_length_too(models: dict[str, Path]) -> None:
    """A length that is asked for overrules estimates, not what the files and the share say."""
    no = refused(models["e2b"], "--gpu-memory-utilization 0.1 --max-model-len 4096")
    assert no.what.startswith("--gpu-memory-utilization 0.1 leaves the model no room")


def test_a_length_gets_one_that_fits(models: dict[str, Path]) -> None:
    no = refused(models["llama8"], "-tp 2 --max-model-len 131072")
    assert no.what == "--max-model-len 131072 does not fit the card"
    fits = number(r"-- --max-model-len (\d+); or", no.fix)
    assert planned(models["llama8"], "-tp", "2", "--max-model-len", f"{fits:.0f}").length == fits


def test_flags_that_are_not_why(models: dict[str, Path]) -> None:
    no = refused(models["llama8"], "--gpu-memory-utilization 0.5")
    assert no.what == "the model does not fit the card"
    assert "the GPUs without --gpu-memory-utilization 0.5" in no.why
    assert "--tensor-parallel-size 2" in no.fix


def test_what_is_started_with_a_doubt(models: dict[str, Path]) -> None:
    said = planned(models["llama8"], "-tp", "2", "--max-model-len", "114000").warnings
    assert any(line.startswith("--max-model-len 114000: one request takes 7,") for line in said)
    assert any("no g5g has more than 2" in line
               for line in planned(models["llama8"], "-tp", "4").warnings)  # fmt: skip
