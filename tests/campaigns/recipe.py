"""Kill the build of the real package, again and again, and compare what comes of it.

python -m tests.campaigns.recipe CHECKOUT PACKAGE --times 14 --seed 7

CHECKOUT is a clone of this project with nothing built in it, PACKAGE the undisturbed build's of the
same commit. Each run is killed with SIGKILL after a random time, every process of it; the next goes
on where it stopped. Take a warm compiler cache (docs/building.md), or it takes hours.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from sm75.store import hash_file

# Seconds after which a run is killed: from its start to the end of a compile out of the cache.
MOMENTS = (2.0, 28.0)
COMMAND = (sys.executable, "orchestrator.py", "build", "--offline")


def left_behind(checkout: Path) -> list[str]:
    """Command lines of processes that still work below a checkout."""
    told = subprocess.run(
        ["pgrep", "-af", str(checkout / ".sm75")], check=False, capture_output=True, text=True
    ).stdout
    return told.splitlines()


def kill_once(checkout: Path, after: float) -> None:
    """Start a build, and kill all of it."""
    run = subprocess.Popen(
        COMMAND, cwd=checkout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    time.sleep(after)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def main() -> int:
    """Run the campaign; 0: nothing left, nothing published early, the bytes are the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("package", type=Path)
    parser.add_argument("--times", type=int, default=14)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    chance, faults = random.Random(given.seed), 0
    checkout = given.checkout.resolve()
    for number in range(given.times):
        after = chance.uniform(*MOMENTS)
        kill_once(checkout, after)
        time.sleep(1)
        left = left_behind(checkout)
        early = [str(path) for path in checkout.glob("channel/*/*.conda")]
        faults += bool(left) + bool(early)
        print(f"kill {number + 1} after {after:.1f} s: left {left}, published {early}", flush=True)
    subprocess.run(COMMAND, cwd=checkout, check=True)
    made = next(checkout.glob(f"channel/*/{given.package.name}"), None)
    same = made is not None and hash_file(made) == hash_file(given.package)
    print(f"{given.times} kills, {faults} faults, bytes {'the same' if same else 'OTHER'}")
    return 0 if same and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
