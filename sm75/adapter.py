"""Build ``dlami-torch``, the adapter to the image's torch, for one target contract.

The recipe in ``recipes/dlami-torch`` is what counts: its metadata are rendered by the recipe
library and its build script is run. It compiles nothing, so no build environment is made for it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rattler_build
from packaging.version import InvalidVersion, Version

from sm75.condapkg import FileSource, canonical_json, tree, write_conda
from sm75.errors import BuildError, LockError
from sm75.lockfile import G5G, TargetContract

NAME = "dlami-torch"
# vLLM's extensions use torch's stable ABI of this version (TORCH_TARGET_VERSION, CMakeLists.txt).
FLOOR = Version("2.11")
# Raise it when the same recipe and contract would give another package.
_FORMAT = 1


def check_contract(contract: TargetContract) -> None:
    """Refuse a contract that no build can serve.

    Args:
        contract: The target.

    Raises:
        LockError: Its torch is too old, or has no sm_75 code.
    """
    try:
        version = Version(contract.torch)
    except InvalidVersion as err:
        raise LockError(f"{contract.name}: torch '{contract.torch}' is no version") from err
    if version.release < FLOOR.release:
        raise LockError(
            f"no build serves {contract.name}: it has torch {contract.torch}",
            why=f"vLLM's kernels use torch's stable ABI of {FLOOR}, which older ones lack",
            fix="use an image with a newer torch, for instance dlami-pytorch-2.12-ubuntu24.04",
        )
    if contract.torch_arches and "sm_75" not in contract.torch_arches:
        raise LockError(
            f"no build serves {contract.name}: its torch has no sm_75 code",
            why=f"it has {', '.join(contract.torch_arches)}",
            fix="use an image whose torch lists sm_75",
        )


def build(root: Path, contract: TargetContract, out_dir: Path) -> Path:
    """Build the package.

    Args:
        root: The project's directory.
        contract: The target.
        out_dir: Channel root to write into.

    Returns:
        The package; the same recipe and contract always give the same bytes.

    Raises:
        LockError: No build can serve the contract.
        BuildError: The recipe's script failed.
        DiskError: The package cannot be written.
    """
    check_contract(contract)
    recipe = root / "recipes" / NAME
    facts = {
        "contract": contract.name,
        "torch_version": contract.torch,
        "torch_release": contract.torch.partition("+")[0],
        "cuda_version": contract.cuda,
        "cuda_major": contract.cuda.partition(".")[0],
        "image_path": contract.path,
    }
    rendered = _render(recipe / "recipe.yaml", facts)
    requirements = rendered["requirements"]
    depends = [_python(str(spec), contract) for spec in requirements["run"]]
    constrains = [str(spec) for spec in requirements["run_constraints"]]
    with tempfile.TemporaryDirectory(prefix="vllm-sm75-adapter-") as name:
        site = Path(name) / "site-packages"
        site.mkdir()
        _run_script(root, recipe, site, contract)
        files = tree(site, dest="site-packages")
        content = {
            "format": _FORMAT,
            "facts": facts,
            "files": {path: _digest(source) for path, source in files.items()},
            "depends": depends,
            "constrains": constrains,
        }
        digest = hashlib.sha256(canonical_json(content)).hexdigest()
        return write_conda(
            out_dir,
            name=NAME,
            version=str(rendered["package"]["version"]),
            build=f"h{digest[:12]}_0",
            subdir=G5G,
            files=files,
            depends=depends,
            constrains=constrains,
            noarch="python",
            compiled=True,  # of no use elsewhere
            about={
                "summary": rendered["about"]["summary"],
                "extra": {"contract": facts, "torch_arches": list(contract.torch_arches)},
            },
            license=str(rendered["about"]["license"]),
            license_files={"LICENSE": FileSource.from_path(root / "LICENSE", executable=False)},
        )


def _render(recipe: Path, facts: Mapping[str, str]) -> dict[str, Any]:
    platform = rattler_build.PlatformConfig(
        target_platform=G5G, build_platform=G5G, host_platform=G5G
    )
    variants = rattler_build.VariantConfig(
        {
            "host_platform": [G5G],
            "build_platform": [G5G],
            **{key: [value] for key, value in facts.items()},
        }
    )
    stage0 = rattler_build.Stage0Recipe.from_file(recipe)
    (variant,) = stage0.render(variants, rattler_build.RenderConfig(platform=platform))
    found: dict[str, Any] = variant.recipe.to_dict()
    return found


def _run_script(root: Path, recipe: Path, site: Path, contract: TargetContract) -> None:
    done = subprocess.run(
        [sys.executable, "-I", str(recipe / "build.py")],
        env={
            "SP_DIR": str(site),
            "SRC_DIR": str(recipe),
            "PATH": os.environ.get("PATH", ""),
            "SM75_CONTRACT": contract.name,
            "SM75_TORCH": contract.torch,
            "SM75_CUDA": contract.cuda,
            "SM75_PATH": contract.path,
        },
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise BuildError(
            f"the build script of {NAME} failed", why=done.stderr[-1000:], fix="look at the recipe"
        )


def _python(spec: str, contract: TargetContract) -> str:
    """Narrow the dependency on Python where the contract knows the image's minor."""
    if spec.partition(" ")[0] == "python" and len(contract.python) == 1:
        return f"python {contract.python[0]}.*"
    return spec


def _digest(source: FileSource) -> str:
    if source.opener is None:
        return f"-> {source.link}"
    with source.opener() as raw:
        return hashlib.file_digest(raw, "sha256").hexdigest()  # type: ignore[arg-type]
