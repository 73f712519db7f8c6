"""Where a channel's files lie in an OCI registry, as clients of conda look for them.

It is the layout of conda-oci-mirror ("v0"), which rattler (pixi) and libmamba read. A later draft,
with a letter before each name, is read by neither. Sources:
https://github.com/conda/rattler/blob/main/crates/rattler_networking/src/oci_middleware.rs
https://github.com/mamba-org/mamba/blob/main/libmamba/src/download/mirror_impl.cpp
https://github.com/conda/ceps/pull/70 (v0), https://github.com/conda/ceps/pull/115 (the later one)

A package is the tag ``VERSION-BUILD`` of the repository ``SUBDIR/NAME``; an index is the tag
``latest`` of ``SUBDIR/repodata.json``. What is neither (``SHA256SUMS``, documents) is a tag of
``documents``: for people, no client looks for it. The drafts' tags with dates are left out: they
would make each run another one, and no client reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sm75.channelcheck import REPODATA, is_inside
from sm75.errors import ChannelError

PACKAGE_TYPE = "application/vnd.conda.package.v2"
INDEX_TYPE = "application/vnd.conda.repodata.v1+json"
# The type of bytes of which nothing is known (RFC 2046, 4.5.1).
DOCUMENT_TYPE = "application/octet-stream"
DOCUMENTS = "documents"
LATEST = "latest"

# https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md#pulling-manifests
_REPOSITORY = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}")
# Clients write these for what a tag may not have, and this before a name that begins with "_".
_CODES = (("+", "__p__"), ("!", "__e__"), ("=", "__eq__"))
_PREFIX = "zzz"


@dataclass(frozen=True, kw_only=True, order=True)
class Place:
    """Where a file lies.

    Attributes:
        repository: Below the channel's namespace.
        tag: In it.
        kind: Media type of the layer that is the file.
    """

    repository: str
    tag: str
    kind: str


def is_repository(name: str) -> bool:
    """Whether a repository, or a namespace, may have this name."""
    return bool(_REPOSITORY.fullmatch(name))


def place(name: str) -> Place:
    """Say where a file of a channel lies.

    Args:
        name: The file, relative to the channel.

    Raises:
        ChannelError: No registry can have it.
    """
    subdir, _, file = name.rpartition("/")
    if not subdir:
        found = Place(repository=DOCUMENTS, tag=_coded(file), kind=DOCUMENT_TYPE)
    elif file == REPODATA:
        found = Place(repository=name, tag=LATEST, kind=INDEX_TYPE)
    else:
        parts = file.removesuffix(".conda").rsplit("-", 2)
        package = f"{_PREFIX}{parts[0]}" if parts[0].startswith("_") else parts[0]
        found = Place(
            repository=f"{subdir}/{package}", tag=_coded("-".join(parts[1:])), kind=PACKAGE_TYPE
        )
    if not (is_repository(found.repository) and _TAG.fullmatch(found.tag)):
        raise ChannelError(
            f"an OCI registry cannot have {name}",
            why=f"{found.repository}:{found.tag} is no name of the distribution specification",
            fix="publish into a directory or an object store",
        )
    return found


def sound(names: Iterable[str]) -> Iterator[tuple[str, Place]]:
    """Give those of a registry's own names that are possible ones, with their places."""
    for name in names:
        try:
            if is_inside(name):
                yield name, place(name)
        except ChannelError:
            continue


def file_of(repository: str, tag: str) -> str:
    """Say which file of a channel lies there, as ``place`` read backwards.

    Args:
        repository: Below the channel's namespace.
        tag: In it.
    """
    for character, code in _CODES:
        tag = tag.replace(code, character)
    if repository == DOCUMENTS:
        return tag
    if repository.endswith(f"/{REPODATA}"):
        return repository
    subdir, _, package = repository.rpartition("/")
    if package.startswith(f"{_PREFIX}_"):
        package = package.removeprefix(_PREFIX)
    return f"{subdir}/{package}-{tag}.conda"


def _coded(text: str) -> str:
    for character, code in _CODES:
        text = text.replace(character, code)
    return text
