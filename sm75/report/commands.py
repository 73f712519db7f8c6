"""The commands that a report names: what fills a section, and what to do next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from sm75 import sbom
from sm75.report.facts import Bill, Missing, Step
from sm75.verify import Verification

RUN = "python3 orchestrator.py"
BUILD = f"{RUN} build"
PLACE = "DIR"
"""The channel, in the page's commands: it is published with the channel, and names no directory of
the machine that made it. :func:`named` puts one in its place."""


def file(name: str, *, ours: bool) -> str:
    """A file of the channel in a command of the page.

    Args:
        name: Its path in the channel.
        ours: The channel is the project's own.
    """
    return shlex.quote(f"{'channel' if ours else PLACE}/{name}")


def named(gap: Missing, channel: Path) -> Missing:
    """The same with the channel's own directory in its command, for the one who runs it."""
    place = shlex.quote(str(channel))
    command = gap.command.replace(f"--channel {PLACE}", f"--channel {place}")
    command = re.sub(rf" {PLACE}/(\S+)", lambda m: f" {shlex.quote(f'{channel}/{m[1]}')}", command)
    return replace(gap, command=command)


def steps(
    gaps: list[Missing], checked: Verification | None, bill: Bill | None, option: str
) -> Iterable[Step]:
    """What to do next.

    Args:
        gaps: Sections that have nothing.
        checked: The package's verdict.
        bill: The channel's packages.
        option: What names the channel in a command; empty for the project's own.
    """
    names = {item.name for item in bill.items} if bill else set()
    if not names & set(sbom.OURS):
        yield Step(text="Build the package.", command=f"{BUILD}{option}")
        return
    if checked is None:
        yield Step(text="Check the package.", command=f"{RUN} verify{option}")
    elif not checked.ok:
        yield Step(text="Read which rules are broken, mend the build, and build again. "
                   "Do not install this package.", command=f"{RUN} verify{option}")  # fmt: skip
        return
    if any(gap.section == "smem" for gap in gaps):
        yield Step(text="Audit the kernels' shared memory.", command=f"{RUN} verify --smem{option}")
    if "dlami-torch" not in names:
        yield Step(text="Bring the dependencies in: a package alone does not install.",
                   command=f"{RUN} channel build{option}")  # fmt: skip
    yield Step(text="See what an installation without network would still lack; nothing is printed "
               "when it lacks nothing.", command=f"{RUN} channel missing{option}")  # fmt: skip
    yield Step(text="Check every file of the channel, before carrying it and after.",
               command=f"{RUN} channel verify{option}")  # fmt: skip
    yield Step(text="Look at the g5g before installing.", command=f"{RUN} doctor")
    yield Step(text="Install on the g5g; python's minor must be that of the image's torch.",
               command="conda create -n vllm -c ./channel -c conda-forge "
               "--strict-channel-priority vllm-sm75 python=3.12")  # fmt: skip
    yield Step(text="Ask the server questions once it runs, and read its answers.",
               command=f"{RUN} health")  # fmt: skip
