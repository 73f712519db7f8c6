"""The page: templates filled, one HTML file that needs nothing else.

No script, no network: a Content-Security-Policy in the page allows its own style sheet and nothing
more. Everything that comes from outside is escaped by the templates' engine.
"""

from __future__ import annotations

import base64
import hashlib
import unicodedata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sm75 import __version__
from sm75.progress import amount, span
from sm75.report import charts
from sm75.report.claims import plain
from sm75.report.facts import Facts
from sm75.report.palette import style

_TEMPLATES = Path(__file__).parent / "templates"
# Characters that are no text: control, formatting (among them those that turn the direction of what
# follows), surrogates, private and unassigned ones.
_ODD = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})


def render(facts: Facts) -> bytes:
    """Write the page; the same facts give the same bytes.

    Args:
        facts: From :func:`sm75.report.gather.gather`.
    """
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, finalize=_shown,
    )  # fmt: skip
    environment.filters |= {
        "size": lambda n: amount(n, "B"),
        "ms": lambda n: f"{n / 1000:.1f} s" if n < 10_000 else span(n / 1000),
        "millis": lambda n: f"{n:,.3f}",
        "times": lambda n: f"{n:,.1f}",
        "thousands": lambda n: f"{n:,}",
        "link": _link,
        "plain": lambda text: plain(str(_shown(text))),
        "spaced": lambda counts: " ".join(f"{k}×{v}" for k, v in counts.items()),
        "bylength": lambda steps: sorted(steps, key=lambda s: (-s.took, s.name)),
    }
    css = style((_TEMPLATES / "style.css").read_text(encoding="utf-8"))
    page = environment.get_template("report.html.j2").render(
        facts=facts,
        style=Markup(css),  # noqa: S704 (ours)
        style_hash=base64.b64encode(hashlib.sha256(css.encode()).digest()).decode(),
        gantt=charts.gantt(facts.timeline) if facts.timeline else None,
        bars=charts.bars(facts.smem.chart) if facts.smem else None,
        race=charts.race(facts.attention.rows) if facts.attention else None,
        charts=charts,
        version=__version__,
    )
    return page.encode("utf-8", "replace")


def _shown(value: Any) -> Any:
    """Text without what is no text; other values, and marked-up text, as they are."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if c not in "\n\t" and unicodedata.category(c) in _ODD else c
        for c in value
    )


def _link(address: str) -> str | Markup:
    """A link, of what is a web address; any other text as it is."""
    if not address.startswith(("https://", "http://")):
        return address
    shown = address.removeprefix("https://").removeprefix("http://")
    return Markup('<a href="{}" rel="noopener noreferrer">{}</a>').format(
        _shown(address), _shown(shown)
    )
