"""Which compiled kernels have been run and found right: ``proofs.json`` of the recipe.

A variant is known by the sha256 of its PTX. What ran on a GPU was that PTX, compiled by the driver;
the machine code of the package is made of the same text by the pinned ptxas. A variant that is not
listed is not packed, so that a changed kernel never ships unproved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sm75 import atomic
from sm75.aot.pack import Compiled
from sm75.errors import UsageError

FILE = Path("recipes") / "vllm-sm75-kernels" / "proofs.json"


class Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of one PTX.

    Attributes:
        trials: In how many trials it was launched.
        max_error: The largest difference from float32 in them.
        gpu: Where.
        date: When (UTC).
        wrong: Trials in which it was wrong; such a one is never packed.
    """

    trials: int
    max_error: float | None
    gpu: str
    date: str
    wrong: int = 0


def digest(ptx: str) -> str:
    """What a variant is known by."""
    return hashlib.sha256(ptx.encode()).hexdigest()


def load(root: Path) -> dict[str, Proof]:
    """The proofs there are.

    Raises:
        UsageError: The file is damaged.
    """
    path = root / FILE
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Proof])
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"cannot read {FILE}", why=str(error), fix="restore the file") from error


def sort(
    compiled: Iterable[Compiled], known: Mapping[str, Proof]
) -> tuple[list[Compiled], list[Compiled], list[Compiled]]:
    """Variants that are proved, that nothing is known of, and that were wrong."""
    proved: list[Compiled] = []
    unknown: list[Compiled] = []
    wrong: list[Compiled] = []
    for one in compiled:
        proof = known.get(digest(one.ptx))
        place = unknown if proof is None else wrong if proof.wrong else proved
        place.append(one)
    return proved, unknown, wrong


def gather(report: Mapping[str, Any]) -> dict[str, Proof]:
    """The proofs in a result of ``verify --gpu``.

    Args:
        report: The result's JSON.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for result in report["results"]:
        for name in dict.fromkeys(result.get("kernels", ())):
            found.setdefault(name, []).append(result)
    return {
        name: Proof(
            trials=len(results),
            max_error=max((one["max_error"] for one in results if one["max_error"] is not None),
                          default=None),
            gpu=report["gpu"], date=report["date"][:10],
            wrong=sum(not one["passed"] for one in results),
        )
        for name, results in found.items()
    }  # fmt: skip


def merge(root: Path, reports: Sequence[Mapping[str, Any]]) -> int:
    """Add results' proofs to the file; returns how many it holds. The newest counts."""
    known = load(root)
    for report in reports:
        known |= gather(report)
    ordered = {name: known[name] for name in sorted(known)}
    # A line a kernel, for diffs.
    rows = ",\n".join(
        f"{msgspec.json.encode(name).decode()}: {msgspec.json.encode(proof).decode()}"
        for name, proof in ordered.items()
    )
    atomic.write_bytes(root / FILE, f"{{\n{rows}\n}}\n".encode())
    return len(ordered)
