"""Directories that are no model of vLLM's, or not the whole of one."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from sm75.errors import CheckFailed
from tests.unit import servekit
from tests.unit.commandkit import Runner
from tests.unit.test_doctor_model import asked
from tests.unit.test_serve_plan import planned


def refused(model: Path, *arguments: str) -> CheckFailed:
    with pytest.raises(CheckFailed) as error:
        planned(model, *arguments)
    return error.value


def test_an_adapter_alone(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "adapter_config.json").write_text("{}")
    servekit.write_file(model / "adapter_model.safetensors", {"a.weight": ("F16", [4, 4])})
    said = refused(model)
    assert said.what == f"{model} is a LoRA adapter, not a model"
    assert f"serve BASE -- --enable-lora --lora-modules NAME={model}" in said.fix


def test_an_adapter_beside_its_base_is_a_model(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    (model / "adapter_config.json").write_text("{}")
    planned(model)


@pytest.mark.parametrize(
    ("file", "says"),
    [("m-Q4_K_M.gguf", "GGUF"), ("consolidated.00.pth", "original form"), ("m.onnx", "ONNX"),
     ("tf_model.h5", "TensorFlow"), ("flax_model.msgpack", "Flax")],
)  # fmt: skip
@pytest.mark.parametrize("config", [True, False])
def test_weights_of_another_program(tmp_path: Path, file: str, says: str, config: bool) -> None:
    model = tmp_path / "m"
    model.mkdir()
    if config:
        (model / "config.json").write_text(json.dumps(servekit.LLAMA1))
    (model / file).write_bytes(b"x")
    said = refused(model)
    assert says in said.what
    assert file in said.why


def test_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    assert "is a diffusion pipeline" in refused(tmp_path).what


def test_mistrals_own_form(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    servekit.write_file(tmp_path / "consolidated.safetensors", {"a": ("F16", [4, 4])})
    said = refused(tmp_path)
    assert "is in Mistral's own form" in said.what
    assert "no config.json" in said.why


def test_no_tokenizer(tmp_path: Path, run: Runner) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    (model / "tokenizer.json").unlink()
    assert refused(model).what == f"{model} has no tokenizer"
    planned(model, "--tokenizer", "elsewhere")
    planned(model, "--skip-tokenizer-init")
    assert asked(run, model)[0]["says"].startswith(f"{model} has no tokenizer")
    (model / "tekken.json").write_text("{}")
    planned(model)


def test_layers_that_are_not_there(tmp_path: Path) -> None:
    tensors = servekit.text_tensors(servekit.LLAMA1)
    some = {name: entry for name, entry in tensors.items()
            if ".layers.1." not in name and ".layers.15." not in name}  # fmt: skip
    said = refused(servekit.model(tmp_path / "m", servekit.LLAMA1, some))
    assert "lack 2 layers of 16" in said.what
    assert "no tensor of layer 1, 15," in said.why
    # Of a model whose names are others nothing is concluded, nor of a tower's layers.
    other = {name.replace("model.layers", "net.block"): entry for name, entry in tensors.items()}
    planned(servekit.model(tmp_path / "o", servekit.LLAMA1, other))
    tower = {"vision_tower.layers.0.weight": ("F16", [8, 8])}
    planned(servekit.model(tmp_path / "t", servekit.LLAMA1, {**other, **tower}))


@pytest.mark.parametrize(("part", "says"), [(3, True), (40, False)])
def test_an_index_of_other_files(tmp_path: Path, part: int, says: bool) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1, files=2)
    index = model / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    names = list(data["weight_map"])
    file = data["weight_map"][names[0]]
    data["weight_map"] |= {f"stale.{n}": file for n in range(len(names) // part)}
    index.write_text(json.dumps(data))
    if says:
        said = refused(model)
        assert f"have {len(names)} of {len(data['weight_map'])} tensors" in said.what
        assert said.why == "missing: stale.0, stale.1, stale.2 …"
    else:
        planned(model)


@pytest.mark.parametrize(
    ("data", "says"), [(b"<html>404", "neither a zip archive nor a pickle"), (b"", "it is empty")]
)
def test_a_bin_that_torch_did_not_write(tmp_path: Path, data: bytes, says: str) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"
    file.write_bytes(data)
    assert says in refused(model).why
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    planned(model)
    file.write_bytes(b"\x80\x02}q")
    planned(model)


def test_doctor_and_serve_agree_on_embeddings(tmp_path: Path, run: Runner) -> None:
    config = {**servekit.QWEN4, "architectures": ["Qwen3ForSequenceClassification"]}
    model = servekit.model(tmp_path / "m", config)
    plan = planned(model)
    assert plan.cache is None
    assert "embeddings or scores take none" in "\n".join(plan.lines())
    lines = [line["says"] for line in asked(run, model) if line["name"] == "model"]
    assert lines[0] == (
        "fits by serve's sum: how many tokens fit is not told here: embeddings or scores take "
        "none, or another"
    )
    assert "there is no chat" in lines[1]


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "hf_quant_config.json", "modules.json"]
)
def test_deep_nesting(tmp_path: Path, name: str) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    (model / name).write_text("[" * 200_000)
    if name in ("config.json", "model.safetensors.index.json"):
        assert "nested too deeply" in refused(model).why
    else:
        planned(model)


@pytest.mark.parametrize("name", ["a.safetensors", "pytorch_model.bin"])
def test_weights_that_are_no_files(tmp_path: Path, name: str) -> None:
    """Reading a pipe would wait for ever."""
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    if name.endswith(".bin"):
        (model / "model.safetensors").unlink()
    os.mkfifo(model / name)
    assert refused(model).why == "it is no file"


def test_what_a_model_says_moves_no_cursor(tmp_path: Path, run: Runner) -> None:
    config = {**servekit.LLAMA1, "architectures": ["\x1b[2JEvil\x07"], "model_type": "\u202ex"}
    model = servekit.model(tmp_path / "m", config)
    said = run("serve", model, "--dry-run")
    assert r"no code of its own for \x1b[2JEvil\x07" in said.out
    assert not set("\x1b\x07\u202e") & set(said.out + said.err)
