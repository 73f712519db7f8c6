"""Start fetch, lock, channel and build twice at once; both must end well with one result.

.venv/bin/python -m tests.campaigns.pairs --times 10 [JOB ...]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.campaigns.places import Place, places

JOBS = ["fetch", "lock", "channel", "build"]


def pairs(place: Place, times: int) -> Counter[str]:
    """Run pairs; the keys say whether one of them said that it waits."""
    states: Counter[str] = Counter()
    for _ in range(times):
        with place.fresh() as where:
            both = [place.start(where), place.start(where)]
            said = [process.communicate(timeout=300)[1] for process in both]
            codes = [process.returncode for process in both]
            assert codes == [0, 0], f"{place.job}: {codes}\n{said[0]}\n{said[1]}"
            assert not (differing := place.differing(where)), f"{place.job}: {differing}"
            assert not (wrong := place.problems(where)), f"{place.job}: {wrong}"
            states["one waited" if any("waiting" in text for text in said) else "no wait"] += 1
    return states


def main() -> int:
    """Run the campaign and print a line for each job."""
    parser = argparse.ArgumentParser(description="Run jobs twice at once.")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--times", type=int, default=10)
    given = parser.parse_args()
    with places(given.jobs or JOBS) as made:
        for place in made:
            print(f"{place.job}: {dict(pairs(place, given.times))}, one result", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
