"""``docs/claims.md`` as rows: Markdown read by markdown-it, raw HTML in it shown as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup, escape

from sm75.report.facts import Claims


def read(path: Path) -> Claims | None:
    """Read the claims.

    Args:
        path: The Markdown file: what the kinds mean, a table of claims, and a list of what is not
            claimed.

    Returns:
        None when there is no such file or no table in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    head, *rows = list(_rows(parser, tokens)) or [()]
    if not rows:
        return None
    start = next(i for i, token in enumerate(tokens) if token.type == "table_open")
    end = next(i for i, token in enumerate(tokens) if token.type == "table_close")
    before, after = (_html(parser, part) for part in (tokens[:start], tokens[end + 1 :]))
    return Claims(before=before, head=head, rows=tuple(rows), after=after)


def _html(parser: MarkdownIt, tokens: Sequence[Token]) -> Markup:
    """Rendered; headings stay out, for the page has its own."""
    kept: list[Token] = []
    heading = False
    for token in _local(tokens):
        heading = token.type == "heading_open" or (heading and token.type != "heading_close")
        if not heading and token.type != "heading_close":
            kept.append(token)
    return Markup(parser.renderer.render(kept, parser.options, {}))  # noqa: S704 (escaped there)


def _rows(parser: MarkdownIt, tokens: Sequence[Token]) -> Iterator[tuple[Markup, ...]]:
    row: list[Markup] = []
    inside = 0
    for token in _local(tokens):
        inside += (token.type == "table_open") - (token.type == "table_close")
        if not inside:
            continue
        if token.type == "tr_open":
            row = []
        elif token.type == "inline":
            html = parser.renderer.render([token], parser.options, {})
            row.append(Markup(html))  # noqa: S704 (markdown-it escapes)
        elif token.type == "tr_close":
            yield tuple(row)


def _local(tokens: Sequence[Token]) -> list[Token]:
    """Give links that lead to other files of the documentation as text: a report stands alone."""
    for token in tokens:
        if token.type != "inline" or not token.children:
            continue
        kept: list[Token] = []
        dropped: list[bool] = []
        for child in token.children:
            if child.type == "link_open":
                away = re.match(r"https?://", str(child.attrs.get("href", "")))
                dropped.append(not away)
            if child.type == "image" or (child.type == "link_open" and dropped[-1]):
                continue
            if child.type == "link_close" and dropped.pop():
                continue
            kept.append(child)
        token.children = kept
    return list(tokens)


def plain(text: str) -> Markup:
    """Text with its ```code``` spans marked up, all else escaped."""
    parts = re.split(r"`([^`]+)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part)
        for i, part in enumerate(parts)
    )
