"""Version bounds with their reasons: ``lock/constraints.toml``, and whether a lock keeps to them.

A bound that is broken stops ``lock`` and ``lock --check``, never ``build``.
"""

from __future__ import annotations

import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from sm75 import rules
from sm75.errors import LockError
from sm75.lockfile import Constraint, Declared, ReleaseLock, TargetContract, Text
from sm75.store import Store
from sm75.toolchain.host import GCC_MIN

SCHEMA = 1
FILE = Path("lock", "constraints.toml")
# Bounds that every lock must state, so that each has a reason and an error text.
NAMES = ("cuda", "driver", "gcc", "glibc", "python", "torch", "transformers", "triton", "vllm")


class Bound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file. Several may have one name; all that speak of a release hold.

    Attributes:
        name: What is bounded, one of ``NAMES``.
        reason: Why.
        error: What happens outside the bound, word for word where that is known; ``{spec}`` is the
            whole bound of the release.
        sources: Addresses where it can be read.
        test: What checks it, ``file::function``.
        spec: The bound, as PEP 440 has it; empty: only that of ``declared``.
        declared: A declaration of vLLM's tree whose bound is added.
        vllm: The vLLM releases that it holds for; empty: all.
        unconfirmed: What of it could not be confirmed in the sources.
    """

    name: Text
    reason: Text
    error: Text
    sources: tuple[Text, ...]
    test: Text
    spec: str = ""
    declared: str = ""
    vllm: str = ""
    unconfirmed: str = ""

    def speaks_of(self, release: str) -> bool:
        """Whether it holds for a vLLM release."""
        return allows(self.vllm, release)


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    constraint: tuple[Bound, ...]


def load(root: Path) -> tuple[Bound, ...]:
    """Read ``lock/constraints.toml``.

    Args:
        root: The project's directory.

    Raises:
        LockError: It is missing or malformed.
    """
    path = root / FILE
    fix = f"correct it, or restore it: git checkout -- {FILE}"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        found = msgspec.convert(raw, _File)
        if found.schema != SCHEMA:
            raise LockError(f"{path} has schema {found.schema}", why="not known here", fix=fix)
        for bound in found.constraint:
            SpecifierSet(bound.spec)
            SpecifierSet(bound.vllm)
            if bound.name not in NAMES:
                raise LockError(f"{path}: nothing here can check '{bound.name}'", fix=fix)
    except (OSError, ValueError, msgspec.ValidationError, InvalidSpecifier) as error:
        raise LockError(f"{path} cannot be read", why=str(error), fix=fix) from error
    return found.constraint


def for_release(
    bounds: Iterable[Bound], release: str, declared: Iterable[Declared]
) -> tuple[Constraint, ...]:
    """The bounds of one release, as its lock states them: one entry a name, in the file's order.

    Args:
        bounds: From :func:`load`.
        release: The vLLM release.
        declared: What its tree declares.
    """
    theirs = {entry.name: entry.value for entry in declared}
    grouped: dict[str, list[Bound]] = {}
    for bound in bounds:
        if bound.speaks_of(release):
            grouped.setdefault(bound.name, []).append(bound)
    found = []
    for name, group in grouped.items():
        spec = ""
        for bound in group:
            spec = both(both(theirs.get(bound.declared, ""), bound.spec), spec)
        found.append(
            Constraint(
                name=name,
                spec=spec,
                reason="; ".join(bound.reason for bound in group),
                # The last entry is the narrowest: the general one stands first in the file.
                error=group[-1].error.replace("{spec}", spec),
                # Addresses stay there: a lock names no host.
                source=FILE.as_posix(),
                test=group[-1].test,
            )
        )
    return tuple(found)


def both(one: str, two: str) -> str:
    """One bound that means both; ``one`` as it is written where it implies ``two``.

    Only lower bounds (``>=``) are merged; everything else is kept side by side.
    """
    if not one or not two:
        return one or two
    parts = {str(part) for part in SpecifierSet(one)} | {str(part) for part in SpecifierSet(two)}
    floors = [part for part in parts if part.startswith(">=")]
    highest = max(floors, key=lambda part: Version(part[2:]), default="")
    kept = {part for part in parts if not part.startswith(">=") or part == highest}
    if SpecifierSet(",".join(kept)) == SpecifierSet(one):
        return one
    return ",".join(sorted(kept, key=lambda part: (not part.startswith(">="), part)))


def allows(spec: str, version: str) -> bool:
    """Whether a bound allows a version; pre-releases count."""
    return SpecifierSet(spec).contains(Version(version), prereleases=True)


def drift(bounds: Iterable[Bound], lock: ReleaseLock) -> Iterator[str]:
    """Where a lock does not state what the file says, one sentence each."""
    wanted = {c.name: c for c in for_release(bounds, lock.vllm, lock.declared)}
    for constraint in lock.constraints:
        if constraint.name in wanted and constraint != wanted[constraint.name]:
            yield (
                f"constraint {constraint.name}: the lock says '{constraint.spec}' for another "
                f"reason or another bound than {FILE}: '{wanted[constraint.name].spec}'"
            )


def problems(
    lock: ReleaseLock, target: TargetContract, requires: Sequence[Requirement] = ()
) -> Iterator[str]:
    """Bounds that are missing, repeated, unreadable, or broken by the lock or its target.

    Args:
        lock: The release lock.
        target: Its target contract.
        requires: What the locked torch requires; the bound on Triton is checked there.
    """
    counts = Counter(constraint.name for constraint in lock.constraints)
    yield from (f"constraint {name}: the lock lacks it" for name in NAMES if not counts[name])
    yield from (f"constraint {name}: stated {n} times" for name, n in counts.items() if n > 1)
    yield from (
        f"constraint {constraint.name}: nothing here can check it"
        for constraint in lock.constraints
        if constraint.name not in NAMES
    )
    yield from broken(lock.constraints, [*_of_lock(lock, requires), *of_target(target)])
    stated = {constraint.name: constraint.spec for constraint in lock.constraints}
    for name, floor, who in (
        ("gcc", str(GCC_MIN), "the toolchain"),
        ("glibc", dict(rules.Policy(version=lock.vllm).ceilings)["GLIBC"], "verify"),
    ):
        if name in stated and stated[name] != f">={floor}":
            yield f"constraint {name} {stated[name]}: {who} holds to >={floor}"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Something that a bound applies to.

    Attributes:
        name: The bound's name.
        what: What it is, for people.
        version: Its version.
    """

    name: str
    what: str
    version: str


def broken(bounds: Iterable[Constraint], subjects: Iterable[Subject]) -> Iterator[str]:
    """Every bound that a subject breaks, with what then happens; and every unreadable one."""
    listed = list(subjects)
    for constraint in bounds:
        try:
            spec = SpecifierSet(constraint.spec)
        except InvalidSpecifier:
            yield f"constraint {constraint.name}: {constraint.spec!r} is not a version bound"
            continue
        for subject in listed:
            if subject.name == constraint.name and not spec.contains(
                Version(subject.version), prereleases=True
            ):
                yield (
                    f"constraint {constraint.name} {constraint.spec}: {subject.what} is "
                    f"{subject.version}"
                    + (f"; outside it: {constraint.error}" if constraint.error else "")
                )


def of_target(target: TargetContract) -> list[Subject]:
    """What a target contract says that bounds apply to."""
    facts = [
        ("torch", "torch", target.torch),
        ("cuda", "CUDA", target.cuda),
        ("glibc", "glibc", target.glibc),
        ("driver", "driver", target.driver),
        *(("python", "Python", minor) for minor in target.python),
    ]
    return [
        Subject(name=name, what=f"the {what} of {target.name}", version=version)
        for name, what, version in facts
        if version
    ]


def of_release(release: str) -> Subject:
    """The release itself, to which the bound ``vllm`` applies."""
    return Subject(name="vllm", what="the lock's release", version=release)


def _of_lock(lock: ReleaseLock, requires: Sequence[Requirement]) -> Iterator[Subject]:
    torch = lock.artifact("torch-dev")
    yield of_release(lock.vllm)
    yield Subject(name="torch", what=torch.filename, version=torch.version)
    for artifact in lock.artifacts:
        if artifact.project.startswith("nvidia-cuda-"):
            yield Subject(name="cuda", what=artifact.filename, version=artifact.version)
    for requirement in requires:
        for part in requirement.specifier if requirement.name == "triton" else ():
            if part.operator == "==":
                what = f"the triton that {torch.filename} requires"
                yield Subject(name="triton", what=what, version=part.version)


def torch_requires(lock: ReleaseLock, store: Store) -> list[Requirement]:
    """What the locked torch requires, by its wheel's METADATA; empty where the store lacks it."""
    artifact = lock.artifact("torch-dev")
    if not store.has(artifact):
        return []
    with zipfile.ZipFile(store.get(artifact)) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        text = wheel.read(name).decode("utf-8", "replace")
    lines = HeaderParser().parsestr(text).get_all("Requires-Dist") or []
    return [Requirement(line) for line in lines]
