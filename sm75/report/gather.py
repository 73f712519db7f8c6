"""Collect what a report shows from a channel, the lock, and the records of this directory."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sm75 import channeltools, inspection, sbom
from sm75.channelcheck import REPODATA, SUMS
from sm75.condapkg import read_info
from sm75.errors import LockError, PatchError, Sm75Error
from sm75.lockfile import ReleaseLock, TargetContract, load_target
from sm75.report import attention, claims, commands, records, timeline
from sm75.report.commands import BUILD, PLACE, RUN
from sm75.report.facts import (
    Bill,
    Change,
    Facts,
    Group,
    Input,
    Missing,
    Origin,
    Sizes,
    Subject,
)
from sm75.report.records import SmemRecord
from sm75.report.timeline import Timeline
from sm75.series import load_series
from sm75.verify import Verification
from sm75.words import counted


def gather(root: Path, lock: ReleaseLock, channel: Path, *, keep: bool = True) -> Facts:
    """Collect it.

    Args:
        root: The project's directory.
        lock: The release.
        channel: The channel, present or not.
        keep: Keep as records what had to be read anew.

    Raises:
        ChannelError: An index or the package cannot be read.
        DiskError: A record cannot be kept.
    """
    gaps: list[Missing] = []
    ours = channel.resolve() == (root / "channel").resolve()
    option = "" if ours else f" --channel {PLACE}"
    bill = _bill(root, lock, channel)
    if bill is None:
        gaps.append(
            Missing(section="sbom", what="The list of packages", why="The channel has none.",
                    command=BUILD + option)
        )  # fmt: skip
    subject = _subject(bill.items if bill else (), channel, lock)
    package = channel / subject.file if subject else None
    no_package = "There is no built package in the channel."

    def absent(section: str, what: str, why: str, command: str) -> None:
        command = command if package else BUILD + option
        gaps.append(
            Missing(section=section, what=what, why=why if package else no_package, command=command)
        )

    origin = _origin(root, lock, package) if package else None
    if origin is None:
        absent("origin", "What it was made of", "The package does not say it.", f"{BUILD}{option}")
    look = _inspection(root, package, subject, keep=keep) if package and subject else None
    if look is None:
        absent("arches", "The device code by library", "The package holds no library.",
               f"{RUN} inspect "
               + commands.file(subject.file if subject else "", ours=ours))  # fmt: skip
    checked = records.find(root, subject.sha256, Verification) if subject else None
    if checked is None:
        absent("rules", "The verdict of verify",
               "Nobody has checked this package from this directory.",
               f"{RUN} verify{option}")  # fmt: skip
    smem, why = _smem(root, lock, subject)
    if smem is None:
        gaps.append(Missing(section="smem", what="The shared memory of the Triton kernels",
                            why=why, command=f"{RUN} verify --smem{option}"))  # fmt: skip
    timed = attention.find(root, lock.vllm)
    if timed is None:
        gaps.append(
            Missing(section="attention", what="Attention's times, FMA against tensor cores",
                    why=f"docs/evidence has no run of vLLM {lock.vllm} that timed both. It takes a "
                    "GPU, and what `kernels build --files k` writes.",
                    command=f"{RUN} verify --gpu --kernels k/vllm_sm75_kernels --json "
                    "> docs/evidence/attention-new.json")
        )  # fmt: skip
    line = _timeline(root, package, subject, keep=keep) if package and subject else None
    if line is None:
        absent("timeline", "The compile as it went",
               "The log of the build is kept where it was built, not in the channel.",
               f"{BUILD} --recompile{option}")  # fmt: skip
    sizes = _sizes(channel, package) if package else None
    if sizes is None:
        absent("sizes", "The sizes", "", f"{BUILD}{option}")
    claimed = claims.read(root / "docs" / "claims.md")
    if claimed is None:
        gaps.append(Missing(section="claims", what="The claims", why="docs/claims.md is not there.",
                            command="git checkout -- docs/claims.md"))  # fmt: skip
    return Facts(
        release=lock.vllm, channel_sums=_digest(channel / SUMS), subject=subject, origin=origin,
        inspection=look, verification=checked, smem=smem, attention=timed, timeline=line,
        sizes=sizes, bill=bill, claims=claimed, missing=tuple(gaps),
        steps=tuple(commands.steps(gaps, checked, bill, option)),
    )  # fmt: skip


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _bill(root: Path, lock: ReleaseLock, channel: Path) -> Bill | None:
    if not any(channel.glob(f"*/{REPODATA}")):
        return None
    listed = tuple(sbom.items(channel))
    if not listed:
        return None
    there = channel / sbom.SBOM
    if not there.is_file():
        state = "absent"
    else:
        state = "current" if there.read_bytes() == sbom.make(channel, root, lock) else "old"
    return Bill(items=listed, file=state)


def _subject(items: Iterable[sbom.Item], channel: Path, lock: ReleaseLock) -> Subject | None:
    """The last one built of the release; by file name where two have the same date."""
    ours = [i for i in items if i.name in sbom.OURS and i.version == lock.vllm]
    ours = [i for i in ours if (channel / i.file).is_file()]
    ours.sort(key=lambda item: ((channel / item.file).stat().st_mtime, item.file))
    if not ours:
        return None
    *others, item = ours
    index = read_info(channel / item.file)["index"]
    return Subject(
        file=item.file, name=item.name, version=item.version, build=str(index.get("build", "")),
        size=item.size, sha256=item.sha256, others=tuple(sorted(other.file for other in others)),
    )  # fmt: skip


def _origin(root: Path, lock: ReleaseLock, package: Path) -> Origin | None:
    facts = sbom.provenance(package)
    if not facts.get("artifacts"):
        return None
    known: dict[tuple[str, str], str] = {}
    try:
        series = load_series(root / "patches" / lock.vllm)
        known = {(o.dest, o.sha256): o.purpose for o in series.overlays}
    except (PatchError, OSError):
        pass
    tools = facts.get("toolchain")
    settings = {
        "vLLM": facts.get("vllm"),
        "Rust frontend": facts.get("rust_frontend"),
        "built for": facts.get("target_platform"),
        "target contract": facts.get("target"),
        "PTX": "yes" if facts.get("ptx") else "no",
        **{f"toolchain: {k.replace('_', ' ')}": v
           for k, v in sorted((tools if isinstance(tools, dict) else {}).items())},
    }  # fmt: skip
    return Origin(
        inputs=tuple(
            Input(name=name, sha256=digest, entry=entry)
            for name, digest, entry in sbom.artifacts_of(facts, lock)
        ),
        changes=tuple(
            Change(file=name, sha256=digest, entry=entry)
            for name, digest, entry in sbom.patches_of(facts, root)
        ),
        overlay=tuple(
            (dest, str(digest), known.get((dest, str(digest)), ""))
            for dest, digest in sorted((facts.get("overlay") or {}).items())
        ),
        departures=lock.substitutions,
        settings=tuple((name, str(value)) for name, value in settings.items() if value),
        target=_target(root, facts),
    )


def _target(root: Path, facts: dict[str, Any]) -> TargetContract | None:
    name = str(facts.get("target", ""))
    if _digest(root / "lock" / "targets" / f"{name}.toml") != facts.get("target_contract"):
        return None
    try:
        return load_target(root, name)
    except LockError:
        return None


def _inspection(
    root: Path, package: Path, subject: Subject, *, keep: bool
) -> inspection.Report | None:
    """Kept once made: it is a function of the package's bytes."""
    if found := records.find(root, subject.sha256, inspection.Report):
        return found
    try:
        made = inspection.inspect(package)
    except Sm75Error:
        return None
    if keep:
        records.keep(root, package, made)
    return made


def _smem(root: Path, lock: ReleaseLock, subject: Subject | None) -> tuple[SmemRecord | None, str]:
    found = records.find_smem(root)
    if found is None:
        return None, "No audit was made in this directory."
    name = subject.file.rpartition("/")[2] if subject else ""
    if found.package:
        return (found, "") if found.package == name else (
            None, f"The last audit was of {found.package}, another package."
        )  # fmt: skip
    series = _digest(root / "patches" / lock.vllm / "series.toml")
    if found.vllm != lock.vllm or found.series != series:
        return None, "The last audit was of other patches."
    return found, ""


def native_build(root: Path, package: Path) -> Path | None:
    """The directory that ninja built a package in, if it is still there."""
    about = read_info(package).get("about") or {}
    digest = str((about.get("extra") or {}).get("native_hash", ""))
    if not re.fullmatch(r"[0-9a-f]{16,}", digest):
        return None
    place = root / ".sm75" / "native" / digest[:16] / "build"
    return place if place.is_dir() else None


def _timeline(root: Path, package: Path, subject: Subject, *, keep: bool) -> Timeline | None:
    """The one kept, else that of the directory it was built in, which is kept from then on."""
    if found := records.find(root, subject.sha256, Timeline):
        return found
    place = native_build(root, package)
    made = timeline.read(place) if place else None
    if made and keep:
        records.keep(root, package, made)
    return made


_LARGEST = 12
"""Rows of a table of sizes; the rest is summed."""


def _sizes(channel: Path, package: Path) -> Sizes:
    paths = read_info(package)["paths"]["paths"]
    files = [(str(e["_path"]), int(e.get("size_in_bytes", 0))) for e in paths]
    return Sizes(
        directories=_groups((_directory(name), size) for name, size in files),
        endings=_groups((_ending(name), size) for name, size in files),
        totals=tuple(channeltools.totals(channeltools.sizes(channel)).items()),
    )


def _directory(name: str) -> str:
    """Three levels: site-packages/vllm/model_executor."""
    parts = name.split("/")[:-1]
    return "/".join(parts[:3]) or "(top)"


def _ending(name: str) -> str:
    base = name.rpartition("/")[2]
    return f".{base.rpartition('.')[2]}" if "." in base.lstrip(".") else "(none)"


def _groups(files: Iterable[tuple[str, int]]) -> tuple[Group, ...]:
    count: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for name, size in files:
        count[name] += 1
        total[name] += size
    order = sorted(total, key=lambda name: (-total[name], name))
    shown = [Group(name=n, files=count[n], size=total[n]) for n in order[:_LARGEST]]
    if rest := order[_LARGEST:]:
        shown.append(
            Group(name=f"{counted(len(rest), 'other')}", files=sum(count[n] for n in rest),
                  size=sum(total[n] for n in rest))
        )  # fmt: skip
    return tuple(shown)
