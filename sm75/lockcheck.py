"""Whether a release lock agrees with the pinned tree, its patches, variants file and recipe.

Every pin that the tree declares must be in the lock, and must be used as declared or departed from
by a recorded substitution with its reason. So a new external project, extension or requirement of
the next release is refused until somebody has looked at it.
"""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from sm75 import closurelock, closureresolve, constraints, fetch, lockpolicy, recipedeps, rules
from sm75.errors import LockError, PatchError
from sm75.lockfile import (
    BUILD_PLATFORMS,
    G5G,
    TARGET_PLATFORMS,
    Declared,
    ReleaseLock,
    Substitution,
    artifacts_for,
    load_target,
)
from sm75.pins import TreePins, read_pins
from sm75.progress import SilentReporter
from sm75.series import load_series
from sm75.store import Store

# The extensions that the package holds; ``verify`` demands exactly these.
EXTENSIONS: tuple[str, ...] = (*rules.DEVICE_EXTENSIONS, *rules.HOST_EXTENSIONS)
_CUTLASS_VERSION = re.compile(r"(?m)^#define CUTLASS_(MAJOR|MINOR|PATCH) (\d+)$")


def check(root: Path, lock: ReleaseLock, store: Store) -> None:
    """Compare a release lock with everything it speaks of.

    Args:
        root: The project's directory.
        lock: The lock.
        store: The store; the sdist is fetched into it when it is not there.

    Raises:
        LockError: They disagree; every disagreement is listed. Or the tree declares something in a
            form that is not known, or the target contract is malformed.
        FetchError: The sdist cannot be had.
    """
    sdist = fetch.obtain(lock.artifact("vllm-sdist"), store, SilentReporter())
    pins = read_pins(sdist, cuda=cuda_version(lock))
    target = load_target(root, lock.target)
    judged = lock if (root / "patches" / lock.vllm).is_dir() else without_patches(lock)
    problems = [
        *tree_problems(judged, pins),
        *policy_problems(root, lock, sdist),
        *target_problems(lock),
        *constraints.problems(lock, target, constraints.torch_requires(lock, store)),
        *constraints.drift(constraints.load(root), lock),
        *cutlass_problems(lock, store),
        *patch_problems(root, lock),
        *variant_problems(root, lock),
        *recipedeps.problems(root, lock, sdist),
    ]
    if problems:
        raise LockError(
            f"the lock of vLLM {lock.vllm} disagrees in {len(problems)} "
            + ("place" if len(problems) == 1 else "places"),
            why="\n        ".join(problems),
            fix="look at each; record a substitution with its reason in lock/policy.toml, then "
            f"python3 orchestrator.py lock --vllm {lock.vllm}",
        )


def without_patches(lock: ReleaseLock) -> ReleaseLock:
    """The lock with no substitution naming a patch: for a release that has none, said once."""
    named = tuple(msgspec.structs.replace(s, patch="") for s in lock.substitutions)
    return msgspec.structs.replace(lock, substitutions=named)


def policy_problems(root: Path, lock: ReleaseLock, sdist: Path) -> Iterator[str]:
    """Disagreements with ``lock/policy.toml`` and ``lock/omissions.toml``, which locks are made of.

    Args:
        root: The project's directory.
        lock: The lock.
        sdist: Its sdist.
    """
    torch = lock.artifact("torch-dev").version
    wanted = lockpolicy.substitutions(
        lockpolicy.load(root),
        lock.vllm,
        lock.declared,
        lockpolicy.values(
            lock.vllm, torch, load_target(root, lock.target), lock.declared, lock.constraints
        ),
    )
    ours = {substitution.name: substitution for substitution in lock.substitutions}
    theirs = {substitution.name: substitution for substitution in wanted}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield f"substitution {name}: the lock and {lockpolicy.FILE} do not say the same"
    path = root / "lock" / lock.vllm / closurelock.OMISSIONS
    names = [requirement.name for requirement in closureresolve.sdist_requirements(sdist)]
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text != closurelock.omissions_for(root, lock.vllm, names):
        yield f"{path.relative_to(root)}: not what lock/{closurelock.OMISSIONS} says"


def with_declared(lock: ReleaseLock, pins: TreePins) -> ReleaseLock:
    """The lock with what the tree declares put in; substitutions and the rest stay.

    Args:
        lock: The lock.
        pins: Read from its sdist.
    """
    return msgspec.structs.replace(
        lock,
        declared=pins.declared,
        rust=msgspec.structs.replace(
            lock.rust,
            channel=pins.rust.channel,
            cargo_lock_sha256=pins.rust.cargo_lock_sha256,
            git=pins.rust.git,
            git_sha256={k: v for k, v in lock.rust.git_sha256.items() if k in pins.rust.git},
        ),
    )


def summary(lock: ReleaseLock) -> dict[str, object]:
    """Short facts about a lock.

    Args:
        lock: The lock.

    Returns:
        Names and values for people and for JSON. ``download_bytes_<platform>`` is what a first
        fetch on that machine reads, in bytes.
    """
    overlays = sum(ref.file.startswith("overlay/") for ref in lock.patches)
    return {
        "vllm": lock.vllm,
        "target": lock.target,
        "torch": lock.artifact("torch-dev").version,
        "cuda": cuda_version(lock),
        "rust": ", ".join(
            f"{mode} (default)" if mode == lock.rust.default else mode for mode in lock.rust.modes
        ),
        **{
            f"download_bytes_{platform}": sum(
                artifact.download_size
                for artifact in artifacts_for(lock, platform, lock.rust.default)
            )
            for platform in BUILD_PLATFORMS
        },
        "artifacts": len(lock.artifacts),
        "patches": len(lock.patches) - overlays,
        "overlay_files": overlays,
        "declared": len(lock.declared),
        "substitutions": len(lock.substitutions),
        "constraints": ", ".join(f"{c.name} {c.spec}" for c in lock.constraints),
    }


def cuda_version(lock: ReleaseLock) -> str:
    """Version of the pinned nvcc.

    Raises:
        LockError: None is pinned, or different ones for different build platforms.
    """
    versions = {a.version for a in lock.artifacts if a.project == "nvidia-cuda-nvcc"}
    if len(versions) != 1:
        raise LockError(
            f"the lock of vLLM {lock.vllm} pins {len(versions)} versions of nvcc",
            why=", ".join(sorted(versions)) or "no artifact of the project nvidia-cuda-nvcc",
            fix="pin one version for all build platforms",
        )
    return versions.pop()


def tree_problems(lock: ReleaseLock, pins: TreePins) -> Iterator[str]:
    """Disagreements between a lock and what the tree declares."""
    if pins.version != lock.vllm:
        yield f"vllm: the lock says {lock.vllm}, the sdist says {pins.version}"
    yield from _declared_problems(lock, pins)
    yield from _use_problems(lock, pins)
    yield from _rust_problems(lock, pins)


def _declared_problems(lock: ReleaseLock, pins: TreePins) -> Iterator[str]:
    counts = Counter(entry.name for entry in lock.declared)
    yield from (f"{name}: the lock declares it twice" for name, n in counts.items() if n > 1)
    ours = {entry.name: entry for entry in lock.declared}
    theirs = {entry.name: entry for entry in pins.declared}
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours:
            yield f"{name}: {_said(theirs[name])}; the lock does not have it"
        elif name not in theirs:
            yield f"{name}: the lock has {ours[name].value}; the tree no longer declares it"
        elif ours[name] != theirs[name]:
            yield f"{name}: the lock has {_said(ours[name])}, the tree {_said(theirs[name])}"


def _use_problems(lock: ReleaseLock, pins: TreePins) -> Iterator[str]:
    declared = {entry.name: entry for entry in pins.declared}
    accounted: Counter[str] = Counter()
    for substitution in lock.substitutions:
        accounted.update((substitution.name, *substitution.covers))
        yield from _substitution_problems(lock, substitution, declared)
    for name, entry in declared.items():
        used = _used(lock, entry)
        if accounted[name] > 1:
            yield f"{name}: {accounted[name]} substitutions speak of it"
        elif used == entry.value and accounted[name]:
            yield f"{name}: it is used as declared, yet a substitution speaks of it"
        elif used is None and not accounted[name]:
            yield f"{name}: {_said(entry)}; the lock neither uses it nor says why not"
        elif used not in (None, entry.value) and not accounted[name]:
            yield f"{name}: {_said(entry)}; the lock uses {used} and gives no reason"
    for extension in EXTENSIONS:
        for name in (f"extension:vllm.{extension}", f"target:{extension}"):
            if name not in declared:
                yield f"{name}: the package must hold it, but the tree does not declare it"


def _substitution_problems(
    lock: ReleaseLock, substitution: Substitution, declared: dict[str, Declared]
) -> Iterator[str]:
    where = f"substitution {substitution.name}"
    for name in (substitution.name, *substitution.covers):
        if name not in declared:
            yield f"{where}: the tree declares no {name}"
    entry = declared.get(substitution.name)
    if entry and substitution.declared != entry.value:
        yield f"{where}: it departs from {substitution.declared}, the tree declares {entry.value}"
    used = _used(lock, entry) if entry else None
    if used not in (None, substitution.used):
        yield f"{where}: it says {substitution.used} is used, the lock uses {used}"
    if substitution.patch and substitution.patch not in {ref.file for ref in lock.patches}:
        yield f"{where}: the lock pins no patch {substitution.patch}"


def _used(lock: ReleaseLock, entry: Declared) -> str | None:
    """What the build uses of a declared pin; ``None``: nothing, as far as the lock shows."""
    bounds = {constraint.name: constraint.spec for constraint in lock.constraints}
    kind, _, name = entry.name.partition(":")
    match kind, name:
        case "TORCH_SUPPORTED_VERSION_CUDA", "":
            return lock.artifact("torch-dev").version
        case "CUTLASS_REVISION", "":
            return lock.artifact("cutlass").provides or None
        case "external", "cutlass":
            revision = lock.artifact("cutlass").provides
            return f"nvidia/cutlass@{revision}" if revision else None
        case "requirement", "torch":
            return f"=={lock.artifact('torch-dev').version}"
        case "requirement", "transformers":
            return _same(entry.value, bounds.get("transformers"))
        case "TORCH_TARGET_VERSION", _:
            return bounds.get("torch", "nothing").removeprefix(">=")
        case "gcc", _:
            return bounds.get("gcc", "nothing").removeprefix(">=")
        case "requires-python", "":
            return _same(entry.value, bounds.get("python"))
        case "PYTHON_SUPPORTED_VERSIONS", "":
            return _minors(bounds.get("python", ""))
        case ("CUDA_SUPPORTED_ARCHS", "") | ("docker", "torch_cuda_arch_list"):
            return entry.value if "7.5" in re.split("[; ]", entry.value) else "7.5"
        case "extension", "vllm.vllm-rs":
            return entry.value
        case "extension", _:
            return entry.value if name.removeprefix("vllm.") in EXTENSIONS else None
        case "target", _:
            return entry.value if name in EXTENSIONS else None
        case _:
            return None


def _same(declared: str, used: str | None) -> str | None:
    """``declared`` when ``used`` means the same, else ``used``."""
    try:
        return declared if used and SpecifierSet(used) == SpecifierSet(declared) else used
    except InvalidSpecifier:
        return used


def _minors(spec: str) -> str:
    """The Python minors that a bound allows, as CMake writes a list."""
    try:
        allowed = SpecifierSet(spec)
    except InvalidSpecifier:
        return spec
    return ";".join(f"3.{minor}" for minor in range(50) if allowed.contains(f"3.{minor}"))


def _said(entry: Declared) -> str:
    return f"{entry.value} in {entry.file}"


def _rust_problems(lock: ReleaseLock, pins: TreePins) -> Iterator[str]:
    for name, ours, theirs in (
        ("channel", lock.rust.channel, pins.rust.channel),
        ("Cargo.lock", lock.rust.cargo_lock_sha256, pins.rust.cargo_lock_sha256),
        ("git dependencies", ", ".join(lock.rust.git), ", ".join(pins.rust.git)),
    ):
        if ours != theirs:
            yield f"rust {name}: the lock has {ours or 'none'}, the tree {theirs or 'none'}"


def target_problems(lock: ReleaseLock) -> Iterator[str]:
    """What belongs to a target must say to which, and be of one version for all of them."""
    by_id = {artifact.id: artifact for artifact in lock.artifacts}
    for artifact in lock.artifacts:
        if artifact.role == "target" and len(artifact.targets) != 1:
            yield f"{artifact.id}: it belongs to a target and does not say to which one"
    for target in set(TARGET_PLATFORMS) - {G5G}:
        suffix = f"-for-{target}"
        for artifact in lock.artifacts:
            if not artifact.id.endswith(suffix):
                continue
            ours = by_id.get(artifact.id.removesuffix(suffix))
            if ours is None or (ours.project, ours.version, ours.members) != (
                artifact.project, artifact.version, artifact.members
            ):  # fmt: skip
                yield f"{artifact.id}: the g5g's counterpart is missing or of another version"


def cutlass_problems(lock: ReleaseLock, store: Store) -> Iterator[str]:
    """Whether the CUTLASS headers are of the version the lock says; needs them in the store."""
    artifact = lock.artifact("cutlass")
    said = {s.used for s in lock.substitutions if s.name == "CUTLASS_REVISION"}
    said |= {artifact.provides} - {""}
    if not said or not store.has(artifact):
        return
    with zipfile.ZipFile(store.get(artifact)) as wheel:
        headers = [n for n in wheel.namelist() if n.endswith("/include/cutlass/version.h")]
        if len(headers) != 1:
            yield f"cutlass: {artifact.filename} holds {len(headers)} cutlass/version.h"
            return
        found = dict(_CUTLASS_VERSION.findall(wheel.read(headers[0]).decode()))
    version = "v" + ".".join(found.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))
    if said != {version}:
        yield f"cutlass: the lock says {', '.join(sorted(said))}, the headers say {version}"


def patch_problems(root: Path, lock: ReleaseLock) -> Iterator[str]:
    """Disagreements between the lock and ``patches/<release>``."""
    if not (root / "patches" / lock.vllm).is_dir():
        yield f"patches: there is no patches/{lock.vllm}: nothing can be built from this lock yet"
        return
    try:
        series = load_series(root / "patches" / lock.vllm)
    except PatchError as error:
        yield f"patches: {error.what}: {error.why}"
        return
    if series.release != lock.vllm:
        yield f"patches: series.toml is of release {series.release}"
    there = {patch.file: patch.sha256 for patch in series.patches}
    there |= {f"overlay/{overlay.file}": overlay.sha256 for overlay in series.overlays}
    pinned = {ref.file: ref.sha256 for ref in lock.patches}
    for name in sorted(pinned.keys() | there.keys()):
        if name not in pinned:
            yield f"patches: the lock does not pin {name}"
        elif name not in there:
            yield f"patches: the lock pins {name}, which patches/{lock.vllm} lacks"
        elif pinned[name] != there[name]:
            yield f"patches: the lock pins another {name}"


def variant_problems(root: Path, lock: ReleaseLock) -> Iterator[str]:
    """Disagreements between the lock and ``variants.yaml``, which the recipe reads."""
    from rattler_build import VariantConfig, VariantError

    path = root / "lock" / lock.vllm / "variants.yaml"
    where = f"lock/{lock.vllm}/variants.yaml"
    sdist = lock.artifact("vllm-sdist")
    wanted = {
        "vllm_version": [lock.vllm],
        "vllm_sdist": [sdist.filename],
        "vllm_sdist_sha256": [sdist.sha256],
        "rust_frontend": [lock.rust.default],
    }
    try:
        found = VariantConfig.from_file(path).to_dict() if path.is_file() else None
    except VariantError as error:
        yield f"{where}: {error}"
        return
    if found is None:
        yield f"{where}: there is no such file"
        return
    for key in sorted(wanted.keys() | found.keys()):
        if wanted.get(key) != found.get(key):
            yield f"{where}: {key} is {found.get(key)}, by the lock {wanted.get(key)}"
