"""Install the adapter: the package, its start hook, the contract, and a record of torch for pip."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

# pip and uv do not ask import hooks what is installed. This record makes them count the image's
# torch as installed, so that a package that needs torch does not bring another one.
RECORDED = """\
Metadata-Version: 2.1
Name: torch
Version: {version}
Summary: The torch of the machine image, made visible by dlami-torch; no file of it is here
"""
OWN = """\
Metadata-Version: 2.1
Name: dlami-torch
Version: {version}
Summary: Makes the torch of an AWS Deep Learning AMI visible in a conda environment
License-Expression: Apache-2.0
"""


def main() -> None:
    """Write everything below ``SP_DIR``."""
    site = Path(os.environ["SP_DIR"])
    source = Path(os.environ["SRC_DIR"])
    torch = os.environ["SM75_TORCH"]
    package = site / "dlami_torch"
    shutil.copytree(
        source / "dlami_torch", package, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    contract = {
        "name": os.environ["SM75_CONTRACT"],
        "torch": torch,
        "cuda": os.environ["SM75_CUDA"],
        "path": os.environ["SM75_PATH"],
    }
    (package / "contract.json").write_text(json.dumps(contract, indent=2, sort_keys=True) + "\n")
    (site / "dlami_torch.pth").write_text("import dlami_torch; dlami_torch.install()\n")
    write_info(site / f"torch-{torch}.dist-info", RECORDED.format(version=torch))
    version = torch.partition("+")[0]
    write_info(site / f"dlami_torch-{version}.dist-info", OWN.format(version=version))


def write_info(info: Path, metadata: str) -> None:
    """Write a dist-info directory that says who installed it."""
    info.mkdir(parents=True)
    (info / "METADATA").write_text(metadata)
    (info / "INSTALLER").write_text("conda\n")


if __name__ == "__main__":
    main()
