"""Ask the random models for the texts in ``tests/data/health/random-model.jsonl.gz``.

    .venv/bin/python -m tests.realserver.sample --python PYTHON --work DIR --out FILE.jsonl.gz

PYTHON and DIR as for ``tests.realserver.run``. Each line of the file is an answer of a real server:
which model, at which temperature, the question, the text as it came, why it ended. The first line
says how the file was made. A text judged by machine should be what a machine said: tests read this.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from pathlib import Path
from typing import Any

import httpx

from sm75.atomic import write_bytes
from sm75.health.questions import Question, choose
from tests.realserver.run import prepare
from tests.realserver.server import Served

MODELS = ("random-llama", "random-gemma")
# Of each model: rounds of three questions with sampling, and without.
_SAMPLED, _GREEDY = 45, 15


def ask(client: httpx.Client, url: str, name: str, question: Question, temperature: float) -> Any:
    """One answer."""
    asked = {
        "model": f"sm75/{name}",
        "messages": [{"role": "user", "content": question.text}],
        "temperature": temperature,
        "max_tokens": question.max_tokens,
    }
    answer = client.post(f"{url}/v1/chat/completions", json=asked).raise_for_status().json()
    choice = answer["choices"][0]
    return {
        "model": name,
        "temperature": temperature,
        "question": question.text,
        "text": choice["message"]["content"],
        "finish": choice["finish_reason"],
    }


def main() -> None:
    """Ask and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", default=os.environ.get("SM75_TORCH_PYTHON", ""))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    work = given.work.absolute()
    prepare(given.python, work)
    rows: list[Any] = [
        {"made": "python3 -m tests.realserver.sample: transformers serve, models of random weights"}
    ]
    with httpx.Client(trust_env=False, timeout=120) as client:
        for name in MODELS:
            with Served(given.python, work, name, work / f"sample-{name}.log") as server:
                for temperature, rounds in ((1.0, _SAMPLED), (0.0, _GREEDY)):
                    for seed in range(rounds):
                        rows += [
                            ask(client, server.url, name, question, temperature)
                            for question in choose(seed)
                        ]
    # Greedy answers repeat where the question does.
    lines = dict.fromkeys(json.dumps(row, ensure_ascii=False) for row in rows)
    write_bytes(given.out, gzip.compress("\n".join(lines).encode() + b"\n", mtime=0))
    print(f"{len(lines) - 1} answers")


if __name__ == "__main__":
    main()
