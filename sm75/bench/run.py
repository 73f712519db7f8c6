"""The measurement: cases, warm-ups, repeats in changing order, what was seen on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sm75.bench.client import Client, Refused, Reply
from sm75.bench.prompts import Length, Writer
from sm75.errors import ServerError, UsageError
from sm75.health.client import BadAnswer
from sm75.progress import Reporter

# Tokens of the answers by which the server's abilities are found out.
_TRIAL_TOKENS = 4
# Prompts that are asked twice.
_AGAIN = 3
# Rounds in a row without one whole answer, after which the server is given up.
_HOPELESS = 3


@dataclass(frozen=True, order=True, kw_only=True)
class Case:
    """Lengths in tokens, and how many ask at once."""

    prompt: int
    output: int
    streams: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        prompts: Tokens of prompts, the template's among them.
        outputs: Tokens of answers.
        streams: How many ask at once.
        repeats: Measured rounds of each case.
        warmups: Rounds of each case before, which do not count.
        seed: Of prompts and order.
    """

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    streams: tuple[int, ...]
    repeats: int
    warmups: int
    seed: int

    def cases(self) -> list[Case]:
        """All combinations, in order."""
        return sorted(
            {
                Case(prompt=prompt, output=output, streams=streams)
                for prompt in self.prompts
                for output in self.outputs
                for streams in self.streams
            }
        )

    def requests(self) -> int:
        """How many are sent, without the few that find out how the server counts."""
        return sum(case.streams for case in self.cases()) * (self.repeats + self.warmups)

    def tokens(self) -> tuple[int, int]:
        """Tokens of these requests: of prompts, of answers."""
        rounds = self.repeats + self.warmups
        return (
            rounds * sum(case.streams * case.prompt for case in self.cases()),
            rounds * sum(case.streams * case.output for case in self.cases()),
        )


@dataclass(kw_only=True)
class Round:
    """So many questions at once, and what came of them."""

    replies: list[Reply] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the first question to the last event of the last answer."""
        return max(one.last for one in self.replies) - min(one.start for one in self.replies)


@dataclass(kw_only=True)
class Measured:
    """All that was seen.

    Attributes:
        counts: Whether the server counts tokens in its streams.
        exact: Whether it takes ``ignore_eos`` and ``min_tokens``.
        lengths: How prompts of each length are made.
        rounds: Of each case.
        again: Seconds to the first text of prompts, the least, and of the same prompts once more,
            the most.
        again_cached: Tokens that it took from its cache then, as it says.
        model: The model's name at the server.
    """

    model: str
    counts: bool = False
    exact: bool = False
    lengths: dict[int, Length] = field(default_factory=dict)
    rounds: dict[Case, list[Round]] = field(default_factory=dict)
    again: tuple[float, float] | None = None
    again_cached: int | None = None


async def measure(client: Client, plan: Plan, reporter: Reporter) -> Measured:
    """Measure.

    Args:
        client: The server; its wishes become what it takes.
        plan: What to measure.
        reporter: Told of each round.

    Raises:
        ServerError: No answer to the first question, or none any more.
        BadAnswer: Its first answer is none.
        UsageError: A prompt of a length cannot be made.
    """
    measured = Measured(model=client.model)
    writer = Writer(plan.seed)

    async def count(text: str) -> int | None:
        return (await client.ask(text, 1)).prompt_tokens

    task = reporter.task("bench", plan.requests(), "requests")
    task.message("how the server counts")
    measured.counts = await _abilities(client) is not None
    measured.exact = client.wishes.exact
    if measured.counts:
        measured.counts = await writer.learn(count)
    for wanted in plan.prompts:
        measured.lengths[wanted] = (
            await writer.fit(wanted, count)
            if measured.counts
            else Length(wanted=wanted, words=max(2, wanted))
        )
    longest = measured.lengths[max(plan.prompts)]
    await _again(client, measured, [writer.write(longest) for _ in range(_AGAIN)])
    cases = plan.cases()
    measured.rounds = {case: [] for case in cases}
    order = random.Random(plan.seed)  # noqa: S311
    hopeless = 0
    for number in range(-plan.warmups, plan.repeats):
        # In another order each time: what changes slowly must not fall on one case.
        for case in order.sample(cases, len(cases)):
            task.message(
                f"{case.prompt}+{case.output} x{case.streams}, "
                + ("warm-up" if number < 0 else f"round {number + 1} of {plan.repeats}")
            )
            length = measured.lengths[case.prompt]
            done = await _round(client, [writer.write(length) for _ in range(case.streams)],
                                case.output)  # fmt: skip
            if number >= 0:
                measured.rounds[case].append(done)
            task.advance(case.streams)
            hopeless = 0 if done.replies else hopeless + 1
            if hopeless >= _HOPELESS:
                raise ServerError(
                    f"no whole answer any more from {client.url}", why=done.faults[0],
                    fix="look at its log: python3 orchestrator.py explain LOG",
                )  # fmt: skip
    task.done()
    return measured


async def _abilities(client: Client) -> int | None:
    """Leave out of requests what the server does not take; its count of a trial answer."""
    while True:
        try:
            return (await client.ask("Count from one to ten.", _TRIAL_TOKENS)).completion_tokens
        except Refused as error:
            less = client.wishes.less() if error.status in (400, 422) else None
            if less is None:
                raise
            client.wishes = less


async def _again(client: Client, measured: Measured, prompts: Sequence[str]) -> None:
    """Ask the same things twice: are they known the second time?"""
    try:
        first = [await client.ask(prompt, 1) for prompt in prompts]
        second = [await client.ask(prompt, 1) for prompt in prompts]
    except (ServerError, BadAnswer):  # too long for it, say: the rounds will tell
        return
    measured.again = (min(one.ttft for one in first), max(one.ttft for one in second))
    measured.again_cached = max(
        (one.cached_tokens for one in second if one.cached_tokens is not None), default=None
    )


async def _round(client: Client, prompts: Sequence[str], tokens: int) -> Round:
    done = Round()
    asked = (client.ask(prompt, tokens) for prompt in prompts)
    for one in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(one, Reply):
            done.replies.append(one)
        elif isinstance(one, ServerError):
            done.faults.append(one.what + (f" ({one.why})" if one.why else ""))
        elif isinstance(one, BadAnswer):
            done.faults.append(str(one))
        else:
            raise one
    return done


def plan_of(
    prompts: str, outputs: str, streams: str, *, repeats: int, warmups: int, seed: int
) -> Plan:
    """A plan of lists as they are typed: ``128,1024``.

    Raises:
        UsageError: One is no list of numbers.
    """
    return Plan(
        prompts=_numbers("--prompt-tokens", prompts, 8, "128,1024"),
        # Two: between tokens there is nothing to measure in one.
        outputs=_numbers("--output-tokens", outputs, 2, "128,512"),
        streams=_numbers("--concurrency", streams, 1, "1,4,8"),
        repeats=repeats, warmups=warmups, seed=seed,
    )  # fmt: skip


def _numbers(option: str, text: str, least: int, such: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"{option} {text}: no list of numbers", fix=f"{option} {such}")
    numbers = tuple(dict.fromkeys(int(part) for part in parts))
    if min(numbers) < least:
        raise UsageError(f"{option} {text}: {least} is the least", fix=f"{option} {least}")
    return numbers
