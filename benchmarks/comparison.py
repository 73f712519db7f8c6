"""The table of docs/comparison.md: which published builds have code that a T4G can run.

    python3 -m benchmarks.comparison --record FILE     # inspect a wheel or package, keep the facts
    python3 -m benchmarks.comparison --write           # make the table anew
    python3 -m benchmarks.comparison --check           # is the page in step

The rows are those of ``docs/evidence/artifacts.toml``. A row that names a file is made of what
``inspect`` found in it (``docs/evidence/inspected.json``); the others are published facts, each
with its page and date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sm75 import atomic
from sm75.errors import CheckFailed

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs") / "comparison.md"
ROWS = Path("docs") / "evidence" / "artifacts.toml"
INSPECTED = Path("docs") / "evidence" / "inspected.json"
BEGIN = "<!-- Made by `python3 -m benchmarks.comparison --write`; not written by hand. -->"
END = "<!-- The end of what is made. -->"
_HEAD = (
    "| artifact | aarch64 | sm_75 machine code | PTX <= 7.5 | on a g5g | source |\n"
    "|---|---|---|---|---|---|"
)


def facts(path: Path) -> dict[str, Any]:
    """What ``inspect`` finds in a file, as far as the table needs it.

    Args:
        path: A wheel, a ``.conda``, an archive or a library.

    Raises:
        UsageError: There is no library in it.
        ChannelError: It is damaged.
    """
    from sm75.inspection import inspect
    from sm75.store import hash_file

    report = inspect(path)
    return {
        "file": path.name,
        "sha256": hash_file(path),
        "inspected": datetime.now(UTC).date().isoformat(),
        "libraries": [
            {
                "name": library.name, "machine": library.elf.machine if library.elf else "cuda",
                "sass": library.sass, "ptx": library.ptx,
                "sources": library.sources, "covered": library.covered,
            }
            for library in report.libraries
        ],
    }  # fmt: skip


def record(root: Path, path: Path) -> None:
    """Keep the facts of a file, in the place of older facts of the same name."""
    kept = {one["file"]: one for one in inspected(root)} | {path.name: facts(path)}
    text = json.dumps([kept[name] for name in sorted(kept)], indent=1) + "\n"
    atomic.write_bytes(root / INSPECTED, text.encode())


def inspected(root: Path) -> list[dict[str, Any]]:
    """The facts that were kept."""
    path = root / INSPECTED
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    return found


def markdown(root: Path) -> str:
    """The table with its marks.

    Raises:
        CheckFailed: A row names a file of which no facts are kept, or says too little.
    """
    known = {one["file"]: one for one in inspected(root)}
    rows = tomllib.loads((root / ROWS).read_text(encoding="utf-8"))["artifact"]
    return "\n".join((BEGIN, _HEAD, *(_row(row, known) for row in rows), END)) + "\n"


def _row(row: dict[str, str], known: dict[str, dict[str, Any]]) -> str:
    if "file" not in row:
        missing = {"name", "aarch64", "sass", "ptx", "verdict", "url", "says", "date"} - set(row)
        if missing:
            raise CheckFailed(f"{ROWS}: {row.get('name')} lacks {', '.join(sorted(missing))}")
        source = f"published fact, not inspected: [{row['says']}]({row['url']}), {row['date']}"
        cells = (row["name"], row["aarch64"], row["sass"], row["ptx"], row["verdict"], source)
        return f"| {' | '.join(cells)} |"
    if row["file"] not in known:
        raise CheckFailed(
            f"nothing is known of {row['file']}", why=f"{INSPECTED} has no facts of it",
            fix="python3 -m benchmarks.comparison --record FILE",
        )  # fmt: skip
    found = known[row["file"]]
    device = [library for library in found["libraries"] if library["sources"]]
    arm = all(library["machine"] == "aarch64" for library in found["libraries"])
    runs = arm and all(library["covered"] for library in device)
    cells = (
        row["name"],
        "yes" if arm else "no",
        _share(device, lambda library: "sm_75" in library["sass"]),
        _share(device, lambda library: any(_number(arch) <= 75 for arch in library["ptx"])),
        row.get("verdict") or ("yes" if runs else "no"),
        f"inspected {found['inspected']}: `{found['file']}`, sha256 `{found['sha256'][:16]}…`",
    )
    return f"| {' | '.join(cells)} |"


def _share(device: list[dict[str, Any]], has: Any) -> str:
    count = sum(1 for library in device if has(library))
    return f"in {count} of {len(device)} libraries with device code" if count else "none"


def _number(arch: str) -> int:
    found = re.search(r"\d+", arch)
    return int(found[0]) if found else 0


def written(page: str) -> str:
    """The table as it stands in the page.

    Raises:
        CheckFailed: The marks are not there.
    """
    begin, end = page.find(BEGIN), page.find(END)
    if begin < 0 or end < begin:
        raise CheckFailed(f"{PAGE} has no marks around its table", fix="restore them")
    return page[begin : end + len(END)] + "\n"


def check(root: Path) -> None:
    """Compare the page with the facts.

    Raises:
        CheckFailed: It is stale.
    """
    if written((root / PAGE).read_text(encoding="utf-8")) != markdown(root):
        raise CheckFailed(
            f"{PAGE} is not of the facts in {ROWS} and {INSPECTED}",
            fix="python3 -m benchmarks.comparison --write",
        )


def write(root: Path) -> None:
    """Put the table into the page."""
    page = (root / PAGE).read_text(encoding="utf-8")
    atomic.write_bytes(root / PAGE, page.replace(written(page), markdown(root)).encode())


def main() -> None:
    """Record, write or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path, metavar="FILE")
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        if options.record:
            record(ROOT, options.record)
        elif options.write:
            write(ROOT)
        else:
            check(ROOT)
    except CheckFailed as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
