"""Crates, a registry, a repository and a small program for the tests of Rust from source."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from sm75 import cargolock
from sm75.cargolock import CRATES_IO
from sm75.crates import Sources
from tests.unit.badserver import BadServer

GIT_URL = "https://git.test/x/tool"


def crate_bytes(
    name: str,
    version: str,
    files: Mapping[str, bytes],
    *,
    top: str | None = None,
    extra: tuple[tuple[tarfile.TarInfo, bytes], ...] = (),
) -> bytes:
    """A ``.crate`` archive with those files below its directory, and further raw members."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for path, data in files.items():
            info = tarfile.TarInfo(f"{top or f'{name}-{version}'}/{path}")
            info.size, info.mode = len(data), 0o755 if path.endswith(".sh") else 0o644
            archive.addfile(info, io.BytesIO(data))
        for info, data in extra:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(plain.getvalue(), mtime=0)


def manifest(name: str, version: str, more: str = "") -> bytes:
    text = f'[package]\nname = "{name}"\nversion = "{version}"\nedition = "2021"\n{more}'
    return text.encode()


ADD = crate_bytes(
    "add", "1.2.3",
    {
        "Cargo.toml": manifest("add", "1.2.3", '[dependencies]\nbase = "0.1"\n'),
        "Cargo.toml.orig": b"as it was written",
        ".gitignore": b"target\n",
        ".gitattributes": b"",
        ".cargo_vcs_info.json": b"{}",
        ".github/x.yml": b"",
        "src/.gitignore": b"",
        "notes.rej": b"",
        "notes.orig": b"",
        "src/Cargo.toml.orig": b"",
        "src/lib.rs": b"pub fn add(a: u32, b: u32) -> u32 { base::id(a) + b }\n"
        b"pub fn place() -> &'static str { file!() }\n",
        "tools/run.sh": b"#!/bin/sh\n",
    },
)  # fmt: skip
BASE = crate_bytes(
    "base", "0.1.0",
    {"Cargo.toml": manifest("base", "0.1.0"), "src/lib.rs": b"pub fn id(a: u32) -> u32 { a }\n"},
)  # fmt: skip
CRATES = {("add", "1.2.3"): ADD, ("base", "0.1.0"): BASE}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def cargo_lock(git_revision: str = "") -> str:
    """The Cargo.lock of a program that needs ``add``, and ``gitty`` where there is a revision."""
    text = "version = 3\n"
    for (name, version), data in CRATES.items():
        text += f'\n[[package]]\nname = "{name}"\nversion = "{version}"\nsource = "{CRATES_IO}"\n'
        text += f'checksum = "{sha256(data)}"\n'
        text += 'dependencies = [\n "base",\n]\n' if name == "add" else ""
    if git_revision:
        text += '\n[[package]]\nname = "gitty"\nversion = "0.3.0"\n'
        text += f'source = "git+{GIT_URL}?rev={git_revision}#{git_revision}"\n'
    needs = ' "add",\n' + (' "gitty",\n' if git_revision else "")
    text += f'\n[[package]]\nname = "program"\nversion = "0.0.1"\ndependencies = [\n{needs}]\n'
    return text


def sources(git_revision: str = "", **git_sha256: str) -> Sources:
    """The same as the build knows it."""
    return Sources(crates=cargolock.parse(cargo_lock(git_revision)), git_sha256=git_sha256)


def program(tree: Path, git_revision: str = "") -> None:
    """A tree with that program where vLLM has its own."""
    gitty = f'gitty = {{ git = "{GIT_URL}", rev = "{git_revision}" }}\n' if git_revision else ""
    call = "gitty::word()" if git_revision else '"no git"'
    files = {
        "rust/Cargo.toml": '[workspace]\nmembers = ["src/cmd"]\nresolver = "2"\n'
        '[profile.release]\npanic = "abort"\n',
        "rust/Cargo.lock": cargo_lock(git_revision),
        "rust/src/cmd/Cargo.toml": manifest(
            "program", "0.0.1", f'[dependencies]\nadd = "1"\n{gitty}[features]\nloud = []\n'
            '[[bin]]\nname = "vllm-rs"\npath = "main.rs"\n',
        ).decode(),
        "rust/src/cmd/main.rs": 'fn main() { println!("{} {} {} {} {:?} {}", add::add(1, 2), '
        f'add::place(), {call}, cfg!(feature = "loud"), option_env!("VLLM_RS_BUILD_VERSION"), '
        'file!()); }\n',
        "tools/build_rust.py": "def rust_extensions():\n    return [RustExtension(\n"
        '        target="vllm.vllm-rs", path="rust/src/cmd/Cargo.toml",\n'
        '        args=["--bin", "vllm-rs"],\n'
        '        features=["loud"], binding=Binding.Exec)]\n',
    }  # fmt: skip
    for path, text in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)


def offer(server: BadServer) -> str:
    """Put the crates on the server as a sparse registry does; returns the registry's URL."""
    base = server.url.removesuffix("simple/") + "files/"
    server.files["config.json"] = json.dumps({"dl": f"{base}dl/{{crate}}-{{version}}"}).encode()
    for (name, version), data in CRATES.items():
        server.files[f"dl/{name}-{version}"] = data
    return base


def local_registry(where: Path) -> Path:
    """The crates as a registry in a directory, which every cargo reads."""
    for (name, version), data in CRATES.items():
        folder = where / "index" / (f"3/{name[0]}" if len(name) == 3 else f"{name[:2]}/{name[2:4]}")
        folder.mkdir(parents=True, exist_ok=True)
        needs = [{"name": "base", "req": "^0.1", "features": [], "optional": False,
                  "default_features": True, "target": None, "kind": "normal"}]  # fmt: skip
        entry = {"name": name, "vers": version, "deps": needs if name == "add" else [],
                 "cksum": sha256(data), "features": {}, "yanked": False}  # fmt: skip
        (folder / name).write_text(json.dumps(entry) + "\n")
        (where / f"{name}-{version}.crate").write_bytes(data)
    return where


def repository(where: Path, files: Mapping[str, str] | None = None) -> str:
    """A git repository with the crate ``gitty`` 0.3.0; returns its commit."""
    where.mkdir(parents=True)
    for path, text in (files or GITTY).items():
        (where / path).parent.mkdir(parents=True, exist_ok=True)
        (where / path).write_text(text)
    (where / "LICENSE").symlink_to("docs/license.txt")
    (where / "outside").symlink_to("/etc/passwd")
    (where / "build.sh").chmod(0o755)
    git(where, "init", "--quiet", "--initial-branch=main")
    git(where, "config", "uploadpack.allowAnySHA1InWant", "true")
    return commit(where)


GITTY = {
    "Cargo.toml": manifest("gitty", "0.3.0").decode(),
    "src/lib.rs": 'pub fn word() -> &\'static str { "git" }\n',
    "docs/license.txt": "free",
    "build.sh": "#!/bin/sh\n",
    "other/Cargo.toml": manifest("other", "0.1.0").decode(),
    "other/src/lib.rs": "",
}


def commit(where: Path) -> str:
    git(where, "add", "-A")
    git(where, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "-m", "x",
        "--date=2024-01-01T00:00:00Z")  # fmt: skip
    return git(where, "rev-parse", "HEAD").strip()


def git(where: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=where, check=True, capture_output=True, text=True
    )
    return done.stdout


def git_settings(place: Path) -> dict[str, str]:
    """Settings that send git to a directory when it is asked for ``GIT_URL``."""
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{place.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": GIT_URL,
    }


def cargo() -> str | None:
    """The real cargo; installed where that is allowed (root on Debian or Ubuntu)."""
    if not shutil.which("cargo") and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["update", "-qq"], ["install", "-y", "-qq", "cargo"]):
            subprocess.run(
                ["apt-get", *command], check=False, stdout=subprocess.DEVNULL,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )  # fmt: skip
    return shutil.which("cargo")
