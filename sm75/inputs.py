"""What a build is made of, and the hashes that name it.

The **input hash** covers everything that can change the package: sources, patches, overlay, recipe,
toolchain, target contract, options. It names the package's build string, so that the same hash in
the channel means that there is nothing to do. The **native hash** covers what the compilers read;
it names the directory in which CMake and ninja keep their state, so that a change to a Python file
compiles nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm75.closurelock import OMISSIONS
from sm75.condapkg import canonical_json
from sm75.errors import LockError
from sm75.lockfile import ReleaseLock, load_target
from sm75.series import Series

# Where the paths begin that the recipe's build script hands to CMake (its NATIVE_INPUTS).
NATIVE_ROOTS = ("CMakeLists.txt", "cmake/", "csrc/")
# Raise it when the orchestrator makes another package of the same inputs.
FORMAT = 1
# The program that the recipe applies the patches with: its `filter` names the same files.
PATCHER = ("__init__.py", "errors.py", "hunks.py", "patching.py", "series.py", "trees.py")
# Artifacts that only checks read.
_NOT_INPUT = {"tool"}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of one build.

    Attributes:
        facts: Everything, as JSON-ready data; also the package's provenance.
        input_hash: sha256 (hex) over all facts.
        native_hash: sha256 (hex) over those that the compilers see.
    """

    facts: dict[str, Any]
    input_hash: str
    native_hash: str

    @property
    def build_string(self) -> str:
        """The package's build string."""
        return f"h{self.input_hash[:12]}_0"


def collect(
    root: Path,
    lock: ReleaseLock,
    series: Series,
    *,
    toolchain: dict[str, str],
    build_platform: str,
    target_platform: str,
    rust: str,
    ptx: bool = False,
) -> Inputs:
    """Hash the inputs of a build.

    Args:
        root: The project's directory.
        lock: The release lock.
        series: The release's patches, whose hashes are checked already.
        toolchain: The provider's identity.
        build_platform: Where the build runs.
        target_platform: What it builds for.
        rust: ``--rust``.
        ptx: ``--ptx``.

    Raises:
        LockError: The lock pins other patches than there are, or names an unknown target.
    """
    patches = {p.file: p.sha256 for p in series.patches}
    overlays = {o.dest: o.sha256 for o in series.overlays}
    _check_patches(lock, patches | {f"overlay/{o.file}": o.sha256 for o in series.overlays})
    artifacts = {
        a.id: a.stored_sha256
        for a in lock.artifacts
        if a.role not in _NOT_INPUT and a.needed(build_platform, target_platform, rust)
    }
    recipe = _hashes(root / "recipes" / "vllm-sm75", ("recipe.yaml", "build.py"))
    patcher = _hashes(root / "sm75", PATCHER)
    native_patches = {
        p.file: p.sha256 for p in series.patches if any(_native(diff.path) for diff in p.diffs)
    }
    native_overlays = {dest: digest for dest, digest in overlays.items() if _native(dest)}
    toolchain_digest = _digest([toolchain, {k: v for k, v in artifacts.items() if k != "vllm-rs"}])
    native = {
        "format": FORMAT,
        "toolchain": toolchain_digest,
        "build_script": recipe["build.py"],
        "patcher": patcher,
        "patches": native_patches,
        "overlay": native_overlays,
        "target_platform": target_platform,
        "ptx": ptx,
    }
    facts = {
        "format": FORMAT,
        "vllm": lock.vllm,
        "target": lock.target,
        "target_contract": _contract_digest(root, lock.target),
        "rust_frontend": rust,
        "artifacts": artifacts,
        "patches": patches,
        "overlay": overlays,
        "recipe": recipe,
        # the package's metadata do not ask for what is left out
        "omissions": _hashes(root / "lock" / lock.vllm, (OMISSIONS,))[OMISSIONS],
        "patcher": patcher,
        "toolchain": toolchain,
        "target_platform": target_platform,
        "ptx": ptx,
    }
    if rust == "source":  # every crate's hash is in Cargo.lock
        facts["crates"] = {
            "Cargo.lock": lock.rust.cargo_lock_sha256,
            **lock.rust.git_sha256,
        }
    return Inputs(
        facts=facts,
        input_hash=_digest(facts),
        native_hash=_digest(native),
    )


def _contract_digest(root: Path, name: str) -> str:
    load_target(root, name)  # it must be there and well-formed
    return _hashes(root / "lock" / "targets", [f"{name}.toml"])[f"{name}.toml"]


def _native(path: str) -> bool:
    return path.startswith(NATIVE_ROOTS)


def _check_patches(lock: ReleaseLock, found: dict[str, str]) -> None:
    pinned = {ref.file: ref.sha256 for ref in lock.patches}
    if pinned == found:
        return
    changed = sorted(k for k in pinned.keys() | found.keys() if pinned.get(k) != found.get(k))
    raise LockError(
        f"the lock of {lock.vllm} pins other patches than patches/{lock.vllm} holds",
        why=", ".join(changed[:5]) + (", …" if len(changed) > 5 else ""),
        fix=f"review them, then: python3 orchestrator.py patches seal --release {lock.vllm}",
    )


def _hashes(directory: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}


def _digest(data: object) -> str:
    return hashlib.sha256(canonical_json(data)).hexdigest()
