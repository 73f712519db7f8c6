"""Prompts that have so many tokens as the server counts, and that no cache knows.

A prompt is a row of words drawn at random. The words are chosen so that each costs the same,
whatever stands beside it; the server's own count of a few one-token answers says which do, and what
its template adds. A prompt is never sent twice: its first words differ from all before, so that no
cache of prefixes holds more than the template. Nothing measured was sent to count it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from sm75.errors import UsageError

Count = Callable[[str], Awaitable[int | None]]

# Common English words: with the space before them one token each in the vocabularies of most
# models. Those that are not are found out.
_WORDS_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end law car"
)
_WORDS = _WORDS_TEXT.split()
# Words that are counted together; enough groups for 8^12 beginnings and more.
_GROUP = 8
_FEWEST_GROUPS = 2
# The first words, by which prompts differ.
_BEGINNING = 12
_TRIES = 8


@dataclass(frozen=True, kw_only=True)
class Length:
    """How to write prompts of one length.

    Attributes:
        wanted: Tokens asked for.
        words: Words.
        tail: Characters right after them, where words cost more than one token.
        counted: Tokens as the server counted a trial; None where it does not count.
    """

    wanted: int
    words: int
    tail: str = ""
    counted: int | None = None


class Writer:
    """Writes prompts.

    Args:
        seed: The same gives the same prompts.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311
        self._begun: set[tuple[str, ...]] = set()
        self._words = _WORDS
        self._cost, self._template = 1, 0

    async def learn(self, count: Count) -> bool:
        """Find out which words cost the same, and what the template costs.

        Args:
            count: The server's count of a prompt, or None where it does not count.

        Returns:
            Whether the server counts.
        """
        first = _WORDS[0]
        alone = await count(first)
        if alone is None:
            return False
        groups = [_WORDS[n : n + _GROUP] for n in range(0, len(_WORDS), _GROUP)]
        good = [
            group
            for group in groups
            if ((await count(" ".join([first, *group]))) or 0) - alone == len(group)
        ]
        if len(good) >= _FEWEST_GROUPS:
            self._words, self._cost = [word for group in good for word in group], 1
        else:
            await self._learn_costs(count, first, alone)
        shorter = await count(self._words[0])
        if shorter is None:
            return False
        # What one word costs at the very beginning goes with the template.
        self._template = shorter - self._cost
        return True

    async def _learn_costs(self, count: Count, first: str, alone: int) -> None:
        costs = {}
        for word in _WORDS[: 4 * _GROUP]:
            costs[word] = ((await count(f"{first} {word}")) or 0) - alone
        common = Counter(cost for cost in costs.values() if cost > 0)
        # The cheaper, the closer to any length; of enough words.
        enough = sorted(cost for cost, words in common.items() if words >= _GROUP)
        self._cost = (enough or [cost for cost, _ in common.most_common(1)] or [1])[0]
        self._words = [word for word, cost in costs.items() if cost == self._cost] or _WORDS

    async def fit(self, wanted: int, count: Count) -> Length:
        """Find how many words make so many tokens, by counts of trials.

        Args:
            wanted: Tokens, with those of the template.
            count: As for :meth:`learn`.

        Returns:
            The length; ``counted`` is another number than ``wanted`` where it cannot be had.

        Raises:
            UsageError: The template alone has more.
        """
        words, rest = divmod(wanted - self._template, self._cost)
        if words < 2:
            raise UsageError(
                f"no prompt has {wanted} tokens",
                why=f"the server's template takes {self._template} by itself",
                fix=f"--prompt-tokens {self._template + 16 * self._cost}",
            )
        best = length = Length(wanted=wanted, words=words, tail="x" * rest)
        for _ in range(_TRIES):
            counted = await count(self.write(length))
            if counted is None:
                return replace(length, counted=None)
            length = replace(length, counted=counted)
            if best.counted is None or abs(wanted - counted) < abs(wanted - best.counted):
                best = length
            if counted == wanted:
                break
            more, rest = divmod(wanted - counted + len(length.tail), self._cost)
            length = replace(length, words=max(2, length.words + more), tail="x" * rest)
        return best

    def write(self, length: Length) -> str:
        """Write a prompt that was not written before."""
        size = min(length.words, _BEGINNING)
        for _ in range(1000):
            beginning = tuple(self._random.choices(self._words, k=size))
            if beginning not in self._begun:
                break
        else:
            raise UsageError(
                f"no new prompt of {length.wanted} tokens is left", fix="longer --prompt-tokens"
            )
        self._begun.add(beginning)
        words = [*beginning, *self._random.choices(self._words, k=length.words - size)]
        return " ".join(words) + length.tail
