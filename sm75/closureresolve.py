"""Resolve the closure: vLLM's requirements on the target, by uv, to one wheel each.

uv chooses the versions; the wheels are chosen here by the target's tags. What a former lock pins
stays as it is unless ``upgrade`` is asked for or it no longer fits.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from sm75.closurelock import SCHEMA, Omissions, Package, RuntimeLock
from sm75.constraints import both
from sm75.errors import LockError, ToolchainError
from sm75.lockfile import Constraint
from sm75.wheelmeta import MACHINE, marker_environment

# The oldest glibc among the supported images: Amazon Linux 2023's.
GLIBC = (2, 34)
# Python minors that the channel serves: those that a DLAMI may have, and Debian 12's for tests.
MINORS = ("3.11", "3.12", "3.13")
# Where manylinux of aarch64 begins (PEP 599).
_OLDEST = 17


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be resolved.

    Attributes:
        requirements: PEP 508 lines, markers included.
        excluded: Normalised names that no requirement may pull in.
    """

    requirements: tuple[str, ...]
    excluded: frozenset[str]


def sdist_requirements(sdist: Path) -> list[Requirement]:
    """Read vLLM's own requirements (common and CUDA) out of its sdist's metadata.

    Args:
        sdist: The pinned ``.tar.gz``.

    Raises:
        LockError: It has no PKG-INFO at its top.
    """
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            if member.name.count("/") == 1 and member.name.endswith("/PKG-INFO"):
                raw = archive.extractfile(member)
                text = raw.read().decode() if raw else ""
                return read_requirements(text)
    raise LockError(f"{sdist.name} has no PKG-INFO")


def read_requirements(metadata: str) -> list[Requirement]:
    """Read the requirements of a METADATA or PKG-INFO text, extras' own left out."""
    found = HeaderParser().parsestr(metadata).get_all("Requires-Dist") or []
    parsed = [Requirement(line) for line in found]
    return [r for r in parsed if r.marker is None or "extra ==" not in str(r.marker)]


def bounded(
    requirements: Iterable[Requirement], constraints: Iterable[Constraint]
) -> list[Requirement]:
    """The requirements with the bounds that the release lock adds to them.

    Args:
        requirements: vLLM's own.
        constraints: The release lock's.
    """
    bounds = {canonicalize_name(c.name): c.spec for c in constraints}
    found = []
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        # torch is the target's: its bound is on the stable ABI, and vLLM's is departed from.
        if name != "torch" and name in bounds:
            requirement = Requirement(str(requirement))
            requirement.specifier = SpecifierSet(both(str(requirement.specifier), bounds[name]))
        found.append(requirement)
    return found


def wanted(vllm: Iterable[Requirement], omissions: Omissions) -> Wanted:
    """Put together what the closure has to meet: vLLM, the image's torch, and what is offered.

    Args:
        vllm: vLLM's requirements.
        omissions: What is left out, and what torch imports.

    Raises:
        LockError: An omission names nothing that vLLM requires.
    """
    own = list(vllm)
    # torch requires triton, and nothing else does by name
    required = {canonicalize_name(r.name) for r in own} | {"triton"}
    if idle := sorted(omissions.projects - required):
        raise LockError(
            f"omissions that nothing requires: {', '.join(idle)}",
            why="vLLM's requirements have changed",
            fix="remove them from omissions.toml",
        )
    kept = {str(r) for r in own if canonicalize_name(r.name) not in omissions.projects}
    kept |= {str(Requirement(r)) for r in (*omissions.torch, *omissions.offered)}
    return Wanted(requirements=tuple(sorted(kept)), excluded=omissions.projects)


def platform_tags(platform: str, glibc: tuple[int, int] = GLIBC) -> list[str]:
    """Give the wheel platforms that run on ``platform`` with that glibc, best first."""
    machine = MACHINE[platform]
    names = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc[1], _OLDEST - 1, -1)]
    return [*names, f"manylinux2014_{machine}", f"linux_{machine}"]


def target_tags(platform: str, python: str) -> list[Tag]:
    """Give every wheel tag that the target accepts, best first."""
    version = (3, int(python.partition(".")[2]))
    platforms = platform_tags(platform)
    return [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", platforms),
    ]


def choose_wheel(wheels: Sequence[Mapping[str, Any]], tags: Sequence[Tag]) -> Mapping[str, Any]:
    """Choose the wheel that installers would take.

    Args:
        wheels: ``wheels`` of a package in ``pylock.toml``.
        tags: What the target accepts, best first.

    Raises:
        LockError: None fits.
    """
    rank = {tag: place for place, tag in reversed(list(enumerate(tags)))}
    fitting = []
    for wheel in wheels:
        name = wheel.get("name") or wheel["url"].rpartition("/")[2]
        _, _, build, its = parse_wheel_filename(name)
        places = [rank[tag] for tag in its if tag in rank]
        if places:
            fitting.append(((-min(places), build), wheel))
    if not fitting:
        raise LockError("no wheel fits the target", why=str([w.get("url", "") for w in wheels]))
    return max(fitting, key=lambda pair: pair[0])[1]


def uv_program() -> str:
    """Find uv.

    Raises:
        ToolchainError: There is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if not found:
        raise ToolchainError(
            "uv is not installed",
            why="it resolves the closure",
            fix="run the command in the development environment (lock/dev-tools.txt has uv)",
        )
    return found


def resolve(
    want: Wanted,
    *,
    release: str,
    platform: str,
    python: Sequence[str] = MINORS,
    former: RuntimeLock | None = None,
    upgrade: bool = False,
) -> RuntimeLock:
    """Resolve for each Python minor. Licences are still empty: the wheels have not been read.

    Args:
        want: What is to be resolved.
        release: The vLLM release.
        platform: Conda subdir of the target.
        python: Minors.
        former: The lock until now; its versions are kept where they still fit.
        upgrade: Take the newest versions instead.

    Raises:
        LockError: The requirements cannot be met, or the index does not tell hashes or sizes.
        ToolchainError: uv is missing.
    """
    merged: dict[str, Package] = {}
    for minor in python:
        pins = former.of(minor) if former and not upgrade and minor in former.python else ()
        for package in _resolve_one(want, platform, minor, pins):
            known = merged.get(package.filename)
            minors = (*known.python, minor) if known else (minor,)
            merged[package.filename] = Package(
                project=package.project, version=package.version, filename=package.filename,
                sha256=package.sha256, size=package.size, python=minors, license="",
            )  # fmt: skip
    order = sorted(merged.values(), key=lambda p: (p.project, p.version, p.filename))
    return RuntimeLock(
        schema=SCHEMA,
        vllm=release,
        platform=platform,
        glibc=".".join(map(str, GLIBC)),
        python=tuple(python),
        requirements=want.requirements,
        packages=tuple(order),
    )


def _resolve_one(
    want: Wanted, platform: str, minor: str, pins: Iterable[Package]
) -> Iterator[Package]:
    with tempfile.TemporaryDirectory(prefix="vllm-sm75-closure-") as name:
        work = Path(name)
        (work / "requirements.in").write_text("".join(f"{r}\n" for r in want.requirements))
        (work / "excluded.txt").write_text("".join(f"{e}\n" for e in sorted(want.excluded)))
        # uv prefers what it finds in its output file
        (work / "chosen.txt").write_text("".join(f"{p.project}=={p.version}\n" for p in pins))
        target = [*_target(platform, minor), "--excludes", "excluded.txt"]
        _uv(work, [*target, "requirements.in", "--no-annotate", "-o", "chosen.txt"], minor)
        # the same once more, exactly, for the files
        compile_lock(
            work, ["requirements.in", "-c", "chosen.txt", "--excludes", "excluded.txt"],
            platform, minor,
        )  # fmt: skip
        pylock = tomllib.loads((work / "pylock.toml").read_text())
    tags = target_tags(platform, minor)
    for entry in pylock["packages"]:
        wheel = choose_wheel(entry.get("wheels", ()), tags)
        filename = wheel.get("name") or wheel["url"].rpartition("/")[2]
        sha256, size = wheel.get("hashes", {}).get("sha256"), wheel.get("size")
        if not sha256 or not size:
            raise LockError(
                f"the package index does not say the hash and size of {filename}",
                fix="make the lock against an index that does (PEP 691 and 700)",
            )
        yield Package(
            project=canonicalize_name(entry["name"]), version=entry["version"], filename=filename,
            sha256=sha256, size=size, python=(minor,), license="",
        )  # fmt: skip


def compile_lock(
    work: Path, arguments: list[str], platform: str, minor: str, *, what: str = "the closure"
) -> None:
    """Let uv write ``pylock.toml`` in a directory.

    Args:
        work: The directory; it holds the files that the arguments name.
        arguments: Of ``uv pip compile``: requirements and constraints.
        platform: Conda subdir of the target.
        minor: Its Python minor.
        what: What is resolved, for the error.

    Raises:
        LockError: The requirements cannot be met.
        ToolchainError: uv is missing.
    """
    _uv(
        work, [*_target(platform, minor), *arguments, "--format", "pylock.toml",
               "-o", "pylock.toml"], minor, what,
    )  # fmt: skip


def _target(platform: str, minor: str) -> list[str]:
    glibc = f"manylinux_{GLIBC[0]}_{GLIBC[1]}"
    target = ["--python-platform", f"{MACHINE[platform]}-{glibc}", "--python-version", minor]
    return [*target, "--only-binary", ":all:", "--no-header", "-q"]


def _uv(work: Path, arguments: list[str], minor: str, what: str = "the closure") -> None:
    done = subprocess.run(
        [uv_program(), "pip", "compile", *arguments],
        cwd=work, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise LockError(
            f"{what} cannot be resolved for Python {minor}",
            why=re.sub(r"\s+", " ", done.stderr).strip()[-1500:],
            fix="loosen omissions.toml, or give the missing package up with a reason there",
        )


def applies(requirement: Requirement, platform: str, python: str) -> bool:
    """Say whether a requirement's marker holds on the target."""
    environment = {**marker_environment(platform, python), "extra": ""}
    return requirement.marker is None or requirement.marker.evaluate(environment)
