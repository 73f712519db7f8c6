"""Sane and broken answers, to measure what the judgement of ``health`` misses and what it wrongs.

Sane texts: answers written for this purpose, this project's documentation, and the docstrings of
the Python that runs. Broken ones are made, with a seed, in the ways in which models break; one kind
is what two models of random weights said (``tests/realserver/sample.py``).
"""

from __future__ import annotations

import ast
import functools
import gzip
import json
import random
import re
import site
import sysconfig
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.unit.projectkit import ROOT

ANSWERS = ROOT / "tests" / "data" / "health" / "answers.toml"
RANDOM_MODEL = ANSWERS.with_name("random-model.jsonl.gz")
# How long an answer of 96 tokens is, in characters, at most.
LONGEST = 450


def written() -> list[str]:
    """Answers to the questions that ``health`` asks, in many manners."""
    found: list[str] = tomllib.loads(ANSWERS.read_text(encoding="utf-8"))["answers"]
    return found


@functools.cache
def said_by_random_models() -> list[str]:
    """What models of random weights answered over a real server, sampled and greedy."""
    with gzip.open(RANDOM_MODEL, "rt", encoding="utf-8") as lines:
        # The first line says how the file was made.
        next(lines)
        return [json.loads(line)["text"] for line in lines]


def prose() -> list[str]:
    """Paragraphs of prose: documentation and docstrings, no code, no tables."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts += _docstrings(path)
    return list(dict.fromkeys(_paragraphs(texts)))


def _paragraphs(texts: Iterable[str]) -> list[str]:
    paragraphs = []
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            flat = " ".join(paragraph.split())
            # One sentence at least, and none of the signs of code, tables and lists of names.
            if (
                len(flat) >= 60
                and flat[0].isupper()
                and not re.search(r"[`|<>{}=_@\\#/]|\.\w", flat)
            ):
                paragraphs.append(flat[:LONGEST])
    return paragraphs


def foreign_prose() -> list[str]:
    """Prose of the packages that are installed here, of which the table of pairs knows nothing."""
    found: list[str] = []
    for place in sorted({path for path in site.getsitepackages() if Path(path).is_dir()}):
        for path in sorted(Path(place).glob("*/*.py")):
            found += _paragraphs(_docstrings(path))
    return list(dict.fromkeys(found))


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text and ">>>" not in text:
                yield text


def _cycle(r: random.Random, vocabulary: list[str]) -> str:
    unit = " ".join(r.choice(vocabulary) for _ in range(r.randint(1, 6)))
    return f"{unit}{r.choice([' ', ', ', ': ', '. '])}" * r.randint(10, 30)


def _late_cycle(r: random.Random, vocabulary: list[str]) -> str:
    start = " ".join(r.choice(vocabulary) for _ in range(r.randint(4, 12)))
    return f"{start} {_cycle(r, vocabulary)}"


def _pieces(vocabulary: list[str]) -> list[str]:
    """Pieces of words, as of a tokenizer, with a blank before half of them."""
    r = random.Random(5)
    made = set()
    for word in vocabulary:
        cut = r.randint(1, max(1, len(word) - 1))
        made |= {word[:cut], word[cut:], " " + word[:cut], " " + word}
    return sorted(made - {"", " "})


_FOREIGN = [
    *"的一是不了人我在有他这中大来上国",
    *("при", "ств", "ого", "ния", "ско", " на", " что"),
    *("ा", "ें", "क", "में", "है", " की"),
    *("ات", "ال", "ية", " في", " من"),
    *("する", "ます", "です", "した"),
    *("ing", "()", "{", "};", "::", "\n\n", "</", "_id", "0x", "@", "Ã", "€"),
]


def _tokens(r: random.Random, vocabulary: list[str]) -> str:
    """As of a large multilingual vocabulary, drawn evenly: what random weights say."""
    pieces = _pieces(vocabulary)
    return "".join(r.choice(_FOREIGN if r.random() < 0.4 else pieces) for _ in range(64))


def _english_tokens(r: random.Random, vocabulary: list[str]) -> str:
    pieces = _pieces(vocabulary)
    return "".join(r.choice(pieces) for _ in range(64))


def _letters(r: random.Random, vocabulary: list[str]) -> str:
    return " ".join(
        "".join(r.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(r.randint(2, 9)))
        for _ in range(r.randint(12, 40))
    )


def _bytes(r: random.Random, vocabulary: list[str]) -> str:
    return r.randbytes(r.randint(40, 200)).decode("utf-8", errors="replace")


def _unicode(r: random.Random, vocabulary: list[str]) -> str:
    return "".join(chr(r.randint(0x21, 0x9FFF)) for _ in range(r.randint(40, 120)))


def _pads(r: random.Random, vocabulary: list[str]) -> str:
    token = r.choice(["<pad>", "<unk>", "<|endoftext|>", "<unused42>", "</s>", "<|im_end|>"])
    return token * r.randint(1, 64)


def _leak(r: random.Random, vocabulary: list[str]) -> str:
    """A sane answer in which the template shows."""
    return f"The answer is {r.randint(10, 99)}.{r.choice(['<end_of_turn>', '<|im_end|>', '</s>'])}"


def _same(r: random.Random, vocabulary: list[str]) -> str:
    return r.choice("!?,aSs0123456789的") * r.randint(20, 200)


def _blank(r: random.Random, vocabulary: list[str]) -> str:
    return r.choice(["", " ", "\n", "\n\n \t", "\u00a0"])


def _words(r: random.Random, vocabulary: list[str]) -> str:
    """Real words in no order, drawn evenly."""
    return " ".join(r.choice(vocabulary) for _ in range(r.randint(15, 60)))


def _shuffled(r: random.Random, vocabulary: list[str]) -> str:
    """The words of a sane text in no order: grammar is gone, statistics are not."""
    words = r.choice(_PROSE()).split()
    r.shuffle(words)
    return " ".join(words)


def _random_model(r: random.Random, vocabulary: list[str]) -> str:
    return r.choice(said_by_random_models())


_cache: list[str] = []


def _PROSE() -> list[str]:
    if not _cache:
        _cache.extend(prose())
    return _cache


BROKEN: dict[str, Callable[[random.Random, list[str]], str]] = {
    "blank": _blank,
    "pads": _pads,
    "template shows": _leak,
    "one character": _same,
    "cycle": _cycle,
    "cycle after a start": _late_cycle,
    "random bytes": _bytes,
    "random unicode": _unicode,
    "random letters": _letters,
    "random tokens": _tokens,
    "random English tokens": _english_tokens,
    "random words": _words,
    "shuffled words": _shuffled,
    "said by random models": _random_model,
}


def vocabulary() -> list[str]:
    """Different words of the prose, sorted."""
    return sorted({w.lower() for text in _PROSE() for w in re.findall(r"[A-Za-z]{2,}", text)})


def broken(kind: str, count: int, seed: int = 1) -> list[str]:
    """Made texts of one kind.

    Args:
        kind: A key of ``BROKEN``.
        count: How many.
        seed: The same gives the same.
    """
    r = random.Random(f"{kind} {seed}")
    words = vocabulary()
    return [BROKEN[kind](r, words) for _ in range(count)]
