"""``lock --vllm``: choose the release, make its lock, say what changes, and only then write.

``latest`` starts from the newest release of the index. What stops one is said and recorded in the
lock, and the next older one is tried.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from sm75 import closurelock, constraints, fetch, lockdiff, lockmake, lockpolicy
from sm75.aot import sources
from sm75.atomic import sweep, write_bytes
from sm75.closureresolve import sdist_requirements
from sm75.errors import FetchError, LockError, PatchError, UsageError
from sm75.index import PackageIndex
from sm75.lockfile import Skipped, known_releases, load_release, load_target
from sm75.lockmake import Former, Made, Workplace
from sm75.progress import Reporter
from sm75.store import Store
from sm75.transfer import TransferOptions
from sm75.turns import one_at_a_time

LATEST = "latest"
_VERSION = re.compile(r"\d+(\.\d+)+(\.?(post|rc|a|b)\d+)?")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for.

    Attributes:
        vllm: A release, or ``latest``.
        torch: The torch to compile against; empty: the target's.
        target: Target contract; empty: the policy's.
        base: The release to compare with and to keep versions of; empty: the one whose lock there
            is already, else the default.
        upgrade: Take the newest versions of everything.
        with_closure: Whether to resolve the closure too.
        dry_run: Write nothing.
    """

    vllm: str
    torch: str = ""
    target: str = ""
    base: str = ""
    upgrade: bool = False
    with_closure: bool = True
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        made: The lock.
        diff: Against the former lock.
        changed: Paths whose content is new, sorted; with ``dry_run`` they are not written.
        written: Whether they were.
        kernels: Whether the attention kernels of ahead of time are those that were proved.
    """

    made: Made
    diff: lockdiff.Diff
    changed: tuple[str, ...]
    written: bool
    kernels: str

    def lines(self) -> Iterator[str]:
        """The outcome for a person: what changes, what is missing, what was written."""
        lock = self.made.lock
        yield (
            f"lock: vLLM {lock.vllm} for {lock.target}, torch {lock.artifact('torch-dev').version}"
            + (f", compared with {self.diff.old}" if self.diff.old else ", the first one")
        )
        yield from self.diff.lines()
        if self.diff.empty:
            yield "no pin differs"
        for skipped in lock.skipped:
            yield f"newer and not taken: {skipped.release}: {skipped.reason}"
        yield f"patches: {self.made.standing.statement()}"
        if not self.made.standing.own:
            yield f"  when there are some: python3 orchestrator.py lock --vllm {lock.vllm}"
        yield f"kernels: {self.kernels}"
        if not self.changed:
            yield "every file is as it was"
        for name in self.changed:
            yield f"{'wrote' if self.written else 'would write'} {name}"

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON-ready data."""
        lock = self.made.lock
        return {
            "release": lock.vllm,
            "target": lock.target,
            "torch": lock.artifact("torch-dev").version,
            "skipped": [{"release": s.release, "reason": s.reason} for s in lock.skipped],
            "patches": {
                "statement": self.made.standing.statement(),
                "buildable": self.made.standing.buildable,
                "states": {r.name: str(r.state) for r in self.made.standing.results},
            },
            "kernels": self.kernels,
            "diff": self.diff.to_json(),
            "files": list(self.changed),
            "written": self.written,
        }


def update(
    root: Path,
    request: Request,
    store: Store,
    reporter: Reporter,
    *,
    index: PackageIndex | None = None,
    options: TransferOptions | None = None,
    say: Callable[[str], None] = lambda text: None,
    wait: float = 3600.0,
) -> Outcome:
    """Make a release's lock and write it, when everything of it resolved.

    Runs that write take turns: each keeps versions of what the one before it has written.

    Args:
        root: The project's directory.
        request: What is asked for.
        store: The store.
        reporter: Shows progress.
        index: The package index; None: as the user has configured.
        options: How patient to be.
        say: Told what stopped a newer release, as it happens.
        wait: Seconds to wait for another run that makes a lock here.

    Raises:
        BusyError: That one still runs.
        UsageError: No such release or base.
        LockError: The release cannot be locked; nothing was written.
        PatchError: Its patches are malformed; nothing was written.
        FetchError: The index or a file cannot be read; nothing was written.
    """
    with only_one(root, reporter, wait) if not request.dry_run else contextlib.nullcontext():
        return _update(root, request, store, reporter, index, options, say)


def only_one(
    root: Path, reporter: Reporter, wait: float = 3600.0
) -> contextlib.AbstractContextManager[None]:
    """Keep other runs that write below ``lock`` and ``recipes`` out while the block runs.

    Args:
        root: The project's directory.
        reporter: Is told of a wait.
        wait: Seconds to wait.

    Raises:
        BusyError: Another one still runs.
    """
    other = "another run is making a lock in this directory"
    return one_at_a_time(root / ".sm75" / "lock.lock", other, wait=wait, say=reporter.line)


def _update(
    root: Path, request: Request, store: Store, reporter: Reporter, index: PackageIndex | None,
    options: TransferOptions | None, say: Callable[[str], None],
) -> Outcome:  # fmt: skip
    _check_torch(request.torch)
    policy = lockpolicy.load(root)
    target = load_target(root, request.target or policy.target)
    place = Workplace(
        root=root, store=store, index=index or PackageIndex(options=options), reporter=reporter,
        policy=policy, bounds=constraints.load(root), target=target,
        torch=lockmake.public(request.torch or target.torch), upgrade=request.upgrade,
        with_closure=request.with_closure, options=options,
    )  # fmt: skip
    there = lockmake.releases(place.index)
    if request.vllm == LATEST:
        made = _latest(place, request, there, say)
    else:
        _check_release(request.vllm, there)
        formers = _formers(root, request.vllm, request.base)
        kept = next((f.lock.skipped for f in formers if f.lock.vllm == request.vllm), ())
        made = lockmake.make(place, request.vllm, formers, skipped=kept)
    diff = lockdiff.compare(_base(place, made, request.base), _side(made))
    changed = tuple(
        name for name, content in sorted(made.files.items()) if _read(root / name) != content
    )
    if not request.dry_run:
        for folder in {(root / name).parent for name in made.files}:
            sweep(folder)
        # In the order of `files`: release.toml, with which the release is known, comes last.
        for name, content in made.files.items():
            if name in changed:
                write_bytes(root / name, content)
    kernels = sources.note(root, store.get(made.lock.artifact("vllm-sdist")))
    return Outcome(
        made=made, diff=diff, changed=changed, written=not request.dry_run, kernels=kernels
    )


def _latest(
    place: Workplace, request: Request, there: list[str], say: Callable[[str], None]
) -> Made:
    """The newest release that can be locked and has patches that apply."""
    skipped: list[Skipped] = []
    for release in there:
        try:
            formers = _formers(place.root, release, request.base)
            return lockmake.make(place, release, formers, skipped=tuple(skipped), to_build=True)
        except (LockError, PatchError) as error:
            reason = " ".join(f"{error.what}: {error.why}".split())
            skipped.append(Skipped(release=release, reason=reason))
            say(f"lock: not vLLM {release}: {reason}")
            floor = [b for b in place.bounds if b.name == "vllm"]
            if not all(constraints.allows(bound.spec, release) for bound in floor):
                break  # all that follow are older still
    raise LockError(
        "no vLLM release can be locked",
        why="\n        ".join(f"{s.release}: {s.reason}" for s in skipped)
        or "the package index has none with an sdist and an aarch64 wheel",
        fix="look at the newest one: python3 orchestrator.py lock --vllm VERSION --dry-run",
    )


def _check_release(release: str, there: list[str]) -> None:
    if not _VERSION.fullmatch(release):
        raise UsageError(
            f"'{release}' is no vLLM release", fix=f"give {LATEST}, or a version such as 0.33.0"
        )
    if release not in there:
        raise LockError(
            f"the package index has no vLLM {release} with an sdist and an aarch64 wheel",
            why="it has " + (", ".join(there[:8]) or "none"),
            fix="give one of those; a git tag that is on no index cannot be pinned",
        )


def _check_torch(torch: str) -> None:
    try:
        Version(torch or "0")
    except InvalidVersion as error:
        raise UsageError(f"'{torch}' is no version of torch", fix="give one as 2.12.0") from error


def _formers(root: Path, release: str, base: str) -> tuple[Former, ...]:
    """The locks to keep versions of: the release's own, then the base."""
    known = known_releases(root)
    if base and base not in known:
        raise UsageError(
            f"there is no lock for vLLM {base}", fix="give --from one of " + ", ".join(known)
        )
    names = [release] if release in known else []
    if base or not names:
        names.append(base or _default(root, known))
    return tuple(_former(root, name) for name in dict.fromkeys(names) if name)


def _default(root: Path, known: list[str]) -> str:
    path = root / "lock" / "default"
    named = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return named if named in known else (known[-1] if known else "")


def _former(root: Path, release: str) -> Former:
    there = (root / "lock" / release / closurelock.RUNTIME).is_file()
    return Former(
        lock=load_release(root, release),
        runtime=closurelock.load_runtime(root, release) if there else None,
    )


def _side(made: Made) -> lockdiff.Side:
    return lockdiff.Side(lock=made.lock, requirements=made.requirements, runtime=made.runtime)


def _base(place: Workplace, made: Made, base: str) -> lockdiff.Side | None:
    """What to compare with: the base that was asked for, the former lock, or the default."""
    formers = _formers(place.root, made.lock.vllm, base)
    if not formers:
        return None
    former = formers[-1] if base else formers[0]
    # The same sdist has the same requirements; another content of it stands under Sources.
    requirements = (
        made.requirements if former.lock.vllm == made.lock.vllm else _required(place, former)
    )
    return lockdiff.Side(lock=former.lock, requirements=requirements, runtime=former.runtime)


def _required(place: Workplace, former: Former) -> tuple[str, ...] | None:
    """A former release's requirements; None where no index has its sdist any more."""
    artifact = former.lock.artifact("vllm-sdist")
    plan = fetch.plan_artifacts([artifact], place.store)
    try:
        if plan.todo:
            fetch.fetch(plan, place.store, place.reporter, index=place.index, options=place.options)
    except FetchError:
        return None
    return tuple(sorted(map(str, sdist_requirements(place.store.get(artifact)))))


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
