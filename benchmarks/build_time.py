"""How long a cold build takes: core-minutes, and the sources that take longest.

    python3 benchmarks/build_time.py [--write]

It compiles everything anew (about 50 core-minutes) into a channel of its own. ``--write`` renews
the list of slow sources that the build starts first and takes its ETA from.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_OBJECT = re.compile(r"CMakeFiles/[^/]+\.dir/(?P<source>.+)\.o$")
# Sources under this many seconds do not matter for the order.
FLOOR = 20.0


def source_seconds(ninja_log: Path) -> dict[str, float]:
    """Wall seconds by source, from ninja's own log."""
    seconds = {}
    for line in ninja_log.read_text().splitlines()[1:]:
        start, end, _, output, _ = line.split("\t")
        if found := _OBJECT.match(output):
            seconds[found["source"]] = (int(end) - int(start)) / 1000
    return seconds


def main() -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew slowest.txt")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as channel:
        done = subprocess.run(
            [sys.executable, str(ROOT / "orchestrator.py"), "build", "--recompile", "--json",
             "--channel", channel],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
    built = json.loads(done.stdout)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    native = ROOT / ".sm75" / "native" / built["native_hash"][:16]
    seconds = source_seconds(native / "build" / ".ninja_log")
    slowest = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))
    print(f"wall time         {(time.monotonic() - started) / 60:6.1f} min")
    print(f"core-minutes      {(usage.ru_utime + usage.ru_stime) / 60:6.1f}")
    print(f"sources           {len(seconds):6d}, {sum(seconds.values()) / 60:.1f} job-minutes")
    print(f"largest process   {usage.ru_maxrss / 2**20:6.1f} GiB")
    print("slowest ten:")
    for name, took in slowest[:10]:
        print(f"  {took:6.0f} s  {name}")
    if options.write:
        release = (ROOT / "lock" / "default").read_text().strip()
        path = ROOT / "patches" / release / "overlay" / "cmake" / "sm75" / "slowest.txt"
        lines = [f"{took:.0f} {name}" for name, took in slowest if took >= FLOOR]
        path.write_text(
            "# Seconds of one compile job by source, longest first: benchmarks/build_time.py\n"
            + "\n".join(lines)
            + "\n"
        )
        print(f"wrote {path.relative_to(ROOT)}; now: python3 orchestrator.py patches seal")


if __name__ == "__main__":
    main()
