"""Kill fetch, lock, channel and build at many moments; the next run must make the same bytes.

    .venv/bin/python -m tests.campaigns.kill --times 50 --seed 1 [JOB ...]
    .venv/bin/python -m tests.campaigns.kill --each-step [JOB ...]

The first kills with SIGKILL at moments spread over the time that a run takes; the second before
each step in which the process changes the disk. After each kill nothing may be half-written, and
the same command, started at once, must end with the result of an undisturbed run.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.campaigns.places import Place, places

JOBS = ["fetch", "lock", "channel", "build"]


def killed_after(place: Place, where: Path, seconds: float) -> bool:
    """Start the job and kill it; False: it had ended before."""
    process = place.start(where)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    return process.returncode == -signal.SIGKILL


def examine(place: Place, where: Path, what: str) -> str:
    """Look at what a kill left, run the job again and compare.

    Returns:
        ``untouched``, ``between`` or ``complete``: what the kill left of the result.
    """
    assert not (wrong := place.faults(where)), f"{what}: {wrong}"
    left = place.result(where)
    state = (
        "complete" if left == place.reference
        else "untouched" if left == place.before() else "between"
    )  # fmt: skip
    done = place.run(where)
    assert done.returncode == 0, f"{what}: the next run: {done.returncode}\n{done.stderr}"
    differing = place.differing(where)
    assert not differing, f"{what}: other bytes: {differing}"
    assert not (wrong := place.problems(where)), f"{what}: {wrong}"
    return state


def by_time(place: Place, times: int, seed: int) -> Counter[str]:
    """Kill at moments of which there is one in each of ``times`` equal parts of a run."""
    chance = random.Random(f"{seed} {place.job}")
    states: Counter[str] = Counter()
    for number in range(times):
        if number % 10 == 0:  # other programs run on this machine, more or fewer of them
            with place.fresh() as where:
                place.seconds = place.measure(where)
        part = (number + chance.random()) / times
        while True:
            with place.fresh() as where:
                if not killed_after(place, where, part * place.seconds):
                    with place.fresh() as other:  # it is faster by now
                        place.seconds = place.measure(other)
                    part *= 0.95
                    continue
                states[examine(place, where, f"{place.job}, killed at {part:.3f} of a run")] += 1
                break
    return states


def by_step(place: Place, last: int = 0) -> Counter[str]:
    """Kill before each step that changes the disk; ``last``: before that many at the end only."""
    states: Counter[str] = Counter()
    for step in range(max(1, place.steps - last + 1) if last else 1, place.steps + 1):
        with place.fresh() as where:
            died = place.run(where, "--die-at", str(step))
            # Threads take turns in another order each time; the last steps may not come.
            if died.returncode == 0:
                states["not reached"] += 1
                continue
            assert died.returncode == -signal.SIGKILL, died.stderr
            states[examine(place, where, f"{place.job}, killed before step {step}")] += 1
    return states


def main() -> int:
    """Run the campaign and print a line for each job."""
    parser = argparse.ArgumentParser(description="Kill runs and compare what the next one makes.")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each-step", action="store_true")
    parser.add_argument("--last", type=int, default=0, help="with --each-step: the last steps only")
    given = parser.parse_args()
    with places(given.jobs or JOBS) as made:
        for place in made:
            started = time.monotonic()
            states = (
                by_step(place, given.last)
                if given.each_step
                else by_time(place, given.times, given.seed)
            )
            count = sum(states.values()) - states["not reached"]
            print(
                f"{place.job}: {count} kills "
                + (f"at {place.steps} steps" if given.each_step else f"in {place.seconds:.1f} s")
                + f", every next run complete and identical; left: {dict(states)}; "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
