"""A source tree to read: an unpacked directory, or the members of an sdist left packed."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from sm75.errors import PatchError

# The largest text file of vLLM 0.33.0 is under 2 MiB; more than this is no file of ours to patch.
MAX_FILE_BYTES = 32 * 1024 * 1024


class Tree(Protocol):
    """Read access to a tree by relative POSIX path."""

    label: str

    def load(self, paths: Iterable[str]) -> dict[str, bytes | None]:
        """Contents of the paths; ``None`` for one that does not exist."""

    def walk(self, suffix: str) -> Iterator[tuple[str, bytes]]:
        """All regular files whose name ends in ``suffix``."""


class DirectoryTree:
    """An unpacked tree. Symbolic links are never followed.

    Args:
        root: The directory that holds ``CMakeLists.txt``, ``vllm/`` and so on.

    Raises:
        PatchError: It is not a directory.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise PatchError(
                f"{root} is not a directory",
                why="patches apply to an unpacked source tree",
                fix="give the directory that the sdist unpacks to",
            )
        self.root = root
        self.label = str(root)

    def load(self, paths: Iterable[str]) -> dict[str, bytes | None]:
        """Contents of the paths; ``None`` for one that does not exist.

        Raises:
            PatchError: A path runs through a symbolic link or is no regular file.
        """
        return {path: self._read(path) for path in paths}

    def _read(self, path: str) -> bytes | None:
        target = self.root
        for part in path.split("/"):
            target = target / part
            if target.is_symlink():
                raise PatchError(
                    f"{path} runs through the symbolic link {target}",
                    why="a link may lead out of the tree",
                    fix="unpack the sdist afresh",
                )
        if not target.exists():
            return None
        if not target.is_file():
            raise _not_regular(path, self.label)
        if target.stat().st_size > MAX_FILE_BYTES:
            raise _too_large(path, self.label)
        return target.read_bytes()

    def walk(self, suffix: str) -> Iterator[tuple[str, bytes]]:
        """All regular files whose name ends in ``suffix``, in a fixed order."""
        for folder, folders, names in os.walk(self.root):
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                if name.endswith(suffix) and path.is_file() and not path.is_symlink():
                    yield path.relative_to(self.root).as_posix(), path.read_bytes()


class SdistTree:
    """The members of an sdist (``.tar.gz`` with one top folder); nothing is unpacked.

    Args:
        archive: The archive. Its hash is the fetch step's business.
    """

    def __init__(self, archive: Path) -> None:
        self.archive = archive
        self.label = archive.name

    def load(self, paths: Iterable[str]) -> dict[str, bytes | None]:
        """Contents of the paths; ``None`` for one that does not exist.

        Raises:
            PatchError: The archive is unreadable or damaged, holds a path twice, or holds a link
                or device in its place.
        """
        contents: dict[str, bytes | None] = dict.fromkeys(paths)
        for path, member, handle in self._members():
            if path in contents:
                if contents[path] is not None:
                    raise self._damaged(f"it holds {path} twice")
                contents[path] = self._content(path, member, handle)
            elif member.issym() or member.islnk():
                inside = [wanted for wanted in contents if wanted.startswith(f"{path}/")]
                if inside:
                    raise self._damaged(f"{path} is a link, so {inside[0]} would lie behind it")
        return contents

    def walk(self, suffix: str) -> Iterator[tuple[str, bytes]]:
        """All regular files whose name ends in ``suffix``, in the archive's order."""
        for path, member, handle in self._members():
            if path.endswith(suffix) and member.isfile():
                yield path, self._content(path, member, handle)

    def _members(self) -> Iterator[tuple[str, tarfile.TarInfo, tarfile.TarFile]]:
        top = ""
        try:
            # Stream mode: one pass, and only the wanted members are held in memory.
            with tarfile.open(self.archive, "r|gz") as handle:
                for member in handle:
                    first, _, path = member.name.partition("/")
                    top = top or first
                    if first != top or first in ("", ".", ".."):
                        raise self._damaged(f"member {member.name!r} is outside the folder {top!r}")
                    if path:
                        yield path, member, handle
        except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
            raise self._damaged(str(error)) from error

    def _content(self, path: str, member: tarfile.TarInfo, handle: tarfile.TarFile) -> bytes:
        if not member.isfile():
            raise _not_regular(path, self.label)
        if member.size > MAX_FILE_BYTES:
            raise _too_large(path, self.label)
        stream = handle.extractfile(member)
        if stream is None:
            raise _not_regular(path, self.label)
        try:
            return stream.read()
        except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, reason: str) -> PatchError:
        return PatchError(
            f"{self.archive} cannot be read as an sdist",
            why=reason,
            fix="fetch it again; the release lock holds its sha256",
        )


def open_tree(path: Path) -> Tree:
    """A directory as ``DirectoryTree``, anything else as ``SdistTree``.

    Raises:
        PatchError: The path does not exist.
    """
    if path.is_dir():
        return DirectoryTree(path)
    if not path.is_file():
        raise PatchError(
            f"{path} does not exist",
            why="a source tree or an sdist is needed to look at",
            fix="run the fetch step first, or correct the path",
        )
    return SdistTree(path)


def _not_regular(path: str, label: str) -> PatchError:
    return PatchError(
        f"{path} in {label} is not a regular file",
        why="only regular files are patched; links and devices could lead out of the tree",
        fix="unpack or fetch the sdist afresh",
    )


def _too_large(path: str, label: str) -> PatchError:
    return PatchError(
        f"{path} in {label} is larger than {MAX_FILE_BYTES} bytes",
        why="no source file of vLLM is; the tree is not what the lock says",
        fix="unpack or fetch the sdist afresh",
    )
