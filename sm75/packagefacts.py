"""Everything ``verify`` needs to know of a built package, gathered in one walk over it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from sm75 import cubin
from sm75.archives import Member, walk
from sm75.condapkg import read_info, read_info_files
from sm75.cubin import DeviceCode
from sm75.elf import Abi3Facts, ElfFacts, audit_abi3, is_elf, read_elf

# Absolute paths of places where software is built and never installed. Looked for in libraries,
# in their unpacked device code and in dist-info; not in Python sources, which name /tmp rightly.
_BUILD_PLACE = re.compile(
    rb"(?:(?<![\w./~:$@{}%-])|(?<=file://)|(?<=-[IL]))/(?:home|root|tmp|var/tmp|work|workspace|build|builds|mnt|src|opt|data"
    rb"|github|__w|conda|croot|feedstock_root)/[\x21-\x7e]{2,160}"
)
# What conda's builders put for the prefix until a package is installed.
_PLACEHOLDER = re.compile(rb"/[\x21-\x7e]*_placehold_[\x21-\x7e]*")
_CHUNK = 1 << 22  # bytes a step when a file is searched
_OVERLAP = 4096  # longest match expected


@dataclass(frozen=True, kw_only=True)
class Library:
    """One ELF file or cubin of the package.

    Attributes:
        name: Path in the package.
        elf: What it asks of the machine.
        codes: Its device code, by its headers.
        listed: The same by cuobjdump; None: not asked.
        abi3: Stable-ABI audit, for ``*.abi3.so``.
        build_places: Absolute build paths in it or in its device code.
    """

    name: str
    elf: ElfFacts
    codes: tuple[DeviceCode, ...]
    listed: tuple[DeviceCode, ...] | None
    abi3: Abi3Facts | None
    build_places: tuple[str, ...]


@dataclass(kw_only=True)
class PackageFacts:
    """A built package, taken apart.

    Attributes:
        info: The package's JSON descriptions (``condapkg.read_info``).
        names: Every file in it.
        libraries: Its ELF files and cubins.
        metadata: Headers of vLLM's dist-info METADATA, lower-case; empty when there is none.
        entry_points: Text of its ``entry_points.txt``.
        leaks: Build paths by file: given ones and placeholders anywhere, build places in
            dist-info.
    """

    info: dict[str, Any]
    names: list[str] = field(default_factory=list)
    libraries: list[Library] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    entry_points: str = ""
    leaks: dict[str, tuple[str, ...]] = field(default_factory=dict)


def gather(
    package: Path,
    *,
    python_abi: str,
    build_paths: tuple[str, ...] = (),
    cuobjdump: Path | None = None,
) -> PackageFacts:
    """Take a ``.conda`` apart.

    Args:
        package: The file.
        python_abi: Python minor that abi3 extensions may assume.
        build_paths: Absolute paths of this build, looked for in every file.
        cuobjdump: NVIDIA's tool; None: not used.

    Raises:
        UsageError: There is no such file.
        ChannelError: The package or a library in it is damaged.
        ToolchainError: cuobjdump cannot be run.
    """
    members = walk(package)
    first = next(members, None)  # says first what is wrong with the path itself
    facts = PackageFacts(info=read_info(package))
    declared = {
        entry["_path"]: entry.get("file_mode", "text")
        for entry in facts.info["paths"]["paths"]
        if entry.get("prefix_placeholder")
    }
    given = (
        re.compile(b"|".join(re.escape(path.encode()) for path in build_paths))
        if build_paths
        else None
    )
    while first is not None:
        _member(facts, first, declared, given, python_abi, cuobjdump)
        first = next(members, None)
    for name, content in read_info_files(package).items():
        if given is not None and (found := given.findall(content)):
            facts.leaks[name] = _texts(found)
    return facts


def _member(
    facts: PackageFacts,
    member: Member,
    declared: dict[str, str],
    given: re.Pattern[bytes] | None,
    python_abi: str,
    cuobjdump: Path | None,
) -> None:
    name = member.name
    facts.names.append(name)
    path = member.path()
    with path.open("rb") as file:
        library = is_elf(file.read(4))
    patterns = [given] if given is not None else []
    if declared.get(name) != "text" or library:
        patterns.append(_PLACEHOLDER)
    if re.search(r"site-packages/vllm-[^/]+\.dist-info/", name):
        patterns.append(_BUILD_PLACE)
        _dist_info(facts, name, path)
    found = [match for pattern in patterns for match in _search(path, pattern)]
    if found:
        facts.leaks[name] = _texts(found)
    if library:
        facts.libraries.append(_library(name, path, given, python_abi, cuobjdump))


def _dist_info(facts: PackageFacts, name: str, path: Path) -> None:
    if name.endswith("/METADATA"):
        headers = HeaderParser().parsestr(path.read_text(encoding="utf-8", errors="replace"))
        facts.metadata = {key.lower(): value for key, value in headers.items()}
    elif name.endswith("/entry_points.txt"):
        facts.entry_points = path.read_text(encoding="utf-8", errors="replace")


def _library(
    name: str,
    path: Path,
    given: re.Pattern[bytes] | None,
    python_abi: str,
    cuobjdump: Path | None,
) -> Library:
    codes = cubin.read_device_code(path)
    places = list(_search(path, _BUILD_PLACE))
    for payload in cubin.payloads(path) if codes else ():
        places += _BUILD_PLACE.findall(payload)
        places += given.findall(payload) if given is not None else []
    return Library(
        name=name,
        elf=read_elf(path),
        codes=codes,
        listed=None if cuobjdump is None else cubin.list_with_cuobjdump(cuobjdump, path),
        abi3=audit_abi3(path, baseline=python_abi) if name.endswith(".abi3.so") else None,
        build_places=_texts(places),
    )


def _search(path: Path, pattern: re.Pattern[bytes]) -> Iterator[bytes]:
    with path.open("rb") as file:
        tail = b""
        while chunk := file.read(_CHUNK):
            block = tail + chunk
            yield from pattern.findall(block)
            tail = block[-_OVERLAP:]


def _texts(found: list[bytes]) -> tuple[str, ...]:
    return tuple(sorted({match.decode("ascii", "replace") for match in found}))
