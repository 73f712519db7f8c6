"""Let the disk fill up under fetch, lock, channel and build; nothing may be lost.

    .venv/bin/python -m tests.campaigns.disk --sizes 12 [JOB ...]        # as root: real small disks
    .venv/bin/python -m tests.campaigns.disk --each-step [JOB ...]       # anybody

The first puts the job's place on a tmpfs with a little more room than it has files, in growing
steps; the second lets the disk be full from each of the process's file-making steps on. A run must
end well or with exit code 9 and a message, must leave every file old or new, and must succeed, with
the bytes of an undisturbed run, when there is room again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.campaigns.places import Place, places

JOBS = ["fetch", "lock", "channel", "build"]
_ROOM = 512  # MiB of a disk with room


def judge(place: Place, where: Path, done: subprocess.CompletedProcess[str], what: str) -> str:
    """Check how a run on a full disk ended and what it left."""
    said = done.stderr
    assert done.returncode in (0, 9), f"{what}: exit code {done.returncode}\n{said}"
    assert "Traceback" not in said, f"{what}\n{said}"
    if done.returncode:
        assert "next:" in said, f"{what}\n{said}"
        assert "space" in said or "room" in said or "full" in said, f"{what}\n{said}"
    assert not (wrong := place.faults(where)), f"{what}: {wrong}"
    return "enough" if done.returncode == 0 else "exit code 9"


def again(place: Place, where: Path, what: str) -> None:
    """With room, the same command must make the result."""
    done = place.run(where)
    assert done.returncode == 0, f"{what}: with room: {done.returncode}\n{done.stderr}"
    assert not (differing := place.differing(where)), f"{what}: other bytes: {differing}"
    assert not (wrong := place.problems(where)), f"{what}: {wrong}"


def _mount(where: Path, size: int, *, remount: bool = False) -> None:
    options = f"{'remount,' if remount else ''}size={size}k"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)]
    subprocess.run(command, check=True)


def _used(where: Path) -> int:
    """KiB that a directory's files take."""
    out = subprocess.run(["du", "-sk", str(where)], check=True, capture_output=True, text=True)
    return int(out.stdout.split()[0])


def by_size(place: Place, sizes: int) -> Counter[str]:
    """Real small disks."""
    ends: Counter[str] = Counter()
    with place.fresh() as where:
        first = _used(where)
        place.must(where)
        grown = max(_used(where) - first, 64)
    for number in range(sizes):
        disk = place.scratch / "disk"
        disk.mkdir(exist_ok=True)
        _mount(disk, _ROOM * 1024)
        try:
            with place.fresh(under=disk) as where:
                # From nothing to three times what the job leaves; build drops much again.
                free = grown * 3 * number // sizes
                _mount(disk, _used(disk) + free, remount=True)
                what = f"{place.job}, {free} KiB free"
                ends[judge(place, where, place.run(where, "--unchecked"), what)] += 1
                _mount(disk, _ROOM * 1024, remount=True)
                again(place, where, what)
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)
    return ends


def by_step(place: Place) -> Counter[str]:
    """A disk that is full from each file-making step on; made up inside the process."""
    ends: Counter[str] = Counter()
    for step in range(1, place.steps + 1):
        with place.fresh() as where:
            what = f"{place.job}, full from step {step} on"
            ends[judge(place, where, place.run(where, "--full-at", str(step)), what)] += 1
            again(place, where, what)
    return ends


def main() -> int:
    """Run the campaign and print a line for each job."""
    parser = argparse.ArgumentParser(description="Fill the disk under runs.")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--sizes", type=int, default=12)
    parser.add_argument("--each-step", action="store_true")
    given = parser.parse_args()
    with places(given.jobs or JOBS) as made:
        for place in made:
            ends = by_step(place) if given.each_step else by_size(place, given.sizes)
            print(f"{place.job}: {dict(ends)}; nothing lost, all complete with room", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
