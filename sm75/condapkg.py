"""Deterministic ``.conda`` packages: writer and reader.

A ``.conda`` file (CEP 17, CEP 35) is an uncompressed zip of ``metadata.json``,
``pkg-<stem>.tar.zst`` (the payload) and ``info-<stem>.tar.zst`` (its description). The same input
gives the same bytes here: fixed dates, owners and modes, sorted members, one compression setting.
Payload files are streamed, so a package of several gigabytes needs no memory for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, Literal, cast

import zstandard

from sm75.atomic import replacing
from sm75.budget import Budget
from sm75.errors import ChannelError

# 2024-01-01T00:00:00Z, seconds. Any fixed moment serves; zip cannot hold one before 1980.
EPOCH = 1_704_067_200
_ZIP_DATE = (2024, 1, 1, 0, 0, 0)

# Local packages are read a few times at most: 3 is zstd's own default.
LOCAL_LEVEL = 3

# Text files that name the prefix carry this instead; the installer puts the prefix in its place.
# 255 bytes is the length conda-build pads to, and what its tools expect (conda-build manual,
# "prefix replacement").
PREFIX_PLACEHOLDER = ("/opt/" + "placehold_" * 26)[:255]

_ARCH = {"linux-64": "x86_64", "linux-aarch64": "aarch64"}
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """One payload file, described but not yet read.

    Use the ``from_*`` and ``symlink`` constructors.

    Args:
        opener: Opens the content for reading; ``None`` for a symbolic link.
        size: Bytes the opener will give.
        executable: Mode 0755 instead of 0644.
        sha256: Expected hash (hex); the writer refuses content that differs.
        placeholder: The placeholder prefix the content holds, if any (text files only).
        link: Target of a symbolic link, relative.
    """

    opener: Callable[[], IO[bytes]] | None
    size: int = 0
    executable: bool = False
    sha256: str | None = None
    placeholder: str | None = None
    link: str | None = None

    @classmethod
    def from_bytes(
        cls, data: bytes, *, executable: bool = False, placeholder: str | None = None
    ) -> FileSource:
        """Make a source of bytes in memory."""
        return cls(
            opener=lambda: io.BytesIO(data),
            size=len(data),
            executable=executable,
            sha256=hashlib.sha256(data).hexdigest(),
            placeholder=placeholder,
        )

    @classmethod
    def from_path(cls, path: Path, *, executable: bool | None = None) -> FileSource:
        """Make a source of a file on disk; a symbolic link stays one.

        Args:
            path: The file.
            executable: Override the file's own executable bit.
        """
        if path.is_symlink():
            return cls.symlink(str(path.readlink()))
        info = path.stat()
        return cls(
            opener=lambda: path.open("rb"),
            size=info.st_size,
            executable=bool(info.st_mode & 0o111) if executable is None else executable,
        )

    @classmethod
    def symlink(cls, target: str) -> FileSource:
        """Make a symbolic link to ``target`` (relative, and inside the prefix)."""
        return cls(opener=None, link=target)


def tree(directory: Path, *, dest: str = "") -> dict[str, FileSource]:
    """Describe every file and symbolic link below a directory.

    Args:
        directory: The root; its own name is not part of the result.
        dest: Path inside the prefix that the root stands for.

    Returns:
        Sources by path relative to the prefix.
    """
    return {
        (PurePosixPath(dest) / p.relative_to(directory).as_posix()).as_posix(): (
            FileSource.from_path(p)
        )
        for p in sorted(directory.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def canonical_json(data: object) -> bytes:
    """Encode JSON one way only: sorted keys, two spaces, a final newline."""
    return (json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def check_path(path: str) -> None:
    """Refuse a payload path that could land outside the prefix or shadow the package's metadata.

    Args:
        path: A path relative to the prefix, ``/`` separated.

    Raises:
        ChannelError: Absolute, with ``..`` or ``.`` parts, control characters, or in ``info/``.
    """
    parts = path.split("/")
    bad = (
        not path
        or any(part in ("", ".", "..") for part in parts)
        or parts[0] == "info"
        or any(ord(c) < 32 or ord(c) == 127 for c in path)
    )
    if bad:
        raise ChannelError(
            f"refusing the package path {path!r}",
            why="it would leave the prefix, or is not a plain file name",
        )


def _check_link(path: str, target: str) -> None:
    depth = path.count("/")
    for part in target.split("/"):
        depth += -1 if part == ".." else 0 if part in (".", "") else 1
        if depth < 0:
            break
    if target.startswith("/") or not target or depth < 0:
        raise ChannelError(
            f"refusing the link {path} -> {target!r}", why="its target is outside the prefix"
        )


def _check_files(files: Mapping[str, FileSource]) -> None:
    for path, source in files.items():
        check_path(path)
        if source.link is not None:
            _check_link(path, source.link)
        parent = PurePosixPath(path).parent
        while parent != PurePosixPath("."):
            if parent.as_posix() in files:
                raise ChannelError(
                    f"{parent.as_posix()} is both a file and a directory in the package",
                    why=f"{path} lies below it",
                )
            parent = parent.parent


class HashingReader:
    """A reader that hashes and counts what passes through.

    Args:
        raw: Where the bytes come from.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._sha = hashlib.sha256()
        self.count = 0

    def read(self, size: int = -1) -> bytes:
        """Read as the wrapped file does."""
        data = self._raw.read(size)
        self._sha.update(data)
        self.count += len(data)
        return data

    @property
    def sha256(self) -> str:
        """Hash (hex) of what has passed so far."""
        return self._sha.hexdigest()


def tar_info(name: str, epoch: int, *, executable: bool = False, size: int = 0) -> tarfile.TarInfo:
    """Make a tar entry with fixed owner, date and mode."""
    info = tarfile.TarInfo(name)
    info.mtime = epoch
    info.mode = 0o755 if executable else 0o644
    info.size = size
    return info


@contextlib.contextmanager
def _tar_member(
    archive: zipfile.ZipFile, name: str, level: int, size_hint: int
) -> Iterator[tarfile.TarFile]:
    """Open ``name`` in the zip for writing and yield a tar stream compressed into it."""
    entry = _zip_entry(name)
    entry.file_size = size_hint  # zipfile decides on zip64 by it; the true size is filled in later
    with (
        archive.open(entry, "w") as raw,
        zstandard.ZstdCompressor(level=level).stream_writer(raw, closefd=False) as packed,
        tarfile.open(
            fileobj=cast(IO[bytes], packed), mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK
        ) as tar,
    ):
        yield tar


def _zip_entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _ZIP_DATE)
    entry.compress_type = zipfile.ZIP_STORED
    entry.create_system = 3  # Unix, whatever the machine
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    return entry


def _add_payload(tar: tarfile.TarFile, path: str, source: FileSource, epoch: int) -> dict[str, Any]:
    """Stream one file into the payload and return its ``paths.json`` entry."""
    if source.link is not None or source.opener is None:
        info = tar_info(path, epoch, executable=True)
        info.type, info.linkname = tarfile.SYMTYPE, source.link or ""
        tar.addfile(info)
        return {"_path": path, "path_type": "softlink"}
    with source.opener() as raw:
        reader = HashingReader(raw)
        try:
            tar.addfile(
                tar_info(path, epoch, executable=source.executable, size=source.size),
                cast(IO[bytes], reader),
            )
        except (OSError, EOFError) as err:
            if reader.count == source.size or getattr(err, "errno", None) is not None:
                raise
            raise ChannelError(f"{path}: the content is shorter than announced") from err
        if raw.read(1):
            raise ChannelError(f"{path}: the content is longer than the announced {source.size} B")
    if source.sha256 is not None and reader.sha256 != source.sha256:
        raise ChannelError(
            f"{path}: the content is not what was expected",
            why=f"sha256 expected {source.sha256}, got {reader.sha256}",
        )
    entry: dict[str, Any] = {
        "_path": path,
        "path_type": "hardlink",
        "sha256": reader.sha256,
        "size_in_bytes": source.size,
    }
    if source.placeholder is not None:
        entry |= {"file_mode": "text", "prefix_placeholder": source.placeholder}
    return entry


def write_archive(
    out: BinaryIO,
    stem: str,
    payload: Callable[[tarfile.TarFile], dict[str, bytes]],
    *,
    payload_size: int,
    epoch: int,
    level: int,
) -> None:
    """Write the zip: payload first, then the info files that ``payload`` returns.

    Args:
        out: Seekable file.
        stem: ``name-version-build``.
        payload: Fills the payload tar and returns the files of ``info/`` by full name.
        payload_size: Roughly the size of the payload, B; decides on zip64.
        epoch: Date of the info files, seconds since 1970.
        level: zstd level.
    """
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_zip_entry("metadata.json"), b'{"conda_pkg_format_version": 2}')
        with _tar_member(archive, f"pkg-{stem}.tar.zst", level, payload_size) as tar:
            info_files = payload(tar)
        info_size = sum(map(len, info_files.values()))
        with _tar_member(archive, f"info-{stem}.tar.zst", level, info_size) as tar:
            for name, data in sorted(info_files.items()):
                tar.addfile(tar_info(name, epoch, size=len(data)), io.BytesIO(data))


def write_conda(
    out_dir: Path,
    *,
    name: str,
    version: str,
    build: str,
    build_number: int = 0,
    subdir: str,
    files: Mapping[str, FileSource],
    depends: Iterable[str] = (),
    constrains: Iterable[str] = (),
    noarch: Literal["python", "generic"] | None = None,
    compiled: bool = False,
    entry_points: Iterable[str] = (),
    about: Mapping[str, Any] | None = None,
    license: str = "",
    license_files: Mapping[str, FileSource] | None = None,
    run_exports: Mapping[str, list[str]] | None = None,
    extra_info: Mapping[str, bytes] | None = None,
    epoch: int = EPOCH,
    level: int = LOCAL_LEVEL,
) -> Path:
    """Write ``<out_dir>/<subdir>/<name>-<version>-<build>.conda``.

    Args:
        out_dir: Channel root; the subdirectory is made. ``noarch`` packages go to ``noarch/``.
        name: Conda package name.
        version: Conda version.
        build: Build string.
        build_number: Build number.
        subdir: ``linux-64`` or ``linux-aarch64``; ignored when ``noarch`` is given.
        files: Payload by path relative to the prefix (``noarch="python"``: Python files below
            ``site-packages/``, scripts below ``python-scripts/``).
        depends: Run dependencies (conda specs).
        constrains: Run constraints.
        noarch: Kind of an architecture-independent package.
        compiled: With ``noarch="python"``: it holds compiled code, so that it fits every Python but
            stays in ``subdir`` (CEP 20).
        entry_points: ``command = module:function``; only with ``noarch="python"`` (other packages
            carry their scripts as files).
        about: ``about.json``; ``license`` is added.
        license: SPDX expression.
        license_files: Licence texts by path relative to ``info/licenses``.
        run_exports: ``run_exports.json``: specs by strength (``weak``, ``strong``, ``noarch``, …).
        extra_info: Further files by path relative to ``info/``.
        epoch: Date of the package and of its files, seconds since 1970.
        level: zstd level.

    Returns:
        The finished file.

    Raises:
        ChannelError: A path or link would leave the prefix, or content differs from its hash.
        DiskError: The file cannot be written.
    """
    entry_points = list(entry_points)
    if entry_points and noarch != "python":
        raise ValueError("entry_points need noarch='python'")
    _check_files(files)
    where = "noarch" if noarch and not compiled else subdir
    index: dict[str, Any] = {
        "arch": None if where == "noarch" else _ARCH[subdir],
        "build": build,
        "build_number": build_number,
        "constrains": sorted(set(constrains)),
        "depends": sorted(set(depends)),
        "license": license,
        "name": name,
        "platform": None if where == "noarch" else "linux",
        "subdir": where,
        "timestamp": epoch * 1000,
        "version": version,
    }
    if noarch:
        index["noarch"] = noarch
    info: dict[str, bytes] = {
        "info/index.json": canonical_json(index),
        "info/about.json": canonical_json({**(about or {}), "license": license}),
    }
    if noarch == "python":
        link: dict[str, Any] = {"noarch": {"type": "python"}, "package_metadata_version": 1}
        if entry_points:
            link["noarch"]["entry_points"] = entry_points
        info["info/link.json"] = canonical_json(link)
    if run_exports:
        info["info/run_exports.json"] = canonical_json(run_exports)
    for rel, source in (license_files or {}).items():
        check_path(rel)
        info[f"info/licenses/{rel}"] = _read_source(source)
    for rel, data in (extra_info or {}).items():
        check_path(rel)
        info[f"info/{rel}"] = data

    stem = f"{name}-{version}-{build}"

    def payload(tar: tarfile.TarFile) -> dict[str, bytes]:
        paths = [_add_payload(tar, p, source, epoch) for p, source in sorted(files.items())]
        info["info/paths.json"] = canonical_json({"paths": paths, "paths_version": 1})
        info["info/files"] = "".join(f"{p}\n" for p in sorted(files)).encode()
        return info

    target = out_dir / where / f"{stem}.conda"
    with replacing(target) as out:
        size = sum(source.size + 1024 for source in files.values())
        write_archive(out, stem, payload, payload_size=size, epoch=epoch, level=level)
    return target


def _read_source(source: FileSource) -> bytes:
    if source.opener is None:
        raise ValueError("a licence text cannot be a link")
    with source.opener() as raw:
        return raw.read()


@contextlib.contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Say which package is damaged instead of how the archive library failed."""
    try:
        yield
    except FileNotFoundError as err:
        raise ChannelError(f"the package {path} does not exist") from err
    except (zipfile.BadZipFile, tarfile.TarError, zstandard.ZstdError, EOFError, ValueError) as err:
        raise ChannelError(
            f"{path.name} is not a readable .conda package",
            why=str(err) or type(err).__name__,
            fix="fetch or build it again",
        ) from err


def _members(
    path: Path, archive: zipfile.ZipFile, kind: str
) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    budget = Budget(path.name, path.stat().st_size)
    names = [n for n in archive.namelist() if n.startswith(f"{kind}-") and n.endswith(".tar.zst")]
    if len(names) != 1:
        raise tarfile.ReadError(f"it has {len(names)} {kind}-*.tar.zst members instead of one")
    with (
        archive.open(names[0]) as raw,
        zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as plain,
        tarfile.open(
            fileobj=cast(IO[bytes], budget.counted(cast(IO[bytes], plain))),
            mode="r|",
            bufsize=_CHUNK,
        ) as tar,
    ):
        for member in tar:
            if not (member.isreg() or member.issym() or member.isdir()):
                raise tarfile.ReadError(f"{member.name} is neither a file nor a symbolic link")
            content = tar.extractfile(member) if member.isreg() else None
            yield member, content or io.BytesIO()


def iter_payload(path: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """Walk the payload in stored order, streaming.

    Args:
        path: A ``.conda`` file.

    Yields:
        Tar entry and a reader of its content, valid until the next step (empty for links).

    Raises:
        ChannelError: The package is damaged.
    """
    with _damaged(path), zipfile.ZipFile(path) as archive:
        yield from _members(path, archive, "pkg")


def read_info_files(path: Path) -> dict[str, bytes]:
    """Read every file of the package's ``info/`` by its full name (``info/index.json``, …).

    Args:
        path: A ``.conda`` file.

    Raises:
        ChannelError: The package is damaged.
    """
    with _damaged(path), zipfile.ZipFile(path) as archive:
        return {m.name: raw.read() for m, raw in _members(path, archive, "info") if m.isreg()}


def read_info(path: Path) -> dict[str, Any]:
    """Read the package's JSON descriptions.

    Args:
        path: A ``.conda`` file.

    Returns:
        ``{"index": …, "paths": …, "about": …}`` and, where present, ``link``, ``run_exports``,
        ``hash_input``: one key for each ``info/<key>.json``.

    Raises:
        ChannelError: The package is damaged or has no ``index.json`` or ``paths.json``.
    """
    with _damaged(path):
        info = {
            name.removeprefix("info/").removesuffix(".json"): json.loads(data)
            for name, data in read_info_files(path).items()
            if name.count("/") == 1 and name.endswith(".json")
        }
        for key in ("index", "paths"):
            if key not in info:
                raise ValueError(f"info/{key}.json is missing")
        return info


def verify_payload(path: Path) -> list[str]:
    """Compare the payload with the package's own ``paths.json``.

    Args:
        path: A ``.conda`` file.

    Returns:
        One sentence for each file that is missing, extra or altered; empty when all is well.

    Raises:
        ChannelError: The package cannot be read at all.
    """
    expected = {e["_path"]: e for e in read_info(path)["paths"]["paths"]}
    problems, seen = [], set()
    for member, raw in iter_payload(path):
        if member.isdir():
            continue
        seen.add(member.name)
        entry = expected.get(member.name)
        if entry is None:
            problems.append(f"{member.name} is not listed in paths.json")
        elif member.isreg():
            reader = HashingReader(raw)
            while reader.read(_CHUNK):
                pass
            digest = reader.sha256
            if entry.get("sha256") not in (None, digest):
                problems.append(f"{member.name} differs from its sha256 in paths.json")
    problems += [f"{name} is missing" for name in expected if name not in seen]
    return problems
