"""Ask the questions, judge the answers, say whether the server is well."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sm75.errors import CheckFailed, ServerError, UsageError
from sm75.health import advice, text
from sm75.health.client import Answer, BadAnswer, KeyRefused, Server
from sm75.health.questions import Question, choose
from sm75.words import counted

# Seconds between tries of ``wait``.
_PAUSE = 2.0
_SHOWN = 120


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A question, what was said, and what is wrong with that.

    Attributes:
        question: The question.
        answer: What was said; nothing, when it was no answer.
        faults: Empty for a good answer.
    """

    question: str
    answer: Answer | None
    faults: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Health:
    """How a server is.

    Attributes:
        url: The server.
        model: The model that was asked.
        judged: All questions; those after a missing answer are not asked.
        silent: Why there was no answer; empty when there were answers.
        refused: Whether the key was refused, so that nothing is known of the server.
        next: What to do; empty when it is well.
    """

    url: str
    model: str
    judged: tuple[Judged, ...]
    silent: str = ""
    refused: bool = False
    next: str = ""

    @property
    def well(self) -> bool:
        return not self.silent and all(not one.faults for one in self.judged)

    @property
    def exit_code(self) -> int:
        """0: well; 1: it says nonsense; 2: the key is refused; 11: it does not answer."""
        if self.well:
            return 0
        if self.refused:
            return UsageError.exit_code
        return ServerError.exit_code if self.silent else CheckFailed.exit_code

    def lines(self) -> list[str]:
        """For people: one line a question, the verdict, and what to do."""
        found = []
        for one in self.judged:
            said = _short(one.answer.text) if one.answer else "no answer"
            found.append(f"  {'fail' if one.faults else 'ok  '}  {one.question}  ->  {said}")
            found += [f"        {fault}" for fault in one.faults]
        found.append(f"health: {self.url} {self.verdict}")
        if self.next:
            found.append(f"  next: {self.next}")
        return found

    @property
    def verdict(self) -> str:
        """In one line."""
        if self.silent:
            return f"does not answer: {self.silent}"
        if self.refused:
            return f"lets nobody in with this key: {self.judged[-1].faults[0]}"
        bad = [one for one in self.judged if one.faults]
        if bad:
            return f"is NOT well: {bad[0].faults[0]}"
        slowest = max((one.answer.seconds for one in self.judged if one.answer), default=0.0)
        answers = counted(len(self.judged), "answer")
        return f"is well ({answers} read, the slowest took {slowest:.1f} s)"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "url": self.url,
            "model": self.model,
            "well": self.well,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "next": self.next,
            "questions": [
                {
                    "question": one.question,
                    "answer": one.answer.text if one.answer else None,
                    "finish_reason": one.answer.finish if one.answer else None,
                    "seconds": round(one.answer.seconds, 3) if one.answer else None,
                    "faults": list(one.faults),
                }
                for one in self.judged
            ],
        }


def judge(question: Question, answer: Answer) -> tuple[str, ...]:
    """Say what is wrong with an answer.

    Args:
        question: The question.
        answer: What was said.
    """
    found = text.faults(answer.text)
    good = ("stop", "length") if question.may_be_cut else ("stop",)
    if answer.finish not in good:
        why = {
            "": "the server does not say why it ended",
            "length": f"it did not end within {counted(question.max_tokens, 'token')}",
        }.get(answer.finish, f"it ended by '{answer.finish}'")
        found.append(f"finish_reason: {why}; expected {' or '.join(good)}")
    if not question.right(answer.text):
        found.append(f"it is not the answer: expected {question.expected}")
    return tuple(found)


def check(
    server: Server, *, model: str = "", questions: Sequence[Question] | None = None
) -> Health:
    """Ask a server all questions.

    Args:
        server: The server.
        model: The model; default: the first one that it lists.
        questions: What to ask; default: :func:`questions.choose`.
    """
    judged: list[Judged] = []
    silent, fix, refused = "", "", False
    try:
        model = model or server.model()
        for question in choose() if questions is None else questions:
            try:
                answer = server.chat(model, question)
            except BadAnswer as error:
                judged.append(Judged(question=question.text, answer=None, faults=(str(error),)))
                fix, refused = fix or error.fix, isinstance(error, KeyRefused)
                if refused:
                    break
                continue
            faults = judge(question, answer)
            judged.append(Judged(question=question.text, answer=answer, faults=faults))
    except ServerError as error:
        silent, fix = error.what + (f" ({error.why})" if error.why else ""), error.fix
    except BadAnswer as error:
        judged.append(Judged(question="which models are there?", answer=None, faults=(str(error),)))
        fix, refused = error.fix, isinstance(error, KeyRefused)
    return Health(
        url=server.url, model=model, judged=tuple(judged), silent=silent, refused=refused,
        next=fix or _advice(judged),
    )  # fmt: skip


def _advice(judged: Sequence[Judged]) -> str:
    bad = [one for one in judged if one.faults]
    if not bad:
        return ""
    return advice.of_nonsense(cut=any(one.answer and one.answer.finish == "length" for one in bad))


def wait(
    ask: Callable[[], Health],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Health:
    """Ask until the server answers at all, or the time is over. Nonsense is not waited for.

    Args:
        ask: Asks once.
        seconds: How long; 0: once.
        clock: Monotonic seconds.
        sleep: Sleeps.
    """
    end = clock() + seconds
    while True:
        health = ask()
        if not health.silent or clock() >= end:
            return health
        sleep(min(_PAUSE, max(0.0, end - clock())))


def watch(
    ask: Callable[[], Health],
    say: Callable[[Health], None],
    *,
    interval: float,
    failures: int,
    rounds: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> Health:
    """Ask again and again; end after so many failures in a row.

    Args:
        ask: Asks once.
        say: Told the first verdict and each that is another than the one before.
        interval: Seconds between the end of one round and the next.
        failures: How many in a row end it.
        rounds: End after that many; 0: never.
        sleep: Sleeps.

    Returns:
        The last verdict.
    """
    failed, done, before = 0, 0, None
    while True:
        health = ask()
        done += 1
        failed = 0 if health.well else failed + 1
        state = (health.exit_code, () if health.well else health.verdict)
        if state != before:
            say(health)
            before = state
        if failed >= failures or done == rounds:
            return health
        sleep(interval)


def _short(said: str) -> str:
    flat = " ".join(said.split())
    return flat if len(flat) <= _SHOWN else flat[: _SHOWN - 1] + "…"
