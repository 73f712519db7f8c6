"""Small real libraries and packages for the tests, compiled on the spot."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from sm75.condapkg import FileSource, write_conda
from sm75.rules import DEVICE_EXTENSIONS, HOST_EXTENSIONS

DATA = Path(__file__).parents[1] / "data"
DEVICE = DATA / "device"
ARM_GCC = "aarch64-linux-gnu-gcc"
SITE = "lib/python3.12/site-packages"
_CACHE: dict[str, bytes] = {}

# What an extension of the stable ABI must have; declared here so that no Python headers are needed.
MODULE = """
extern void *PyModule_Create2(void *, int);
void *PyInit_it(void) { return PyModule_Create2(0, 3); }
"""


def compile_library(
    out: Path, source: str = MODULE, *flags: str, gcc: str = ARM_GCC, strip: bool = True
) -> Path:
    """Compile a shared library with no C library; skips the test without the compiler."""
    if shutil.which(gcc) is None:
        pytest.skip(f"{gcc} is not installed")
    command = [gcc, "-shared", "-fPIC", "-nostdlib", "-O1", *(["-s"] if strip else [])]
    done = subprocess.run(
        [*command, "-o", str(out), "-x", "c", "-", "-x", "none", *flags],
        input=source,
        text=True,
        capture_output=True,
        cwd=out.parent,
    )
    assert done.returncode == 0, done.stderr
    return out


def with_device_code(*fatbins: str) -> str:
    """C source whose library carries these files of tests/data/device, as nvcc lays them out."""
    lines = [f'".balign 8\\n.incbin \\"{DEVICE / name}\\"\\n"' for name in fatbins]
    return 'asm(".pushsection .nv_fatbin,\\"a\\"\\n"' + "".join(lines) + '".popsection");\n'


def versioned_libc(directory: Path, version: str, soname: str = "libc.so.6") -> Path:
    """A stand-in C library whose one function carries the symbol version ``version``."""
    script = directory / "versions.map"
    script.write_text(f"{version} {{ global: sm75_probe; }};\n")
    return compile_library(
        directory / f"stub-{soname}",
        "void sm75_probe(void) {}",
        f"-Wl,-soname,{soname}",
        f"-Wl,--version-script={script}",
    )


def extension(name: str, extra: str = "", *flags: str, strip: bool = True) -> bytes:
    """Bytes of an aarch64 extension as our build makes them."""
    device = with_device_code("sm75.fatbin") if name in DEVICE_EXTENSIONS else ""
    return library_bytes(MODULE + device + extra, *flags, strip=strip)


def library_bytes(source: str, *flags: str, strip: bool = True) -> bytes:
    """Bytes of an aarch64 library; the same request is compiled once."""
    key = hashlib.sha256(repr((source, flags, strip)).encode()).hexdigest()
    if key not in _CACHE:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "it.abi3.so"
            _CACHE[key] = compile_library(out, source, *flags, strip=strip).read_bytes()
    return _CACHE[key]


def package(
    directory: Path,
    changes: Mapping[str, bytes | None] | None = None,
    *,
    name: str = "vllm-sm75",
    version: str = "0.33.0",
    rust: str = "none",
    placeholder: Mapping[str, str] | None = None,
    command: bool = True,
    extra_info: Mapping[str, bytes] | None = None,
) -> Path:
    """A sound package, then ``changes`` by path below site-packages (None: left out)."""
    files: dict[str, bytes | None] = {
        f"vllm/{ext}.abi3.so": extension(ext) for ext in (*DEVICE_EXTENSIONS, *HOST_EXTENSIONS)
    }
    files["vllm/__init__.py"] = b"scratch = '/tmp/vllm'\n"
    info = "vllm-0.33.0.dist-info"
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.4\nName: vllm\nVersion: 0.33.0\n\nText.\n"
    files[f"{info}/entry_points.txt"] = (
        b"[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n"
    )
    files |= changes or {}
    marked = placeholder or {}
    script = {"bin/vllm": FileSource.from_bytes(b"#!/usr/bin/env python\n", executable=True)}
    return write_conda(
        directory,
        name=name,
        version=version,
        build="h0_0",
        subdir="linux-aarch64",
        files={
            f"{SITE}/{path}": FileSource.from_bytes(data, placeholder=marked.get(path))
            for path, data in files.items()
            if data is not None
        }
        | (script if command else {}),
        about={"extra": {"rust_frontend": rust}} if rust else {},
        license="Apache-2.0",
        license_files={"LICENSE": FileSource.from_bytes(b"text")},
        extra_info=extra_info,
    )
