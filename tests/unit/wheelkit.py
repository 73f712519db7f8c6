"""Tiny wheels for the tests, made in memory; real ones would be megabytes."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path


def make_wheel(
    directory: Path,
    *,
    project: str = "Demo.Pkg",
    version: str = "1.2.0",
    tag: str = "py3-none-any",
    files: Mapping[str, bytes] | None = None,
    metadata: str = "",
    entry_points: str = "",
    executable: tuple[str, ...] = (),
    record: Mapping[str, str] | None = None,
    modes: Mapping[str, int] | None = None,
) -> Path:
    """Write a wheel; ``record`` overrides RECORD's hash field of single members."""
    stem = f"{re.sub(r'[-.]', '_', project).lower()}-{version}"
    info = f"{stem}.dist-info"
    members: dict[str, bytes] = {
        **(files if files is not None else {"demo/__init__.py": b"x = 1\n"}),
        f"{info}/METADATA": (
            f"Metadata-Version: 2.4\nName: {project}\nVersion: {version}\n"
            f"Summary: a demo\nLicense-Expression: MIT\n{metadata}\n"
        ).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n".encode(),
        f"{info}/licenses/LICENSE": b"MIT text\n",
    }
    if entry_points:
        members[f"{info}/entry_points.txt"] = entry_points.encode()
    rows = []
    for name, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},{(record or {}).get(name, f'sha256={digest}')},{len(data)}\n")
    members[f"{info}/RECORD"] = ("".join(rows) + f"{info}/RECORD,,\n").encode()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, (2020, 5, 5, 0, 0, 0))
            mode = 0o100755 if name in executable else 0o100644
            entry.external_attr = (modes or {}).get(name, mode) << 16
            archive.writestr(entry, data)
    return path
