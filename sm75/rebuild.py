"""``build --check``: make everything a second time, elsewhere, and compare it byte for byte.

The second build runs in a copy of the project in another directory, with another number of compile
jobs, and compiles everything anew. Where the channel has the closure, its wheels are converted and
the adapter is built once more as well.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm75 import build, channelcommands, closure, pkgdiff
from sm75.atomic import disk_errors
from sm75.errors import CheckFailed, DiskError
from sm75.lockfile import load_release
from sm75.progress import Reporter, span
from sm75.toolchain import Provider
from sm75.words import counted

# What a build reads of the project.
PARTS = ("LICENSE", "lock", "patches", "recipes", "sm75")
# Bytes: what the second build takes, measured (sources, toolchain, objects, closure), and headroom.
SPACE = 6 * 2**30


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One package of the channel and its second build.

    Attributes:
        package: ``subdir/file``.
        differences: Where they differ; nothing when they are the same.
    """

    package: str
    differences: tuple[pkgdiff.Difference, ...]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a check found.

    Attributes:
        compared: Every package that was made twice.
        skipped: Packages of the channel that were not, each with the reason.
        jobs: Compile jobs of the second build.
        seconds: What it took.
    """

    compared: tuple[Compared, ...]
    skipped: tuple[str, ...]
    jobs: int
    seconds: float

    @property
    def wrong(self) -> tuple[Compared, ...]:
        """Those that came out otherwise."""
        return tuple(one for one in self.compared if one.differences)


def check(
    settings: build.Settings,
    first: Path,
    provide: Callable[[Path], Provider],
    release: str,
    reporter: Reporter,
) -> Result:
    """Build a second time and compare.

    Args:
        settings: Of the first build.
        first: Its package, in the channel.
        provide: Gives the toolchain provider for a project directory.
        release: Which release.
        reporter: Shows progress.

    Raises:
        DiskError: There is no room for it.
        Sm75Error: As for a build.
    """
    jobs = other_jobs(settings.jobs)
    with _elsewhere(settings, reporter) as root:
        lock = load_release(root, release)
        again = replace(settings, root=root, channel=root / "second", jobs=jobs, recompile=True)
        provider = provide(root)
        reporter.line(f"check: building again in {root}, {jobs} at a time")
        outcome = build.build(lock, provider, again, build.look(lock, provider, again), reporter)
        names = [f"{first.parent.name}/{first.name}"]
        skipped: tuple[str, ...] = ()
        if (settings.channel / closure.DOCUMENT).exists():
            reporter.line("check: converting the closure again")
            channelcommands.build(root, lock, settings.store, again.channel, reporter, offline=True)
            names, skipped = _both(settings.channel, again.channel, names[0])
        return Result(
            compared=tuple(
                Compared(
                    package=name,
                    differences=pkgdiff.compare(settings.channel / name, again.channel / name)
                    if (again.channel / name).exists()
                    else (_renamed(name, outcome.package),),
                )
                for name in names
            ),
            skipped=skipped,
            jobs=jobs,
            seconds=outcome.seconds,
        )


def require(result: Result) -> None:
    """Raise when anything came out otherwise.

    Raises:
        CheckFailed: It did; the message names the files and the places.
    """
    if result.wrong:
        lines = [f"{one.package}: {where}" for one in result.wrong for where in one.differences]
        more = [f"and {counted(len(lines) - 20, 'place')} more"] if len(lines) > 20 else []
        raise CheckFailed(
            f"{len(result.wrong)} of {len(result.compared)} packages came out otherwise the "
            "second time",
            why="\n        ".join(lines[:20] + more),
            fix="the same inputs must give the same bytes: please report this, with the places "
            "above",
        )


def describe(result: Result) -> str:
    """Say what was compared, for a person."""
    count = len(result.compared)
    said = (
        f"check: {count} package{'s' if count != 1 else ''} came out the same, byte for byte, in "
        f"another directory and with {result.jobs} compile jobs ({span(result.seconds)})"
    )
    return "\n".join([said, *(f"  not compared: {text}" for text in result.skipped)])


def to_json(result: Result) -> dict[str, Any]:
    """Give the result as JSON-ready data."""
    return {
        "identical": not result.wrong,
        "jobs": result.jobs,
        "skipped": list(result.skipped),
        "packages": {
            one.package: [str(where) for where in one.differences] for one in result.compared
        },
    }


def other_jobs(first: int) -> int:
    """Another number of compile jobs than the first build's.

    Args:
        first: Its number; 0: from cores and memory.
    """
    cores = os.cpu_count() or 1
    if first:
        return first - 1 if first > 1 else 2
    return cores - 1 if cores > 2 else cores + 1


@contextmanager
def _elsewhere(settings: build.Settings, reporter: Reporter) -> Iterator[Path]:
    """A copy of the project, of what a build reads, that is gone afterwards."""
    place = settings.work / "second-build"
    with build.only_one(settings, reporter, "second-build.lock"), disk_errors(settings.work):
        shutil.rmtree(place, ignore_errors=True)  # of a run that was killed
        free = shutil.disk_usage(settings.work).free
        if free < SPACE:
            raise DiskError(
                f"a second build takes {SPACE / 2**30:.0f} GiB; {settings.work} has "
                f"{free / 2**30:.1f} GiB",
                fix="free some space and run the same command again",
            )
        try:
            root = place / "in" / "another" / "place"
            copy_project(settings.root, root)
            yield root
        finally:
            shutil.rmtree(place, ignore_errors=True)


def copy_project(source: Path, target: Path) -> None:
    """Copy what a build and the closure read of the project.

    Args:
        source: The project's directory.
        target: The new one.
    """
    target.mkdir(parents=True)
    for part in PARTS:
        if (source / part).is_dir():
            shutil.copytree(
                source / part, target / part, symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )  # fmt: skip
        else:
            shutil.copy2(source / part, target / part)


def _both(mine: Path, theirs: Path, main: str) -> tuple[list[str], tuple[str, ...]]:
    """The packages to compare, and those that only the first channel has."""
    first, second = (
        {path.relative_to(channel).as_posix() for path in channel.glob("*/*.conda")}
        for channel in (mine, theirs)
    )
    skipped = [f"{name}: not made from this lock" for name in sorted(first - second - {main})]
    return [main, *sorted(second - {main})], tuple(skipped)


def _renamed(name: str, second: Path) -> pkgdiff.Difference:
    return pkgdiff.Difference(
        file=name,
        where="file name",
        detail=f"the second build's package is {second.name}; its input hash is another",
    )
