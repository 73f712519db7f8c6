"""What ``health`` said in one run, and the figures of several."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

from sm75.health import text
from tests.realserver.cases import Case

# Of a round of ``health``.
QUESTIONS = 3


@dataclass(frozen=True, kw_only=True)
class Told:
    """One run of ``health``.

    Attributes:
        code: Its exit code.
        seconds: That it took, the start of Python included.
        data: What it says as JSON.
    """

    code: int
    seconds: float
    data: dict[str, Any]

    @property
    def by_text(self) -> bool:
        """Whether an answer's text alone, without knowing the right one, is seen to be broken."""
        said = [one["answer"] for one in self.data.get("questions", [])]
        return any(text.faults(answer) for answer in said if answer is not None)


def summary(runs: list[Told], expected: int) -> dict[str, Any]:
    """The figures of some runs that should end alike."""
    seconds = sorted(run.seconds for run in runs)
    answers = [q for run in runs for q in run.data.get("questions", [])]
    wrong = [run.data.get("verdict") for run in runs if run.code != expected]
    return {
        "runs": len(runs),
        "expected_exit_code": expected,
        "exit_codes": dict(sorted(Counter(str(run.code) for run in runs).items())),
        "right": sum(run.code == expected for run in runs),
        "seen_by_text_alone": sum(run.by_text for run in runs),
        "answers_with_faults": [
            sum(bool(q["faults"]) for q in answers[place::QUESTIONS]) for place in range(QUESTIONS)
        ],
        "different_answers": len({q["answer"] for q in answers}),
        "an_example": [q["answer"] for q in runs[0].data.get("questions", [])],
        "seconds": {
            "least": round(seconds[0], 2),
            "median": round(statistics.median(seconds), 2),
            "most": round(seconds[-1], 2),
        },
        **({"wrong": wrong[:5]} if wrong else {}),
    }


def faulty(case: Case, runs: list[Told]) -> dict[str, Any]:
    """The figures of a case."""
    good = [run.code == case.code and case.says in str(run.data.get("verdict")) for run in runs]
    print(f"{case.name}: {sum(good)} of {len(good)} right", flush=True)
    return {
        "expected_exit_code": case.code,
        "exit_codes": [run.code for run in runs],
        "runs": len(runs),
        "right": sum(good),
        "verdict": _local(str(runs[-1].data.get("verdict"))),
        "most_seconds": round(max(run.seconds for run in runs), 2),
    }


def _local(said: str) -> str:
    """Without the port, which is another each time."""
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", said)
