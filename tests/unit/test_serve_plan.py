"""Models as directories, and what is planned for them."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sm75.errors import CheckFailed, UsageError
from sm75.serve import memory, place, shape
from sm75.serve.flags import Given
from sm75.serve.host import Host, Note, look
from sm75.serve.plan import make
from sm75.serve.planned import Plan
from sm75.serve.weights import measure, weight_files
from sm75.smem.models import MODELS, Layer
from tests.unit import servekit
from tests.unit.projectkit import ROOT

VLLM = Path("/env/bin/vllm")


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    return file.getvalue()


ZIP = _zip()
TABLE = {model.name: model for model in MODELS}


def planned(directory: Path, *arguments: str, **more: Any) -> Plan:
    return make(VLLM, str(directory), directory, Given(arguments),
                environment=more.pop("environment", {}), **more)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config", "own", "known"),
    [
        ("E2B", servekit.E2B, 15, "Gemma 4 E2B"),
        ("E4B", servekit.E4B, 24, "Gemma 4 E4B"),
        ("26B", servekit.A4B, 30, "Gemma 4 26B-A4B"),
        ("gemma3", servekit.GEMMA3, 34, "Gemma 3 4B"),
        ("llama1", servekit.LLAMA1, 16, "Llama 3.2 1B"),
        ("llama8", servekit.LLAMA8, 32, "Llama 3.1 8B"),
        ("qwen", servekit.QWEN4, 36, "Qwen3 4B"),
    ],
)
def test_shapes_are_those_of_the_table(
    name: str, config: Mapping[str, Any], own: int, known: str
) -> None:
    """The shapes that the shared-memory audit has, by another way."""
    found = shape.parse(config)
    assert len(found.layers) == own
    assert found.shared == found.count - own
    assert not found.unknown

    def bare(layer: Layer) -> tuple[int, int, int, int]:
        return (layer.head, layer.q_heads, layer.kv_heads, layer.window)

    assert {bare(layer) for layer in found.layers} == {bare(one) for one in TABLE[known].layers}
    assert found.hidden == TABLE[known].hidden


def test_gemma4_e2b_in_full() -> None:
    found = shape.parse({"text_config": servekit.E2B, "vision_config": {"hidden_size": 768}})
    assert [layer.head for layer in found.layers] == [256, 256, 256, 256, 512] * 3
    assert [layer.window for layer in found.layers] == [512, 512, 512, 512, 0] * 3
    assert (found.inner, found.per_layer, found.towers) == (12_288, 256, True)


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"sliding_window": 4096}, "SSSS"),  # Mistral
        ({"sliding_window": 4096, "use_sliding_window": False}, "FFFF"),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 3}, "FFFS"),
        ({"sliding_window": 4096, "sliding_window_pattern": 2}, "SFSF"),
        ({"sliding_window": 4096, "model_type": "gemma2"}, "SFSF"),
        ({"layer_types": ["full_attention"] * 4}, "FFFF"),
        ({}, "FFFF"),
    ],
)
def test_layer_kinds(change: dict[str, Any], kinds: str) -> None:
    found = shape.layer_kinds(change, 4)
    assert "".join("F" if kind == "full_attention" else "S" for kind in found) == kinds


@pytest.mark.parametrize(
    ("change", "says"),
    [({"layer_types": ["full_attention"] * 3}, "3 entries for 16 layers"),
     ({"hidden_size": None}, "TypeError")],
)  # fmt: skip
def test_malformed_configs(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    (model / "config.json").write_text(json.dumps({**servekit.LLAMA1, **change}))
    with pytest.raises(CheckFailed, match="not understood") as caught:
        planned(model)
    assert says in caught.value.why


@pytest.mark.parametrize("tokens", [1, 64, 100])
def test_no_more_sequences_than_tokens_a_step(tmp_path: Path, tokens: int) -> None:
    """vLLM refuses what has fewer (vllm/config/scheduler.py)."""
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    found = planned(model, "--max-num-batched-tokens", str(tokens))
    assert found.settings.seqs <= tokens


def test_no_config(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    (model / "config.json").write_text("{")
    with pytest.raises(CheckFailed, match="cannot be read"):
        planned(model)
    (model / "config.json").unlink()
    with pytest.raises(CheckFailed, match=r"no config\.json"):
        planned(model)


def test_weights_by_their_headers(tmp_path: Path) -> None:
    tensors: servekit.Tensors = {
        "a": ("BF16", [10, 100]), "b": ("F32", [1000]), "c": ("I32", [50]), "d": ("F8_E4M3", [7]),
        "lm_head.weight": ("F16", [500]),
    }  # fmt: skip
    model = servekit.model(tmp_path / "m", servekit.LLAMA1, tensors)
    found = measure(model)
    assert found is not None
    # What is float becomes float16; what is packed stays.
    assert found.card_bytes() == 2000 + 2000 + 200 + 7 + 1000
    assert found.card_bytes(4) == 4000 + 4000 + 200 + 7 + 2000
    assert found.disk_bytes == (model / "model.safetensors").stat().st_size
    tied = measure(model, tied=True)
    assert tied is not None
    assert (tied.card_bytes(), tied.tied_bytes) == (2000 + 2000 + 200 + 7, 1000)


def test_files_of_an_index_and_no_others(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1, files=3)
    whole = measure(model)
    (model / "extra.safetensors").write_bytes(b"not of the index")
    (model / "pytorch_model.bin").write_bytes(b"neither")
    again = measure(model)
    assert whole is not None
    assert again == whole
    assert len(whole.files) == 3
    assert whole.card_bytes() == servekit.size(servekit.text_tensors(servekit.LLAMA1))
    whole.files[1].unlink()
    with pytest.raises(CheckFailed, match="2 of 3 files") as caught:
        measure(model)
    assert whole.files[1].name in caught.value.why


def test_the_same_weights_twice_count_once(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    (model / "consolidated.safetensors").write_bytes(b"x")
    (model / "pytorch_model.bin").write_bytes(b"x")
    assert [file.name for file in weight_files(model)] == ["model.safetensors"]
    (model / "model.safetensors").unlink()
    assert [file.name for file in weight_files(model)] == ["consolidated.safetensors"]
    (model / "consolidated.safetensors").unlink()
    (model / "optimizer.bin").write_bytes(b"x")
    assert [file.name for file in weight_files(model)] == ["pytorch_model.bin"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data[:-1], "its header speaks of"),
        (lambda data: data[:5], "no safetensors header"),
        (lambda data: b"\xff" * 8 + data[8:], "no safetensors header"),
        (lambda data: data[:8] + b"x" + data[9:], "no JSON"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (lambda data: data.replace(b'"BF16"', b'"BF99"'), "unknown type BF99"),
        (lambda data: data.replace(b'"shape"', b'"shade"'), "malformed"),
        (lambda data: b"\x02" + b"\0" * 7 + b"[]", "no table"),
    ],
)
def test_damaged_weights(tmp_path: Path, spoil: Any, says: str) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1, {"a": ("BF16", [10])})
    file = model / "model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(CheckFailed) as caught:
        planned(model)
    assert says in caught.value.why


@pytest.mark.parametrize("ends", [".bin", ".pt"])
@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "empty"), (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
     (ZIP[:-30], "cut short")],
)  # fmt: skip
def test_damaged_files_of_torch(tmp_path: Path, ends: str, data: bytes, says: str) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    (model / "model.safetensors").unlink()
    file = model / f"pytorch_model{ends}"
    file.write_bytes(data)
    with pytest.raises(CheckFailed) as caught:
        measure(model)
    assert says in caught.value.why
    for whole in (ZIP, b"\x80\x02 an old pickle"):
        file.write_bytes(whole)
        found = measure(model)
        assert found is not None
        assert found.disk_bytes == len(whole)


def test_what_vllm_does_not_read_are_no_weights(tmp_path: Path) -> None:
    """0.33.0, default_loader.py, _prepare_weights: it has no GGUF."""
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    (model / "model.safetensors").rename(model / "model.gguf")
    assert weight_files(model) == ()


def test_no_weights(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckFailed, match="has no weights"):
        planned(model)


@pytest.mark.parametrize(
    "config", [servekit.E2B, servekit.SLIDING, servekit.LLAMA1, servekit.QWEN4]
)
def test_what_is_planned_adds_up(tmp_path: Path, config: Mapping[str, Any]) -> None:
    found = planned(servekit.model(tmp_path / "m", config))
    rows = {row.what: row.mib for row in found.budget.rows}
    offered = rows["card"] - rows["- kept by the driver"]
    outside = sum(rows[f"- {name}"] for name in
                  ("CUDA context, cuBLAS", "attention scratch", "held back"))  # fmt: skip
    assert rows["= vLLM's share"] + outside <= offered
    assert rows["= vLLM's share"] == pytest.approx(found.budget.share * offered)
    used = sum(
        mib
        for name, mib in rows.items()
        if name
        in ("- weights", "- one step's activations", "- logits while sampling", "- CUDA graphs")
    )
    assert rows["= KV cache"] == pytest.approx(rows["= vLLM's share"] - used)
    assert found.budget.cache == int(rows["= KV cache"] * memory.MIB)
    sums = found.sums()
    # A request of full length fits with room to spare, for the rows above it are estimates.
    assert sums["request_bytes"] <= 0.85 * found.budget.cache
    assert sums["requests_of_usual_length"] >= found.settings.seqs
    assert found.length <= int(config["max_position_embeddings"])
    assert found.length % 16 == 0


def test_the_command_line(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "a model", servekit.E2B)
    found = planned(model)
    assert found.command == (
        "/env/bin/vllm", "serve", str(model), "--dtype", "float16", "--kv-cache-dtype", "auto",
        "--gpu-memory-utilization", "0.95", "--max-model-len", "131072", "--max-num-seqs", "64",
    )  # fmt: skip
    assert f"'{model}'" in found.line
    assert found.lines()[-1] == found.line
    yours = planned(model, "--max-num-seqs", "4", "--gpu-memory-utilization=0.8", "--port", "9")
    assert yours.command[3:] == (
        "--dtype", "float16", "--kv-cache-dtype", "auto", "--max-model-len", "131072",
        "--max-num-seqs", "4", "--gpu-memory-utilization=0.8", "--port", "9",
    )  # fmt: skip
    assert yours.gave_way == ("--gpu-memory-utilization", "--max-num-seqs")
    assert any("yours, not ours: --gpu" in line for line in yours.lines())
    assert yours.budget.share == 0.8
    rows = {row.what: row for row in yours.budget.rows}
    assert rows["= vLLM's share"].known == "yours"


def test_the_users_numbers_are_counted_with(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.E2B)
    plain = planned(model)
    eager = planned(model, "--enforce-eager", "--max-num-seqs", "64")
    assert {row.what: row.mib for row in eager.budget.rows}["- CUDA graphs"] == 0
    assert eager.budget.cache > plain.budget.cache
    short = planned(model, "--max-model-len", "4k")
    assert short.length == 4000
    assert short.sums()["requests_of_full_length"] > plain.sums()["requests_of_full_length"]
    auto = planned(model, "--max-model-len", "auto")
    assert auto.command[-2:] == ("--max-model-len", "auto")
    weights = {row.what: row.mib for row in plain.budget.rows}["- weights"]
    for flag, parts in (("-tp", 2), ("-pp", 2)):
        cut = planned(model, flag, str(parts))
        assert {row.what: row.mib for row in cut.budget.rows}["- weights"] == pytest.approx(
            weights / parts
        )
    assert plain.cache is not None
    staged = planned(model, "-pp", "3").cache
    assert staged is not None
    assert sum(group.layers for group in staged.groups) == 5


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA8)
    with pytest.raises(CheckFailed, match="does not fit the card") as caught:
        planned(model)
    assert "MiB are missing before the first token" in caught.value.why
    assert "all the same" not in caught.value.fix
    with pytest.raises(CheckFailed, match="does not fit the card"):
        planned(model, "--max-model-len", "512")  # more than the card has: not by estimates
    assert planned(model, "-tp", "2").length
    assert planned(model, "-pp", "2").length
    assert planned(model, card_mib=24_576).length


def test_estimates_alone_can_be_overruled(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.E4B)
    with pytest.raises(CheckFailed, match="does not fit the card") as caught:
        planned(model)
    assert "all the same" in caught.value.fix
    found = planned(model, "--max-model-len", "512", "--enforce-eager")
    assert any("by these estimates nothing is left" in line for line in found.lines())


def test_a_length_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA8, {"x": ("F16", [1 << 30])})
    with pytest.raises(CheckFailed, match="--max-model-len 131072 does not fit"):
        planned(model, "--max-model-len", "131072")
    assert planned(model, "--max-model-len", "40960").length == 40_960


@pytest.mark.parametrize(
    "change",
    [{"layer_types": ["full_attention", "linear_attention"] * 8}, {"kv_lora_rank": 512}],
)
def test_other_kinds_of_layers_leave_the_length_to_vllm(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    found = planned(servekit.model(tmp_path / "m", {**servekit.LLAMA1, **change}))
    assert not found.sums()
    at = found.command.index("--max-model-len")
    assert found.command[at + 1] == "auto"
    assert any("not told here" in line for line in found.lines())


def said_of(model: Path, **host: Any) -> list[tuple[str, str]]:
    return [(note.status, note.says) for note in planned(model, host=Host(**host)).host]


def test_ram(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.E2B, files=3)
    assert said_of(model, ram_gib=7.6) == [
        ("warn", "8.7 GiB pass through 7.6 GiB of RAM: slow, and untested")
    ]
    assert said_of(model, ram_gib=31.0) == [("ok", "31.0 GiB for 8.7 GiB of weights")]
    assert planned(model).host == (Note(status="unknown", says="cannot be seen"),)
    assert "RAM: cannot be seen" in planned(model).lines()


def test_a_file_that_cannot_be_mapped(tmp_path: Path) -> None:
    """docs/g5g.md, 8 GiB of RAM: one file of more than RAM and swap is refused, two are read."""
    one = servekit.model(tmp_path / "one", servekit.E2B)
    [slow, refused] = said_of(one, ram_gib=7.6, swap_gib=0.5)
    assert slow[0] == refused[0] == "warn"
    assert refused[1].startswith("model.safetensors has 8.7 GiB, RAM and swap together 8.1: Linux")
    assert len(said_of(one, ram_gib=7.6, swap_gib=8.0)) == 1
    assert len(said_of(one, ram_gib=7.6, overcommit=1)) == 1
    assert len(said_of(one, ram_gib=7.6, overcommit=2)) == 2


def test_this_machines_memory(tmp_path: Path) -> None:
    proc = tmp_path / "proc" / "sys" / "vm"
    proc.mkdir(parents=True)
    (proc / "overcommit_memory").write_text("1\n")
    (tmp_path / "proc" / "meminfo").write_text(
        "MemTotal:       7340032 kB\nSwapTotal:      1048576 kB\n"
    )
    assert look(tmp_path) == Host(ram_gib=7.0, swap_gib=1.0, overcommit=1)
    assert look(tmp_path / "none") == Host()
    assert look().ram_gib == pytest.approx(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, rel=0.05
    )


def test_towers_cost(tmp_path: Path) -> None:
    text = planned(servekit.model(tmp_path / "t", servekit.E2B))
    seeing = planned(
        servekit.model(tmp_path / "s", servekit.E2B, whole={"vision_config": {"hidden_size": 768}}),
        "--max-num-seqs", "64",
    )  # fmt: skip
    assert text.budget.cache - seeing.budget.cache == memory.TOWERS_MIB * memory.MIB


def test_graph_sizes_are_vllms() -> None:
    """vllm/config/vllm.py:2398 says them in words."""
    sizes = memory.Settings(seqs=256).captured
    assert sizes[:5] == [1, 2, 4, 8, 16]
    assert sizes[-2:] == [496, 512]
    assert len(sizes) == 51
    assert memory.Settings(seqs=8).captured == [1, 2, 4, 8, 16]
    assert memory.Settings(seqs=1).captured == [1, 2]
    assert memory.Settings(seqs=8, graphs=False).captured == []
    assert memory.Settings(seqs=8, most_graph=4).captured == [1, 2, 4]


def test_the_program(tmp_path: Path) -> None:
    env = servekit.prefix(tmp_path / "env", "#!/bin/sh\n")
    assert place.program(env, {}) == env / "bin" / "vllm"
    assert place.program(None, {"CONDA_PREFIX": str(env)}) == env / "bin" / "vllm"
    with pytest.raises(UsageError, match="no environment is named"):
        place.program(None, {})
    with pytest.raises(UsageError, match="there is no"):
        place.program(tmp_path / "none", {})


def test_a_model_in_the_hubs_cache(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    entry = tmp_path / "hub" / "models--a--b"
    model = servekit.model(entry / "snapshots" / commit, servekit.LLAMA1)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(commit)
    assert place.model("a/b", {"HF_HUB_CACHE": str(tmp_path / "hub")}) == model
    assert place.model("a/b", {"HF_HOME": str(tmp_path)}) == model
    with pytest.raises(UsageError, match="not in Hugging Face's cache") as caught:
        place.model("a/c", {"HF_HOME": str(tmp_path)})
    assert "hf download a/c" in caught.value.fix
    (entry / "refs" / "main").write_text("../../..")
    with pytest.raises(UsageError, match="not in Hugging Face's cache"):
        place.model("a/b", {"HF_HOME": str(tmp_path)})
    assert place.model(str(model), {}) == model
    with pytest.raises(UsageError, match="is a file"):
        place.model(str(model / "config.json"), {})
    with pytest.raises(UsageError, match="there is no directory"):
        place.model("/no/such/dir", {})


@pytest.mark.parametrize(
    ("arguments", "url"),
    [((), "http://127.0.0.1:8000"), (("--port", "9"), "http://127.0.0.1:9"),
     (("--host", "0.0.0.0"), "http://127.0.0.1:8000"), (("--host", "::1"), "http://[::1]:8000"),
     (("--ssl-certfile", "c"), "https://127.0.0.1:8000")],
)  # fmt: skip
def test_the_address(arguments: tuple[str, ...], url: str) -> None:
    assert place.address(Given(arguments)) == url


def test_no_port() -> None:
    with pytest.raises(UsageError, match="is no port"):
        place.address(Given(("--port", "99999")))


def test_the_documentation_shows_what_is_said(tmp_path: Path) -> None:
    """The example of docs/serving.md: the language part of Gemma 4 E2B on a g5g.2xlarge."""
    directory = servekit.model(tmp_path / "m", servekit.E2B)
    found = make(Path("/opt/vllm/bin/vllm"), "/srv/model", directory, Given(()), environment={},
                 host=Host(ram_gib=15.4))  # fmt: skip
    page = (ROOT / "docs" / "serving.md").read_text()
    shown = page.partition("<!-- example -->\n```\n")[2].partition("\n```\n")[0]
    assert shown == "\n".join(found.lines())
