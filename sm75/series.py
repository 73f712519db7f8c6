"""``patches/<release>/series.toml``: which patches and overlay files belong to a release, and why.

    schema = 1
    release = "0.33.0"

    [[patch]]
    file = "0101-name.patch"        # beside series.toml; applied in the order of this file
    sha256 = "…"
    purpose = "what it changes and why"
    upstream = ["https://…/issues/1"] # issues or pull requests; may be empty
    proof = "tests/unit/test_x.py::test_y"
    [[patch.drop_when]]             # all of them hold: upstream no longer needs the patch
    file = "vllm/x.py"              # in the unpatched tree
    absent = "raise ImportError("   # or: present = "…", or: exists = true/false

    [[overlay]]                     # a file of ours, copied into the tree
    file = "vllm/y.py"              # below overlay/
    dest = "vllm/y.py"              # must not exist upstream
    sha256 = "…"
    purpose = "…"
    from = "0.33.0"                 # optional: it lies below ../0.33.0/overlay/, not here
    [[overlay.needs]]               # optional: what it relies on, as drop_when is written; all hold
    file = "vllm/z.py"              # in the unpatched tree, else the overlay file conflicts
    present = "def f("

Paths are plain relative POSIX paths. Every ``*.patch`` and every file below ``overlay/`` must be
listed, so that nothing lies about unused or unhashed. A file that two releases have in common lies
with one of them; the other pins its hash, so that no change to it goes unseen.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sm75.errors import PatchError
from sm75.hunks import FileDiff, parse_patch, safe_path

SCHEMA = 1
# What is replaced in the text of a series.toml, so that comments and order stay.
BLOCK = re.compile(r"(?m)^(\[\[(?:patch|overlay)\]\])$")
FILE = re.compile(r'(?m)^file = "([^"]+)"$')
FROM = re.compile(r'(?m)^from = "([^"]+)"$')
SHA256 = re.compile(r'(?m)^sha256 = "[^"]*"$')
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Something checkable about one file of the unpatched tree.

    ``present`` and ``absent`` are literal text; both are false when the file does not exist, so
    that a renamed file never passes for a fixed one. ``exists`` asks about the file itself.
    """

    file: str
    present: str | None = None
    absent: str | None = None
    exists: bool | None = None

    def holds(self, content: bytes | None) -> bool:
        """Whether the condition holds for the file's content (``None``: no such file)."""
        if self.exists is not None:
            return (content is not None) is self.exists
        if content is None:
            return False
        if self.present is not None:
            return self.present.encode() in content
        return self.absent is not None and self.absent.encode() not in content

    @property
    def words(self) -> str:
        """The condition in words, of its file."""
        if self.exists is not None:
            return "it exists" if self.exists else "it does not exist"
        if self.present is not None:
            return f"it has {self.present!r}"
        return f"it is there and lacks {self.absent!r}"


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One patch of a series, parsed."""

    file: str
    sha256: str
    purpose: str
    upstream: tuple[str, ...]
    proof: str
    drop_when: tuple[Condition, ...]
    diffs: tuple[FileDiff, ...]


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """One file of ours that goes into the tree; ``content`` is its checked bytes.

    ``path`` is where it lies; ``home`` is the release that it lies with, when that is another one.
    """

    file: str
    dest: str
    sha256: str
    purpose: str
    content: bytes
    path: Path
    home: str = ""
    needs: tuple[Condition, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Series:
    """All changes to one release, in order of application."""

    root: Path
    release: str
    patches: tuple[Patch, ...]
    overlays: tuple[Overlay, ...]

    def paths(self) -> set[str]:
        """Every path of the tree that the series reads or writes."""
        touched = {diff.path for patch in self.patches for diff in patch.diffs}
        asked = {rule.file for patch in self.patches for rule in patch.drop_when}
        asked |= {rule.file for overlay in self.overlays for rule in overlay.needs}
        return touched | asked | {overlay.dest for overlay in self.overlays}


class _Table:
    """One TOML table, read key by key; what is left over at the end is refused."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = dict(data)
        self.where = where

    def refuse(self, reason: str) -> PatchError:
        return PatchError(
            f"{self.where} is not valid", why=reason, fix="see the format in sm75/series.py"
        )

    def take(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        value = self.data.pop(key, default)
        if not isinstance(value, kind) or value == "":
            raise self.refuse(f"key {key!r} must be a non-empty {kind.__name__}")
        return value

    def tables(self, key: str) -> list[_Table]:
        rows = self.take(key, list, [])
        if not all(isinstance(row, dict) for row in rows):
            raise self.refuse(f"{key!r} must be an array of tables")
        return [_Table(row, f"{self.where}: {key} {i}") for i, row in enumerate(rows, 1)]

    def end(self) -> None:
        if self.data:
            raise self.refuse(f"unknown keys: {', '.join(sorted(self.data))}")


def load_series(root: Path) -> Series:
    """Read and check a patch directory.

    Args:
        root: The directory with ``series.toml``, for example ``patches/0.33.0``.

    Raises:
        PatchError: It is missing or malformed, a hash differs, a patch is no strict diff, a path
            leaves the tree, the order is not by file name, or a file is not listed.
    """
    where = f"{root.name}/series.toml"
    top = _Table(_read_toml(root / "series.toml"), where)
    if (schema := top.take("schema", int)) != SCHEMA:
        raise top.refuse(
            f"schema {schema if abs(schema) < 1000 else 'that'} is unknown; "
            f"this program reads schema {SCHEMA}"
        )
    series = Series(
        root=root,
        release=top.take("release", str),
        patches=tuple(_patch(row, root) for row in top.tables("patch")),
        overlays=tuple(_overlay(row, root) for row in top.tables("overlay")),
    )
    top.end()
    names = [patch.file for patch in series.patches]
    if names != sorted(set(names)):
        raise top.refuse("patches must be listed once each, sorted by file name")
    dests = [overlay.dest for overlay in series.overlays]
    patched = {diff.path for patch in series.patches for diff in patch.diffs}
    if len(dests) != len(set(dests)) or patched & set(dests):
        raise top.refuse("an overlay destination is listed twice or also changed by a patch")
    for dest in dests:
        if inside := [other for other in (*dests, *patched) if other.startswith(f"{dest}/")]:
            raise top.refuse(f"{dest} cannot be a file, for {inside[0]} is to lie below it")
    files = [overlay.file for overlay in series.overlays]
    if len(files) != len(set(files)):
        raise top.refuse("an overlay file is listed twice")
    listed = ["series.toml", *names, *(f"overlay/{o.file}" for o in series.overlays if not o.home)]
    found = (
        path for path in root.rglob("*") if not path.is_dir() and "__pycache__" not in path.parts
    )
    _refuse_strays(found, listed, root, top.refuse)
    return series


def all_series(patches: Path) -> list[Series]:
    """Every series there is, by release, oldest first.

    Args:
        patches: The directory that holds one for each release.

    Raises:
        PatchError: One of them is not valid.
    """
    roots = [path.parent for path in patches.glob("[!.]*/series.toml")]
    return sorted(
        map(load_series, roots),
        key=lambda series: [int(part) for part in re.findall(r"\d+", series.release)],
    )


def seal(root: Path) -> list[str]:
    """Put the present hashes of all listed files into ``series.toml``, for the author of a patch.

    The rest of the text stays as it is.

    Args:
        root: The directory with ``series.toml``.

    Returns:
        The files whose hash changed.

    Raises:
        PatchError: ``series.toml`` or a listed file cannot be read.
    """
    _read_toml(root / "series.toml")
    blocks = BLOCK.split((root / "series.toml").read_text(encoding="utf-8"))
    changed: list[str] = []
    for index in range(1, len(blocks), 2):
        named = FILE.search(blocks[index + 1])
        if named is None:
            continue
        home = FROM.search(blocks[index + 1])
        folder = root
        if "overlay" in blocks[index]:
            folder = _overlays(root, home[1] if home else "", where="series.toml")
        file = folder / safe_path(named[1], where="series.toml")
        actual = hashlib.sha256(_read(file)).hexdigest()
        sealed = SHA256.sub(f'sha256 = "{actual}"', blocks[index + 1], count=1)
        if sealed != blocks[index + 1]:
            changed.append(named[1])
            blocks[index + 1] = sealed
    if changed:
        temporary = root / ".series.toml.new"
        temporary.write_text("".join(blocks), encoding="utf-8")
        temporary.replace(root / "series.toml")
    return changed


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PatchError(
            f"{path} cannot be read",
            why=str(error),
            fix="give a patch directory such as patches/0.33.0",
        ) from error


def _patch(row: _Table, root: Path) -> Patch:
    file = row.take("file", str)
    if "/" in file or not file.endswith(".patch"):
        raise row.refuse(f"{file!r} must be a *.patch file beside series.toml")
    sha256 = row.take("sha256", str)
    data = _read_pinned(root / safe_path(file, where=row.where), sha256)
    upstream = row.take("upstream", list, [])
    if not all(isinstance(link, str) for link in upstream):
        raise row.refuse("'upstream' must be a list of links")
    patch = Patch(
        file=file,
        sha256=sha256,
        purpose=row.take("purpose", str),
        upstream=tuple(upstream),
        proof=row.take("proof", str),
        drop_when=tuple(_condition(rule) for rule in row.tables("drop_when")),
        diffs=parse_patch(data, name=file),
    )
    if not patch.drop_when:
        raise row.refuse(f"{file} has no drop_when: say how to see that upstream has the fix")
    row.end()
    return patch


def _condition(row: _Table) -> Condition:
    file = safe_path(row.take("file", str), where=row.where)
    asked = [key for key in ("present", "absent", "exists") if key in row.data]
    if len(asked) != 1:
        raise row.refuse("give exactly one of present, absent, exists")
    condition = Condition(
        file=file,
        present=row.take("present", str) if asked == ["present"] else None,
        absent=row.take("absent", str) if asked == ["absent"] else None,
        exists=row.take("exists", bool) if asked == ["exists"] else None,
    )
    row.end()
    return condition


def _overlay(row: _Table, root: Path) -> Overlay:
    file = safe_path(row.take("file", str), where=row.where)
    sha256 = row.take("sha256", str)
    home = row.take("from", str) if "from" in row.data else ""
    path = _overlays(root, home, where=row.where) / file
    overlay = Overlay(
        file=file,
        dest=safe_path(row.take("dest", str), where=row.where),
        sha256=sha256,
        purpose=row.take("purpose", str),
        content=_read_pinned(path, sha256),
        path=path,
        home=home,
        needs=tuple(_condition(rule) for rule in row.tables("needs")),
    )
    row.end()
    return overlay


def _overlays(root: Path, home: str, *, where: str) -> Path:
    """Where a series' overlay files lie: with it, or with the release that it names."""
    if not home:
        return root / "overlay"
    if "/" in safe_path(home, where=where) or home == root.name:
        raise PatchError(
            f"{where} takes a file from {home!r}, which is no other release",
            why="'from' names a directory beside this one",
            fix="name another release, or leave 'from' out",
        )
    return root.parent / home / "overlay"


def _read(path: Path) -> bytes:
    try:
        if path.is_symlink():
            raise OSError("it is a symbolic link")
        return path.read_bytes()
    except OSError as error:
        raise PatchError(
            f"{path} cannot be read", why=str(error), fix="restore it, or drop it from series.toml"
        ) from error


def _read_pinned(path: Path, sha256: str) -> bytes:
    data = _read(path)
    actual = hashlib.sha256(data).hexdigest()
    if actual != sha256:
        raise PatchError(
            f"{path} is not the file that series.toml pins",
            why=f"expected sha256 {sha256}, found {actual}",
            fix="restore the file, or after reviewing it: python -m sm75.patching seal --series … "
            "(a file of another release: or copy the old one here and leave out its 'from')",
        )
    return data


def _refuse_strays(
    found: Iterable[Path], listed: list[str], root: Path, refuse: Callable[[str], PatchError]
) -> None:
    names = sorted(path.relative_to(root).as_posix() for path in found)
    if strays := [name for name in names if name not in listed]:
        raise refuse(f"not listed: {', '.join(strays)}")
