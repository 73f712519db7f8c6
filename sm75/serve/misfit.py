"""Why a model does not fit, with the arithmetic, and what would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from sm75.errors import CheckFailed, UsageError
from sm75.serve.choose import LEAST, Asked, Case, Choice, choose
from sm75.serve.flags import Given
from sm75.serve.memory import MIB
from sm75.serve.shape import Shape

# GPUs of the largest g5g, and their names (https://aws.amazon.com/ec2/instance-types/g5g/).
MOST_GPUS, _LARGEST = 2, "g5g.16xlarge or g5g.metal"
# Cards that are reckoned with, to say how many it would take.
_CARDS = 64
# The flags that can be why it does not fit, by what Asked calls them.
_FLAGS = {
    "share": "--gpu-memory-utilization", "seqs": "--max-num-seqs", "length": "--max-model-len",
    "batched": "--max-num-batched-tokens", "graph": "--max-cudagraph-capture-size",
}  # fmt: skip


def refuse(case: Case, choice: Choice, given: Given) -> None:
    """Refuse what does not fit; blame the user's own flags where they are why.

    Args:
        case: The model and the card.
        choice: What came of the flags.
        given: They, as they were typed.

    Raises:
        CheckFailed: It does not fit.
    """
    if choice.fits:
        return
    asked = choice.asked
    mine = [name for name in _FLAGS if getattr(asked, name)]
    for many in range(1, len(mine) + 1):
        for names in combinations(mine, many):
            if choose(case, _without(asked, names)).fits:
                raise _blamed(case, choice, given, names)
    # Without the user's flags it does not fit either; what more cards hold is said without them.
    cards, bare = asked.tensor * asked.stages, _without(asked, mine)
    one, each = ("the card", "the") if cards == 1 else (f"{cards} cards", "each")
    why = f"weights {choice.weights / MIB:,.0f} MiB of {each} card's {case.card_mib:,}; "
    more = list(_more_cards(case, bare))
    fewest = next((number for number, fits, _ in more if fits), 0)
    fix = "take a smaller or a 4-bit checkpoint (AWQ, GPTQ)"
    if 0 < fewest <= MOST_GPUS and asked.stages == 1:
        fix += f"; or on a {_LARGEST}, which have {MOST_GPUS} GPUs: -- --tensor-parallel-size "
        fix += str(fewest)
    else:
        fix += f"; it would take {fewest} GPUs" if fewest else ""
        fix += f"{', and' if fewest else ';'} no g5g has more than {MOST_GPUS}"
    if choice.budget.at_most > 0:
        fix += f"; to try it all the same: -- --max-model-len {LEAST} --enforce-eager"
    lines = [why + _left(choice), _table(choice), *(f"        {line}" for _, _, line in more)]
    if mine:
        typed = ", ".join(f"{_FLAGS[name]} {given.value(_FLAGS[name])}" for name in mine)
        lines.append(
            f"        the GPUs without {typed}: the model is too large for the card anyway"
        )
    raise CheckFailed(f"the model does not fit {one}", why="\n".join(lines), fix=fix)


def _without(asked: Asked, names: Sequence[str]) -> Asked:
    return _with(asked, **dict.fromkeys(names, 0))


def _with(asked: Asked, **changes: Any) -> Asked:
    return replace(asked, **changes)


def _blamed(case: Case, choice: Choice, given: Given, names: tuple[str, ...]) -> CheckFailed:
    """The words where flags of the user's are why."""
    asked, free = choice.asked, choose(case, _without(choice.asked, names))
    what = " and ".join(f"{_FLAGS[name]} {given.value(_FLAGS[name])}" for name in names)
    good = {
        "share": free.budget.share, "seqs": free.settings.seqs, "length": free.length,
        "batched": free.settings.batched, "graph": max(free.settings.captured, default=1),
    }  # fmt: skip
    fix = "--" + "".join(f" {_FLAGS[name]} {good[name]:.15g}" for name in names)
    # Of a length what is known alone allows more than the estimates do; it is not said.
    if len(names) == 1 and names != ("length",):
        edge = _edge(case, asked, names[0], good[names[0]])
        bound = "least" if getattr(asked, names[0]) < good[names[0]] else "most"
        fix += f" (at {bound} {edge:.15g})"
    fix += f"; or leave {'it' if len(names) == 1 else 'them'} out"
    many = choice.settings
    if many.seqs > many.batched:
        why = (f"vLLM: max_num_batched_tokens ({many.batched}) must be greater than or equal to "
               f"max_num_seqs ({many.seqs})")  # fmt: skip
        return CheckFailed(f"{what} cannot be", why=why, fix=fix)
    if choice.too_long and choice.budget.at_most > 0:
        share = asked.share
        offered = f"--gpu-memory-utilization {share:g}" if share else "the card"
        why = (f"one request of it takes {choice.needs / MIB:,.0f} MiB, and beside the weights "
               f"{offered} has {choice.budget.at_most / MIB:,.0f}")  # fmt: skip
        return CheckFailed(f"{what} does not fit the card", why=why, fix=fix)
    plural = "" if len(names) > 1 else "s"
    return CheckFailed(
        f"{what} leave{plural} the model no room; without, it fits",
        why=f"{_left(choice)}\n{_table(choice)}", fix=fix,
    )  # fmt: skip


def _left(choice: Choice) -> str:
    left = choice.budget.cache / MIB
    if left <= 0:
        return f"{-left:,.0f} MiB are missing before the first token"
    return f"{left:,.0f} MiB are left for the KV cache, {choice.length} tokens"


def _edge(case: Case, asked: Asked, name: str, good: float) -> float:
    """The last value of a flag, from a good one towards the one that is asked for, that fits."""
    unit = 100 if name == "share" else 1

    def value(steps: int) -> float:
        return steps / unit if name == "share" else steps

    fine, bad = round(good * unit), round(getattr(asked, name) * unit)
    while abs(fine - bad) > 1:
        middle = (fine + bad) // 2
        if choose(case, _with(asked, **{name: value(middle)})).fits:
            fine = middle
        else:
            bad = middle
    return value(fine)


def _more_cards(case: Case, asked: Asked) -> Iterator[tuple[int, bool, str]]:
    """What more cards would hold: their number, whether it fits, and a line with the sum.

    The largest g5g's, and the fewest that fit, which are last.
    """
    for cards in range(asked.tensor + 1, _CARDS + 1):
        if reason := cut(case.shape, cards):
            if cards == MOST_GPUS:
                yield cards, False, f"on {cards} GPUs ({_LARGEST}): not possible: {reason}"
            continue
        found = choose(case, _with(asked, tensor=cards))
        if not found.fits and cards != MOST_GPUS:
            continue
        left = found.budget.cache / MIB
        room = f"{left:,.0f} are left for the KV cache" if left > 0 else f"{-left:,.0f} are missing"
        if left > 0 and found.length:
            room += f", {found.length:,} tokens"
        where = _LARGEST if cards <= MOST_GPUS else "no g5g has so many"
        verdict = "" if found.fits else ": does not fit"
        yield (
            cards,
            found.fits,
            (
                f"on {cards} GPUs ({where}): weights {found.weights / MIB:,.0f} MiB a GPU of "
                f"{case.card_mib:,}, {room}{verdict}"
            ),
        )
        if found.fits:
            return


def cut(shape: Shape, cards: int) -> str:
    """Why vLLM cannot cut a model's heads for so many cards; empty: it can.

    ``ModelConfig.verify_with_parallel_config`` (vllm/config/model.py:1557) and
    ``QKVParallelLinear`` (vllm/model_executor/layers/linear.py:1066).
    """
    for layer in shape.layers:
        if layer.q_heads % cards:
            return f"{layer.q_heads} attention heads cannot be divided by {cards}"
        if layer.kv_heads % cards and cards % layer.kv_heads:
            return f"{layer.kv_heads} KV heads cannot be divided by {cards}, nor {cards} by them"
    return ""


def refuse_cut(shape: Shape, asked: Asked) -> None:
    """Refuse a --tensor-parallel-size that does not divide the heads.

    Raises:
        UsageError: It does not.
    """
    if reason := cut(shape, asked.tensor):
        good = [cards for cards in range(1, asked.tensor) if not cut(shape, cards)]
        raise UsageError(
            f"--tensor-parallel-size {asked.tensor} cannot work with this model",
            why=f"vLLM: {reason}", fix=f"-- --tensor-parallel-size {good[-1]}",
        )  # fmt: skip


def notes(choice: Choice) -> list[str]:
    """What is to be said of what is started all the same."""
    said, cards = [], choice.asked.tensor * choice.asked.stages
    if cards > MOST_GPUS:
        said.append(f"{cards} GPUs are asked for; no g5g has more than {MOST_GPUS} ({_LARGEST})")
    if choice.budget.cache <= 0:
        said.append(
            "by these estimates nothing is left for the KV cache; vLLM may end at its start"
        )
    elif choice.cache and choice.asked.length and choice.needs > choice.budget.cache:
        fits = choice.cache.longest(
            choice.budget.cache, choice.asked.length, choice.settings.in_flight
        )
        said.append(
            f"--max-model-len {choice.asked.length}: one request takes {choice.needs / MIB:,.0f} "
            f"MiB, by these estimates {choice.budget.cache / MIB:,.0f} are left, for {fits:,} "
            "tokens; vLLM may end at its start"
        )
    return said


def _table(choice: Choice) -> str:
    return "\n".join(f"        {row.mib:>8,.0f}  {row.what}" for row in choice.budget.rows)
