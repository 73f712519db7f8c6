"""``bench`` as a whole: health first, then the measurement, then JSON and plot."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm75 import atomic
from sm75.bench import memory as card
from sm75.bench import plot, report, run, stats, vllmtool
from sm75.bench.client import Client
from sm75.bench.roofline import T4G_READ, Roofline, field_report
from sm75.bench.weights import Reads, reads
from sm75.errors import CheckFailed, ServerError, UsageError
from sm75.health import check as checks
from sm75.health.client import BadAnswer, KeyRefused, Server, base_url
from sm75.progress import Reporter, make_reporter
from sm75.words import counted

REPEATS = 10
"""Of an interval of 97.9 %: the second smallest and second largest of ten."""
_UNREAD = "answers were not looked at: these may be the speeds of nonsense"
T4G_FROM = "read on a T4G, field report, not ours"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for.

    Attributes:
        url: The server, as typed.
        served: The model's name there; empty: the first that it lists.
        api_key: For the server.
        model: The model's files, for the ceiling.
        weight_bytes: Instead: bytes of weights read a token; 0: not given.
        bandwidth: GB/s; 0: a T4G's.
        plan: What to measure.
        timeout: Seconds an answer.
        health: Whether to read answers first.
        prefix: An environment whose ``vllm bench serve`` measures instead of us.
        out: Where files go, without suffix.
    """

    url: str
    plan: run.Plan
    served: str = ""
    api_key: str = ""
    model: Path | None = None
    weight_bytes: int = 0
    bandwidth: float = 0.0
    timeout: float = 600.0
    health: bool = True
    prefix: Path | None = None
    out: Path | None = None


def roofline(settings: Settings) -> Roofline:
    """The ceiling of the settings.

    Raises:
        UsageError: The model's files are none.
    """
    if settings.model is not None and not settings.weight_bytes:
        read: Reads | None = reads(settings.model)
    elif settings.weight_bytes:
        layers = reads(settings.model).layers if settings.model else ()
        read = Reads(
            weights=settings.weight_bytes, kinds={}, layers=layers,
            source="--weight-bytes" + ("" if layers else ", keys and values not counted"),
        )  # fmt: skip
    else:
        read = None
    return Roofline(
        bandwidth=settings.bandwidth or T4G_READ,
        bandwidth_from="--bandwidth" if settings.bandwidth else T4G_FROM,
        reads=read,
    )


def bench(settings: Settings, reporter: Reporter) -> dict[str, Any]:
    """Measure a server.

    Args:
        settings: What was asked for.
        reporter: Told of the progress.

    Returns:
        JSON-ready data, which is also what is written.

    Raises:
        ServerError: No answer.
        CheckFailed: It answers nonsense.
        UsageError: A path or length does not do.
    """
    # What can be wrong without the server is said before it is asked.
    ceiling = roofline(settings)
    url = base_url(settings.url)
    server = Server(url, api_key=settings.api_key, timeout=min(settings.timeout, 120.0))
    served = settings.served
    try:
        served = served or server.model()
        health = _health(server, served, settings)
        totals: dict[run.Case, float] = {}
        if settings.prefix is not None:
            measured, totals = vllmtool.measure(
                settings.prefix, settings.plan, reporter, url=url, model=served,
                tokenizer=settings.model, api_key=settings.api_key,
            )  # fmt: skip
        else:
            measured = asyncio.run(_measure(settings, url, served, reporter))
    except KeyRefused as error:
        raise UsageError(
            f"{url} lets nobody in with this key", why=str(error), fix=error.fix
        ) from error  # fmt: skip
    except BadAnswer as error:
        raise CheckFailed(
            f"{url} does not answer as the protocol wants", why=str(error),
            fix=error.fix or f"python3 orchestrator.py health --url {url}",
        ) from error  # fmt: skip
    cases = report.cases(measured, ceiling)
    if not any(one["answers"] for one in cases):
        faults = [fault for one in cases for fault in one["faults"]]
        raise ServerError(
            f"no whole answer from {url}", why=faults[0] if faults else "",
            fix="look at its log: python3 orchestrator.py explain LOG",
        )  # fmt: skip
    for one, case in zip(cases, sorted(measured.rounds), strict=True):
        if case in totals:
            whole = stats.summarise([totals[case]])
            one["total_tokens_s"] = whole.to_json() if whole else None
    plan = settings.plan
    data: dict[str, Any] = {
        "schema": report.SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "url": url,
        "model": served,
        "tool": "vllm bench serve" if settings.prefix is not None else "bench",
        "health": health,
        "plan": {
            "prompt_tokens": list(plan.prompts), "output_tokens": list(plan.outputs),
            "concurrency": list(plan.streams), "repeats": plan.repeats, "warmups": plan.warmups,
            "seed": plan.seed, "temperature": 0,
        },
        "server": {
            "counts_tokens": measured.counts, "exact_lengths": measured.exact,
            "same_prompt_ttft_s": list(measured.again) if measured.again else None,
            "same_prompt_cached_tokens": measured.again_cached,
        },
        "confidence_method": stats.METHOD,
        "metrics": report.METRICS,
        "roofline": ceiling.to_json(),
        "cases": cases,
        "notes": ([] if settings.health else [_UNREAD]) + report.notes(measured, cases),
        "field_report": field_report(),
        "good": report.good(cases),
    }  # fmt: skip
    if settings.out is not None:
        data["files"] = [str(path) for path in write(data, settings.out)]
    return data


def write(data: dict[str, Any], out: Path) -> tuple[Path, Path]:
    """Write ``out``.json and ``out``.svg.

    Raises:
        DiskError: They cannot be written.
    """
    text, picture = out.with_name(f"{out.name}.json"), out.with_name(f"{out.name}.svg")
    atomic.write_bytes(text, json.dumps(data, indent=2).encode() + b"\n")
    atomic.write_bytes(picture, plot.svg(data).encode())
    return text, picture


def _health(server: Server, model: str, settings: Settings) -> dict[str, Any]:
    if not settings.health:
        return {"asked": False}
    found = checks.check(server, model=model)
    if found.silent:
        raise ServerError(f"{server.url} does not answer", why=found.silent, fix=found.next)
    if found.refused:
        raise UsageError(f"{server.url} {found.verdict}", fix=found.next)
    if not found.well:
        raise CheckFailed(
            f"{server.url} answers no question rightly: {found.verdict}",
            why="a broken model can be fast, and the speed of nonsense is no figure",
            fix=f"python3 orchestrator.py health --url {server.url}, and mend it; a model that is "
            "no chat model, or thinks aloud: --no-health",
        )
    return {"asked": True, "verdict": found.verdict}


async def _measure(
    settings: Settings, url: str, served: str, reporter: Reporter
) -> run.Measured:  # fmt: skip
    async with Client(
        url, served, api_key=settings.api_key, timeout=settings.timeout,
        connections=max(settings.plan.streams),
    ) as client:  # fmt: skip
        return await run.measure(client, settings.plan, reporter)


def dry(settings: Settings) -> dict[str, Any]:
    """What would be asked, without asking.

    Raises:
        UsageError: A path does not do.
    """
    plan, ceiling = settings.plan, roofline(settings)
    prompts, outputs = plan.tokens()
    return {
        "url": base_url(settings.url),
        "cases": len(plan.cases()),
        "requests": plan.requests(),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "roofline": ceiling.to_json(),
    }


def server(chosen: Set[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """``bench`` as typed.

    Args:
        chosen: Options that were typed.
        given: All options.

    Returns:
        What was measured, or with ``dry_run`` what would be.

    Raises:
        Sm75Error: It could not be measured, or the options do not fit each other.
    """
    _refuse(chosen, ("size", "device"), "belongs to --memory")
    if (given["tool"] == "vllm") != (given["prefix"] is not None):
        raise UsageError(
            "--tool vllm and --prefix DIRECTORY belong together",
            fix="give both, or neither to measure with our own client",
        )
    if given["tool"] == "vllm":
        _refuse(chosen, ("timeout",), "would be ignored: vllm bench serve has limits of its own")
    if given["model"] is None and given["weight_bytes"] is None:
        # Of tokens a second only the bytes of a model make a share of the bandwidth.
        _refuse(
            chosen, ("bandwidth",), "would be ignored: it is compared with what a token reads",
            "python3 orchestrator.py bench --bandwidth 277 --model DIRECTORY, or --weight-bytes N",
        )  # fmt: skip
    settings = Settings(
        url=given["url"], served=given["served"], api_key=os.environ.get("VLLM_API_KEY", ""),
        model=given["model"], weight_bytes=given["weight_bytes"] or 0,
        bandwidth=given["bandwidth"] or 0.0, timeout=given["timeout"],
        health=not given["no_health"], prefix=given["prefix"],
        # A name of its own: no result is written over another.
        out=given["out"] or Path(f"bench-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"),
        plan=run.plan_of(
            given["prompt_tokens"], given["output_tokens"], given["concurrency"],
            repeats=given["repeats"] or REPEATS, warmups=given["warmups"],
            seed=secrets.randbelow(1 << 31) if given["seed"] is None else given["seed"],
        ),
    )  # fmt: skip
    if given["dry_run"]:
        return dry(settings)
    # Progress goes to stderr, so that --json stays whole.
    with make_reporter(sys.stderr) as reporter:
        return bench(settings, reporter)


def server_lines(data: dict[str, Any]) -> None:
    """Print what :func:`server` returned, for people."""
    if "requests" in data:
        print(
            f"bench: would send {counted(data['requests'], 'request')} in "
            f"{counted(data['cases'], 'case')} to {data['url']}: "
            f"{data['prompt_tokens']} tokens of prompts, {data['output_tokens']} of answers, "
            "and some 20 to see how it counts"
        )
        return
    report.show(data)
    print(f"bench: wrote {' and '.join(data['files'])}")


def memory(chosen: Set[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """``bench --memory`` as typed; arguments and result as of :func:`server`.

    Raises:
        Sm75Error: It could not be measured, or the options do not fit each other.
    """
    for name in chosen - {"memory", "size", "device", "repeats", "out", "as_json", "dry_run"}:
        _refuse(chosen, (name,), "belongs to servers, not to --memory")
    sizes = list(given["size"]) or [card.SIZE_MIB]
    if given["dry_run"]:
        return {"sizes_mib": sizes, "device": given["device"]}
    repeats = given["repeats"] or card.REPEATS
    data = card.run(sizes, repeats=repeats, device=given["device"])
    if given["out"] is not None:
        out: Path = given["out"]
        path = out.with_name(f"{out.name}.json")
        atomic.write_bytes(path, json.dumps(data, indent=2).encode() + b"\n")
    return data


def memory_lines(data: dict[str, Any]) -> None:
    """Print what :func:`memory` returned, for people."""
    if "results" in data:
        print("\n".join(card.lines(data)))
    else:
        sizes = ", ".join(f"{size} MiB" for size in data["sizes_mib"])
        print(f"bench: would read and copy {sizes} on GPU {data['device']}")


def _refuse(
    chosen: Set[str], names: Sequence[str], why: str, fix: str = "leave it out"
) -> None:  # fmt: skip
    for name in names:
        if name in chosen:
            raise UsageError(f"--{name.replace('_', '-')} {why}", fix=fix)
