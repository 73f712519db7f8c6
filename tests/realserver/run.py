"""Ask real servers of a real model, sane or not, whether they are well; write down what was said.

    .venv/bin/python -m tests.realserver.run --python PYTHON --work DIR --out EVIDENCE.json

PYTHON has torch and ``transformers[serving]``; the default is ``SM75_TORCH_PYTHON``. The models are
made in DIR on the first run (minutes). docs/health.md says what is tried. Exit code 0: ``health``
was right every time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sm75.atomic import write_bytes
from tests.realserver import lessons
from tests.realserver.cases import CASES, NONSENSE, SILENT, WELL, Case, dying, in_manner, throttled
from tests.realserver.proxy import between
from tests.realserver.server import Served
from tests.realserver.told import QUESTIONS, Told, faulty, summary

ROOT = Path(__file__).resolve().parents[2]
BROKEN = ("random-llama", "random-gemma", "damaged")
MODELS = (*BROKEN, "sane")
_VERSIONS = """
import importlib.metadata as m, json, platform
names = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn")
print(json.dumps({"python": platform.python_version(), **{n: m.version(n) for n in names}}))
"""
# Seconds for an answer, where a case gives none: a busy machine is not what is tested.
_PATIENT = ("--timeout", "300")


def command(url: str, *options: str) -> list[str]:
    """What a user types."""
    given = options if "--timeout" in options else (*_PATIENT, *options)
    return [sys.executable, str(ROOT / "orchestrator.py"), "health", "--url", url, *given]


def health(url: str, *options: str) -> Told:
    """Run ``health`` once."""
    started = time.monotonic()
    done = subprocess.run(
        command(url, "--json", *options), capture_output=True, text=True, check=False, timeout=1000
    )
    seconds = time.monotonic() - started
    lines = done.stdout.splitlines()
    if not lines:
        return Told(code=done.returncode, seconds=seconds, data={"verdict": done.stderr[-500:]})
    return Told(code=done.returncode, seconds=seconds, data=json.loads(lines[-1]))


def many(urls: Iterable[str], expected: int, name: str) -> dict[str, Any]:
    """One run of ``health`` for each URL."""
    found = summary([health(url) for url in urls], expected)
    print(f"{name}: {found['right']} of {found['runs']} right", flush=True)
    return found


def manners(url: str, times: int) -> dict[str, Any]:
    """The sane model, which gives other answers for other system messages."""
    runs = []
    for number in range(times):
        with between(url, in_manner(number % lessons.MANNERS)) as front:
            runs.append(health(front))
    found = summary(runs, WELL)
    print(f"sane, in every manner: {found['right']} of {found['runs']} right", flush=True)
    return found


def one_case(case: Case, url: str, times: int) -> dict[str, Any]:
    """A wrong between the server and ``health``."""
    runs = []
    for _ in range(times):
        with between(url, case.wrong()) as front:
            runs.append(health(front, *case.options))
    return faulty(case, runs)


def killed(server: Served, times: int) -> dict[str, Any]:
    """The server dies while it answers, is then gone, and is waited for."""
    found = {}
    for case in dying(server):
        runs = []
        for _ in range(times):
            with between(server.url, case.wrong()) as front:
                runs.append(health(front))
            server.kill()
            server.start()
            server.wait()
        found[case.name] = faulty(case, runs)
    server.kill()
    gone = Case(name="killed before", wrong=CASES[0].wrong, code=SILENT, says="refused")
    found[gone.name] = faulty(gone, [health(server.url)])
    with subprocess.Popen(
        command(server.url, "--json", "--wait", "240"), stdout=subprocess.PIPE, text=True
    ) as waiting:
        started = time.monotonic()
        time.sleep(1.0)
        server.start()
        said = (waiting.communicate(timeout=900)[0] or "{}").splitlines()[-1]
    back = Case(name="waited for while it starts", wrong=CASES[0].wrong, code=WELL)
    took = time.monotonic() - started
    run = Told(code=waiting.returncode, seconds=took, data=json.loads(said))
    found[back.name] = faulty(back, [run])
    return found


def stopped(server: Served, times: int) -> dict[str, Any]:
    """The server gets little time, or none."""
    few = Case(name="slow: a fifth of the processor's time", wrong=CASES[0].wrong, code=WELL)
    with throttled(server):
        runs = [health(server.url) for _ in range(times)]
    none = Case(name="stopped, 3 s given", wrong=CASES[0].wrong, code=SILENT, says="within 3 s")
    server.pause()
    silent = [health(server.url, "--timeout", "3") for _ in range(times)]
    server.resume()
    again = Case(name="goes on", wrong=CASES[0].wrong, code=WELL)
    return {
        few.name: faulty(few, runs),
        none.name: faulty(none, silent),
        again.name: faulty(again, [health(server.url)]),
    }


def watched(server: Served, expected: int, *, rounds: int, log: Path) -> dict[str, Any]:
    """``--watch``: a sick model ends it after three rounds; a well one's server is killed at last.

    Args:
        server: The server.
        expected: Exit code.
        rounds: After how many the server is killed, where it is well.
        log: The server's, in which its answers are counted.
    """
    before = _answers(log)
    with subprocess.Popen(
        command(server.url, "--json", "--watch", "--interval", "0", "--failures", "3"),
        stdout=subprocess.PIPE, text=True,
    ) as watching:  # fmt: skip
        end = time.monotonic() + 900
        while expected == SILENT and _answers(log) - before < rounds * QUESTIONS:
            if watching.poll() is not None or time.monotonic() > end:
                break
            time.sleep(0.1)
        if expected == SILENT:
            server.kill()
        try:
            said = [json.loads(line) for line in watching.communicate(timeout=900)[0].splitlines()]
        finally:
            if watching.poll() is None:
                watching.send_signal(signal.SIGINT)
    codes = [one["exit_code"] for one in said]
    # Each change of the verdict is told: the sum is another each time, and a dead server first
    # breaks a connection, then refuses the next.
    start, rest = (codes[:1], codes[1:]) if expected == SILENT else ([WELL], codes)
    told = start == [WELL] and set(rest) == {expected}
    right = watching.returncode == expected and told
    print(f"watch, exit code {watching.returncode}: {'right' if right else 'WRONG'}", flush=True)
    return {
        "expected_exit_code": expected,
        "exit_codes": [watching.returncode],
        "told": codes,
        "answers": _answers(log) - before,
        "runs": 1,
        "right": int(right),
    }


def _answers(log: Path) -> int:
    return log.read_text(errors="replace").count('/v1/chat/completions HTTP/1.1" 200')


def prepare(python: str, work: Path) -> None:
    """Make the models, unless they are there and were taught the same.

    Raises:
        RuntimeError: That failed.
    """
    wanted = work / "lessons.json"
    if (work / "made").exists() and lessons.same(wanted):
        return
    (work / "made").unlink(missing_ok=True)
    lessons.write(wanted)
    log = work / "make.log"
    with log.open("wb") as handle:
        done = subprocess.run(
            [python, "-m", "tests.realserver.make", str(wanted), str(work)], cwd=ROOT,
            stdout=handle, stderr=subprocess.STDOUT, check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the models were not made:\n{log.read_text(errors='replace')[-2000:]}")
    (work / "made").touch()


def sick(python: str, work: Path, name: str, times: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A broken model, asked so many times and then watched."""
    log = work / f"serve-{name}.log"
    with Served(python, work, name, log) as server:
        asked = many([server.url] * times, NONSENSE, name)
        return asked, watched(server, NONSENSE, rounds=3, log=log)


def well(python: str, work: Path, times: int, few: int) -> dict[str, dict[str, Any]]:
    """The sane model: asked, with each wrong before it, stopped, killed, watched."""
    log = work / "serve-sane.log"
    with Served(python, work, "sane", log) as server:
        if not times:
            return {
                "models": {},
                "wrongs": {},
                "watch": {"sane, then killed": watched(server, SILENT, rounds=10, log=log)},
            }
        return {
            "models": {
                "sane": many([server.url] * times, WELL, "sane"),
                "sane, in every manner": manners(server.url, times),
            },
            "wrongs": {
                **{case.name: one_case(case, server.url, few) for case in CASES},
                **stopped(server, few),
                **killed(server, few),
            },
            "watch": {"sane, then killed": watched(server, SILENT, rounds=10, log=log)},
        }


def campaign(python: str, work: Path, times: int, few: int, parallel: int = 1) -> dict[str, Any]:
    """Everything; the evidence.

    Args:
        python: A Python with torch and ``transformers[serving]``.
        work: Directory of models and logs.
        times: Runs of each model; 0: only ``--watch`` until the server is killed.
        few: Runs of each wrong.
        parallel: Models that are served and asked at once.
    """
    work.mkdir(parents=True, exist_ok=True)
    prepare(python, work)
    with ThreadPoolExecutor(parallel) as pool:
        good = pool.submit(well, python, work, times, few)
        sick_ones = BROKEN if times else ()
        bad = {name: pool.submit(sick, python, work, name, times) for name in sick_ones}
    models = {name: made.result()[0] for name, made in bad.items()} | good.result()["models"]
    watches = {name: made.result()[1] for name, made in bad.items()} | good.result()["watch"]
    wrongs = good.result()["wrongs"]
    versions = subprocess.run(
        [python, "-c", _VERSIONS], check=True, capture_output=True, text=True
    ).stdout
    evidence = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "server": "transformers serve, on a CPU, one thread",
        "versions": json.loads(versions.splitlines()[-1]),
        "made": [line for line in (work / "make.log").read_text(errors="replace").splitlines()
                 if line.split(":")[0] in MODELS],
        "models": models,
        "watch": watches,
        "wrongs": wrongs,
    }  # fmt: skip
    rows = {**models, **{f"watch: {k}": v for k, v in watches.items()}, **wrongs}
    evidence["faults"] = [
        f"{name}: {row['right']} of {row['runs']} right"
        for name, row in rows.items()
        if row["right"] != row["runs"]
    ]
    return evidence


def main() -> int:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", default=os.environ.get("SM75_TORCH_PYTHON", ""))
    parser.add_argument("--work", type=Path, required=True, help="models and logs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--times", type=int, default=100, help="runs of each model; 0: --watch")
    parser.add_argument("--few", type=int, default=3, help="runs of each wrong")
    parser.add_argument("--parallel", type=int, default=1, help="models served at once")
    given = parser.parse_args()
    if not given.python:
        parser.error("name a Python with torch and transformers[serving]: --python")
    evidence = campaign(given.python, given.work.absolute(), given.times, given.few, given.parallel)
    write_bytes(given.out, (json.dumps(evidence, indent=1, ensure_ascii=False) + "\n").encode())
    for fault in evidence["faults"]:
        print(f"FAULT {fault}")
    return bool(evidence["faults"])


if __name__ == "__main__":
    raise SystemExit(main())
