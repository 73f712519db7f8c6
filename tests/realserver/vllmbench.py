"""Run vLLM's own benchmark, of the pinned sdist, through ``bench --tool vllm``: no GPU is needed.

    .venv/bin/python -m tests.realserver.vllmbench --python PYTHON --tokenizer DIR --out FILE

PYTHON has torch (a CPU build will do), transformers and the further packages that vLLM's command
line imports; which is missing is said. DIR has any tokenizer. The server is that of the unit tests:
its delays are known, so that the figures can be judged. Exit code 0: each was right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from sm75.atomic import write_bytes
from sm75.lockfile import load_release
from sm75.store import Store, default_root
from tests.unit.chatserver import ChatServer

ROOT = Path(__file__).resolve().parents[2]
# Seconds that the server takes to the first token, and for each further one.
PREFILL, DELAY = 0.1, 0.02
OUTPUT = 8
# On a busy machine sleeps last longer, never shorter; a client's own time comes on top.
SLACK = 3.0
_MAIN = """#!{python} -B
import sys
sys.path.insert(0, {tree!r})
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""


def prefix(home: Path, python: Path) -> Path:
    """Lay the pinned sources out as an environment that has ``bin/vllm``."""
    lock = load_release(ROOT, None)
    sdist = Store(default_root()).get(lock.artifact("vllm-sdist"))
    top = f"vllm-{lock.vllm}"
    with tarfile.open(sdist) as archive:
        wanted = [m for m in archive if m.name.startswith((f"{top}/vllm/", f"{top}/PKG-INFO"))]
        archive.extractall(home, members=wanted, filter="data")
    # What pip would make of it: vLLM looks its own version up.
    facts = home / top / f"{top}.dist-info"
    facts.mkdir()
    (home / top / "PKG-INFO").rename(facts / "METADATA")
    program = home / "prefix" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(_MAIN.format(python=python, tree=str(home / top)))
    program.chmod(0o755)
    return program.parent.parent


def bench(server: ChatServer, home: Path, tokenizer: Path, *more: str) -> dict[str, Any]:
    """Run the command, and read its JSON."""
    done = subprocess.run(
        [
            str(ROOT / ".venv/bin/python"), str(ROOT / "orchestrator.py"), "bench", "--json",
            "--tool", "vllm", "--prefix", str(home / "prefix"), "--model", str(tokenizer),
            "--weight-bytes", "1000000000", "--url", server.url, "--prompt-tokens", "64",
            "--output-tokens", str(OUTPUT), "--no-health", "--out", str(home / "result"), *more,
        ],
        check=False, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_API_KEY": "secret"},
    )  # fmt: skip
    if not done.stdout:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def faults(data: dict[str, Any], answers: int, failed: int) -> list[str]:
    """What is wrong with the figures, by what the server is known to do."""
    found = []
    for one in data["cases"]:
        name = f"{one['concurrency']} at once"
        if (one["answers"], one["failed"]) != (answers * one["concurrency"] - failed, failed):
            found.append(f"{name}: {one['answers']} answers, {one['failed']} failed")
        ttft, itl = one["ttft_s"], one["itl_s"]
        if not PREFILL <= ttft["least"] <= ttft["median"] <= SLACK * PREFILL:
            found.append(f"{name}: TTFT {ttft}")
        # The first token may be late by a little where the last is not: a tenth either way.
        if not 0.9 * DELAY <= itl["least"] <= itl["median"] <= SLACK * DELAY:
            found.append(f"{name}: ITL {itl}")
        if one["output_tokens_counted"] != [OUTPUT]:
            found.append(f"{name}: {one['output_tokens_counted']} tokens")
    return found


def run(home: Path, python: Path, tokenizer: Path) -> dict[str, Any]:
    """Three runs: a plain server, one that caches prefixes, one that fails once."""
    prefix(home, python)
    told: dict[str, Any] = {}
    with ChatServer() as server:
        server.prefill, server.delay, server.sane = PREFILL, DELAY, False
        data = bench(server, home, tokenizer, "--concurrency", "1,2", "--repeats", "6")
        told["plain"] = {"faults": faults(data, 6, 0), "cases": data["cases"]}
        told["first request"] = server.asked[0]
        # Both warm-ups of the case of one stream, and then it is measured.
        told["first prompt sent"] = server.prompts.count(server.prompts[0])
    with ChatServer() as server:
        server.prefill, server.delay, server.sane = PREFILL, DELAY, False
        server.cache = True
        data = bench(server, home, tokenizer, "--concurrency", "1", "--repeats", "6")
        told["caching"] = {"faults": faults(data, 6, 0), "cases": data["cases"]}
    with ChatServer() as server:
        server.prefill, server.delay, server.sane = PREFILL, DELAY, False
        # Two warm-ups, the group that is left out, one good answer.
        server.moods = ["", "", "", "", 500]
        data = bench(server, home, tokenizer, "--concurrency", "1", "--repeats", "6")
        told["failing"] = {"faults": faults(data, 6, 1), "cases": data["cases"]}
    return told


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sm75-vllmbench-") as scratch:
        told = run(Path(scratch), given.python.absolute(), given.tokenizer.absolute())
    write_bytes(given.out, json.dumps(told, indent=2).encode() + b"\n")
    found = [
        fault for one in told.values() if isinstance(one, dict) for fault in one.get("faults", ())
    ]
    print("\n".join(found) or f"vllm bench serve: every figure is right; {given.out}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
