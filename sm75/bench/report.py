"""What was measured, in numbers: JSON and lines for people."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sm75.bench import stats
from sm75.bench.client import Reply
from sm75.bench.roofline import Roofline, field_report
from sm75.bench.run import Case, Measured, Round
from sm75.bench.stats import Summary
from sm75.words import counted

SCHEMA = 1
# Prompts are known the second time when the slowest takes less than this share of the fastest.
_KNOWN = 0.5
METRICS = {
    "ttft_s": "seconds to the first text",
    "itl_s": "seconds between tokens, the mean of an answer by the server's count",
    "stream_tokens_s": "tokens a second of one stream while it decodes",
    "total_tokens_s": "tokens a second of all streams, prompts' time within",
}


def cases(measured: Measured, roofline: Roofline) -> list[dict[str, Any]]:
    """Each case summed up; JSON-ready.

    A value of a round is the median of its answers: these are not independent of each other,
    rounds nearly are. Intervals are over rounds.
    """
    return [_case(case, rounds, roofline) for case, rounds in sorted(measured.rounds.items())]


def _case(case: Case, rounds: Sequence[Round], roofline: Roofline) -> dict[str, Any]:
    whole = [one for one in rounds if one.replies]
    replies = [reply for one in whole for reply in one.replies]
    # Fewer at once than asked for is another load.
    full = [one for one in whole if not one.faults]

    def over(value: Callable[[Reply], float | None]) -> Summary | None:
        found = []
        for one in full:
            values = [number for reply in one.replies if (number := value(reply)) is not None]
            if values:
                found.append(statistics.median(values))
        return stats.summarise(found)

    itl = over(lambda reply: reply.itl)
    rate = over(lambda reply: 1 / reply.itl if reply.itl else None)
    totals = [
        sum(reply.completion_tokens or 0 for reply in one.replies) / one.seconds
        for one in full
        if all(reply.completion_tokens for reply in one.replies) and one.seconds > 0
    ]
    gaps = sorted(gap for reply in replies for gap in reply.gaps)
    prompt = [reply.prompt_tokens for reply in replies if reply.prompt_tokens is not None]
    output = [reply.completion_tokens for reply in replies if reply.completion_tokens is not None]
    context = (statistics.mean(prompt) if prompt else case.prompt) + (
        statistics.mean(output) if output else case.output
    ) / 2
    ceiling = roofline.rate(context, case.streams)
    return {
        "prompt_tokens": case.prompt,
        "output_tokens": case.output,
        "concurrency": case.streams,
        "rounds": len(full),
        "ttft_s": _json(over(lambda reply: reply.ttft)),
        "itl_s": _json(itl),
        "stream_tokens_s": _json(rate),
        "total_tokens_s": _json(stats.summarise(totals)),
        "gap_s": {
            "p50": stats.quantile(gaps, 0.5), "p99": stats.quantile(gaps, 0.99), "most": gaps[-1]
        } if gaps else None,
        "tokens_a_piece": sum(output) / sum(reply.pieces for reply in replies) if output else None,
        "prompt_tokens_counted": sorted(set(prompt)),
        "output_tokens_counted": sorted(set(output)),
        "short_answers": sum(reply.short for reply in replies),
        "cached_tokens": max((reply.cached_tokens or 0 for reply in replies), default=0),
        "lies": sorted({reply.lie for reply in replies if reply.lie}),
        "failed": sum(len(one.faults) for one in rounds),
        "faults": sorted({fault for one in rounds for fault in one.faults})[:5],
        "answers": len(replies),
        "ceiling_stream_tokens_s": ceiling,
        "of_ceiling": rate.median / ceiling if rate and ceiling else None,
    }  # fmt: skip


def _json(summary: Summary | None) -> dict[str, Any] | None:
    return summary.to_json() if summary else None


def notes(measured: Measured, found: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader of the figures must know, in words."""
    said = []
    answers = sum(one["answers"] for one in found)
    failed = sum(one["failed"] for one in found)
    if failed:
        said.append(
            f"{failed} of {answers + failed} requests failed; rounds with a failure are left out: "
            + next(one["faults"][0] for one in found if one["faults"])
        )
    for lie in sorted({lie for one in found for lie in one["lies"]}):
        said.append(f"the server's count of tokens cannot be right: {lie}")
    if not measured.counts:
        said.append(
            "the server gives no usage in its streams: tokens are not known, so there are no "
            "tokens/s, and prompts have as many words as tokens were asked for"
        )
    if not measured.exact:
        said.append("the server refuses ignore_eos and min_tokens: answers end when they end")
    if short := sum(one["short_answers"] for one in found):
        said.append(f"{short} of {answers} answers have fewer tokens than were asked for")
    for one in found:
        if one["prompt_tokens_counted"] not in ([], [one["prompt_tokens"]]):
            told = ", ".join(map(str, one["prompt_tokens_counted"][:5]))
            said.append(f"prompts of {one['prompt_tokens']} tokens have {told}")
    if cached := max((one["cached_tokens"] for one in found), default=0):
        tokens = counted(cached, "token")
        said.append(f"up to {tokens} of a prompt came from the server's cache, it says")
    if measured.again:
        first, second = measured.again
        if second < _KNOWN * first or measured.again_cached:
            said.append(
                f"the server caches prefixes: the same prompts again took {second * 1e3:.0f} ms to "
                f"the first text instead of {first * 1e3:.0f}. No measured prompt was sent twice"
            )
    if any((one["tokens_a_piece"] or 0) > 1.5 for one in found):
        said.append("pieces hold several tokens: gaps between pieces are not those of tokens")
    return list(dict.fromkeys(said))


def good(found: Sequence[dict[str, Any]]) -> bool:
    """Whether all answers came and nothing in them is impossible."""
    return not any(one["failed"] or one["lies"] for one in found)


def table(data: dict[str, Any]) -> Table:
    """One row a case."""
    out = Table(
        title=f"{data['model']} at {data['url']}, {counted(data['plan']['repeats'], 'round')} each",
        header_style="bold", box=None, pad_edge=False,
    )  # fmt: skip
    for name in (
        "prompt", "output", "at once", "TTFT ms", "ms/token", "tok/s a stream", "tok/s total",
        "ceiling", "reached",
    ):  # fmt: skip
        out.add_column(name, justify="right", no_wrap=True)
    for one in data["cases"]:
        ceiling, share = one["ceiling_stream_tokens_s"], one["of_ceiling"]
        out.add_row(
            str(one["prompt_tokens"]), str(one["output_tokens"]), str(one["concurrency"]),
            _text(one["ttft_s"], 1e3, 0), _text(one["itl_s"], 1e3, 1),
            _text(one["stream_tokens_s"], 1, 1), _text(one["total_tokens_s"], 1, 1),
            f"{ceiling:.1f}" if ceiling else "?", f"{share:.0%}" if share else "?",
        )  # fmt: skip
    return out


def _text(data: dict[str, Any] | None, scale: float, digits: int) -> str:
    if data is None:
        return "?"
    names = Summary.__dataclass_fields__
    return Summary(**{name: data[name] for name in names}).text(scale, digits)


def lines(data: dict[str, Any]) -> list[str]:
    """What stands below the table."""
    roofline, report = data["roofline"], field_report()
    found = [f"median [interval: {stats.METHOD}] over rounds"]
    if roofline["weight_bytes_a_token"] is None:
        found.append("ceiling: not known without --model DIRECTORY or --weight-bytes")
    else:
        found.append(
            f"ceiling: {roofline['bandwidth_gb_s']:g} GB/s ({roofline['bandwidth_from']}) over "
            f"{roofline['weight_bytes_a_token'] / 1e9:.3f} GB of weights a step "
            f"({roofline['weight_bytes_from']})"
            + (" and the keys and values of each stream" if roofline["kv_layers"] else "")
        )
        for kind, about in roofline["weight_kinds"].items():
            found.append(
                f"  {kind}: {about['read_a_token'] / 1e9:.3f} of {about['bytes'] / 1e9:.3f} GB"
            )
    found.append(f"beside it, {report['tokens_s']} tok/s: {report['conditions']}")
    found += [f"note: {note}" for note in data["notes"]]
    return found


def show(data: dict[str, Any]) -> None:
    """Print it."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)
    console.print(table(data))
    for line in lines(data):
        console.print(line, markup=False, highlight=False)
