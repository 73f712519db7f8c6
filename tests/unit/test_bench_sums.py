"""Statistics, prompts, bytes a token and the ceiling, against sums done by hand."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sm75.bench import stats
from sm75.bench.prompts import Length, Writer
from sm75.bench.roofline import Roofline
from sm75.bench.weights import EXPERTS, ROW, UNUSED, WHOLE, Reads, reads
from sm75.errors import UsageError
from sm75.health.events import Events
from tests.unit import chatserver


@pytest.mark.parametrize(
    ("n", "rank", "confidence"),
    [
        (1, 0, 0.0),
        (5, 0, 0.0),
        (6, 1, 1 - 2 / 64),
        (8, 1, 1 - 2 / 256),
        # 1 + 9 of 512; 1 + 10 of 1024 twice.
        (9, 2, 1 - 2 * 10 / 512),
        (10, 2, 1 - 22 / 1024),
        # 1 + 20 + 190 + 1140 + 4845 + 15504 = 21700 of 1048576.
        (20, 6, 1 - 2 * 21700 / 1048576),
    ],
)
def test_the_interval_of_the_median(n: int, rank: int, confidence: float) -> None:
    found = stats.interval(n)
    if found is None:
        assert rank == 0
    else:
        assert found[0] == rank
        assert found[1] == pytest.approx(confidence)


def test_summary() -> None:
    found = stats.summarise([9.0, 1.0, 3.0, 7.0, 5.0, 2.0, 8.0, 4.0, 6.0, 100.0])
    assert found is not None
    assert (found.n, found.median, found.low, found.high) == (10, 5.5, 2.0, 9.0)
    assert found.confidence == pytest.approx(0.978515625)
    assert found.quartiles == (3.25, 7.75)
    assert (found.least, found.most) == (1.0, 100.0)
    assert found.text() == "5.5 [2.0, 9.0]"
    few = stats.summarise([4.0, 1.0])
    assert few is not None
    assert (few.median, few.low, few.confidence) == (2.5, None, None)
    assert few.text(10, 0) == "25 (10 to 40)"
    assert stats.summarise([]) is None


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_in_any_pieces(size: int) -> None:
    body = 'data: {"a": "x\u2028y\u0085"}\r\n\r\n: ping\r\rdata:b\n\nid: 5\ndata: [DONE]'.encode()
    events = Events()
    found = [e for n in range(0, len(body), size) for e in events.feed(body[n : n + size])]
    assert [*found, *events.close()] == ['{"a": "x\u2028y\u0085"}', "b", "[DONE]"]


def fit(tokenizer: Callable[[str], int], wanted: list[int]) -> tuple[list[str], list[int], int]:
    """Prompts of such lengths, three each, their trials' counts, and how often was counted."""
    calls = 0

    async def count(text: str) -> int | None:
        nonlocal calls
        calls += 1
        return tokenizer(text) + chatserver.TEMPLATE

    async def make() -> tuple[list[str], list[int]]:
        writer = Writer(7)
        assert await writer.learn(count)
        lengths = [await writer.fit(number, count) for number in wanted]
        return (
            [writer.write(length) for length in lengths for _ in range(3)],
            [length.counted or 0 for length in lengths],
        )

    prompts, counted = asyncio.run(make())
    return prompts, counted, calls


@pytest.mark.parametrize("tokenizer", [chatserver.words, chatserver.pieces, chatserver.letters])
def test_prompts_have_the_length_that_the_server_counts(tokenizer: Callable[[str], int]) -> None:
    wanted = [64, 127, 1024, 5000]
    prompts, counted, calls = fit(tokenizer, wanted)
    assert counted == wanted
    assert [tokenizer(one) + chatserver.TEMPLATE for one in prompts] == [
        number for number in wanted for _ in range(3)
    ]
    assert calls < 100
    # Long before any block of a cache ends, all differ.
    assert len({one[:60] for one in prompts}) == len(prompts)


def test_prompts_are_never_the_same() -> None:
    prompts, _, _ = fit(chatserver.words, [12] * 200)
    assert len(set(prompts)) == 600
    writer = Writer(1)
    writer._words = ["one", "two", "three"]
    length = Length(wanted=9, words=2)
    assert len({writer.write(length) for _ in range(9)}) == 9
    with pytest.raises(UsageError, match="no new prompt of 9 tokens is left"):
        writer.write(length)


def test_no_prompt_is_shorter_than_the_template() -> None:
    with pytest.raises(UsageError, match="no prompt has 8 tokens"):
        fit(chatserver.words, [8])


def model(home: Path, config: dict[str, Any], tensors: dict[str, tuple[str, list[int]]]) -> Path:
    """A model's directory; of the weights only the places are there."""
    sizes = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "I32": 4}
    header, at = {}, 0
    for name, (kind, shape) in tensors.items():
        size = sizes[kind]
        for side in shape:
            size *= side
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    home.mkdir(exist_ok=True)
    (home / "config.json").write_text(json.dumps(config))
    with (home / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + at)
    return home


GEMMA = {
    "tie_word_embeddings": True,
    "text_config": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 1, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
}  # fmt: skip


def test_bytes_a_token_of_a_model_with_tables(tmp_path: Path) -> None:
    """Shaped as Gemma 4 E2B is: a table of embeddings a layer, towers, shared keys and values."""
    found = reads(
        model(
            tmp_path / "m", GEMMA,
            {
                "model.language_model.embed_tokens.weight": ("BF16", [1000, 64]),
                "model.language_model.embed_tokens_per_layer.weight": ("BF16", [1000, 4 * 16]),
                "model.language_model.layers.0.self_attn.k_proj.weight": ("BF16", [256, 64]),
                "model.language_model.layers.3.self_attn.k_proj.weight": ("BF16", [512, 64]),
                "model.language_model.layers.3.self_attn.q_proj.weight": ("F32", [10, 64]),
                "model.language_model.layers.3.mlp.up_proj.weight_packed": ("I32", [10, 8]),
                "model.vision_tower.layers.0.self_attn.k_proj.weight": ("BF16", [999]),
                "model.embed_vision.embedding_projection.weight": ("BF16", [77]),
            },
        )
    )  # fmt: skip
    # Tied: the logits read the table whole. F32 is served as float16, packed integers as they are.
    whole = 1000 * 64 * 2 + 256 * 64 * 2 + 10 * 64 * 2 + 10 * 8 * 4
    assert found.kinds == {
        WHOLE: (whole, whole),
        ROW: (1000 * 64 * 2, 64 * 2),
        UNUSED: (512 * 64 * 2 + 999 * 2 + 77 * 2, 0),
    }
    assert found.weights == whole + 128
    # Keys and values of float16: 1 KiB a token of each sliding layer, 2 KiB of the full one.
    assert found.layers == ((1024, 512),) * 3 + ((2048, 0),)
    assert found.kv(100) == 100 * (3 * 1024 + 2048)
    assert found.kv(5000) == 512 * 3 * 1024 + 5000 * 2048


def test_a_table_of_logits_of_its_own(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    found = reads(
        model(
            tmp_path / "m", config,
            {"model.embed_tokens.weight": ("F16", [100, 16]), "lm_head.weight": ("F16", [100, 16])},
        )
    )  # fmt: skip
    assert found.kinds == {WHOLE: (3200, 3200), ROW: (3200, 32)}
    assert found.layers == ((2 * 2 * 8 * 2, 0),)


def test_experts_that_are_chosen(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 2}
    found = reads(model(tmp_path / "m", config, {"model.layers.0.mlp.experts.3.w1": ("F16", [80])}))
    assert found.kinds == {EXPERTS: (160, 40)}


def test_models_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no readable config\.json"):
        reads(tmp_path)
    home = model(tmp_path / "m", {"num_hidden_layers": 1}, {"a": ("F16", [4])})
    file = home / "model.safetensors"
    good = file.read_bytes()
    for broken in (b"", b"12345", struct.pack("<Q", 1 << 40) + good[8:], good[:-1],
                   good[:8] + b"x" * (len(good) - 8), struct.pack("<Q", 2) + b"[]"):  # fmt: skip
        file.write_bytes(broken)
        with pytest.raises(UsageError, match="is no safetensors file"):
            reads(home)
    file.unlink()
    with pytest.raises(UsageError, match=r"no \*\.safetensors"):
        reads(home)
    (home / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="num_hidden_layers"):
        reads(home)


def test_the_ceiling() -> None:
    layers = ((1000, 0), (1000, 500))
    read = Reads(weights=2_770_000_000, kinds={}, layers=layers, source="")
    line = Roofline(bandwidth=277.0, bandwidth_from="", reads=read)
    assert line.rate(0, 1) == pytest.approx(100.0)
    assert line.rate(0, 8) == pytest.approx(100.0)
    # 1,000 tokens: 1 MB of the full layer, half of one of the sliding one.
    assert line.step_bytes(1000, 4) == 2_770_000_000 + 4 * 1_500_000
    assert Roofline(bandwidth=277.0, bandwidth_from="", reads=None).rate(0, 1) is None
