"""docs/troubleshooting.md, made of the knowledge base."""

from __future__ import annotations

from pathlib import Path

from sm75 import atomic
from sm75.explain.knowledge import Entry, Knowledge, Severity

PAGE = Path("docs") / "troubleshooting.md"
_HEAD = """\
<!-- Made by `python3 orchestrator.py explain --write-page` of sm75/explain/knowledge.toml. -->

# Troubleshooting

`explain` finds these in a log by itself, says on which line, and does the sums:

```
python3 orchestrator.py explain serve.log
journalctl -u vllm | python3 orchestrator.py explain -
```

It takes logs of any size, with colours, progress bars and the prefixes of containers, journald and
vLLM's processes. Exit code 0: something known was found; 1: nothing was; 2: there is no such log.
`--json` prints the findings for programs. A failed `build` looks at its own log.
"""
_TITLES: dict[Severity, str] = {
    "failure": "Failures",
    "warning": "Warnings",
    "harmless": "Harmless, but they look bad",
}


def markdown(base: Knowledge) -> str:
    """The whole page.

    Args:
        base: The knowledge base.
    """
    parts = [_HEAD]
    for severity, title in _TITLES.items():
        parts.append(f"## {title}\n")
        parts += [_entry(entry) for entry in base.entries if entry.severity == severity]
    return "\n".join(parts)


def _entry(entry: Entry) -> str:
    title = _plain(entry.title)
    lines = [f"### {title[0].upper()}{title[1:]}\n"]
    needles = dict.fromkeys(pattern.needle for pattern in entry.pattern)
    lines.append(f"In the log ({' or '.join(entry.area)}): {', '.join(map(_code, needles))}.\n")
    lines.append(f"{_plain(entry.cause)}\n")
    lines += [f"- {step}" for step in entry.fix]
    lines.append(f"\nMore: <{entry.link}>\n")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """A text whose groups stand for themselves."""
    return text.replace("'{", "{").replace("}'", "}").replace("{", "*").replace("}", "*")


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def write(root: Path, base: Knowledge) -> bool:
    """Write the page.

    Args:
        root: The project's directory.
        base: The knowledge base.

    Returns:
        Whether it changed.

    Raises:
        DiskError: It cannot be written.
    """
    made = markdown(base)
    path = root / PAGE
    if path.is_file() and path.read_text(encoding="utf-8") == made:
        return False
    atomic.write_bytes(path, made.encode())
    return True
