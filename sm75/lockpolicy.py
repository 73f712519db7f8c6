"""``lock/policy.toml``: what the index is asked for, and which declared pins are departed from.

The release locks are made of it. What a new release declares and nothing speaks of is refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from sm75.errors import LockError
from sm75.lockfile import (
    BUILD_PLATFORMS,
    G5G,
    TARGET_PLATFORMS,
    Constraint,
    Declared,
    Role,
    RustMode,
    Substitution,
    TargetContract,
    Text,
)

SCHEMA = 1
FILE = Path("lock", "policy.toml")
# Processor names as wheels write them.
ARCHES = {"linux-64": "x86_64", "linux-aarch64": "aarch64"}
# Words for a version that something else decides.
FOLLOWS = ("release", "torch", "toolkit")


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Common settings of everything here."""


class ArtifactRule(_Record, frozen=True, kw_only=True):
    """One artifact, or one for each platform.

    Attributes:
        id: As in the lock; ``{python}`` with ``pythons``.
        project: Project on the package index.
        version: A PEP 440 bound, or one of ``FOLLOWS``.
        pattern: Glob that one file name of that version matches; ``{arch}``, ``{python}``.
        role: As in the lock.
        why: As in the lock.
        each: Whether there is one a target or one a build platform.
        targets: Without ``each``: the targets that need it; empty: all.
        pythons: Python tags, one artifact each.
        members: Globs of wheel members; empty: the whole file.
        provides: As in the lock.
        vllm: Releases that it is for; empty: all.
        declared: Values that the release's tree must declare.
    """

    id: Text
    project: Text
    version: Text
    pattern: Text
    role: Role
    why: Text
    each: Literal["", "target", "build"] = ""
    targets: tuple[Literal["linux-aarch64", "linux-64"], ...] = ()
    pythons: tuple[Text, ...] = ()
    members: tuple[Text, ...] = ()
    provides: str = ""
    vllm: str = ""
    declared: dict[str, str] = {}

    def fits(self, release: str, declared: Mapping[str, str]) -> bool:
        """Whether it is for a release with these declarations."""
        return SpecifierSet(self.vllm).contains(Version(release), prereleases=True) and all(
            declared.get(name) == value for name, value in self.declared.items()
        )


class SubstitutionRule(_Record, frozen=True, kw_only=True):
    """A departure from a declared pin, for some releases.

    Attributes:
        name: As in the lock, as for the other fields of the same name.
        declared: The value departed from; empty: any.
        vllm: Releases that it is for; empty: all.
    """

    name: Text
    used: Text
    reason: Text
    covers: tuple[Text, ...] = ()
    patch: str = ""
    declared: str = ""
    vllm: str = ""


class RustPolicy(_Record, frozen=True, kw_only=True):
    """How the Rust frontend may be had."""

    modes: tuple[RustMode, ...]
    default: RustMode


class Policy(_Record, frozen=True, kw_only=True):
    """The whole file.

    Attributes:
        schema: Must be ``SCHEMA``.
        target: Target contract when none is named.
        rust: How the Rust frontend may be had.
        artifact: Every input file, in the lock's order.
        substitution: Every known departure.
    """

    schema: int
    target: Text
    rust: RustPolicy
    artifact: tuple[ArtifactRule, ...]
    substitution: tuple[SubstitutionRule, ...]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One artifact to look for: a rule with its platforms filled in.

    Attributes:
        rule: Where it comes from.
        id: As in the lock.
        pattern: Glob of the file name.
        platforms: Build platforms, or ``any``.
        targets: Target platforms; empty: all.
    """

    rule: ArtifactRule
    id: str
    pattern: str
    platforms: tuple[str, ...]
    targets: tuple[str, ...]


def load(root: Path) -> Policy:
    """Read ``lock/policy.toml``.

    Args:
        root: The project's directory.

    Raises:
        LockError: It is missing or malformed.
    """
    path = root / FILE
    try:
        policy = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Policy)
        for bound in [
            *(rule.vllm for rule in policy.artifact),
            *(rule.vllm for rule in policy.substitution),
            *(rule.version for rule in policy.artifact if rule.version not in FOLLOWS),
        ]:
            SpecifierSet(bound)
    except (OSError, ValueError, msgspec.ValidationError, InvalidSpecifier) as error:
        raise LockError(
            f"{path} cannot be read",
            why=str(error),
            fix=f"correct it, or restore it: git checkout -- {FILE}",
        ) from error
    if policy.schema != SCHEMA:
        raise LockError(f"{path} has schema {policy.schema}", why=f"this reads schema {SCHEMA}")
    return policy


def sdist(policy: Policy) -> list[Wanted]:
    """The sdist alone, which is needed to know what else is wanted."""
    rule = next(rule for rule in policy.artifact if rule.id == "vllm-sdist")
    return list(_for_targets(rule))


def wanted(policy: Policy, release: str, declared: Iterable[Declared]) -> list[Wanted]:
    """The artifacts of a release, in the lock's order.

    Neighbours that are made for each build platform stay together by platform.

    Args:
        policy: The policy.
        release: The vLLM release.
        declared: What its tree declares.

    Raises:
        LockError: No entry of some id is for this release, or several are.
    """
    values = {entry.name: entry.value for entry in declared}
    chosen: list[ArtifactRule] = []
    for name, group in groupby(policy.artifact, key=lambda rule: rule.id):
        rules = list(group)
        fitting = [rule for rule in rules if rule.fits(release, values)]
        if len(fitting) != 1:
            asked = sorted({key for rule in rules for key in rule.declared})
            raise LockError(
                f"{FILE} has {len(fitting)} entries of the artifact '{name}' for vLLM {release}",
                why="; ".join(f"the tree declares {key} {values.get(key)}" for key in asked)
                or "its entries are for other releases",
                fix=f"find out where this release can have it from, and add an entry to {FILE}",
            )
        chosen += fitting
    found: list[Wanted] = []
    for each, neighbours in groupby(chosen, key=lambda rule: rule.each):
        block = list(neighbours)
        if each == "build":
            for platform in BUILD_PLATFORMS:
                for rule in block:
                    found += _for_platform(rule, platform)
        else:
            for rule in block:
                found += _for_targets(rule)
    return found


def _for_platform(rule: ArtifactRule, platform: str) -> Iterator[Wanted]:
    for python in rule.pythons or ("",):
        yield Wanted(
            rule=rule,
            id=f"{rule.id}-{platform}".replace("{python}", python),
            pattern=_filled(rule.pattern, platform, python),
            platforms=(platform,),
            targets=(),
        )


def _for_targets(rule: ArtifactRule) -> Iterator[Wanted]:
    if rule.each != "target":
        yield Wanted(
            rule=rule, id=rule.id, pattern=rule.pattern, platforms=("any",), targets=rule.targets
        )
        return
    for target in TARGET_PLATFORMS:
        yield Wanted(
            rule=rule,
            id=rule.id if target == G5G else f"{rule.id}-for-{target}",
            pattern=_filled(rule.pattern, target),
            platforms=("any",),
            targets=(target,),
        )


def _filled(pattern: str, platform: str, python: str = "") -> str:
    return pattern.replace("{arch}", ARCHES[platform]).replace("{python}", python)


def substitutions(
    policy: Policy, release: str, declared: Iterable[Declared], values: Mapping[str, str]
) -> tuple[Substitution, ...]:
    """The departures of a release that its tree makes necessary.

    Args:
        policy: The policy.
        release: The vLLM release.
        declared: What its tree declares.
        values: What ``{…}`` stands for.
    """
    theirs = {entry.name: entry.value for entry in declared}
    found = []
    for rule in policy.substitution:
        value = theirs.get(rule.name)
        if value is None or rule.declared not in ("", value):
            continue
        if not SpecifierSet(rule.vllm).contains(Version(release), prereleases=True):
            continue
        used = _told(rule.used, values)
        if used == value:  # nothing is departed from
            continue
        found.append(
            Substitution(
                name=rule.name,
                declared=value,
                used=used,
                reason=_told(rule.reason, values),
                covers=tuple(name for name in rule.covers if name in theirs),
                patch=rule.patch,
            )
        )
    return tuple(found)


def values(
    release: str,
    torch: str,
    target: TargetContract,
    declared: Iterable[Declared],
    bounds: Iterable[Constraint],
) -> dict[str, str]:
    """What ``{…}`` stands for in a substitution.

    Args:
        release: The vLLM release.
        torch: The torch that is compiled against.
        target: The target contract.
        declared: What the tree declares.
        bounds: The release's.
    """
    theirs = {entry.name: entry.value for entry in declared}
    return {
        **{bound.name: bound.spec for bound in bounds},
        "vllm": release,
        "torch": torch,
        "target_torch": Version(target.torch).public,
        "declared_torch": theirs.get("TORCH_SUPPORTED_VERSION_CUDA", ""),
    }


def _told(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text
