"""A small channel of the product's shape: vllm-sm75, the adapter, one package of the closure.

The constraints are the real ones, and the packages are real packages of a few bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sm75 import channel, condapkg
from sm75.condapkg import FileSource

SUBDIR = "linux-aarch64"
CONSTRAINS = (
    "vllm <0a0",
    "pytorch <0a0",
    "__cuda >=13",
    "__cuda_arch >=7.5,<8",
    "__glibc >=2.34",
)


def write(
    where: Path, name: str, version: str = "1.0", build: str = "0", *, size: int = 1,
    depends: Sequence[str] = (), constrains: Sequence[str] = (), noarch: bool = False,
    entry_points: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Write one package; ``noarch``: for every Python, but with compiled code."""
    folder = "site-packages" if noarch else "share"
    return condapkg.write_conda(
        where, name=name, version=version, build=build, subdir=SUBDIR, depends=depends,
        constrains=constrains, noarch="python" if noarch else None, compiled=noarch,
        entry_points=entry_points,
        files={f"{folder}/{name}.py": FileSource.from_bytes(name.encode() * size)},
    )  # fmt: skip


def python(where: Path, version: str = "3.12.4") -> Path:
    """A python that runs nothing."""
    minor = version.rpartition(".")[0]
    return condapkg.write_conda(
        where, name="python", version=version, build=f"0_cp{minor.replace('.', '')}",
        subdir=SUBDIR,
        files={f"bin/python{minor}": FileSource.from_bytes(b"\x7fELF", executable=True)},
    )  # fmt: skip


def product(where: Path, minors: Sequence[str] = ("3.12",), *more: Path) -> Path:
    """Publish such a channel, with further packages, and return it."""
    made = where.with_name(f"{where.name}-made")
    packages = [
        write(made, "vllm-sm75", "0.33.0", "h0_0", noarch=True, size=20_000,
              depends=["python >=3.11,<3.15", "dlami-torch >=2.11", "numpy"],
              constrains=CONSTRAINS,
              entry_points=["vllm = vllm.entrypoints.cli.main:main"]),
        write(made, "dlami-torch", "2.12.0", "h0_0", noarch=True,
              depends=["python >=3.11,<3.15"], constrains=["pytorch <0a0", "__cuda >=13"]),
        *(write(made, "numpy", "2.4", f"py{minor.replace('.', '')}", size=1000,
                depends=[f"python {minor}.*"]) for minor in minors),
        *more,
    ]  # fmt: skip
    channel.publish(packages, where)
    return where


def bare(where: Path, *packages: Path) -> Path:
    """A channel as others make it: with an index, without SHA256SUMS."""
    channel.publish(list(packages), where)
    (where / "SHA256SUMS").unlink()
    return where


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_index(where: Path, name: str, **changes: object) -> None:
    """Change the record of a package in the index."""
    index = where / SUBDIR / "repodata.json"
    data = json.loads(index.read_bytes())
    for record in data["packages.conda"].values():
        if record["name"] == name:
            record.update(changes)
    index.write_text(json.dumps(data))
