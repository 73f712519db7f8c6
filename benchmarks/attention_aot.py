"""Attention compiled ahead of time against Triton's FMA, of one run of ``verify --gpu``.

python3 -m benchmarks.attention_aot RESULT.json     # exit code 1 where a ratio is too small

RESULT is what a bundle with the kernels wrote (``verify --gpu --bundle FILE --kernels DIR``). Times
are those of the sm_75 PTX on that GPU, as launched. "4 warps" is what the field report ran, "FMA"
the best that this project launches without the kernels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm75.gpu.ratios import Row, rows

__all__ = ["Row", "rows"]

# Trial, and what it must be against 4 warps and against the best of FMA.
MUST: Mapping[str, tuple[float, float]] = {
    "h512 8:1, prefill 4 x 512 of 2048": (4.5, 4.5),
    "h512 8:1, decode 8 x 4096": (6.0, 2.5),
    "h256 8:4, prefill 4 x 512 of 2048": (4.0, 4.0),
}


def faults(found: Sequence[Row]) -> list[str]:
    """What does not hold; a trial that was not timed is a fault too."""
    said = []
    known = {row.trial: row for row in found}
    for trial, (field, best) in MUST.items():
        row = known.get(trial)
        if row is None:
            said.append(f"{trial} was not timed ahead of time")
            continue
        for name, have, want in (
            ("4 warps", row.over_field, field), ("the best FMA", row.over_best, best),
        ):  # fmt: skip
            if have < want:
                said.append(f"{trial}: {have:.2f} times {name}, {want} is wanted")
    return said


def table(found: Sequence[Row]) -> str:
    """As Markdown."""
    lines = [
        "| trial | FMA, 4 warps (ms) | FMA, best (ms) | ahead of time (ms) | ratios |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.trial} | {row.field:.3f} | {row.best:.3f} | {row.ahead:.3f} "
        f"| {row.over_field:.1f} / {row.over_best:.1f} |"
        for row in found
    ]
    return "\n".join(lines)


def main() -> int:
    """Print the table and what does not hold."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    found = rows(json.loads(Path(sys.argv[1]).read_bytes()))
    print(table(found))
    wrong = faults(found)
    for one in wrong:
        print(f"wrong: {one}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
