"""``health`` on a real vLLM server: what it says of a random model, and of a sane one.

python -m tests.device.health MODEL OUT LOG

It runs in the Python of the server, so it calls what the command ``health`` calls, not the command.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from sm75.health import check
from sm75.health.client import Server
from tests.device.server import serving

# The start of the engine takes longer than these.
ROUNDS = 20


def main() -> None:
    """Start, ask, stop, and write what was said."""
    model, out, log = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    # Small, so that it starts soon: the questions and answers have some 200 tokens.
    options = ("--max-model-len", "1024", "--enforce-eager", "--kv-cache-memory-bytes",
               str(256 << 20))  # fmt: skip
    with serving(model, log, *options) as (port, seconds):
        ready = time.monotonic()
        server = Server(f"http://127.0.0.1:{port}")
        found = [check.check(server).to_json() for _ in range(ROUNDS)]
        took = time.monotonic() - ready
    said = {
        "start_seconds": round(seconds, 1),
        "health_seconds": round(took, 1),
        "exit_codes": [one["exit_code"] for one in found],
        "verdicts": sorted({one["verdict"].partition(" (")[0] for one in found})[:8],
        "an_example": [one["answer"] for one in found[0]["questions"]],
    }
    out.write_text(json.dumps(said, ensure_ascii=False).replace(str(port), "PORT"))


if __name__ == "__main__":
    main()
