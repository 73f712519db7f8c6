"""The candidates of the ahead-of-time kernels: the model's cost beside the times of an H200.

python3 -m benchmarks.attention_tuning [--write]    # --write: into docs/attention-tuning.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sm75.aot import manifest, model
from sm75.aot.plan import LEAST_ROWS

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs" / "evidence" / "attention-tuning-h200-2026-12-01.json"
DOCS = ROOT / "docs" / "attention-tuning.md"
BEGIN = "<!-- Made by `python3 -m benchmarks.attention_tuning --write`; not written by hand. -->\n"
END = "<!-- end -->\n"
# A batch of each kind stands for it: (split KV, mean queries).
SHOWN = {
    "prefill 4x512 of 2048": (False, 512),
    "decode 2D 150x200": (False, 1),
    "decode 8x4096": (True, 1),
}


def groups(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[int, str, str], list[Mapping[str, Any]]]:
    """The shown rows by head, cache and batch."""
    found: dict[tuple[int, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["batch"] in SHOWN:
            key = (int(row["layer"].removeprefix("h")), row["cache"], row["batch"])
            found.setdefault(key, []).append(row)
    return dict(sorted(found.items(), key=lambda one: (one[0][1], -one[0][0])))


def costs(head: int, cache: str, row: Mapping[str, Any]) -> model.Cost:
    """The model's figures of a row. A single query a request fills no more than the least block."""
    rows = row["launch"]["BLOCK_M"]
    if SHOWN[row["batch"]][1] == 1:
        rows = min(rows, LEAST_ROWS)
    return model.cost(
        head=head, element=1 if cache == "int8" else 2, rows=rows,
        tile=row["launch"]["TILE_SIZE"], warps=row["warps"], registers=row["regs"],
        spills=row["spills"], shared=row["shared"],
    )  # fmt: skip


def right(row: Mapping[str, Any]) -> bool:
    """Whether its result was: 0.004 is what ``verify --gpu`` allows."""
    return bool(row["err"] <= 4e-3)


def taken(head: int, cache: str, batch: str) -> tuple[int, int, int] | None:
    """Rows, tile and warps of ``kernels.toml``."""
    split, queries = SHOWN[batch]
    rows = [
        one for one in manifest.load(ROOT).tuning
        if (one.head, one.cache, one.split) == (head, cache, split) and one.queries <= queries
    ]  # fmt: skip
    best = max(rows, key=lambda one: one.queries, default=None)
    return None if best is None else (best.block_m, best.tile, best.warps)


def lines() -> Iterator[str]:
    """The table."""
    yield (
        "| head, cache, batch | BLOCK_M, tile, warps | shared | registers, spills | warps a "
        "multiprocessor | spilled : keys and values | model | ms | ms as T4G | |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---|"
    rows = json.loads(EVIDENCE.read_bytes())["rows"]
    for (head, cache, batch), found in groups(rows).items():
        chosen = taken(head, cache, batch)
        sane = [row for row in found if right(row)]
        least = min(costs(head, cache, row).cost for row in sane)
        fastest = min(sane, key=lambda row: row["ms_t4g"])
        for number, row in enumerate(found):
            cost = costs(head, cache, row)
            blocks = (row["launch"]["BLOCK_M"], row["launch"]["TILE_SIZE"], row["warps"])
            notes = [
                *(["**taken**"] if blocks == chosen else []),
                *(["model's"] if cost.cost == least and right(row) else []),
                *(["fastest"] if row is fastest else []),
                *([f"wrong by {row['err']:.1g}"] if not right(row) else []),
            ]
            name = (
                f"{head}, {'int8' if cache == 'int8' else 'float16'}, {batch}" if not number else ""
            )
            yield (
                f"| {name} | {', '.join(map(str, blocks))} | {row['shared']:,} "
                f"| {row['regs']}, {row['spills']} | {cost.warps} "
                f"| {cost.spilled / cost.cache:.1f} | {cost.cost:.0f} "
                f"| {row['ms']:.3f} | {row['ms_t4g']:.3f} | {', '.join(notes)} |"
            )


def made(text: str) -> str:
    """The document with a new table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise SystemExit(f"{DOCS.name} lacks the markers")
    return f"{before}{BEGIN}\n" + "\n".join(lines()) + f"\n\n{END}{after}"


def main() -> None:
    """Print or write."""
    if sys.argv[1:] == ["--write"]:
        DOCS.write_text(made(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join(lines()))


if __name__ == "__main__":
    main()
