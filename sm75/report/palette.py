"""Colours, by theme. A test computes the contrast of every pair that stands together.

At least 4.5 for text and 3 for what is drawn: WCAG 2.2, 1.4.3 and 1.4.11.
"""

from __future__ import annotations

PALETTE: dict[str, dict[str, str]] = {
    "light": {
        "page": "#ffffff", "panel": "#f3f5f7", "text": "#1b1f24", "muted": "#4f5965",
        "edge": "#7a8591", "link": "#0a4fa3", "ok": "#0f6130", "fail": "#a8201a",
        "warn": "#754700", "cuda": "#2a62a8", "cxx": "#4d6475", "join": "#6b4a9a",
        "critical": "#a8201a", "before": "#9a5f08", "after": "#1f6f5c", "limit": "#a8201a",
        "onfill": "#ffffff",
    },
    "dark": {
        "page": "#10151b", "panel": "#1a212a", "text": "#e6edf3", "muted": "#a9b4c0",
        "edge": "#74808d", "link": "#86bdff", "ok": "#62d394", "fail": "#ff958b",
        "warn": "#f2bd63", "cuda": "#7fb0ee", "cxx": "#a5b8c6", "join": "#c3a5ee",
        "critical": "#ff958b", "before": "#e0a143", "after": "#58c3a6", "limit": "#ff958b",
        "onfill": "#10151b",
    },
}  # fmt: skip
"""Custom properties of the style sheet, without their dashes."""

TEXT: tuple[tuple[str, str], ...] = (
    *((ink, paper) for ink in ("text", "muted", "link", "ok", "fail", "warn")
      for paper in ("page", "panel")),
    *(("onfill", fill) for fill in ("cuda", "cxx", "join", "critical", "before", "after")),
    ("limit", "page"),
)  # fmt: skip
"""Pairs of letters and what they stand on."""

DRAWN: tuple[tuple[str, str], ...] = tuple(
    (ink, paper)
    for ink in ("cuda", "cxx", "join", "critical", "before", "after", "limit", "edge")
    for paper in ("page", "panel")
)
"""Pairs of what is drawn and what it is drawn on."""


def style(rules: str) -> str:
    """The style sheet: the colours of both themes, then the rules.

    Args:
        rules: CSS that names the colours as ``var(--name)``.
    """
    light, dark = (
        "".join(f"--{name}:{value};" for name, value in PALETTE[theme].items())
        for theme in ("light", "dark")
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{rules}"
    )
