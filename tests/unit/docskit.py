"""The documents as a reader uses them: blocks, commands, links and headings."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.unit.projectkit import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
# A block without a language is one of commands when it starts with one of these, else it is output.
PROGRAMS = frozenset(
    ["aws", "cd", "conda", "curl", "docker", "journalctl", "ls", "pip", "pixi", "python", "python3",
     "rattler-build", "sha256sum", "ssh", "sudo"]
)  # fmt: skip
SHELLS = frozenset(["sh", "bash", "shell", "console"])
_BETWEEN = frozenset(["|", "||", "&&", ";", "&", "(", ")", ";;", "then", "do", "else", "!"])
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_OUR_NAME = "orchestrator.py"


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: Its page.
        line: Where it starts, from 1.
        language: As the page says; ``sh`` where there is none and it holds commands.
        text: What is in it; of a console, the commands alone.
    """

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Call:
    """A command line of ours that a page or a unit names, without ``python3 orchestrator.py``."""

    where: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where} {' '.join(self.words)}"


def tokens(text: str) -> list[Token]:
    """A page as CommonMark with tables."""
    return MarkdownIt("commonmark").enable("table").parse(text)


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    for token in tokens(page.read_text(encoding="utf-8")):
        if token.type == "fence":
            language, text = token.info.split(" ")[0], token.content
            first = text.split(maxsplit=1)[0] if text.split() else ""
            if text.startswith("$ "):
                language = language or "console"
                text = "".join(
                    line.removeprefix("$ ") + "\n"
                    for line in text.splitlines()
                    if line.startswith("$ ")
                )
            elif not language and first in PROGRAMS:
                language = "sh"
            yield Block(page, (token.map or [0])[0] + 1, language, text)


def simple_commands(script: str) -> Iterator[tuple[str, ...]]:
    """The commands of a shell script, each as its words, without assignments and redirections.

    Raises:
        ValueError: A quote is not closed.
    """
    for line in re.sub(r"\\\n\s*", " ", script).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in (*lexer, ";"):
            if word in _BETWEEN:
                yield from _command(words)
                words = []
            else:
                words.append(word)


def _command(words: list[str]) -> Iterator[tuple[str, ...]]:
    while words and (_ASSIGNMENT.match(words[0]) or words[0] in ("sudo", "exec")):
        words = words[1:]
    for at, word in enumerate(words):
        if set(word) & {"<", ">"} and not set(word) - set("<>&0123456789"):
            # A number before it is the stream's; what follows is a file.
            words = words[: at - 1 if words[at - 1] == "2" else at]
            break
    if words:
        yield tuple(words)


def ours(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """The arguments, if the command is ours: ``python3 [/path/]orchestrator.py ...``."""
    for at, word in enumerate(words[:2]):
        if Path(word).name == _OUR_NAME:
            return words[at + 1 :]
    return None


def inline_code(page: Path) -> Iterator[tuple[int, str]]:
    """Code in running text, with its paragraph's line."""
    for token in tokens(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            if child.type == "code_inline":
                yield (token.map or [0])[0] + 1, child.content


def calls() -> list[Call]:
    """Every command line of ours in the pages, in blocks and in running text."""
    found = []
    for page in PAGES:
        scripts = [(block.where, block.text) for block in blocks(page) if block.language in SHELLS]
        scripts += [
            (f"{page.relative_to(ROOT)}:{line}", code)
            for line, code in inline_code(page)
            if f"{_OUR_NAME} " in code
        ]
        for where, script in scripts:
            with suppress(ValueError):  # an open quote: bash says so, in another test
                for command in simple_commands(script):
                    words = ours(command)
                    if words is not None:
                        found.append(Call(where, words))
    return found


def parse(cli: click.Group, words: tuple[str, ...]) -> tuple[str, ...]:
    """Have click read a command line as it would, without running it.

    Returns:
        The names of the commands it goes through.

    Raises:
        click.ClickException: It is not one that click takes.
    """
    path: list[str] = []
    command: click.Command = cli
    parent: click.Context | None = None
    name, rest = _OUR_NAME, list(words)
    try:
        while True:
            parent = command.make_context(name, rest, parent=parent)
            if not isinstance(command, click.Group):
                return tuple(path)
            left = [*parent._protected_args, *parent.args]
            if not left:
                raise click.UsageError(f"{name} needs a command")
            found, resolved, rest = command.resolve_command(parent, left)
            assert found is not None
            assert resolved is not None
            name, command = found, resolved
            path.append(name)
    except click.exceptions.Exit:  # --help and --version end here
        return tuple(path)


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Where a page links to, with the paragraph's line."""
    for token in tokens(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            if child.type == "link_open":
                yield (token.map or [0])[0] + 1, str(child.attrGet("href"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    made = set()
    all_tokens = tokens(page.read_text(encoding="utf-8"))
    for before, token in pairwise(all_tokens):
        if before.type == "heading_open":
            text = "".join(
                child.content
                for child in token.children or ()
                if child.type in ("text", "code_inline")
            )
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            made.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return made
