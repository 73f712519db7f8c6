"""A commit of a git repository as one file that is the same wherever it is made.

A plain tar of the commit's files in the order of their names, with no dates and no owners, below
one directory. git itself checks what it is sent against the commit's id (SHA-1); the release lock
pins the archive's sha256 besides.

A symbolic link to a file of the commit becomes a copy of it; other links are left out. Submodules
are refused: cargo would read them too.
"""

from __future__ import annotations

import io
import os
import posixpath
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sm75.archives import check_name
from sm75.cargolock import Git
from sm75.errors import FetchError, ToolchainError

# Seconds for one repository: a stalled server must not hold a fetch for ever.
_PATIENCE = 600.0
# Links that lead to links, at most.
_LINKS = 8


@dataclass(frozen=True, kw_only=True)
class _Entry:
    mode: str
    blob: str


def filename(place: Git) -> str:
    """The archive's name in the store."""
    return f"{place.key.replace('@', '-')}.tar"


def make(place: Git, out: BinaryIO) -> None:
    """Write the archive of a commit, reading the commit from its repository.

    Args:
        place: The repository and the commit. git's own settings apply (proxies, ``insteadOf``).
        out: Gets the archive.

    Raises:
        ToolchainError: There is no git.
        FetchError: The repository or the commit cannot be had, or has what is not supported.
    """
    if not shutil.which("git"):
        raise ToolchainError(
            f"git is missing; it reads {place.url}", fix="install git, and run the same again"
        )
    with tempfile.TemporaryDirectory(prefix="sm75-git-") as scratch:
        repository = _Repository(Path(scratch), place)
        repository.fetch()
        _write(repository, place, out)


class _Repository:
    def __init__(self, directory: Path, place: Git) -> None:
        self.directory = directory
        self.place = place

    def fetch(self) -> None:
        place = self.place
        self.run("init", "--quiet", "--bare")
        # Servers may refuse a commit by its id; then by what Cargo.toml calls it.
        wants = [place.revision, *([place.reference[1]] if place.reference else [])]
        faults = []
        for want in wants:
            if want.startswith("-"):
                continue
            try:
                self.run("-c", "fetch.fsckObjects=true", "fetch", "--quiet", "--depth=1",
                         "--no-tags", "--no-recurse-submodules", place.url, want)  # fmt: skip
                break
            except FetchError as error:
                faults.append(error)
        else:
            raise faults[0]
        found = self.run("rev-parse", "FETCH_HEAD^{commit}").decode().strip()
        if found != place.revision:
            raise FetchError(
                f"{place.url} gives another commit than Cargo.lock pins",
                why=f"expected {place.revision}, got {found}",
                fix="the tag or branch was moved, and the server does not give commits by id",
            )

    def run(self, *arguments: str, text: bytes = b"") -> bytes:
        environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"):
            environment.pop(name, None)  # of a hook that we may run below
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=self.directory, env=environment, input=text, check=False,
                capture_output=True, timeout=_PATIENCE,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise FetchError(
                f"{self.place.url} cannot be read", why=f"no answer within {_PATIENCE:.0f} s"
            ) from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise FetchError(
                f"commit {self.place.revision[:12]} of {self.place.url} cannot be read",
                why=said[-1] if said else f"git ended with exit code {done.returncode}",
                fix="check the network and git's settings, then run the same command again",
            )
        return done.stdout

    def entries(self) -> dict[str, _Entry]:
        listed = self.run("ls-tree", "-r", "-z", "--full-tree", self.place.revision)
        found = {}
        for line in listed.split(b"\0")[:-1]:
            head, _, name = line.partition(b"\t")
            mode, _, blob = head.decode().split()
            try:
                path = name.decode("utf-8")
            except UnicodeDecodeError as error:
                raise FetchError(f"{self.place.url} has a file name that is not UTF-8") from error
            check_name(path, self.place.key)
            found[path] = _Entry(mode=mode, blob=blob)
        return found

    def contents(self, blobs: set[str]) -> dict[str, bytes]:
        ordered = sorted(blobs)
        stream = io.BytesIO(self.run("cat-file", "--batch", text="\n".join(ordered).encode()))
        found = {}
        for blob in ordered:
            size = int(stream.readline().split()[2])
            found[blob] = stream.read(size)
            stream.read(1)
        return found


def _write(repository: _Repository, place: Git, out: BinaryIO) -> None:
    entries = repository.entries()
    if modules := sorted(path for path, entry in entries.items() if entry.mode == "160000"):
        raise FetchError(
            f"{place.key} has submodules, which are not supported",
            why=", ".join(modules),
            fix="use --rust prebuilt or --rust none",
        )
    contents = repository.contents({entry.blob for entry in entries.values()})
    top = filename(place).removesuffix(".tar")
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(entries):
            real = _resolve(path, entries, contents)
            if real is None:
                continue
            data = contents[entries[real].blob]
            info = tarfile.TarInfo(f"{top}/{path}")
            info.size = len(data)
            info.mode = 0o755 if entries[real].mode == "100755" else 0o644
            archive.addfile(info, io.BytesIO(data))


def _resolve(path: str, entries: dict[str, _Entry], contents: dict[str, bytes]) -> str | None:
    """The file that a path is or leads to inside the commit; None: none."""
    for _ in range(_LINKS):
        entry = entries.get(path)
        if entry is None or entry.mode != "120000":
            return path if entry else None
        target = contents[entry.blob].decode("utf-8", "replace")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return None
