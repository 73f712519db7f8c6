"""The commands ``channel lock|build|missing|sizes|export|publish``, ``install`` and
``doctor --write-contract``, less their command line.

Each function says in its docstring which options the command has. They return what ``--json``
prints; a missing value is an empty one.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from sm75 import (
    adapter,
    channeltools,
    closure,
    contract,
    fetch,
    onebuild,
    publishtargets,
    recipedeps,
)
from sm75 import install as installer
from sm75 import publish as publishing
from sm75.basepython import BasePython
from sm75.channelcheck import require
from sm75.closurelock import load_runtime
from sm75.errors import ChannelError, CheckFailed, LockError
from sm75.lockfile import ReleaseLock, load_target
from sm75.lockupdate import only_one
from sm75.progress import Reporter
from sm75.store import Store

BUILD = "python3 orchestrator.py channel build"


def lock(
    root: Path, release: ReleaseLock, store: Store, reporter: Reporter, *,
    upgrade: bool = False, check: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Resolve the closure and write runtime.lock, and the recipe's list of run dependencies.

    Options: ``--release``, ``--store``, ``--upgrade`` (flag: newest versions instead of the locked
    ones), ``--check`` (flag: write nothing, fail when it would change), ``--json``.
    """
    with contextlib.nullcontext() if check else only_one(root, reporter):
        sdist = fetch.obtain(release.artifact("vllm-sdist"), store, reporter)
        if check and (wrong := list(recipedeps.problems(root, release, sdist))):
            raise CheckFailed(
                f"{recipedeps.RECIPE} does not list what vLLM {release.vllm} requires",
                why="\n        ".join(wrong),
                fix="run: python3 orchestrator.py channel lock",
            )
        found = closure.make_lock(root, release, store, reporter, upgrade=upgrade, check=check)
        specs = recipedeps.wanted(root, release, sdist)
        changed = False if check else recipedeps.write(root, release, specs)
        return {"wheels": len(found.packages), "bytes": sum(p.size for p in found.packages),
                "python": list(found.python), "run_dependencies": len(specs),
                "recipe_changed": changed}  # fmt: skip


def build(
    root: Path, release: ReleaseLock, store: Store, channel: Path, reporter: Reporter, *,
    target: str = "", offline: bool = False, dry_run: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Fetch the closure's wheels, convert them, publish them and the adapter.

    Options: ``--release``, ``--store``, ``--channel``, ``--target NAME`` (contract; default: the
    release lock's), ``--offline`` (flag: fetch nothing), ``--dry-run``, ``--json``.
    """
    # before anything is fetched
    agreed = load_target(root, target or release.target)
    adapter.check_contract(agreed)
    runtime = load_runtime(root, release.vllm)
    wanted = closure.plan_fetch(runtime, store)
    if dry_run:
        return {"wheels": len(runtime.packages), "download_bytes": wanted.bytes_download,
                "cached_bytes": wanted.bytes_cached,
                "files": [a.filename for a in wanted.todo]}  # fmt: skip
    python = BasePython(root, release, runtime.python)
    if not offline:
        if wanted.todo:
            reporter.line(f"channel: {wanted.describe()}")
            fetch.fetch(wanted, store, reporter)
        if reason := python.mirror(store, reporter):
            reporter.line(
                f"channel: goes without python, for conda-forge is out of reach: {reason}"
            )
    done = closure.build(
        root, release, agreed, store, channel, reporter, base=python.packages(store)
    )
    if done.withdrawn and (others := sorted(onebuild.releases(channel) - {release.vllm})):
        reporter.line(
            f"channel: it also has {onebuild.VLLM} {', '.join(others)}, whose dependencies may be "
            "among what was withdrawn: give each release a channel of its own (--channel DIR)"
        )
    return {"packages": len(done.packages), "published": list(done.published),
            "withdrawn": list(done.withdrawn)}  # fmt: skip


def missing(
    root: Path, release: ReleaseLock, channel: Path, *, target: str = ""
) -> dict[str, list[str]]:
    """Say what the channel lacks to be installed from alone, by Python minor.

    Options: ``--release``, ``--channel``, ``--target NAME``, ``--json``. Exit code 1 when anything
    is missing.
    """
    box = installer.box_of(load_target(root, target or release.target))
    require(channel)
    minors = installer.pythons(channel)
    if not minors:
        raise ChannelError(
            f"{channel} has no closure",
            why="no package in it is for a Python minor",
            fix=f"bring it in: {BUILD}",
        )
    with tempfile.TemporaryDirectory(prefix="vllm-sm75-gaps-") as scratch:
        python = BasePython(root, release, minors)
        found = channeltools.gaps(channel, box, Path(scratch), python)
    return {gap.python: list(gap.missing) for gap in found}


def sizes(channel: Path) -> dict[str, Any]:
    """Show packages by size; ``channeltools.size_table(channeltools.sizes(channel))`` for people.

    Options: ``--channel``, ``--json``.
    """
    found = channeltools.sizes(channel)
    return {"totals": channeltools.totals(found), "packages": {p.file: p.size for p in found}}


def export(channel: Path, out: Path, *, dry_run: bool = False) -> dict[str, Any]:
    """Put the channel into one tar, checked first.

    Options: ``--channel``, argument ``OUT`` (path), ``--dry-run``, ``--json``.
    """
    if dry_run:
        channeltools.check_out(channel, out)
        installer.check_channel(channel, "it would not be exported")
        files = [path.stat().st_size for path in channeltools.exported(channel)]
        return {"file": str(out), "files": len(files), "bytes": sum(files)}
    return {"file": str(out), "sha256": channeltools.export(channel, out)}


def publish(
    root: Path, channel: Path, target: str, reporter: Reporter, *,
    replace: bool = False, delete: bool = False, reread: bool = False, dry_run: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Put the channel where others read it; it is checked first.

    Options: ``--channel``, ``--replace``, ``--delete``, ``--reread`` (flags), argument ``TARGET``,
    ``--dry-run``, ``--json``.
    """
    require(channel)
    with publishtargets.opened(root, target, channel, dry_run=dry_run) as place:
        done = publishing.publish(
            channel, place, reporter,
            replace=replace, delete=delete, reread=reread, dry_run=dry_run,
        )  # fmt: skip
    return {"sent": list(done.sent), "same": list(done.same), "removed": list(done.removed),
            "sent_bytes": done.sent_bytes}  # fmt: skip


def install(
    root: Path, release: ReleaseLock, channel: Path, prefix: Path, *,
    python: str = "", extra_channels: tuple[Path, ...] = (), target: str = "",
    foreign: bool = False, image: Path | None = None, dry_run: bool = False, exact: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Install into a new prefix, offline; the channel is checked first.

    Options: ``--release`` (``exact`` when it was given: that release and no other; otherwise what
    the channel has), ``--channel``, ``--prefix DIR`` (required), ``--python MINOR`` (default:
    that of the image here, or of the contract), ``--extra-channel DIR`` (multiple), ``--target
    NAME``, ``--foreign`` (flag: install for the contract's machine from another one), ``--image
    DIR`` (where the image's torch is, when not where the contract says), ``--dry-run``, ``--json``.
    """
    agreed = load_target(root, target or release.target)
    adapter.check_contract(agreed)
    place = image or Path(agreed.path)
    specs = installer.with_kernels(channel, release.vllm if exact else "")
    plain = len(specs) == 1
    ours, other_image = onebuild.adapter_for(channel, agreed.name)
    specs += (ours,) if ours else ()
    box = installer.box_of(agreed) if foreign else installer.this_box()
    installer.check_platform(box)
    prefix = installer.place(prefix, channel, extra_channels)

    def choose() -> str:
        return installer.choose_python(channel, agreed, None if foreign else place, python)

    try:
        if dry_run:
            records = installer.prepare(
                channel, prefix, python=choose, box=box, extra_channels=extra_channels,
                specs=specs,
            )  # fmt: skip
            packages, minor = installer.names(records), installer.minor_of(records)
        else:
            done = installer.install(
                channel, prefix, python=choose, box=box, extra_channels=extra_channels,
                specs=specs, image=image,
            )  # fmt: skip
            packages, minor = done.packages, done.python
    except KeyboardInterrupt:
        raise fetch.Interrupted(
            "install was interrupted; nothing was installed",
            fix="run the same command again: it starts anew",
        ) from None
    warning = "" if foreign else _image_warning(place, minor)
    if plain:
        warning = warning or (
            f"the channel has no {installer.KERNELS} of this release: attention does without "
            "tensor cores (docs/turing-attention.md)"
        )
    warnings = [warning, other_image, *onebuild.warnings(channel, packages)]
    return {"prefix": str(prefix), "python": minor, "packages": list(packages),
            "warning": "; ".join(filter(None, warnings))}  # fmt: skip


def _image_warning(place: Path, minor: str) -> str:
    theirs = installer.image_python(place)
    if not theirs:
        return f"there is no torch in {place}: `import torch` will fail (docs/installing.md)"
    if theirs != minor:
        return (
            f"the torch in {place} is for Python {theirs}, this environment has {minor}: "
            f"`import torch` will fail; leave --python out, or give --python {theirs}"
        )
    return ""


def write_contract(
    root: Path, *, path: Path, name: str = "", replace: bool = False, dry_run: bool = False
) -> dict[str, Any]:
    """Write a target contract on the machine it is about.

    Options of ``doctor``: ``--write-contract`` (flag), ``--path DIR`` (default ``/opt/pytorch``),
    ``--name NAME``, ``--replace`` (flag), ``--dry-run``, ``--json``.

    Returns:
        Its file (empty with ``dry_run``), its text, and a warning when no build serves it.
    """
    found = contract.probe(path)
    if name:
        found = msgspec.structs.replace(found, name=name)
    warning = ""
    try:
        adapter.check_contract(found)
    except LockError as fault:
        warning = str(fault)
    written = "" if dry_run else str(contract.write(root, found, replace=replace))
    return {"contract": written, "text": contract.dump(found), "warning": warning}
