"""``vllm bench serve`` of an installed vLLM, its result read into our report.

Flags and fields are those of vLLM 0.33.0, vllm/benchmarks/serve.py and datasets/datasets.py. It
sends a steady load, so that there are no rounds: answers are taken in groups as they started, and
the total has one value a case.

Its warm-ups all send the first prompt, which it then measures as well (serve.py:872-945, and seen):
a server that caches prefixes knows that one. So it is asked for a group more than is wanted, and
the first group is left out.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm75 import jsontext
from sm75.bench.client import Reply
from sm75.bench.prompts import Length
from sm75.bench.run import Case, Measured, Plan, Round
from sm75.errors import ToolchainError, UsageError
from sm75.progress import Reporter

_SHOWN = 3
COLUMNS = ("errors", "start_times", "ttfts", "latencies", "itls", "input_lens", "output_lens")
"""Fields of its result that have a value for each request."""


def command(
    program: Path, case: Case, plan: Plan, *, url: str, model: str, tokenizer: Path, out: Path
) -> list[str]:
    """The command line for one case.

    Args:
        program: ``vllm``.
        case: Lengths and concurrency.
        plan: Repeats, warm-ups, seed.
        url: The server's base.
        model: The model's name there.
        tokenizer: A directory that has the model's tokenizer.
        out: The result's file.
    """
    return [
        str(program), "bench", "serve", "--backend", "openai-chat", "--base-url", url,
        "--endpoint", "/v1/chat/completions", "--model", model, "--tokenizer", str(tokenizer),
        "--dataset-name", "random", "--random-input-len", str(case.prompt),
        "--random-output-len", str(case.output), "--random-range-ratio", "0",
        "--num-prompts", str(case.streams * (1 + plan.repeats)),
        "--max-concurrency", str(case.streams),
        "--num-warmups", str(case.streams * plan.warmups),
        # Else the same prompts are in the server's cache from the case before.
        "--seed", str(plan.seed + 1000 * case.prompt + case.streams),
        "--ignore-eos", "--temperature", "0", "--disable-tqdm",
        "--save-result", "--save-detailed", "--result-dir", str(out.parent),
        "--result-filename", out.name,
    ]  # fmt: skip


def measure(
    prefix: Path, plan: Plan, reporter: Reporter, *, url: str, model: str, tokenizer: Path | None,
    api_key: str = "",
) -> tuple[Measured, dict[Case, float]]:  # fmt: skip
    """Run it for each case.

    Args:
        prefix: An environment that has vLLM.
        plan: What to measure.
        reporter: Told of each case.
        url: The server's base.
        model: The model's name there.
        tokenizer: A directory that has the model's tokenizer.
        api_key: For the server.

    Returns:
        What was seen, and each case's tokens a second in total.

    Raises:
        ToolchainError: There is no ``vllm``, or it failed.
        UsageError: There is no tokenizer.
    """
    program = prefix / "bin" / "vllm"
    if not program.is_file():
        raise ToolchainError(
            f"there is no vllm in {prefix}", why=f"{program} does not exist",
            fix="name the environment: --prefix DIRECTORY, with bin/vllm in it",
        )  # fmt: skip
    if tokenizer is None:
        raise UsageError(
            "--tool vllm needs --model DIRECTORY",
            why="its random prompts are made with the model's tokenizer",
            fix="name the directory that the server loaded",
        )
    measured = Measured(model=model, counts=True, exact=True)
    totals: dict[Case, float] = {}
    task = reporter.task("bench", len(plan.cases()), "runs of vllm bench serve")
    env = {**os.environ, **({"OPENAI_API_KEY": api_key} if api_key else {})}
    with tempfile.TemporaryDirectory(prefix="sm75-bench-") as scratch:
        for number, case in enumerate(plan.cases()):
            out = Path(scratch, f"{number}.json")
            task.message(f"{case.prompt}+{case.output} x{case.streams}")
            line = command(program, case, plan, url=url, model=model, tokenizer=tokenizer, out=out)
            done = subprocess.run(
                line, check=False, env=env, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
            result = _result(out, done)
            measured.rounds[case] = rounds(result, case)
            measured.lengths[case.prompt] = Length(wanted=case.prompt, words=0)
            totals[case] = float(result.get("output_throughput") or 0.0)
            task.advance(1)
    task.done()
    return measured, totals


def rounds(result: Mapping[str, Any], case: Case) -> list[Round]:
    """Its answers as ours, in groups as they started, without the first group.

    Args:
        result: What it wrote.
        case: Lengths and concurrency.

    Raises:
        ToolchainError: The result is of another shape.
    """
    try:
        found: list[Reply | str] = []
        rows = zip(*(result[name] for name in COLUMNS), strict=True)
        for error, start, ttft, latency, itl, prompt, output in sorted(rows, key=lambda r: r[1]):
            if error:
                found.append(str(error).strip().splitlines()[-1])
                continue
            found.append(
                Reply(
                    asked=case.output, start=start, first=start + ttft, last=start + latency,
                    pieces=1 + len(itl), gaps=list(itl), prompt_tokens=prompt,
                    completion_tokens=output,
                )
            )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ToolchainError(
            "the result of vllm bench serve is not that of 0.33.0",
            why=f"{type(error).__name__}: {error}", fix="measure without --tool vllm",
        ) from error  # fmt: skip
    return [
        Round(
            replies=[one for one in group if isinstance(one, Reply)],
            faults=[one for one in group if isinstance(one, str)],
        )
        for group in (
            found[n : n + case.streams] for n in range(case.streams, len(found), case.streams)
        )
    ]


def _result(out: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    try:
        if done.returncode:
            raise ValueError(f"it ended with code {done.returncode}")
        result = jsontext.loads(out.read_text(encoding="utf-8"))
        if not isinstance(result, dict):
            raise ValueError("its result is none")
    except (OSError, ValueError) as error:
        said = [line.strip() for line in done.stdout.splitlines() if line.strip()][-_SHOWN:]
        raise ToolchainError(
            "vllm bench serve failed", why=f"{error}; " + " | ".join(said),
            fix="run it by hand: " + " ".join(map(str, done.args)),
        ) from error  # fmt: skip
    return result
