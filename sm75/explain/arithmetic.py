"""Sums with the numbers of a log line, in words.

Each takes the named groups of a match (``None`` where a group took no part) and returns a
sentence, or nothing when the numbers are not all there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

Groups = Mapping[str, str | None]

# Turing's shared memory for one block, in bytes, with opt-in (CUDA C++ Programming Guide, technical
# specifications by compute capability).
TURING_SHARED = 65_536
# What vLLM's unified attention takes on sm_75, in bytes (docs/turing-attention.md, measured with
# Triton 3.7.0): 4 x HEAD_PADDED x (BLOCK_M + TILE).
_HEADS, _ROWS, _TILES = (64, 128, 256, 512), (16, 32), (16, 32, 64, 128)
# A T4G's memory in GiB: 15,360 MiB (nvidia-smi), of which CUDA offers some 14.6 to programs.
_T4G_GIB = 15.0
# RAM of the instances with one T4G each, in GiB (docs/g5g.md).
_G5G_GIB = {"g5g.xlarge": 8, "g5g.2xlarge": 16, "g5g.4xlarge": 32, "g5g.8xlarge": 64}
# Less than this is not what fills such a machine, in GiB: importing torch takes 0.2 (docs/g5g.md).
_LITTLE_GIB = 0.5
_UNITS = {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}


def shared_memory(groups: Groups) -> str:
    """Bytes of shared memory wanted and there, and which attention launch would want as many."""
    required, limit = _number(groups, "required"), _number(groups, "limit")
    if required is None or limit is None:
        return (
            f"the numbers were lost on the way; Turing has {TURING_SHARED:,} bytes a block, and "
            "vLLM's attention of head 512 with its own tile of 32 wants 98,304"
        )
    text = f"{required:,.0f} bytes wanted, {limit:,.0f} there: {required - limit:,.0f} too many"
    shapes = [
        f"head {head}, {rows} rows, tile {tile}"
        for head, rows, tile in product(_HEADS, _ROWS, _TILES)
        if 4 * head * (rows + tile) == required
    ]
    if limit == TURING_SHARED and shapes:
        text += f". On Turing attention takes 4 x head x (rows + tile): {' or '.join(shapes)}"
    return text


def cuda_memory(groups: Groups) -> str:
    """GiB wanted of the card's, free and in use."""
    wanted, total = _size(groups, "wanted"), _size(groups, "total")
    if wanted is None or total is None:
        return ""
    free, used = _size(groups, "free"), _size(groups, "used")
    text = f"{wanted:.2f} GiB wanted at once, of a card with {total:.2f} GiB"
    if free is not None:
        text += f", {free:.2f} GiB of them free: {wanted - free:.2f} GiB too many"
    if used is not None:
        text += f"; this process had {used:.2f} GiB"
        if free is not None and (others := total - free - used) > 0.05:
            text += f", others {others:.2f} GiB"
    if wanted > _T4G_GIB:
        text += ". No T4G has that much"
    return text


def startup_memory(groups: Groups) -> str:
    """GiB free at start against the share that vLLM was told to take."""
    free, total = _number(groups, "free"), _number(groups, "total")
    share, wanted = _number(groups, "share"), _number(groups, "wanted")
    if free is None or total is None or share is None or wanted is None or not total:
        return ""
    most = int(100 * free / total) / 100
    return (
        f"{share:g} of {total:g} GiB are {wanted:g} GiB; {free:g} GiB are free: "
        f"{wanted - free:.2f} GiB too few. What fits now: "
        f"--gpu-memory-utilization {most:.2f}, or less"
    )


def cache_memory(groups: Groups) -> str:
    """GiB of KV cache that one request of full length needs, against what is left for it."""
    needed, there = _number(groups, "needed"), _number(groups, "there")
    if needed is None or there is None:
        return ""
    text = (
        f"{needed:g} GiB wanted for one request of full length, {there:g} GiB there: "
        f"{needed - there:.2f} GiB too few"
    )
    if groups.get("length") and needed:
        length = float(str(groups["length"]))
        text += f" ({needed * 2**20 / length:.1f} KiB a token, taken evenly)"
    if estimate := groups.get("estimate"):
        text += f". What fits now: --max-model-len {estimate}"
    return text


def host_memory(groups: Groups) -> str:
    """GiB that a process held when the kernel ended it, of the kernel's kB."""
    anonymous, mapped = _number(groups, "anonymous"), _number(groups, "mapped")
    if anonymous is None:
        return ""
    own, name = anonymous / 2**20, groups.get("program") or "it"
    text = f"{name} held {own:.2f} GiB of its own when it was killed"
    if mapped is not None:
        text += f", and {mapped / 2**20:.2f} GiB of files, which can be given back"
    if own < _LITTLE_GIB:
        return f"{text}. That is little: another process filled the memory, or a limit is too low"
    enough = next((f"{name} has {ram}" for name, ram in _G5G_GIB.items() if ram > own), "")
    return f"{text}. It wanted more than that{f'; a {enough} GiB of RAM' if enough else ''}"


SUMS: Mapping[str, Callable[[Groups], str]] = {
    "shared-memory": shared_memory,
    "cuda-memory": cuda_memory,
    "startup-memory": startup_memory,
    "cache-memory": cache_memory,
    "host-memory": host_memory,
}


def _number(groups: Groups, name: str) -> float | None:
    text = groups.get(name)
    return float(text.replace(",", "")) if text else None


def _size(groups: Groups, name: str) -> float | None:
    """A size in GiB, of text such as ``14.00 GiB``."""
    text = groups.get(name)
    if not text:
        return None
    value, _, unit = text.partition(" ")
    return float(value) * _UNITS[unit]
