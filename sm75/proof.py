"""Glue between the store and the checks: which tools, policy and trees they are given."""

from __future__ import annotations

import re
import tempfile
import zipfile
from pathlib import Path

from sm75 import atomic, buildgraph, fetch
from sm75.condapkg import read_info
from sm75.elf import declared_shim
from sm75.errors import UsageError
from sm75.lockfile import PatchRef, ReleaseLock, dump_release, load_release
from sm75.progress import SilentReporter
from sm75.rules import Policy
from sm75.series import load_series
from sm75.series import seal as seal_series
from sm75.store import Store
from sm75.toolchain.host import build_platform
from sm75.verify import Verification, verify

_CUOBJDUMP = "nvidia/cu13/bin/cuobjdump"
# Where torch declares the C functions that are the stable ABI.
_SHIM = re.compile(r"torch/include/torch/csrc/(stable/c|inductor/aoti_torch/(c|generated))/.*\.h")


def cuobjdump(root: Path, lock: ReleaseLock, store: Store) -> Path | None:
    """NVIDIA's tool, out of its pinned wheel; ``None`` when the store lacks it.

    Args:
        root: The project's directory.
        lock: The release lock.
        store: The store.
    """
    artifact = lock.artifact(f"cuda-cuobjdump-{build_platform()}")
    if not store.has(artifact):
        return None
    tool = root / ".sm75" / "tools" / f"cuobjdump-{artifact.stored_sha256[:16]}"
    with zipfile.ZipFile(store.get(artifact)) as wheel:
        content = wheel.read(_CUOBJDUMP)
    # What was unpacked before is used only if it is still what the lock pins.
    if not tool.is_file() or tool.read_bytes() != content:
        atomic.write_bytes(tool, content, mode=0o755)
    return tool


def verify_package(root: Path, lock: ReleaseLock, store: Store, package: Path) -> Verification:
    """Hold a built package against the policy, with every tool and fact that is at hand.

    Args:
        root: The project's directory.
        lock: The release lock.
        store: The store; NVIDIA's cuobjdump and torch's headers come from there.
        package: The ``.conda``.

    Raises:
        UsageError: There is no such package.
        ChannelError: It is damaged.
        ToolchainError: cuobjdump cannot be run.
    """
    graph = None
    if package.is_file():
        native = str(read_info(package)["about"].get("extra", {}).get("native_hash", ""))
        ninja = root / ".sm75" / "native" / native[:16] / "build" / "build.ninja"
        if native and ninja.is_file():
            graph = buildgraph.load(ninja)
    policy = Policy(
        version=lock.vllm,
        shim=_shim(lock, store),
        build_paths=(str(root / ".sm75"), str(store.root)),
    )
    return verify(package, policy, graph=graph, cuobjdump=cuobjdump(root, lock, store))


def _shim(lock: ReleaseLock, store: Store) -> frozenset[str] | None:
    """The functions of torch's C shim, from the pinned torch's own headers."""
    artifact = lock.artifact("torch-dev")
    if not store.has(artifact):
        return None
    with (
        tempfile.TemporaryDirectory() as scratch,
        zipfile.ZipFile(store.get(artifact)) as wheel,
    ):
        names = [name for name in wheel.namelist() if _SHIM.fullmatch(name)]
        return declared_shim(Path(wheel.extract(name, scratch)) for name in names)


def sdist(root: Path, lock: ReleaseLock, store: Store, against: str | None) -> Path:
    """The tree or sdist to check patches against.

    Args:
        root: The project's directory.
        lock: The release lock.
        store: The store; the lock's own sdist is fetched when it is not there.
        against: A path, or a release that has a lock here; ``None``: the lock's own.

    Raises:
        UsageError: ``against`` is neither.
        FetchError: The sdist cannot be had.
    """
    if against and Path(against).exists():
        return Path(against)
    wanted = lock
    if against:
        if not (root / "lock" / against / "release.toml").is_file():
            raise UsageError(
                f"{against} is neither a path nor a release that has a lock",
                fix="name an sdist or an unpacked tree",
            )
        wanted = load_release(root, against)
    artifact = wanted.artifact("vllm-sdist")
    if not store.has(artifact):
        fetch.fetch(fetch.plan_artifacts([artifact], store), store, SilentReporter())
    return store.get(artifact)


def seal(root: Path, lock: ReleaseLock) -> list[str]:
    """Pin the patches as they are, in series.toml and in the release lock.

    Args:
        root: The project's directory.
        lock: The release lock.

    Returns:
        The names whose pins changed.

    Raises:
        PatchError: The series is malformed.
        LockError: The lock cannot be read back.
    """
    directory = root / "patches" / lock.vllm
    changed = list(seal_series(directory))
    series = load_series(directory)
    pins = tuple(
        sorted(
            [PatchRef(file=p.file, sha256=p.sha256) for p in series.patches]
            + [PatchRef(file=f"overlay/{o.file}", sha256=o.sha256) for o in series.overlays],
            key=lambda ref: ref.file,
        )
    )
    if pins != lock.patches:
        import msgspec

        path = root / "lock" / lock.vllm / "release.toml"
        atomic.write_bytes(path, dump_release(msgspec.structs.replace(lock, patches=pins)).encode())
        old = {ref.file: ref.sha256 for ref in lock.patches}
        changed += [ref.file for ref in pins if old.get(ref.file) != ref.sha256]
    return sorted(set(changed))
