"""``doctor --model``: serve's sum and its looks at the files, as doctor's lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sm75.errors import CheckFailed, UsageError
from sm75.serve import start
from tests.unit import servekit
from tests.unit.commandkit import Runner

Line = dict[str, Any]


def asked(run: Runner, model: Path | str) -> list[Line]:
    """The lines of the model, after those of the machine."""
    ended = run("doctor", "--path", "/none", "--model", model, "--json")
    lines: list[Line] = json.loads(ended.out)["lines"]
    names = [line["name"] for line in lines]
    last = len(names) - 1 - names[::-1].index("environment")
    return lines[last + 1 :]


def test_a_model_that_fits(run: Runner, tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.E2B)
    lines = asked(run, model)
    assert [(line["name"], line["status"]) for line in lines[:2]] == [
        ("weights", "ok"), ("model", "ok")]  # fmt: skip
    assert lines[0]["says"].startswith("8.7 GiB in 1 file; on the card 8,864 MiB of ")
    plan = start.plan(str(model), (), prefix=None, environment={}, dry_run=True)
    assert f"requests of {plan.length:,} tokens" in lines[1]["says"]
    assert lines[2]["name"] == "RAM for it"


def test_ram_that_is_too_small(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text("MemTotal:       7969177 kB\nSwapTotal:            0 kB\n")
    monkeypatch.setattr(start, "look", lambda: hosts(tmp_path))
    lines = asked(run, servekit.model(tmp_path / "m", servekit.E2B))
    ram = [line for line in lines if line["name"] == "RAM for it"]
    assert [line["status"] for line in ram] == ["warn", "warn"]
    assert "slow, and untested" in ram[0]["says"]
    assert "Linux refuses" in ram[1]["says"]
    assert all(line["fix"] for line in ram)


def hosts(system: Path) -> Any:
    from sm75.serve import host

    return host.look(system)


def large(directory: Path) -> Path:
    """Weights of 15.0 GiB exactly, the card's whole memory."""
    return servekit.model(directory, servekit.LLAMA1, {"model.x": ("F16", [15 << 29])})


def cut(directory: Path) -> Path:
    model = servekit.model(directory, servekit.LLAMA1)
    with (model / "model.safetensors").open("r+b") as stream:
        stream.truncate(1 << 20)
    return model


def pointer(directory: Path) -> Path:
    model = servekit.model(directory, servekit.LLAMA1)
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    return model


def empty(directory: Path) -> Path:
    model = servekit.model(directory, servekit.LLAMA1)
    (model / "model.safetensors").unlink()
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [(large, "does not fit the card: weights 15,360 MiB of the card's 15,360"),
     (cut, "is damaged: it has 1,048,576 bytes"), (pointer, "Git LFS pointer"),
     (empty, "has no weights")],
)  # fmt: skip
def test_serves_refusals_are_doctors(run: Runner, tmp_path: Path, make: Any, says: str) -> None:
    model = make(tmp_path / "m")
    with pytest.raises((CheckFailed, UsageError)) as caught:
        start.plan(str(model), (), prefix=None, environment={}, dry_run=True)
    [line] = asked(run, model)
    assert (line["name"], line["status"], line["fix"]) == ("model", "fail", caught.value.fix)
    assert line["says"].startswith(caught.value.what)
    assert says in line["says"]
    assert "\n" not in line["says"]
    assert run("doctor", "--path", "/none", "--model", model).code == 1


def test_an_id_of_the_hub(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    entry = tmp_path / "hub" / "models--a--b"
    servekit.model(entry / "snapshots" / commit, servekit.LLAMA1)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert asked(run, "a/b")[0]["says"].startswith("2.3 GiB in 1 file")
    ended = run("doctor", "--path", "/none", "--model", "a/c")
    assert (ended.code, ended.out) == (2, "")
    assert "hf download a/c" in ended.err


def test_no_such_directory(run: Runner, tmp_path: Path) -> None:
    assert run("doctor", "--model", tmp_path / "gone").code == 2


def test_variables_have_lines_of_their_own(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hidden GPU is said once, and the model is looked at all the same."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    assert asked(run, servekit.model(tmp_path / "m", servekit.LLAMA1))[0]["name"] == "weights"
