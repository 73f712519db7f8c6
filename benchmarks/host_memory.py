"""Can a machine with 8 GiB of memory stage 9.5 GiB of weights? The host's side of it, measured.

    python3 -m benchmarks.host_memory --python VENV/bin/python [--out FILE.json]

Writes a checkpoint of 9.5 GiB (10 GiB of free disk; it is removed afterwards) and reads it in a
control group with a hard limit and no swap, in the ways of vLLM's loader, and in two ways that must
fail. VENV has torch and safetensors. Needs the right to make control groups: root, or a delegated
group. Takes half an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import checkpoint
from benchmarks.cgroup import Group, home
from sm75 import atomic

GIB = 1 << 30
READER = Path(__file__).with_name("checkpoint_reader.py")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One reading: how, under which limit in bytes, how often in one process."""

    strategy: str
    limit: int
    repeat: int = 1


# One file of 9.5 GiB. `eager` and `keep` must be killed; the others show how low the limit can go.
RUNS = (
    Run(strategy="import", limit=8 * GIB),
    Run(strategy="plain", limit=8 * GIB),
    Run(strategy="lazy", limit=8 * GIB, repeat=2),
    *(Run(strategy="lazy", limit=limit * GIB) for limit in (7, 6, 4, 2, 1)),
    Run(strategy="prefetch", limit=8 * GIB),
    *(Run(strategy="convert", limit=limit * GIB) for limit in (8, 7, 6, 5, 4)),
    Run(strategy="eager", limit=8 * GIB),
    Run(strategy="keep", limit=8 * GIB),
)


def verdict(code: int, killed: int, result: dict[str, Any]) -> str:
    """One word for how a reading ended: ``read``, ``killed``, ``refused`` or ``failed``.

    Args:
        code: Exit status.
        killed: Processes that the kernel killed for want of memory.
        result: What the reader printed.
    """
    if killed:
        return "killed"
    if "error" in result:
        return "refused"
    passes = result.get("passes", [])
    wrong = any(one["sums_agree"] is False for one in passes)
    return "failed" if code or wrong or not result else "read"


def read(python: Path, directory: Path, run: Run) -> dict[str, Any]:
    """Read a checkpoint in a process of its own under a limit; the page cache is cold.

    Args:
        python: What runs the reader.
        directory: The checkpoint's.
        run: How.

    Raises:
        OSError: No control group can be made.
    """
    for path in directory.glob("*.safetensors"):
        drop(path)
    command = [str(python), str(READER), run.strategy, str(directory), "--passes", str(run.repeat)]
    with Group(run.limit) as group:
        ended = group.run(command)
    result: dict[str, Any] = json.loads(ended.out) if ended.code == 0 else {}
    return {
        **asdict(run),
        "ended": verdict(ended.code, ended.killed, result),
        "exit_status": ended.code,
        "group_peak_bytes": ended.peak,
        "group_stat_at_end": ended.stats,
        **({"said": ended.err.strip().splitlines()[-1]} if ended.code > 0 and ended.err else {}),
        **{key: value for key, value in result.items() if key != "strategy"},
    }


def drop(path: Path) -> None:
    """Take a file's pages out of the page cache; they must have been written."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory() -> dict[str, int]:
    """RAM and swap of this machine, in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    found = {key.rstrip(":"): int(value) * 1024 for key, value, *_ in lines}
    return {"ram": found["MemTotal"], "swap": found["SwapTotal"]}


def map_trials(python: Path, scratch: Path, say: Callable[[dict[str, Any]], None]) -> None:
    """A checkpoint larger than RAM and swap together, in one file and in two; no disk is needed.

    A control group does not change how much memory the kernel thinks the machine has, so a file
    that is too large for 8 GiB has to be made too large for this machine. The kernel's rule: with
    ``vm.overcommit_memory`` 0, a private writable map of more than RAM and swap is refused (Linux,
    Documentation/mm/overcommit-accounting.rst; ``__vm_enough_memory`` in mm/util.c).
    """
    total = sum(memory().values()) + GIB
    for files in (1, 2):
        directory = scratch / f"sparse-{files}"
        directory.mkdir()
        for number in range(files):
            checkpoint.write_sparse(
                directory / f"model-{number}-of-{files}.safetensors", total // files
            )
        found = read(python, directory, Run(strategy="lazy", limit=2 * GIB))
        say({"sparse_files": files, "sparse_bytes": total, **found})
        shutil.rmtree(directory)


def measure(
    python: Path, scratch: Path, runs: Sequence[Run], say: Callable[[dict[str, Any]], None]
) -> None:
    """Write the checkpoint and do all runs, each told to ``say``."""
    directory = scratch / "checkpoint"
    checkpoint.write(directory, checkpoint.gemma4_e2b())
    for run in runs:
        say(read(python, directory, run))
    shutil.rmtree(directory)
    map_trials(python, scratch, say)


def table(evidence: dict[str, Any]) -> str:
    """The runs as a table for docs/g5g.md: most GiB of each kind, GiB from disk, seconds."""

    def gib(count: float) -> str:
        return f"{count / GIB:.2f}"

    lines = [
        "| strategy | limit | ended | anonymous | mapped | charged | from disk | faults | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in evidence["runs"]:
        name = run["strategy"]
        if files := run.get("sparse_files"):
            name += f", {gib(run['sparse_bytes'])} GiB in {files} file{'s' if files > 1 else ''}"
        peak, passes = run.get("peak_kib", {}), run.get("passes", [])
        cells = (
            name, f"{run['limit'] // GIB} GiB", run["ended"],
            *(gib(peak[key] * 1024) if peak else "" for key in ("RssAnon", "RssFile")),
            gib(run["group_peak_bytes"]),
            ", ".join(gib(one["bytes_from_disk"]) for one in passes),
            ", ".join(str(one["major_faults"]) for one in passes),
            ", ".join(f"{one['seconds']:.0f}" for one in passes),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, required=True, help="has torch and safetensors")
    parser.add_argument("--scratch", type=Path, default=Path.cwd(), help="where the file is made")
    parser.add_argument("--out", type=Path, help="the evidence, as JSON")
    options = parser.parse_args()
    need, free = (
        checkpoint.size(checkpoint.gemma4_e2b()) + GIB // 2,
        shutil.disk_usage(options.scratch).free,
    )
    if free < need:
        sys.exit(f"{need / GIB:.1f} GiB of disk are needed, {free / GIB:.1f} are free")
    found = home()
    if found is None:
        sys.exit("no memory controller of control groups is mounted here")
    print(f"{free / GIB:.0f} GiB of disk are free, {need / GIB:.1f} are needed for half an hour")
    done: list[dict[str, Any]] = []

    def say(one: dict[str, Any]) -> None:
        done.append(one)
        peak = one.get("peak_kib", {})
        print(
            f"{one['strategy']:9} {one['limit'] / GIB:.0f} GiB  {one['ended']:8}"
            f" group {one['group_peak_bytes'] / GIB:.2f}"
            f" anon {peak.get('RssAnon', 0) / 2**20:.2f} file {peak.get('RssFile', 0) / 2**20:.2f}"
            f" {[(p['seconds'], p['major_faults']) for p in one.get('passes', [])]}"
            f" {one.get('error', '')}",
            flush=True,
        )

    with tempfile.TemporaryDirectory(prefix="sm75-weights-", dir=options.scratch) as scratch:
        measure(options.python, Path(scratch), RUNS, say)
    evidence = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python3 -m benchmarks.host_memory",
        "machine": {
            **memory(),
            "arch": platform.machine(),
            "kernel": platform.release(),
            "cores": os.cpu_count(),
            "cgroup": found[0],
            "overcommit_memory": int(Path("/proc/sys/vm/overcommit_memory").read_text()),
        },
        "checkpoint_bytes": checkpoint.size(checkpoint.gemma4_e2b()),
        "runs": done,
    }
    if options.out:
        atomic.write_bytes(options.out, (json.dumps(evidence, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
