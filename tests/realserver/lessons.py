"""What the sane model is taught, and the text that the tokenizer is made of.

The questions are those of ``health`` (``sm75/health/questions.py``) and other wordings of them. The
answers are sane ones of ``tests/data/health/answers.toml``; those to sums follow its forms. Before
the questions of Paris and the sky a system message can ask for one of ``MANNERS`` manners, so that
one model gives every answer of that file.

This part needs no torch; ``make.py`` reads what :func:`write` wrote.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sm75.health.questions import HIGHEST, LOWEST, SUM, choose
from tests.unit import healthcorpus

_SUMS = (
    "{n}",
    "{n}.",
    "**{n}**",
    "The answer is {n}.",
    "{a} + {b} = {n}",
    "Sure! {a} + {b} equals **{n}**.",
    "${a} + {b} = {n}$",
)
_SUM_WORDINGS = (SUM, "How much is {a} + {b}?", "Please add {a} and {b}.")
_FRANCE_WORDINGS = ("Which city is the capital of France?", "Name the capital of France.")
_SKY_WORDINGS = ("Why is the sky blue?", "Tell me in a few words why the sky looks blue.")
# Where in answers.toml the answers to which question are.
_PARIS, _SKY = slice(8, 14), slice(18, None)
MANNERS = len(healthcorpus.written()[_SKY])


@dataclass(frozen=True)
class Lesson:
    """One question with the answer that is taught.

    Attributes:
        system: The system message; empty for none.
        question: The user's message.
        answer: What the model is to say.
    """

    system: str
    question: str
    answer: str


def manner(number: int) -> str:
    """The system message that asks for a manner of answering."""
    return f"Answer in manner {chr(ord('A') + number % MANNERS)}."


def sums() -> list[Lesson]:
    """Every sum that ``health`` can ask, and one in five of them in two other wordings."""
    found = []
    for a in range(LOWEST, HIGHEST + 1):
        for b in range(LOWEST, HIGHEST + 1):
            answer = _SUMS[a % len(_SUMS)].format(a=a, b=b, n=a + b)
            wordings = _SUM_WORDINGS if (a + b) % 5 == 0 else (SUM,)
            found += [Lesson("", wording.format(a=a, b=b), answer) for wording in wordings]
    return found


def prose() -> list[Lesson]:
    """The other two questions, without a system message and in every manner."""
    written = healthcorpus.written()
    paris, sky = written[_PARIS], written[_SKY]
    _, france, blue = (question.text for question in choose(0))
    found = [Lesson("", wording, paris[n + 1]) for n, wording in enumerate(_FRANCE_WORDINGS)]
    found += [Lesson("", wording, sky[n + 1]) for n, wording in enumerate(_SKY_WORDINGS)]
    found += [Lesson("", france, paris[1]), Lesson("", blue, sky[0])]
    for number in range(MANNERS):
        found.append(Lesson(manner(number), france, paris[number % len(paris)]))
        found.append(Lesson(manner(number), blue, sky[number]))
    return found


def _taught() -> dict[str, list[list[str]]]:
    return {
        name: [[one.system, one.question, one.answer] for one in made]
        for name, made in (("sums", sums()), ("prose", prose()))
    }


def write(out: Path) -> None:
    """Write lessons and the tokenizer's text as JSON."""
    data = {**_taught(), "text": healthcorpus.prose()}
    out.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def same(written: Path) -> bool:
    """Whether these lessons were written there; the text, prose of the docs, may differ."""
    there = json.loads(written.read_text(encoding="utf-8"))
    return all(there.get(name) == rows for name, rows in _taught().items())
