"""SHIM of the device tests: lets an older driver compile the PTX of a newer toolkit.

nvcc writes the newest PTX version it knows into what it makes (13.2: 9.2), and a driver refuses a
version newer than its own (580: 9.0), whatever the text uses. Here the version is lowered in place,
in the directive and in the fat binary's header; not a byte of the code changes. Should it use
something of the newer version, the driver's compiler refuses it, and the test fails.

Only PTX that is stored as plain text can be treated so: ``build --ptx`` makes it so.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
_HEADER = struct.Struct("<IHHQ")
_PTX = 1
_MINOR = 24  # offsets in an entry; sm75/cubin.py describes the layout
_MAJOR = 26
_DIRECTIVE = re.compile(rb"\.version (\d)\.(\d)\n")


def lower(path: Path, version: tuple[int, int]) -> int:
    """Lower the version of all PTX in a library to at most this one.

    Args:
        path: The library; it is changed in place.
        version: Newest PTX version that the driver takes.

    Returns:
        Pieces of PTX in it.

    Raises:
        ValueError: PTX is compressed.
    """
    data = bytearray(path.read_bytes())
    pieces = 0
    at = data.find(_MAGIC)
    while at >= 0:
        _, _, size, length = _HEADER.unpack_from(data, at)
        entry, end = at + size, at + size + length
        while entry < end:
            kind, _, head, payload = struct.unpack_from("<HHIQ", data, entry)
            if kind == _PTX:
                pieces += 1
                _lower(data, entry, entry + head, version, path.name)
            entry += head + payload
        at = data.find(_MAGIC, end)
    path.write_bytes(data)
    return pieces


def _lower(data: bytearray, entry: int, text: int, version: tuple[int, int], name: str) -> None:
    hit = _DIRECTIVE.search(data, text, text + 4096)
    if hit is None:
        raise ValueError(f"{name}: PTX at {entry} is no plain text; build with --ptx")
    if (int(hit[1]), int(hit[2])) <= version:
        return
    major, minor = version
    data[hit.start(1)] = ord(str(major))
    data[hit.start(2)] = ord(str(minor))
    struct.pack_into("<H", data, entry + _MINOR, minor)
    struct.pack_into("<H", data, entry + _MAJOR, major)
