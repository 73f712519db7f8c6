"""Chosen files of the pinned vLLM sdist, read straight out of the archive."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sm75.budget import Budget
from sm75.errors import ChannelError, LockError

# The largest such file of vLLM 0.33.0, rust/Cargo.lock, has 180 kB.
MAX_FILE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class TreeFiles:
    """Files of a source tree by their path in it.

    Attributes:
        label: Name of the tree, for errors.
        content: The files.
    """

    label: str
    content: Mapping[str, bytes]

    def text(self, path: str) -> str:
        """A file's text.

        Raises:
            LockError: The tree has no such file, or it is not UTF-8.
        """
        if path not in self.content:
            raise LockError(
                f"{self.label} has no {path}",
                why="vLLM declares pins there",
                fix="this release keeps them elsewhere: look for them and teach sm75/pins.py",
            )
        try:
            return self.content[path].decode("utf-8")
        except UnicodeDecodeError as error:
            raise refusal(path, "UTF-8 text", str(error)) from error

    def below(self, folder: str, suffix: str) -> list[str]:
        """Paths of the files below a folder whose name ends so, sorted."""
        return sorted(p for p in self.content if p.startswith(f"{folder}/") and p.endswith(suffix))


def refusal(file: str, looked_for: str, why: str) -> LockError:
    """The error about a declaration that is missing or of unknown form.

    Args:
        file: The file of the tree.
        looked_for: What was looked for.
        why: What is there instead.
    """
    return LockError(
        f"cannot read {looked_for} in {file} of the pinned vLLM",
        why=why,
        fix="this release declares it in another way: look at the file and teach sm75/pins.py",
    )


def read_sdist(archive: Path, wanted: Callable[[str], bool]) -> TreeFiles:
    """Read files of an sdist; nothing is unpacked.

    Args:
        archive: A ``.tar.gz`` with one top folder. Its hash is the store's business.
        wanted: Says of a path below the top folder whether to read it.

    Raises:
        LockError: The archive is damaged, or a wanted path is there twice, is too large or is no
            regular file.
    """
    content: dict[str, bytes] = {}
    try:
        budget = Budget(archive.name, archive.stat().st_size)
        # Stream mode: one pass, and only the wanted files are held in memory.
        with tarfile.open(archive, "r|gz") as handle:
            for member in handle:
                budget.take(member.size)
                _, _, path = member.name.partition("/")
                if not wanted(path) or member.isdir():
                    continue
                if path in content:
                    raise _damaged(archive, f"it holds {path} twice")
                stream = handle.extractfile(member) if member.isfile() else None
                if stream is None or member.size > MAX_FILE_BYTES:
                    raise _damaged(archive, f"{path} is no regular file of at most 8 MiB")
                content[path] = stream.read()
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise _damaged(archive, str(error)) from error
    except ChannelError as error:
        raise _damaged(archive, error.what) from error
    return TreeFiles(label=archive.name, content=content)


def _damaged(archive: Path, reason: str) -> LockError:
    return LockError(
        f"{archive} cannot be read as an sdist",
        why=reason,
        fix="fetch it again; the release lock holds its sha256",
    )
