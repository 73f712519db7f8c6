"""``explain``: what it says of a constraint, and of what it does not know."""

from __future__ import annotations

import pytest

from sm75 import constraints, explain
from sm75.explain import Explanation
from tests.unit.commandkit import Runner
from tests.unit.projectkit import ROOT


@pytest.mark.parametrize("name", constraints.NAMES)
def test_every_constraint_has_bound_reason_error_and_source(name: str) -> None:
    parts = explain.explain(ROOT, name).parts
    labels = {label for label, _ in parts}
    assert labels >= {"bound", "holds for", "why", "outside it", "source", "checked by"}
    assert all(text for _, text in parts)
    assert any(label == "in the lock" and "of vLLM 0.33.0" in text for label, text in parts)


def test_entries_of_one_name_stand_together() -> None:
    text = "\n".join(explain.explain(ROOT, "transformers").lines())
    assert "requirement:transformers of vLLM's tree" in text
    assert "<5.17" in text
    assert "vLLM <0.31" in text
    assert "{spec}" not in text


def test_the_run(run: Runner) -> None:
    told = run("explain", "vllm")
    assert told.code == 0
    assert "AmbiguousGlobalPerLayerAttributeError: 'head_dim'" in told.out
    assert run("explain", "vllm", "--json").json["subject"] == "constraint vllm"
    assert run("explain", "--json").json == sorted(constraints.NAMES)
    assert "constraints: cuda, driver" in run("explain").out


@pytest.mark.parametrize("typed", ["vLLM", "VLLM", "Transformers"])
def test_a_name_is_known_however_it_is_written(run: Runner, typed: str) -> None:
    told = run("explain", typed)
    assert told.code == 0
    assert told.out == run("explain", typed.lower()).out


def test_what_is_not_known_is_said_with_what_is(run: Runner) -> None:
    told = run("explain", "Trnsformers")
    assert told.code == 2
    assert "explain transformers" in told.err
    assert "Traceback" not in told.err


def test_another_explainer_takes_what_is_no_constraint(
    monkeypatch: pytest.MonkeyPatch, run: Runner
) -> None:
    """As the one of logs will."""
    found = Explanation(subject="a log", parts=(("says", "nothing"),))
    further = (explain.of_constraint, lambda root, subject: found if "." in subject else None)
    monkeypatch.setattr(explain, "EXPLAINERS", further)
    assert "a log" in run("explain", "build.log").out
    assert "constraint cuda" in run("explain", "cuda").out


@pytest.mark.parametrize(
    "arguments",
    [
        ("lock", "--torch", "2.12.0"),
        ("lock", "--dry-run"),
        ("lock", "--no-closure"),
        ("lock", "--vllm", "0.33.0", "--check"),
        ("lock", "--vllm", "0.33.0", "--tools"),
        ("lock", "--vllm", "0.33.0", "--release", "0.33.0"),
        ("lock", "--vllm", "newest", "--no-closure"),
    ],
)
def test_options_of_lock_that_do_not_go_together(run: Runner, arguments: tuple[str, ...]) -> None:
    told = run(*arguments)
    assert told.code == 2
    assert told.err.startswith("error: ")
