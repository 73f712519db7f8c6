"""An aarch64 Python that runs here under qemu-user: Debian's, unpacked beside the project.

Debian's packages are fetched by apt itself, which checks their signatures; the system's own package
database is not touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6",
            "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3")  # fmt: skip


def qemu() -> str | None:
    """qemu-user for aarch64; installed where that is allowed (root on Debian or Ubuntu)."""
    found = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if found or os.geteuid() != 0 or not shutil.which("apt-get"):
        return found
    for command in (["apt-get", "update", "-qq"],
                    ["apt-get", "install", "-y", "-qq", "qemu-user-static"]):  # fmt: skip
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL,
                       env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})  # fmt: skip
    return shutil.which("qemu-aarch64-static")


def sysroot(place: Path, packages: Sequence[str] = PACKAGES) -> Path | None:
    """Unpack Debian's arm64 Python below ``place``; ``None`` where there is no such archive."""
    done = place / "sysroot" / "usr" / "bin" / "python3.11"
    if done.exists():
        return place / "sysroot"
    if not shutil.which("apt-get") or not Path("/etc/apt/sources.list.d/debian.sources").exists():
        return None
    for name in ("lists/partial", "cache/archives/partial", "debs"):
        (place / name).mkdir(parents=True, exist_ok=True)
    (place / "status").touch()
    config = place / "apt.conf"
    config.write_text(
        f'''APT::Architecture "arm64"; APT::Architectures {{ "arm64"; }};
Dir::State "{place}"; Dir::State::status "{place}/status"; Dir::State::lists "{place}/lists";
Dir::Cache "{place}/cache"; Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "/etc/apt/sources.list.d"; APT::Sandbox::User "root";
'''
    )
    env = {**os.environ, "APT_CONFIG": str(config)}
    for command in (["apt-get", "update", "-qq"], ["apt-get", "download", "-qq", *packages]):
        ran = subprocess.run(command, check=False, cwd=place / "debs", env=env)
        if ran.returncode:
            return None
    root = place / "sysroot"
    for deb in sorted((place / "debs").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(deb), str(root)], check=True)
    return root if done.exists() else None
