"""``explain LOG`` where a log repeats what users and models said: silent there, and only there."""

from __future__ import annotations

import io
import json
import tomllib
from collections.abc import Callable
from typing import Any

import pytest

from sm75.explain import knowledge, lines, scan, speech
from tests.unit.projectkit import ROOT

DATA = ROOT / "tests" / "data" / "logs"
BASE = knowledge.load()
SHAPES: list[dict[str, Any]] = tomllib.loads((DATA / "shapes.toml").read_text())["shape"]
SHAPES = [shape for shape in SHAPES if not shape.get("alone")]
TEXTS = [shape["log"].strip("\n") for shape in SHAPES]
PASTED = (
    "my server says: Traceback (most recent call last):\n"
    "ERROR 07-28 15:07:22 [core.py:632] RuntimeError: CUDA error: no kernel image is available "
    "for execution on the device\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 14.00 GiB. GPU 0 has a total "
    "capacity of 14.56 GiB of which 9.00 GiB is free.\n"
    "Killed\n"
    'why, and don\'t say "reboot"?'
)
_PLACE = "(APIServer pid=812) {} 12-01 10:00:00 [{}] "
_INFO = _PLACE.format("INFO", "request_logger.py:66")
_DEBUG = _PLACE.format("DEBUG", "entrypoints/.../utils/request_logger.py:56")


def _each_line(prefix: str, text: str) -> str:
    """As vllm/logging_utils/formatter.py does."""
    return prefix + text.replace("\n", "\r\n" + prefix)


def _body(text: str) -> str:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], "n": 1})


# The writers: vLLM 0.33.0's request lines and older ones, JSON records, other programs' lines.
ONE_LINE: dict[str, Callable[[str], str]] = {
    "details": lambda t: f"{_DEBUG}Request chatcmpl-1 details: prompt: {t!r}, "
    "prompt_token_ids: [2], prompt_embeds shape: None.",
    "before-0.10": lambda t: "INFO 08-02 11:13:49 [logger.py:40] Received request chatcmpl-1: "
    f"prompt: {t!r}, params: SamplingParams(n=1), lora_request: None.",
    "before-0.8": lambda t: f"INFO 08-02 11:13:49 logger.py:36] Received request 1: prompt: {t!r}",
    "body": lambda t: f"{_INFO}Request chatcmpl-1 JSON body: {_body(t)}",
    "body-as-warning": lambda t: _PLACE.format("WARNING", "request_logger.py:84")
    + f"Request chatcmpl-1 JSON body: {_body(t)}",
    "body-cut": lambda t: f"{_INFO}Request chatcmpl-1 JSON body: {_body(t)[:-8]}",
    "answer": lambda t: f"{_INFO}Generated response chatcmpl-1 (streaming complete): "
    f"output: {t!r}, finish_reason: stop",
    "response": lambda t: _PLACE.format("INFO", "x.py:1") + f"response_body={{{_body(t)}}}",
    "record": lambda t: json.dumps(
        {"asctime": "2026-12-01 10:00:00,123", "levelname": "INFO", "name": "vllm.x",
         "processName": "MainProcess", "process": 8, "message": f"Received request c-1: {t}"}
    ),
    "docker": lambda t: json.dumps({"log": f"{_INFO}prompt: {t!r}\n", "stream": "stderr"}),
    "kubernetes": lambda t: f"2026-12-01T10:00:00.123456789Z stderr F {_INFO}prompt: {t!r}",
    "any-message": lambda t: f"{_INFO}{t!r}",
    "uvicorn": lambda t: f"INFO:     prompt={t!r}",
    "logging": lambda t: f"2026-12-01 10:00:00,123 - app - INFO - messages={[{'content': t}]!r}",
    "basic": lambda t: f"DEBUG:openai._base_client:Request options: {_body(t)}",
    "loguru": lambda t: f"2026-12-01 10:00:00.123 | INFO     | app:main:7 - question: {t!r}",
}  # fmt: skip
SEVERAL: dict[str, Callable[[str], str]] = {
    "prefixed": lambda t: _each_line(_INFO, f"Received request chatcmpl-1: prompt: {t}"),
    "raw": lambda t: f'2026-12-01 10:00:00,123 INFO app prompt: "{t}", user: 7',
    "raw-at-the-end": lambda t: f"INFO:app:question = '{t}'",
}
WRITERS = ONE_LINE | SEVERAL


def found(text: str) -> list[tuple[str, int]]:
    report = scan.scan(io.BytesIO(text.encode()), BASE)
    return [(finding.entry.id, finding.number) for finding in report.findings]


def test_the_samples_are_failures_where_nobody_said_them() -> None:
    assert {entry for entry, _ in found(PASTED)} == {
        "no-kernel-image",
        "cuda-memory",
        "killed-serve",
    }


@pytest.mark.parametrize("writer", ONE_LINE)
def test_no_failure_in_what_was_said(writer: str) -> None:
    for text in [PASTED, *TEXTS]:
        assert found(f"fine\n{WRITERS[writer](text)}\nfine\n") == [], text


def test_several_lines_of_what_was_said() -> None:
    assert found(SEVERAL["prefixed"](PASTED)) == []
    # Where nothing marks its lines, a text that has vLLM's own prefix is taken for vLLM's.
    text = "\n".join(line for line in PASTED.splitlines() if not line.startswith("ERROR "))
    assert found(SEVERAL["raw"](text)) == []
    assert found(SEVERAL["raw-at-the-end"](text)) == []


@pytest.mark.parametrize("writer", WRITERS)
def test_failures_behind_what_was_said_are_found(writer: str) -> None:
    server = "INFO 12-01 09:59:58 [api_server.py:1] vLLM API server version 0.33.0\n"
    said = server + WRITERS[writer]("CUDA out of memory.\nKilled\n") + "\n"
    for shape, text in zip(SHAPES, TEXTS, strict=True):
        place = said.count("\n") + shape.get("line", 1)
        assert found(said + text + "\n" + said) == [(shape["entry"], place)]
    error = "(EngineCore pid=9) ERROR 12-01 10:00:01 [core.py:9] RuntimeError: Could not find nvcc"
    assert found(said + error) == [("nvcc-missing", said.count("\n") + 1)]


def test_the_outer_level_counts() -> None:
    inner = "ERROR 12-01 10:00:01 [core.py:9] RuntimeError: Could not find nvcc"
    assert found(f"INFO 12-01 10:00:00 [a.py:1] {inner}") == []
    assert found(f"vllm-1  | (EngineCore pid=9) {inner}") == [("nvcc-missing", 1)]
    assert found(f"WARNING 12-01 10:00:00 [a.py:1] {inner}") == [("nvcc-missing", 1)]


def test_vllms_next_line_ends_a_quotation() -> None:
    error = "(EngineCore pid=9) RuntimeError: Could not find nvcc\n"
    assert found(f"INFO:app:prompt: 'it begins\nRuntimeError: Could not find nvcc\n{error}") == [
        ("nvcc-missing", 3)
    ]


def test_what_another_program_calls_info_counts_unless_it_is_said() -> None:
    """Supervisors call all of a program's output INFO."""
    assert found("INFO: RuntimeError: Could not find nvcc") == [("nvcc-missing", 1)]
    assert found("INFO: user's prompt: RuntimeError: Could not find nvcc") == []


@pytest.mark.parametrize("writer", ["details", "body", "any-message", "record"])
def test_a_prompt_longer_than_a_piece(writer: str) -> None:
    text = "x" * (lines.PIECE - 40) + " RuntimeError: Could not find nvcc " + "y" * 3 * lines.PIECE
    said = WRITERS[writer](text + " CUDA out of memory. " + "z" * lines.PIECE) + "\n"
    assert found(said * 3) == []
    assert found(said * 3 + "RuntimeError: Could not find nvcc") == [("nvcc-missing", 4)]


def test_a_prompt_across_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins in one batch of lines goes on in the next, with a word of failures or without."""
    monkeypatch.setattr(scan, "_BATCH", 2)
    text = "INFO:app:prompt: 'a\nb\nc\nd\ne\nKilled\nRuntimeError: Could not find nvcc\nf'\n"
    assert found(text) == []
    assert found(text + "Killed\n") == [("killed", 9)]


def test_a_quotation_without_end_hides_no_more_than_its_share() -> None:
    opened = "INFO:app:prompt: 'it begins\n"
    inside = "\n" * (speech._MOST_LINES - 2)
    assert found(opened + inside + "Killed\n") == []
    assert found(opened + "\n" + inside + "Killed\n") == [("killed", speech._MOST_LINES + 1)]
