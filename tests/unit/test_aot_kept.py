"""Variants kept from an earlier run: what is not as it was written is compiled again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sm75.aot import kept, lower, manifest, plan, worker
from sm75.aot.lower import Tools
from sm75.progress import SilentReporter
from tests.unit import test_aot

FACTS = {"entry": "k", "ptx": "ptx", "cubin": "aa00", "shared": 1, "extra": 0, "registers": 2,
         "spills": 0, "mma": 3}  # fmt: skip


def _machine_code(text: str) -> str:
    return text.replace("aa00", "aa01")


@pytest.mark.parametrize(
    "damage",
    [lambda _: "", lambda t: t[:-9], lambda _: "[]", lambda _: "null", lambda _: "7",
     lambda _: '{"entry": 1}', lambda _: "[" * 200_000, lambda _: "\udcff", _machine_code,
     lambda _: json.dumps(FACTS)],
)  # fmt: skip
def test_what_is_not_as_it_was_written_is_not_there(
    tmp_path: Path, damage: Callable[[str], str]
) -> None:
    path = tmp_path / "k" / "one.json"
    assert kept.load(path) is None
    kept.save(path, FACTS)
    assert kept.load(path) == FACTS
    path.write_text(damage(path.read_text()), errors="surrogateescape")
    assert kept.load(path) is None


def test_it_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but Triton and ptxas are real: which variants are asked for, and what is packed."""
    (wanted,) = plan.plan([test_aot.launch()], _plain(test_aot.MANIFEST))
    asked: list[list[str]] = []

    def work(root: Path, python: Path, request: Any) -> Any:
        asked.append([one["id"] for one in request["variants"]])
        for one in request["variants"]:
            yield {"id": one["id"], "entry": "k", "ptx": "ptx", "shared": 1, "extra": 0}

    class Adapted:
        def __enter__(self) -> tuple[Path, str]:
            return tmp_path, "digest"

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(lower, "_work", work)
    monkeypatch.setattr(lower, "launches", lambda *_: [test_aot.launch()])
    monkeypatch.setattr(lower, "adapted", lambda *_: Adapted())
    monkeypatch.setattr(lower, "assemble", lambda *_: (b"code", 2, 0))
    tools = Tools(python=Path("p"), ptxas=Path("x"), disassembler=[], triton="3", toolkit="1")

    def compile_() -> list[bytes]:
        made = lower.compile_all(
            tmp_path, tmp_path, _plain(test_aot.MANIFEST), tools, tmp_path / "kept",
            SilentReporter(),
        )  # fmt: skip
        return [one.cubin for one in made]

    assert compile_() == compile_() == [b"code"]
    assert asked == [[wanted.identity]]
    (path,) = (tmp_path / "kept").iterdir()
    text = path.read_text()
    for damaged in (text[:50], text.replace(b"code".hex(), b"evil".hex())):
        path.write_text(damaged)
        asked.clear()
        assert compile_() == [b"code"]
        assert asked == [[wanted.identity]]
        assert path.read_text() == text


def _plain(made: manifest.Manifest) -> manifest.Manifest:
    """Without tuning: one variant a launch."""
    return msgspec.structs.replace(made, tuning=())


def test_each_variant_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dies is said, and holds nobody up."""

    def lower_(variant: dict[str, Any]) -> dict[str, Any]:
        if variant["id"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if variant["id"] == "gone":
            os._exit(3)
        return {"id": variant["id"], "process": os.getpid(), "ptx": "x" * 500_000}

    monkeypatch.setattr(worker, "lower", lower_)
    names = ["a", "killed", "b", "gone", *(f"v{n}" for n in range(20))]
    for jobs in (1, 3, 50):
        events = {event["id"]: event for event in worker.each([{"id": n} for n in names], jobs)}
        assert set(events) == set(names)
        assert events.pop("killed")["failed"] == "its process ended with code -9"
        assert events.pop("gone")["failed"] == "its process ended with code 3"
        assert len({event["process"] for event in events.values()} - {os.getpid()}) == len(events)
    assert list(worker.each([], 2)) == []
