"""Make the lock of one release: everything is resolved and checked here, nothing is written.

What the release's tree declares and nothing accounts for is refused, with every such thing named.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from packaging.utils import canonicalize_name
from packaging.version import Version

from sm75 import (
    closure,
    closurelock,
    constraints,
    fetch,
    lockcheck,
    lockpatches,
    lockpolicy,
    lockresolve,
    recipedeps,
)
from sm75.closureresolve import sdist_requirements
from sm75.errors import LockError
from sm75.index import PackageIndex
from sm75.lockfile import (
    SCHEMA,
    Artifact,
    ReleaseLock,
    Rust,
    Skipped,
    TargetContract,
    dump_release,
    filename_identity,
)
from sm75.pins import TreePins, read_pins
from sm75.progress import Reporter
from sm75.store import Store
from sm75.transfer import TransferOptions

# Files of a release's lock.
RELEASE, VARIANTS = "release.toml", "variants.yaml"
_VARIANTS = """\
# What the recipe reads of the release lock. Keep it with release.toml: `orchestrator.py lock \
--check`
# compares the two.
vllm_version:
  - "{release}"
vllm_sdist:
  - {filename}
vllm_sdist_sha256:
  - {sha256}
rust_frontend:
  - {rust}
"""


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """What a lock is made with.

    Attributes:
        root: The project's directory.
        store: Gets the sdist, the headers whose version is checked, and the closure's wheels.
        index: The package index.
        reporter: Shows progress.
        policy: From ``lockpolicy.load``.
        bounds: From ``constraints.load``.
        target: The target contract.
        torch: The torch to compile against.
        upgrade: Take the newest versions of everything.
        with_closure: Whether to resolve the closure too.
        options: How patient to be.
    """

    root: Path
    store: Store
    index: PackageIndex
    reporter: Reporter
    policy: lockpolicy.Policy
    bounds: tuple[constraints.Bound, ...]
    target: TargetContract
    torch: str
    upgrade: bool = False
    with_closure: bool = True
    options: TransferOptions | None = None


@dataclass(frozen=True, kw_only=True)
class Made:
    """The lock of one release, ready to be written.

    Attributes:
        lock: The release lock.
        runtime: The closure; None: not resolved.
        requirements: vLLM's own, as its sdist states them.
        standing: How its patches stand.
        files: Content by path below the project's directory.
    """

    lock: ReleaseLock
    runtime: closurelock.RuntimeLock | None
    requirements: tuple[str, ...]
    standing: lockpatches.Standing
    files: dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Former:
    """What there is already of a release, or of the one that a new lock is made from.

    Attributes:
        lock: The release lock.
        runtime: Its closure; None: it has none.
    """

    lock: ReleaseLock
    runtime: closurelock.RuntimeLock | None


def refuse_early(place: Workplace, release: str) -> None:
    """Refuse what the bounds exclude whatever the release declares, before anything is fetched.

    Args:
        place: What the lock is made with.
        release: The vLLM release.

    Raises:
        LockError: The release, the torch or the target is excluded.
    """
    torch = constraints.Subject(name="torch", what="the torch asked for", version=place.torch)
    subjects = [constraints.of_release(release), torch, *constraints.of_target(place.target)]
    bounds = constraints.for_release(place.bounds, release, ())
    problems = list(constraints.broken(bounds, subjects))
    if problems:
        raise LockError(
            f"vLLM {release} is not locked for {place.target.name}",
            why="\n        ".join(problems),
            fix="name another release, torch or target; explain NAME says why a bound is there",
        )


def make(
    place: Workplace,
    release: str,
    formers: tuple[Former, ...] = (),
    *,
    skipped: tuple[Skipped, ...] = (),
    to_build: bool = False,
) -> Made:
    """Resolve and check one release.

    Args:
        place: What it is made with.
        release: The vLLM release.
        formers: Locks whose versions stay where they fit, the most binding first.
        skipped: Newer releases that could not be taken.
        to_build: Refuse a release without patches that apply.

    Raises:
        LockError: A bound is broken, something is not on the index, or the tree declares what
            nothing accounts for; every such thing is named. Or the patches are missing.
        PatchError: The release's patches are malformed or do not apply.
        FetchError: Something cannot be read.
        ToolchainError: uv is missing.
    """
    refuse_early(place, release)
    known = [artifact for former in formers for artifact in former.lock.artifacts]
    toolkit = lockresolve.find_toolkit(
        place.index, place.target.cuda, () if place.upgrade else known, place.options
    )
    versions = lockresolve.Versions(release=release, torch=place.torch, toolkit=toolkit)

    def resolve(wanted: list[lockpolicy.Wanted]) -> tuple[Artifact, ...]:
        return lockresolve.resolve(
            place.index, wanted, versions, place.reporter, former=known, upgrade=place.upgrade,
            options=place.options,
        )  # fmt: skip

    (first,) = resolve(lockpolicy.sdist(place.policy))
    sdist = _obtain(place, first)
    nvcc = str(toolkit.nvcc).removeprefix("==").removesuffix(".*")
    pins = read_pins(sdist, cuda=nvcc)
    artifacts = resolve(lockpolicy.wanted(place.policy, release, pins.declared))
    standing = lockpatches.standing(place.root, release, sdist)
    lock = _lock(place, release, pins, artifacts, standing, skipped)
    lock = msgspec.structs.replace(lock, rust=with_hashes(lock.rust, formers))
    for name in ("torch-dev", "cutlass"):
        _obtain(place, lock.artifact(name))
    _refuse(place, lock, pins, standing)
    if to_build and not standing.buildable:
        raise LockError(
            f"vLLM {release} has no patches that apply",
            why=standing.statement(),
            fix=f"make patches/{release} first",
        )
    return _whole(place, lock, sdist, standing, formers)


def _obtain(place: Workplace, artifact: Artifact) -> Path:
    plan = fetch.plan_artifacts([artifact], place.store)
    if plan.todo:
        fetch.fetch(plan, place.store, place.reporter, index=place.index, options=place.options)
    return place.store.get(artifact)


def _lock(
    place: Workplace,
    release: str,
    pins: TreePins,
    artifacts: tuple[Artifact, ...],
    standing: lockpatches.Standing,
    skipped: tuple[Skipped, ...],
) -> ReleaseLock:
    bounds = constraints.for_release(place.bounds, release, pins.declared)
    return ReleaseLock(
        schema=SCHEMA,
        vllm=release,
        target=place.target.name,
        artifacts=artifacts,
        patches=standing.refs,
        declared=pins.declared,
        substitutions=lockpolicy.substitutions(
            place.policy,
            release,
            pins.declared,
            lockpolicy.values(release, place.torch, place.target, pins.declared, bounds),
        ),
        constraints=bounds,
        skipped=skipped,
        rust=Rust(
            modes=place.policy.rust.modes,
            default=place.policy.rust.default,
            channel=pins.rust.channel,
            cargo_lock_sha256=pins.rust.cargo_lock_sha256,
            git=pins.rust.git,
        ),
    )


def with_hashes(rust: Rust, formers: tuple[Former, ...]) -> Rust:
    """Keep the hashes of git dependencies that were pinned before: a commit's never changes.

    Args:
        rust: Of the lock that is made.
        formers: Locks to take them from.
    """
    known = {key: value for f in formers for key, value in f.lock.rust.git_sha256.items()}
    kept = {key: known[key] for key in rust.git if key in known}
    return msgspec.structs.replace(rust, git_sha256=kept)


def _refuse(
    place: Workplace, lock: ReleaseLock, pins: TreePins, standing: lockpatches.Standing
) -> None:
    # That patches are missing is said by the standing, once.
    judged = lock if standing.own else lockcheck.without_patches(lock)
    problems = [
        *lockcheck.tree_problems(judged, pins),
        *lockcheck.target_problems(lock),
        *constraints.problems(lock, place.target, constraints.torch_requires(lock, place.store)),
        *lockcheck.cutlass_problems(lock, place.store),
        *([standing.statement()] if standing.own and standing.bad else []),
    ]
    if problems:
        raise LockError(
            f"vLLM {lock.vllm} cannot be locked: {len(problems)} "
            + ("thing is" if len(problems) == 1 else "things are")
            + " not understood or not allowed",
            why="\n        ".join(problems),
            fix=f"look at each; a departure and its reason belong into {lockpolicy.FILE}, with a "
            "patch that carries it out; explain NAME says more of a constraint",
        )


def _whole(
    place: Workplace,
    lock: ReleaseLock,
    sdist: Path,
    standing: lockpatches.Standing,
    formers: tuple[Former, ...],
) -> Made:
    folder = f"lock/{lock.vllm}"
    requirements = sdist_requirements(sdist)
    omissions = closurelock.omissions_for(
        place.root, lock.vllm, (requirement.name for requirement in requirements)
    )
    files = {
        f"{folder}/{VARIANTS}": variants(lock),
        f"{folder}/{closurelock.OMISSIONS}": omissions,
    }
    left_out = closurelock.parse_omissions(omissions)
    recipe = place.root / recipedeps.RECIPE
    files[recipedeps.RECIPE.as_posix()] = recipedeps.with_list(
        recipe.read_text(encoding="utf-8"),
        lock.vllm,
        recipedeps.specs(lock, sdist, left_out),
    )
    runtime = None
    if place.with_closure:
        former = next((f.runtime for f in formers if f.runtime is not None), None)
        runtime = closure.resolve_lock(
            lock, left_out, place.store, place.reporter, former=former, upgrade=place.upgrade
        )
        files[f"{folder}/{closurelock.RUNTIME}"] = closurelock.dump_runtime(runtime)
    for former_lock in formers:
        # python itself does not depend on the release
        for path in sorted((place.root / "lock" / former_lock.lock.vllm).glob("python-*.lock")):
            files.setdefault(f"{folder}/{path.name}", path.read_text(encoding="utf-8"))
    # Last, for with it the release is known.
    files[f"{folder}/{RELEASE}"] = dump_release(lock)
    return Made(
        lock=lock,
        runtime=runtime,
        requirements=tuple(sorted(map(str, requirements))),
        standing=standing,
        files={name: text.encode() for name, text in files.items()},
    )


def variants(lock: ReleaseLock) -> str:
    """The text of ``variants.yaml``."""
    sdist = lock.artifact("vllm-sdist")
    return _VARIANTS.format(
        release=lock.vllm, filename=sdist.filename, sha256=sdist.sha256, rust=lock.rust.default
    )


def releases(index: PackageIndex) -> list[str]:
    """The vLLM releases that the index has with sdist and aarch64 wheel, newest first.

    Args:
        index: The package index.

    Raises:
        FetchError: It cannot be read.
    """
    kinds: dict[Version, set[str]] = {}
    for link in index.files("vllm"):
        identity = filename_identity(link.filename)
        if identity is None or identity[0] != canonicalize_name("vllm"):
            continue
        for end in (".tar.gz", "_aarch64.whl"):
            if link.filename.endswith(end):
                kinds.setdefault(identity[1], set()).add(end)
    final = (v for v, ends in kinds.items() if len(ends) == 2 and not v.is_prerelease)
    return [str(version) for version in sorted(final, reverse=True)]


def public(version: str) -> str:
    """A version without its local label: ``2.12.0`` of ``2.12.0+cu132``."""
    return Version(version).public
