"""The content-addressed store: ``<root>/sha256/ab/abcd.../<file name>``.

A file gets its name here only after its size and sha256 were checked, by one rename; an
interrupted writer leaves something below ``<root>/partial`` and nothing else. Files are
read-only. A file that was changed afterwards is noticed: the check is repeated whenever the
file's inode, size or change time is not the one seen at the last check.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from sm75.atomic import fsync_dir, write_bytes
from sm75.errors import DiskError, FetchError, UsageError
from sm75.lockfile import Artifact

_MEMO = ".checked"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def default_root() -> Path:
    """``SM75_STORE``, else ``store`` below the user's cache directory."""
    configured = os.environ.get("SM75_STORE")
    if configured:
        return Path(configured).expanduser().absolute()
    try:
        return platformdirs.user_cache_path("vllm-sm75", appauthor=False) / "store"
    except RuntimeError as error:
        raise UsageError(
            "there is no cache directory to keep the store in",
            why=str(error),
            fix="name one with --store or SM75_STORE",
        ) from error


class AlteredError(FetchError):
    """Bytes are not the ones that the lock pins."""


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a DiskError that names ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskError(
                f"the disk is full: cannot write {path}",
                why=f"{error.strerror}; {_free(path)}",
                fix="free some space, or put the store elsewhere (--store or SM75_STORE), "
                "then run the same command again: it resumes",
            ) from error
        raise DiskError(
            f"cannot write {path}",
            why=str(error),
            fix="check the directory's owner and mode, "
            "or put the store elsewhere (--store or SM75_STORE)",
        ) from error


def hash_file(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Store:
    """Files by their sha256.

    Args:
        root: The store's directory; made when first written to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def partial(self) -> Path:
        """Directory of unfinished bytes, present or not."""
        return self.root / "partial"

    def directory(self, sha256: str) -> Path:
        """Directory of the file with that hash, present or not."""
        return self.root / "sha256" / sha256[:2] / sha256

    def path(self, sha256: str, filename: str = "") -> Path:
        """Where the file with that hash lies or will lie; nothing is checked.

        Args:
            sha256: Its hash.
            filename: Its name; left out: the name it was stored under.

        Raises:
            FetchError: No name is given and the store has no such file.
        """
        folder = self.directory(sha256)
        if filename:
            return folder / filename
        names = sorted(p for p in folder.glob("*") if not p.name.startswith("."))
        if not names:
            raise FetchError(
                f"the store has no file with sha256 {sha256}",
                why=f"looked in {folder}",
                fix="run fetch",
            )
        return names[0]

    def has(self, artifact: Artifact) -> bool:
        """Whether the artifact (its thin wheel, when it has one) is here and sound."""
        return self.sound(artifact.stored_sha256, artifact.stored_filename, artifact.stored_size)

    def has_whole(self, artifact: Artifact) -> bool:
        """Whether the whole file is here, also when only a thin wheel is asked for."""
        return self.sound(artifact.sha256, artifact.filename, artifact.size)

    def get(self, artifact: Artifact) -> Path:
        """Path of the artifact (its thin wheel, when it has one), its hash checked.

        Raises:
            FetchError: It is not here, or its bytes are not those of the lock.
        """
        path = self.path(artifact.stored_sha256, artifact.stored_filename)
        if not self.has(artifact):
            there = path.exists()
            raise FetchError(
                f"{artifact.stored_filename} "
                + ("in the store was altered" if there else "is not in the store"),
                why=f"{path} "
                + (f"does not hash to {artifact.stored_sha256}" if there else "does not exist"),
                fix="run fetch",
            )
        return path

    def sound(self, sha256: str, filename: str, size: int | None = None) -> bool:
        """Whether a file of that hash, name and size (bytes; None: any) is here, bytes checked."""
        path = self.path(sha256, filename)
        try:
            seen = _state(path)
        except OSError:
            return False
        if size is not None and seen["size"] != size:
            return False
        memo = path.parent / _MEMO
        if _read_memo(memo) == seen:
            return True
        try:
            if hash_file(path) != sha256:
                return False
        except OSError:
            return False
        # A store on a read-only disk works too; it is hashed each time.
        with contextlib.suppress(DiskError):
            write_bytes(memo, json.dumps(seen).encode())
        return True

    def add(
        self,
        file: Path,
        *,
        sha256: str,
        size: int | None = None,
        filename: str = "",
        move: bool = False,
    ) -> Path:
        """Take a file in, after checking it.

        Args:
            file: The file.
            sha256: What it must hash to.
            size: How many bytes it must have; None: any.
            filename: Name in the store; empty: its own name.
            move: Take the file itself (it must lie below ``root``), not a copy.

        Returns:
            Its path in the store.

        Raises:
            AlteredError: The bytes are not the ones meant; the file is left where it was.
            FetchError: The file cannot be read.
            DiskError: The disk is full or not writable.
        """
        filename = filename or file.name
        final = self.path(sha256, filename)
        temporary = file
        try:
            if not move:
                temporary = self.part(sha256, f".{os.getpid()}-{threading.get_ident()}.copy")
                _copy(file, temporary)
            check(temporary, filename, sha256, size)
            with disk_errors(final):
                final.parent.mkdir(parents=True, exist_ok=True)
                temporary.chmod(0o444)
                _sync(temporary)
                temporary.replace(final)
                fsync_dir(final.parent)
            write_bytes(final.parent / _MEMO, json.dumps(_state(final)).encode())
        finally:
            if not move:
                temporary.unlink(missing_ok=True)
        return final

    def part(self, sha256: str, suffix: str = ".part") -> Path:
        """A path below ``<root>/partial`` for unfinished bytes; its directory is made.

        Raises:
            DiskError: The directory cannot be made.
        """
        with disk_errors(self.partial):
            self.partial.mkdir(parents=True, exist_ok=True)
        return self.partial / f"{sha256}{suffix}"

    def lock_path(self, sha256: str) -> Path:
        """The lock file of whoever makes the file with that hash; its directory is made.

        Raises:
            DiskError: The directory cannot be made.
        """
        folder = self.root / "locks"
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{sha256}.lock"


def check(path: Path, filename: str, sha256: str, size: int | None) -> None:
    """Compare a file with what the lock pins.

    Raises:
        AlteredError: Another size or hash; it names the file, what was expected and what is there.
    """
    found = path.stat().st_size
    if size is not None and found != size:
        raise AlteredError(
            f"{filename} has {found} bytes instead of {size}",
            why=f"expected sha256 {sha256} and {size} bytes; got {found} bytes",
            fix="run fetch again; if it stays so, the package index serves another file",
        )
    digest = hash_file(path)
    if digest != sha256:
        raise AlteredError(
            f"{filename} is not the file that the lock pins",
            why=f"expected sha256 {sha256}, got {digest}",
            fix="run fetch again; if it stays so, the package index (or a proxy) serves "
            "another file, or the lock is wrong: do not use it",
        )


def _copy(source: Path, target: Path) -> None:
    try:
        stream = source.open("rb")
    except OSError as error:
        raise FetchError(f"cannot read {source}", why=str(error)) from error
    with stream, disk_errors(target), target.open("wb") as out:
        shutil.copyfileobj(stream, out, 1 << 20)


def _state(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {
        "inode": stat.st_ino,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
    }


def _read_memo(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(path: Path) -> str:
    for folder in (path, *path.parents):
        if folder.exists():
            usage = shutil.disk_usage(folder)
            return f"{usage.free / 1e6:.0f} MB free of {usage.total / 1e6:.0f} MB"
    return "free space unknown"
