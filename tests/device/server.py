"""The HTTP server: started as a user starts it, asked for chat completions, one by one and at once.

python -m tests.device.server MODEL OUT LOG
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.device.engine import CHUNK
from tests.device.models import CONTEXT, VOCABULARY

TOKENS = 32
START_TIMEOUT = 400.0


def question(number: int, words: int) -> str:
    """A message of that many words, another for each number."""
    return " ".join(f"w{4 + (number * 131 + i * i * 17) % (VOCABULARY - 4)}" for i in range(words))


QUESTIONS = [question(n, words) for n, words in enumerate((3, 20, 90, 400, 1500, 3000, 7, 60))]


def ask(port: int, text: str, *, stream: bool = False) -> dict[str, Any]:
    """One chat completion; its row for the reference."""
    body: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0,
        "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, "logprobs": True,
        "stream": stream,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        if not stream:
            made = json.loads(answer.read())
            choice = made["choices"][0]
            return {
                "prompt": made["prompt_token_ids"],
                "tokens": choice["token_ids"],
                "logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
                "text": choice["message"]["content"],
            }
        pieces = [
            json.loads(line[6:])
            for line in answer.read().decode().splitlines()
            if line.startswith("data: {")
        ]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    return {
        "prompt": next(p["prompt_token_ids"] for p in pieces if p.get("prompt_token_ids")),
        "tokens": [token for choice in choices for token in choice.get("token_ids") or []],
        "logprobs": [
            entry["logprob"]
            for choice in choices
            for entry in (choice.get("logprobs") or {}).get("content") or []
        ],
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "pieces": len(pieces),
    }


def wait(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until it is healthy.

    Raises:
        RuntimeError: It ended, or took too long.
    """
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}; see its log")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server was not healthy within {START_TIMEOUT:.0f} s")


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[tuple[int, float]]:
    """``vllm serve`` of a checkpoint; its port, and the seconds until it was healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float16", "--max-num-seqs", "8", "--gpu-memory-utilization", "0.1",
        "--enable-prefix-caching", *options,
    ]  # fmt: skip
    started = time.monotonic()
    with log.open("wb") as handle:
        process = subprocess.Popen(
            command, stdout=handle, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait(port, process)
        yield port, time.monotonic() - started
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> None:
    """Start, ask, stop, and write what was answered."""
    model, out, log = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    options = (
        "--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(CHUNK),
        "--kv-cache-memory-bytes", str(2 << 30),
        "--chat-template", "{% for m in messages %}{{ m.content }} {% endfor %}",
        "--compilation-config", '{"cudagraph_capture_sizes": [1, 2, 4, 8]}',
    )  # fmt: skip
    with serving(model, log, *options) as (port, seconds):
        ready = time.monotonic()
        models = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30))
        runs = {"chat, one by one": [ask(port, text) for text in QUESTIONS]}
        with ThreadPoolExecutor(8) as pool:
            runs["chat, eight at once"] = list(pool.map(lambda text: ask(port, text), QUESTIONS))
        runs["chat, streamed"] = [ask(port, text, stream=True) for text in QUESTIONS[:3]]
        found = {
            "start_seconds": round(seconds, 1),
            "generate_seconds": round(time.monotonic() - ready, 1),
            "models": [entry["id"] for entry in models["data"]],
            "runs": runs,
        }
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
