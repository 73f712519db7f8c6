"""Where a channel can be published: a directory, an object store (S3, GCS, Azure), a registry."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from sm75 import publishtools
from sm75.atomic import TMP_PREFIX, disk_errors, replacing
from sm75.channel import locked
from sm75.channelcheck import LOCK, check_location
from sm75.errors import FetchError, UsageError
from sm75.store import hash_file

# What obstore understands and has been tried here: S3. GCS and Azure go the same way.
SCHEMES = ("s3", "gs", "az")
# Seconds that a request is tried again for, with growing pauses; obstore's own defaults for the
# pauses (0.1 s, doubled, at most 15 s).
PATIENCE = 180.0
TRIES = 10
_CHUNK = 1 << 20


class Target(Protocol):
    """A place that holds files by name."""

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Its files, ``/`` separated, with their sizes in bytes.

        Args:
            names: Those that are going to be published, for a place that lists nothing by itself.
        """

    def digest(self, name: str) -> str:
        """sha256 (hex) of a file that the place has checked and keeps; empty: it keeps none."""

    def sha256(self, name: str) -> str:
        """sha256 (hex) of a file, read in full; empty: there is none."""

    def read(self, name: str) -> bytes:
        """A small file; empty: there is none."""

    def put(self, name: str, file: Path) -> None:
        """Store a file; a reader sees the old one, or the new one whole."""

    def delete(self, name: str) -> None:
        """Remove a file."""


class Directory:
    """A directory, on this machine or mounted.

    Args:
        root: The directory; made when first written to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def digest(self, name: str) -> str:
        """None is kept."""
        return ""

    def sizes(self, names: Iterable[str] = ()) -> dict[str, int]:
        """Its files with their sizes, without what an interrupted run has left."""
        return {
            path.relative_to(self.root).as_posix(): path.stat().st_size
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and not path.name.startswith(TMP_PREFIX) and path.name != LOCK
        }

    def sha256(self, name: str) -> str:
        """Hash of a file."""
        path = self.root / name
        return hash_file(path) if path.is_file() else ""

    def read(self, name: str) -> bytes:
        """A file's bytes."""
        path = self.root / name
        return path.read_bytes() if path.is_file() else b""

    def put(self, name: str, file: Path) -> None:
        """Copy a file under another name, then rename it."""
        with replacing(self.root / name) as out, file.open("rb") as source:
            shutil.copyfileobj(source, out, _CHUNK)

    def delete(self, name: str) -> None:
        """Remove a file."""
        with disk_errors(self.root / name):
            (self.root / name).unlink(missing_ok=True)


class Objects:
    """An object store, through obstore, which repeats what fails and signs requests.

    Args:
        root: The project's directory.
        url: ``s3://BUCKET/PREFIX`` and the like.

    Raises:
        UsageError: obstore does not take the URL or the settings.
        ToolchainError: obstore cannot be had.
    """

    def __init__(self, root: Path, url: str) -> None:
        self._url = url
        self._obstore: Any = publishtools.client(root, "obstore", "obstore.store")
        retry = {"max_retries": TRIES, "retry_timeout": _seconds(PATIENCE)}
        try:
            self._store = self._obstore.store.from_url(url.rstrip("/"), retry_config=retry)
        except (self._obstore.exceptions.BaseError, ValueError) as error:
            raise UsageError(f"cannot publish to {url}", why=_short(error)) from error

    def __str__(self) -> str:
        return self._url

    @contextmanager
    def _answers(self, what: str) -> Iterator[None]:
        try:
            yield
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise FetchError(
                f"{what} failed at {self._url}",
                why=_short(error),
                fix="check the network, the credentials (AWS_ACCESS_KEY_ID, AWS_ENDPOINT, …) and "
                "what they may do, then run the same command again: it goes on where it ended",
            ) from error

    def digest(self, name: str) -> str:
        """None is kept that is a sha256 everywhere."""
        return ""

    def sizes(self, names: Iterable[str] = ()) -> dict[str, int]:
        """The objects below the prefix."""
        with self._answers("listing"):
            return {
                str(meta["path"]): int(meta["size"])
                for page in self._obstore.list(self._store)
                for meta in page
            }

    def _stream(self, name: str) -> Iterator[bytes]:
        with self._answers(f"reading {name}"):
            try:
                for chunk in self._obstore.get(self._store, name).stream(min_chunk_size=_CHUNK):
                    yield bytes(chunk)
            except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
                return

    def sha256(self, name: str) -> str:
        """Hash of an object, which is read in full."""
        digest, found = hashlib.sha256(), False
        for chunk in self._stream(name):
            digest.update(chunk)
            found = True
        return digest.hexdigest() if found else ""

    def read(self, name: str) -> bytes:
        """An object's bytes."""
        return b"".join(self._stream(name))

    def put(self, name: str, file: Path) -> None:
        """Upload a file, a large one in parts; an object appears when all of it is there."""
        with self._answers(f"writing {name}"):
            self._obstore.put(self._store, name, file)

    def delete(self, name: str) -> None:
        """Remove an object."""
        with self._answers(f"removing {name}"):
            self._obstore.delete(self._store, name)


@contextmanager
def opened(root: Path, target: str, channel: Path, *, dry_run: bool = False) -> Iterator[Target]:
    """Give the place that a target names; a directory is locked meanwhile.

    Args:
        root: The project's directory.
        target: A path, ``file:///PATH``, ``s3://``, ``gs://``, ``az://`` with bucket and prefix, or
            ``oci://HOST[:PORT]/NAMESPACE``.
        channel: What is going to be published there.
        dry_run: Make and lock nothing.

    Raises:
        UsageError: It is none of those, or the channel itself.
        ChannelError: conda would misread the directory.
        BusyError: Another run publishes there.
        DiskError: The directory cannot be written.
        ToolchainError: The client of object stores or registries cannot be had.
    """
    parts = urlsplit(target)
    if "@" in parts.netloc:  # it would end up in messages
        raise UsageError(
            f"the target of {parts.scheme}:// has a login in it",
            why="credentials come from the environment (AWS_ACCESS_KEY_ID and the like), those of "
            "registries from Docker's settings (docker login)",
        )
    if parts.scheme in SCHEMES and parts.netloc:
        yield Objects(root, target)
        return
    if parts.scheme == "oci" and parts.netloc:
        from sm75.ocitarget import Registry  # brings requests, which takes a while

        yield Registry(root, target)
        return
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        target = unquote(parts.path)
    elif "://" in target:
        raise UsageError(
            f"cannot publish to {parts.scheme}://{parts.hostname or ''}",
            why=f"known: a directory, {', '.join(f'{scheme}://' for scheme in (*SCHEMES, 'oci'))}",
        )
    place = Path(target).expanduser().absolute()
    check_location(place)
    if channel.resolve() in (place.resolve(), *place.resolve().parents):
        raise UsageError(f"{place} is the channel itself, or inside it")
    if dry_run:
        yield Directory(place)
        return
    with locked(place, 60.0):
        for stale in place.rglob(f"{TMP_PREFIX}*"):  # of a killed run: we hold the lock
            stale.unlink(missing_ok=True)
        yield Directory(place)


def _seconds(value: float) -> Any:
    import datetime

    return datetime.timedelta(seconds=value)


def _short(error: Exception) -> str:
    """What obstore says, without the dump of its own data that follows, and without signatures."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"\?\S*X-Amz-\S*", "", first)[:300]
