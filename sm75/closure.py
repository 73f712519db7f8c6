"""The closure: vLLM's run dependencies as conda packages in the channel.

``runtime.lock`` -> wheels in the store -> packages below ``.sm75/closure`` -> channel,
with the adapter ``dlami-torch`` among them.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from sm75 import adapter, channelcheck, closureresolve, fetch, onebuild, sbom, wheelmeta
from sm75 import channel as channels
from sm75.atomic import write_bytes
from sm75.closurelock import (
    RUNTIME,
    Omissions,
    Package,
    RuntimeLock,
    dump_runtime,
    load_omissions,
    load_runtime,
)
from sm75.condapkg import canonical_json, read_info
from sm75.errors import CheckFailed, FetchError
from sm75.lockfile import G5G, ReleaseLock, TargetContract
from sm75.progress import Reporter
from sm75.store import Store
from sm75.wheelfile import Wheel
from sm75.wheels import CONVERTER_VERSION, Options, convert_with, plan
from sm75.words import counted

# Lists the closure's packages in the channel, so that a later one withdraws what is no longer in.
DOCUMENT = "closure.json"
# torch is the adapter's; the image's other packages come with it.
NAMES = {"torch": adapter.NAME}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How building the closure ended.

    Attributes:
        packages: ``subdir/file`` of all packages of the closure, the adapter included.
        published: Those that the channel did not have.
        withdrawn: Those of a former closure that were removed, and other adapters of the contract.
    """

    packages: tuple[str, ...]
    published: tuple[str, ...]
    withdrawn: tuple[str, ...]


def make_lock(
    root: Path, release: ReleaseLock, store: Store, reporter: Reporter, *,
    upgrade: bool = False, check: bool = False,
) -> RuntimeLock:  # fmt: skip
    """Resolve the closure and write ``runtime.lock``.

    Args:
        root: The project's directory.
        release: The release; its sdist must be in the store.
        store: Gets the wheels, whose licences are read.
        reporter: Shows progress.
        upgrade: Take the newest versions instead of those that the lock has.
        check: Write nothing; fail when the lock would change.

    Raises:
        LockError: The requirements cannot be met.
        FetchError: A wheel or the sdist cannot be had.
        CheckFailed: With ``check``: the lock is not what its inputs say.
        ToolchainError: uv is missing.
    """
    path = root / "lock" / release.vllm / RUNTIME
    former = load_runtime(root, release.vllm) if path.exists() else None
    found = resolve_lock(
        release, load_omissions(root, release.vllm), store, reporter, former=former, upgrade=upgrade
    )
    text = dump_runtime(found)
    if check and (former is None or dump_runtime(former) != text):
        raise CheckFailed(
            f"{path.relative_to(root)} is not what its inputs say",
            why="vLLM's requirements, omissions.toml and the lock disagree",
            fix="run: channel lock",
        )
    if not check:
        write_bytes(path, text.encode())
    return found


def resolve_lock(
    release: ReleaseLock, omissions: Omissions, store: Store, reporter: Reporter, *,
    former: RuntimeLock | None = None, upgrade: bool = False,
) -> RuntimeLock:  # fmt: skip
    """Resolve the closure; writes nothing but the store.

    Args:
        release: The release; its sdist must be in the store.
        omissions: What is left out.
        store: Gets the wheels, whose licences are read.
        reporter: Shows progress.
        former: The lock until now, of this release or another; what still fits of it stays.
        upgrade: Take the newest versions instead.

    Raises:
        LockError: The requirements cannot be met.
        FetchError: A wheel or the sdist cannot be had.
        ToolchainError: uv is missing.
    """
    own = closureresolve.sdist_requirements(store.get(release.artifact("vllm-sdist")))
    want = closureresolve.wanted(closureresolve.bounded(own, release.constraints), omissions)
    reporter.line(f"channel: resolving {counted(len(want.requirements), 'requirement')} with uv")
    found = closureresolve.resolve(
        want, release=release.vllm, platform=G5G, former=former, upgrade=upgrade
    )
    fetch.fetch(plan_fetch(found, store), store, reporter)
    return msgspec.structs.replace(
        found,
        packages=tuple(
            msgspec.structs.replace(p, license=wheelmeta.licence(metadata(store.get(p.artifact))))
            for p in found.packages
        ),
    )


def plan_fetch(lock: RuntimeLock, store: Store, python: Iterable[str] = ()) -> fetch.FetchPlan:
    """Compare the wheels that some Python minors (none given: all) need with the store."""
    minors = tuple(python) or lock.python
    return fetch.plan_artifacts([p.artifact for p in _of(lock, minors)], store)


def _of(lock: RuntimeLock, minors: Iterable[str]) -> list[Package]:
    wanted = set(minors)
    return [p for p in lock.packages if wanted & set(p.python)]


def metadata(wheel: Path) -> Message:
    """Read a wheel's METADATA, without a look at the rest.

    Raises:
        FetchError: It is damaged.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(
                n for n in archive.namelist()
                if n.count("/") == 1 and n.endswith(".dist-info/METADATA")
            )  # fmt: skip
            text = archive.read(name).decode("utf-8", "replace")
    except (StopIteration, zipfile.BadZipFile) as err:
        raise FetchError(f"{wheel.name} is not a wheel", why=str(err), fix="fetch again") from err
    found: Message = HeaderParser().parsestr(text)
    return found


def extras(
    requirements: Iterable[str], wheels: Mapping[str, Message], lock: RuntimeLock
) -> dict[str, frozenset[str]]:
    """Find the extras that anything of the closure asks of a project.

    Conda has no extras, so that a project is converted with all that are asked for anywhere.

    Args:
        requirements: The closure's roots, PEP 508.
        wheels: METADATA by file name.
        lock: The closure.

    Returns:
        Extras by normalised project name; projects without any are left out.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for line in requirements:
        requirement = Requirement(line)
        found[canonicalize_name(requirement.name)] |= requirement.extras
    while True:
        before = {name: len(asked) for name, asked in found.items()}
        for package in lock.packages:
            for requirement in _active(wheels[package.filename], package, found, lock.platform):
                found[canonicalize_name(requirement.name)] |= requirement.extras
        if before == {name: len(asked) for name, asked in found.items()}:
            return {name: frozenset(asked) for name, asked in found.items() if asked}


def _active(
    meta: Message, package: Package, asked: Mapping[str, set[str]], platform: str
) -> Iterator[Requirement]:
    for line in meta.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        for python in package.python:
            environment = wheelmeta.marker_environment(platform, python)
            on = ("", *asked.get(package.project, ()))
            if requirement.marker is None or any(
                requirement.marker.evaluate(environment | {"extra": extra}) for extra in on
            ):
                yield requirement
                break


def convert(
    lock: RuntimeLock, omissions: Omissions, store: Store, out_dir: Path, reporter: Reporter, *,
    python: Sequence[str] = (),
) -> list[Path]:  # fmt: skip
    """Convert the wheels of some Python minors (none given: all); what is there is kept.

    Args:
        lock: The closure.
        omissions: What is left out.
        store: Has the wheels.
        out_dir: Channel root to write into.
        reporter: Shows progress.
        python: Minors.

    Returns:
        The packages.

    Raises:
        FetchError: A wheel is missing or damaged.
        ChannelError: A wheel does not fit the target.
        DiskError: A package cannot be written.
    """
    minors = tuple(python) or lock.python
    todo = _of(lock, minors)
    paths = {p.filename: store.get(p.artifact) for p in todo}
    # extras are looked for in the whole lock: what a package is must not depend on `python`
    known = {
        p.filename: metadata(paths.get(p.filename) or store.get(p.artifact)) for p in lock.packages
    }
    asked = extras(lock.requirements, known, lock)
    drop = omissions.projects - set(NAMES)
    made: dict[str, Path] = {}
    task = reporter.task("convert", sum(p.size for p in todo), "B")
    for package in todo:
        task.message(package.filename)
        for minor in package.python:
            if minor not in minors:
                continue
            options = Options(
                subdir=lock.platform,
                python=minor,
                names=NAMES,
                # a project that asks for its own extras needs no dependency on itself
                drop=(*drop, package.project),
                extras=tuple(sorted(asked.get(package.project, ()))),
                constrains=(f"python_abi {minor}.* *_cp{minor.replace('.', '')}",)
                if _one_minor(paths[package.filename])
                else (),
            )
            with Wheel(paths[package.filename]) as wheel:
                planned = plan(wheel, options)
            where = "noarch" if planned.noarch and not planned.compiled else lock.platform
            stem = f"{planned.name}-{planned.version}-{planned.build}"
            # the build string is a hash of all that the package is made of
            done = out_dir / where / f"{stem}.conda"
            if not done.exists():
                convert_with(paths[package.filename], out_dir, options)
            made[stem] = done
        task.advance(package.size)
    task.done()
    return sorted(made.values())


def _one_minor(path: Path) -> bool:
    with Wheel(path) as wheel:
        return not wheel.any_python


def build(
    root: Path, release: ReleaseLock, contract: TargetContract, store: Store, channel: Path,
    reporter: Reporter, *, base: Iterable[Path] = (),
) -> Outcome:  # fmt: skip
    """Bring the closure and the adapter into the channel; fetch nothing.

    Args:
        root: The project's directory.
        release: The release.
        contract: The target; the adapter is made for it.
        store: Has the wheels.
        channel: The channel to publish into.
        reporter: Shows progress.
        base: python and native libraries to publish with it.

    Raises:
        LockError: There is no runtime lock, or no build serves the contract.
        FetchError: Wheels are missing.
        ChannelError: The channel is damaged, or a wheel does not fit.
        DiskError: The disk is full.
    """
    adapter.check_contract(contract)
    lock = load_runtime(root, release.vllm)
    omissions = load_omissions(root, release.vllm)
    fetch.require(plan_fetch(lock, store))
    digest = _digest(lock, omissions)
    made = root / ".sm75" / "closure"
    manifest = made / f"{digest}.json"
    names: list[str] = json.loads(manifest.read_bytes()) if manifest.exists() else []
    if not names or not all((made / name).exists() for name in names):
        packages = convert(lock, omissions, store, made, reporter)
        names = sorted(channelcheck.relative(made, p) for p in packages)
        write_bytes(manifest, canonical_json(names))
    finished = {name: made / name for name in names}
    built = adapter.build(root, contract, root / ".sm75" / "adapter")
    finished[f"{built.parent.name}/{built.name}"] = built
    former = _former(channel)
    finished |= {f"{read_info(p)['index']['subdir']}/{p.name}": p for p in base}
    # adapters of other contracts stay: `install` takes the one of its own
    out = [p for p in former if p not in finished and not _is_adapter(p)]
    rivals = onebuild.Rivals(channel, [built], also=out)
    rivals()
    withdrawn = sorted({*out, *rivals.found})
    new = [p for name, p in sorted(finished.items()) if not channelcheck.holds(channel, name)]
    listed = sorted({*finished, *former} - {*withdrawn})
    if new or listed != former or rivals.found:
        channels.publish(
            new,
            channel,
            record={DOCUMENT: canonical_json({"packages": listed})},
            derived={sbom.SBOM: lambda tree: sbom.make(tree, root, release)},
            remove=rivals,
            subdirs=(lock.platform,),
            say=reporter.line,
        )
    return Outcome(
        packages=tuple(sorted(finished)),
        published=tuple(sorted(f"{p.parent.name}/{p.name}" for p in new)),
        withdrawn=tuple(withdrawn),
    )


def _is_adapter(name: str) -> bool:
    return name.rpartition("/")[2].startswith(f"{onebuild.ADAPTER}-")


def _digest(lock: RuntimeLock, omissions: Omissions) -> str:
    facts = [
        CONVERTER_VERSION, NAMES, msgspec.to_builtins(lock), sorted(omissions.projects),
    ]  # fmt: skip
    return hashlib.sha256(canonical_json(facts)).hexdigest()[:16]


def _former(channel: Path) -> list[str]:
    try:
        document = msgspec.json.decode((channel / DOCUMENT).read_bytes(), type=dict[str, list[str]])
        listed = document["packages"]
    except (OSError, ValueError, KeyError):  # msgspec's errors are ValueErrors
        return []
    # It says what may be withdrawn, and a channel may come from others.
    return [name for name in listed if channelcheck.is_inside(name) and name.endswith(".conda")]


def run_requirements(vllm: Iterable[Requirement], omissions: Omissions) -> tuple[str, ...]:
    """Give the run dependencies that the recipe of vllm-sm75 must list, as conda specs.

    The package serves every Python minor, so that a requirement whose marker asks for some of them
    is there for all.

    Args:
        vllm: vLLM's own requirements.
        omissions: What is left out.
    """
    specs: dict[str, SpecifierSet] = {}
    for requirement in vllm:
        project = canonicalize_name(requirement.name)
        if project in omissions.projects or not any(
            closureresolve.applies(requirement, G5G, minor) for minor in closureresolve.MINORS
        ):
            continue
        name = wheelmeta.conda_name(project, NAMES)
        specs[name] = specs.get(name, SpecifierSet()) & requirement.specifier
    return tuple(
        " ".join(filter(None, (name, wheelmeta.conda_spec(spec))))
        for name, spec in sorted(specs.items())
    )
