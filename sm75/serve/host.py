"""The machine's own memory, through which weights pass on their way to the card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sm75.doctor.facts import meminfo
from sm75.serve.weights import Weights

# vm.overcommit_memory at which Linux refuses no map for its size
# (https://docs.kernel.org/mm/overcommit-accounting.html).
_ALWAYS = 1


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a machine has.

    Attributes:
        ram_gib: Its RAM in GiB; nothing where it cannot be seen.
        swap_gib: Its swap in GiB.
        overcommit: ``vm.overcommit_memory``: 0, 1 or 2.
    """

    ram_gib: float | None = None
    swap_gib: float = 0.0
    overcommit: int = 0


@dataclass(frozen=True, kw_only=True)
class Note:
    """What is to be said of it.

    Attributes:
        status: As doctor's lines have it.
        says: What is so.
        fix: What mends it; empty where nothing is wrong.
    """

    status: Literal["ok", "warn", "unknown"]
    says: str
    fix: str = ""


def look(system: Path = Path("/")) -> Host:
    """This machine's memory.

    Args:
        system: The root of the file system; tests bring their own.
    """
    memory = meminfo(system)
    try:
        mode = int((system / "proc/sys/vm/overcommit_memory").read_text(encoding="ascii"))
    except (OSError, ValueError):
        mode = 0
    return Host(
        ram_gib=memory.get("MemTotal"), swap_gib=memory.get("SwapTotal", 0.0), overcommit=mode
    )


def judge(weights: Weights, host: Host) -> Iterator[Note]:
    """Whether weights pass through a machine; at least one note.

    A file is mapped as a whole, private and writable, and Linux refuses such a map that is larger
    than RAM and swap together (measured: docs/g5g.md, 8 GiB of RAM).
    """
    if host.ram_gib is None:
        yield Note(status="unknown", says="cannot be seen")
        return
    size = weights.disk_bytes / 2**30
    if size > host.ram_gib:
        yield Note(
            status="warn",
            says=f"{size:.1f} GiB pass through {host.ram_gib:.1f} GiB of RAM: slow, and untested",
            fix="take an instance with more RAM",
        )
    else:
        yield Note(status="ok", says=f"{host.ram_gib:.1f} GiB for {size:.1f} GiB of weights")
    name, largest = max(((file.name, file.stat().st_size / 2**30) for file in weights.files),
                        key=lambda pair: pair[1])  # fmt: skip
    room = host.ram_gib + host.swap_gib
    if largest > room and host.overcommit != _ALWAYS:
        yield Note(
            status="warn",
            says=f"{name} has {largest:.1f} GiB, RAM and swap together {room:.1f}: Linux refuses "
            "to map it (Cannot allocate memory)",
            fix="add swap, or: sudo sysctl vm.overcommit_memory=1; or take smaller files "
            "(docs/g5g.md, 8 GiB of RAM)",
        )
