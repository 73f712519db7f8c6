"""Glue between the store and the checks: which tools, policy and trees they are given."""

from __future__ import annotations

import re
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from sm75 import atomic, buildgraph, fetch, sdists
from sm75.aot import check, tools
from sm75.build import PROOF_NAME
from sm75.condapkg import read_info
from sm75.elf import declared_shim
from sm75.errors import UsageError
from sm75.lockfile import PROOFS, ReleaseLock, dump_release
from sm75.lockpatches import refs
from sm75.progress import SilentReporter
from sm75.rules import Policy
from sm75.series import load_series
from sm75.series import seal as seal_series
from sm75.store import Store
from sm75.toolchain.host import build_platform
from sm75.verify import Verification, of_kernels, verify

KERNELS = "vllm-sm75-kernels"
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


def kernels_in(channel: Path, version: str) -> Path | None:
    """The package of kernels of a release that a channel has; the last one, were there several."""
    found = channel.glob(f"noarch/{KERNELS}-{version}-*.conda")
    return max(found, key=lambda path: (path.stat().st_mtime, path.name), default=None)


def verify_kernels(root: Path, source: Path, beside: Path | None = None) -> Verification:
    """Hold kernels that were compiled ahead of time against their rules, and nothing else.

    Args:
        root: The project's directory.
        source: Their ``.conda``, or a directory that has them.
        beside: The package or site-packages of their vllm; None: ``source``, where it has one.

    Raises:
        UsageError: There are none in ``source``.
        ChannelError: They are damaged.
    """
    if beside is None and (source / "vllm").is_dir():
        beside = source
    found = check.check(source, disassembler=tools.disassembler(root), beside=beside)
    return of_kernels(source.name, found)


def verify_package(
    root: Path, lock: ReleaseLock, store: Store, package: Path, kernels: Path | None = None
) -> Verification:
    """Hold a built package against the policy, with every tool and fact that is at hand.

    Args:
        root: The project's directory.
        lock: The release lock.
        store: The store; NVIDIA's cuobjdump and torch's headers come from there.
        package: The ``.conda``.
        kernels: The package of kernels beside it, or a directory that has them; None: not checked.

    Raises:
        UsageError: There is no such package.
        ChannelError: It is damaged.
        ToolchainError: cuobjdump cannot be run.
    """
    graph = None
    name = ""
    if package.is_file():
        info = read_info(package)
        name = info["index"].get("name", "")
        native = str(info["about"].get("extra", {}).get("native_hash", ""))
        ninja = root / ".sm75" / "native" / native[:16] / "build" / "build.ninja"
        if native and ninja.is_file():
            graph = buildgraph.load(ninja)
    policy = policy_of(name, lock.vllm, _shim(lock, store, name), (root / ".sm75", store.root))
    found = None
    if kernels is not None:
        found = check.check(kernels, disassembler=tools.disassembler(root), beside=package)
    return verify(
        package, policy, graph=graph, cuobjdump=cuobjdump(root, lock, store), kernels=found
    )


def policy_of(
    name: str, version: str, shim: frozenset[str] | None, places: tuple[Path, ...]
) -> Policy:
    """What a package is held to, by its name.

    Args:
        name: The package's own.
        version: Of vLLM.
        shim: Functions of torch's C shim; None: not known.
        places: Directories of the build.
    """
    policy = Policy(version=version, shim=shim, build_paths=tuple(map(str, places)))
    if name != PROOF_NAME:
        return policy
    # It runs where it was built, on whatever that has: Ubuntu 24.04's glibc and GCC 14 at most.
    return replace(
        policy, name=PROOF_NAME, subdir=PROOFS, machine="x86_64", ptx=True, rust_modes=("none",),
        ceilings=(("GLIBC", "2.39"), ("GLIBCXX", "3.4.33"), ("CXXABI", "1.3.15")),
    )  # fmt: skip


def _shim(lock: ReleaseLock, store: Store, name: str) -> frozenset[str] | None:
    """The functions of torch's C shim, from the headers that the package was compiled with."""
    artifact = lock.artifact(f"torch-dev-for-{PROOFS}" if name == PROOF_NAME else "torch-dev")
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
        against: A path, or a release whose sdist is pinned; ``None``: the lock's own.

    Raises:
        UsageError: ``against`` is neither.
        FetchError: The sdist cannot be had.
    """
    if against and Path(against).exists():
        return Path(against)
    if not against:
        return fetch.obtain(lock.artifact("vllm-sdist"), store, SilentReporter())
    if against not in sdists.pinned(root):
        raise UsageError(
            f"{against} is neither a path nor a release whose sdist is pinned",
            fix="name an sdist or an unpacked tree",
        )
    return sdists.obtain(root, store, against)


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
    pins = refs(series)
    if pins != lock.patches:
        import msgspec

        path = root / "lock" / lock.vllm / "release.toml"
        atomic.write_bytes(path, dump_release(msgspec.structs.replace(lock, patches=pins)).encode())
        old = {ref.file: ref.sha256 for ref in lock.patches}
        changed += [ref.file for ref in pins if old.get(ref.file) != ref.sha256]
    return sorted(set(changed))
