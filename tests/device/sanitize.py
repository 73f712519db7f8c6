"""compute-sanitizer over the kernels that are compiled ahead of time, with a control for each tool.

    python3 -m tests.device.sanitize BUNDLE --out FILE [--only TEXT]... [--tool NAME]...

BUNDLE is that of ``verify --gpu --bundle FILE --kernels DIR``; the machine has a GPU, torch and
compute-sanitizer. Only the kernels of the package are looked at, in the trials' own launches, with
each tensor in memory of its own, so that a step beyond one shows. After each tool comes a control,
in which it must find a fault: an output one token too short for memcheck, PTX without barriers for
racecheck. Exit code 1: a fault was found, or a control's was not.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KERNELS = ("kernel_unified_attention", "reduce_segments")
TOOLS = ("memcheck", "racecheck")
# Trials by parts of their names. racecheck takes minutes where memcheck takes a second.
ONLY = {
    "memcheck": ("prefill and decode", "chunks", "speculative verify", "image ranges"),
    "racecheck": ("tin", "speculative verify"),
}
CONTROL = ("h512 8:1, tin",)
SIDE = "ahead of time"
_SUMMARY = re.compile(r"^========= (ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", re.MULTILINE)


def short_output(home: Path) -> None:
    """Make the outputs one token too short: every kernel that writes the last one is wrong."""
    path = home / "sm75" / "smem" / "inputs.py"
    text = path.read_text(encoding="utf-8")
    changed = text.replace("out=empty(tokens, ", "out=empty(tokens - 1, ")
    if changed == text:
        raise SystemExit("the control of memcheck no longer fits sm75/smem/inputs.py")
    path.write_text(changed, encoding="utf-8")


def no_barriers(home: Path) -> None:
    """Take the barriers out of the package's PTX."""
    (folder,) = (home / "kernels").iterdir()
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    about, blob = index["files"]["ptx"], bytearray()
    old, removed = (folder / about["name"]).read_bytes(), 0
    for fact in index["variants"]:
        offset, size, _ = fact["ptx"]
        text = zlib.decompress(old[offset : offset + size])
        without, count = re.subn(rb"\bbar\.sync\b[^;]*;", b"", text)
        packed, removed = zlib.compress(without), removed + count
        fact["ptx"] = [len(blob), len(packed), hashlib.sha256(packed).hexdigest()]
        blob += packed
    if not removed:
        raise SystemExit("there is no barrier in the package's PTX")
    about |= {"size": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
    (folder / about["name"]).write_bytes(blob)
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


CONTROLS = {"memcheck": short_output, "racecheck": no_barriers}


def run(home: Path, tool: str, only: Sequence[str], seconds: int) -> dict[str, Any]:
    """Run trials under a tool; what it found."""
    command = [
        "compute-sanitizer", "--tool", tool, "--print-limit", "5", "--report-api-errors", "no",
        "--kernel-name", f"regex={'|'.join(KERNELS)}",
        sys.executable, "-m", "sm75.gpu.runner", "--home", str(home), "--side", SIDE, "--no-times",
    ]  # fmt: skip
    command += [word for part in only for word in ("--only", part)]
    # Each tensor in memory of its own: what is read beyond it belongs to nobody.
    environment = os.environ | {
        "PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=home, env=environment, check=False, capture_output=True, text=True,
            timeout=seconds,
        )  # fmt: skip
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        text, code = (late.stdout or b"").decode(errors="replace"), -1
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"side"')]
    launched = [name for row in rows for name in row.get("kernels", ())]
    found = _SUMMARY.search(text)
    said = [line for line in text.splitlines() if line.startswith("=========")]
    return {
        "trials": len(rows), "right": sum(bool(row.get("passed")) for row in rows),
        "launches": len(launched), "kernels": len(set(launched)), "exit_code": code,
        "faults": int(found[2]) if found else None, "said": said[:12],
        "ended": text.strip().splitlines()[-1][:200] if text.strip() else "",
    }  # fmt: skip


def verdict(found: Mapping[str, Any], control: Mapping[str, Any]) -> list[str]:
    """What is wrong with a tool's run and its control."""
    faults = []
    if found["faults"] is None:
        faults.append(f"it did not end: exit code {found['exit_code']}")
    elif found["faults"]:
        faults.append(f"{found['faults']} faults")
    if not found["launches"] or found["right"] != found["trials"]:
        faults.append(f"{found['right']} of {found['trials']} trials right")
    if not control["faults"]:
        faults.append("the control's fault was not found")
    return faults


def main() -> int:
    """Every tool, then its control; the evidence is written whatever happens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append")
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--seconds", type=int, default=600, help="for each run")
    given = parser.parse_args()
    version = subprocess.run(
        ["compute-sanitizer", "--version"], check=True, capture_output=True, text=True
    ).stdout.strip()
    evidence: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "compute-sanitizer": version.splitlines()[-1], "kernels": list(KERNELS), "tools": {},
    }  # fmt: skip
    faults = []
    with zipfile.ZipFile(given.bundle) as archive, tempfile.TemporaryDirectory() as scratch:
        for tool in given.tool or TOOLS:
            homes = Path(scratch, tool), Path(scratch, f"{tool}-control")
            for home in homes:
                archive.extractall(home)
            CONTROLS[tool](homes[1])
            found = run(homes[0], tool, given.only or ONLY[tool], given.seconds)
            control = run(homes[1], tool, CONTROL, given.seconds)
            faults += [f"{tool}: {fault}" for fault in verdict(found, control)]
            evidence["tools"][tool] = {"found": found, "control": control}
            evidence["faults"] = faults
            given.out.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(evidence, indent=1))
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
