"""Make a package of rattler-build independent of when and where it was built.

rattler-build 0.73 writes the wall clock into ``index.json`` and every date, the output directory
into the prefix placeholder, and this machine's directories, kernel version and channels into
``rendered_recipe.yaml``; none of it can be turned off. This module rewrites the finished package.
"""

from __future__ import annotations

import hashlib
import io
import posixpath
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, cast

from sm75.atomic import replacing
from sm75.condapkg import (
    EPOCH,
    PREFIX_PLACEHOLDER,
    HashingReader,
    canonical_json,
    iter_payload,
    read_info,
    read_info_files,
    tar_info,
    write_archive,
)
from sm75.errors import ChannelError

# What is published is compressed as conda-forge's packages are.
PUBLISH_LEVEL = 19

# Files of info/ that hold this machine's paths, kernel version and wall clock. The recipe itself
# (info/recipe/recipe.yaml) and the variant (info/hash_input.json) stay.
VOLATILE_INFO = ("info/recipe/rendered_recipe.yaml",)


def normalize(
    src: Path,
    dst: Path,
    epoch: int = EPOCH,
    *,
    about_extra: Mapping[str, Any] | None = None,
    drop: Iterable[str] = VOLATILE_INFO,
    level: int = PUBLISH_LEVEL,
) -> str:
    """Rewrite a package of rattler-build so that when and where it was built leaves no trace.

    Dates become ``epoch``; the placeholder prefix, which holds the build directory, becomes
    :data:`PREFIX_PLACEHOLDER` cut or padded to the same length (so binaries stay valid), with the
    hashes in ``paths.json`` made anew; the volatile files of ``info/`` go. Files without a
    placeholder are streamed and checked against ``paths.json`` on the way.

    Args:
        src: The package as built.
        dst: The file to write, or an existing directory. The stem must be the package's own.
        epoch: Seconds since 1970.
        about_extra: Added to ``extra`` of ``about.json`` (input hash, provenance).
        drop: Files of ``info/`` to leave out.
        level: zstd level.

    Returns:
        The sha256 of the new file.

    Raises:
        ChannelError: The package is damaged, or a text still names the build directory.
        DiskError: The file cannot be written.
    """
    target = dst / src.name if dst.is_dir() else dst
    stem = target.name.removesuffix(".conda")
    described = read_info(src)
    index = described["index"]
    if stem != f"{index['name']}-{index['version']}-{index['build']}":
        raise ValueError(f"{target.name} is not the name of {src.name}")
    index["timestamp"] = epoch * 1000
    info = read_info_files(src)
    for name in drop:
        info.pop(name, None)
    entries: dict[str, dict[str, Any]] = {e["_path"]: e for e in described["paths"]["paths"]}
    about = described.get("about", {})
    about.pop("channels", None)  # where this machine keeps its channels
    if about_extra:
        about["extra"] = {**about.get("extra", {}), **about_extra}

    placeholders = {p.encode() for e in entries.values() if (p := e.get("prefix_placeholder"))}
    info |= {
        "info/index.json": canonical_json(index),
        "info/about.json": canonical_json(about),
    }
    for name, data in info.items():
        for old in placeholders:
            if old in data and name != "info/paths.json":
                info[name] = data.replace(old, _placeholder_like(old))

    def payload(tar: tarfile.TarFile) -> dict[str, bytes]:
        links = {}
        for member, raw in iter_payload(src):
            _copy_member(tar, member, raw, entries.get(member.name), epoch, src)
            if member.issym():
                links[member.name] = member.linkname
        _rehash_links(entries, links)
        paths = {**described["paths"], "paths": list(entries.values())}
        info["info/paths.json"] = canonical_json(paths)
        return info

    with replacing(target) as out:
        write_archive(
            out, stem, payload, payload_size=_payload_size(entries), epoch=epoch, level=level
        )
    with target.open("rb") as done:
        return hashlib.file_digest(done, "sha256").hexdigest()


def _payload_size(entries: Mapping[str, Mapping[str, Any]]) -> int:
    return sum(int(e.get("size_in_bytes") or 0) + 1024 for e in entries.values())


def _placeholder_like(old: bytes) -> bytes:
    """Give the fixed placeholder in the length of ``old``."""
    fixed = PREFIX_PLACEHOLDER.encode()
    return (fixed + b"_" * len(old))[: len(old)]


def _rehash_links(entries: Mapping[str, dict[str, Any]], links: Mapping[str, str]) -> None:
    """Give links the new hash of what they point to: rattler-build records the content's."""
    for name in links:
        seen: set[str] = set()
        end = name
        while end in links and end not in seen:
            seen.add(end)
            end = posixpath.normpath(posixpath.join(posixpath.dirname(end), links[end]))
        if name in entries and "sha256" in entries[name] and "sha256" in entries.get(end, {}):
            entries[name]["sha256"] = entries[end]["sha256"]


def _copy_member(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    raw: IO[bytes],
    entry: dict[str, Any] | None,
    epoch: int,
    src: Path,
) -> None:
    """Copy one payload member with a fixed date and placeholder; update its ``entry``."""
    info = tar_info(member.name, epoch, executable=bool(member.mode & 0o111), size=member.size)
    if not member.isreg():
        info.type, info.linkname, info.size = member.type, member.linkname, 0
        tar.addfile(info)
        return
    if entry is None:
        raise ChannelError(f"{src.name}: {member.name} is not listed in its paths.json")
    placeholder = entry.get("prefix_placeholder")
    if not placeholder:
        reader = HashingReader(raw)
        tar.addfile(info, cast(IO[bytes], reader))
        digest = reader.sha256
        if entry.get("sha256") not in (None, digest):
            raise ChannelError(f"{src.name}: {member.name} differs from its paths.json")
        return
    old = placeholder.encode()
    new = _placeholder_like(old)
    data = raw.read().replace(old, new)
    tar.addfile(info, io.BytesIO(data))
    entry |= {
        "prefix_placeholder": new.decode(),
        "sha256": hashlib.sha256(data).hexdigest(),
        "size_in_bytes": len(data),
    }
