"""Is a text something that a working model says? Faults of a short English answer, in words.

The limits were set by ``benchmarks/health_rates.py`` (docs/health.md has its figures): on the sane
texts of its corpus none is broken, and each kind of garbage breaks one nearly always. What they
miss, the known answers catch.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

# Characters that are looked at; no answer to our questions is as long.
_MOST = 20_000
# Tokens that a tokenizer has for itself; shown when a model has collapsed or lost its template.
_CONTROL_TOKEN = re.compile(
    r"<(?:pad|unk|bos|eos|mask|s|/s|sep|cls|start_of_turn|end_of_turn|turn\||\|turn|unused\d+|"
    r"reserved\w{0,30}|0x[0-9A-Fa-f]{2}|image_soft_token|audio_soft_token|extra_id_\d+)>"
    r"|<\|[\w ./-]{1,40}\|>|\[(?:PAD|UNK|CLS|SEP|MASK|INST|/INST)\]",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?|\d+|[^\w\s]")
_LETTERS = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
# A cycle is a repetition when its words stand this many times one after the other ...
_CYCLES = 4
# ... and cover this many words.
_CYCLE_WORDS = 8
# Longest cycle in words.
_LONGEST_CYCLE = 24
# A character that stands this often in a row; lines of these are typography.
_SAME_CHARACTER = 8
# Characters of which longer rows are typography (rules, dots, zeros), and how much longer.
_TYPOGRAPHY, _LONG_ROW = frozenset(".-_=*#~`─—·•0"), 100
_LONG_ZEROS = 16
# Of a text of this many words and more, the share of different groups of three words.
_TRIGRAM_WORDS, _DISTINCT_TRIGRAMS = 30, 0.55
# Texts of fewer letters are too short for statistics: the known answer has to do. Three scripts in
# one sentence need fewer.
_FEWEST_LETTERS, _FEWEST_FOR_SCRIPTS = 40, 10
# Shannon entropy of characters, in bits. English: 4.0 to 4.6.
_ENTROPY = (2.8, 5.3)
# Share of pairs of letters that are among the commonest of English.
_BIGRAM_SHARE = 0.55
# Of a text of this many words and more, the share of function words.
_FUNCTION_WORDS_FROM, _FUNCTION_WORD_SHARE = 10, 0.10
# Share of words that go from small to capital letters inside (`ingThe`).
_ODD_CASE = 0.25
# The 110 commonest pairs of letters of English text, counted over this project's documentation and
# Python's own docstrings; they are three quarters of all pairs there.
_BIGRAMS_TEXT = (
    "ac ad ai al am an ar as at be ca ce ch ck cl co ct de di ea ec ed ef el em en er es et "
    "ex fi fo ge ha he hi ho ic if il im in io is it ke la le li ll lo lt ma me mo mp na nc "
    "nd ne ng no ns nt oc od of om on op or ot ou pa pe pl po pr pt ra re rg ri rn ro rs rt "
    "se si ss st ta te th ti to tr ts tu ue ul um un ur us ut va ve wh wi"
)
_BIGRAMS = frozenset(_BIGRAMS_TEXT.split())
# The commonest words of English that carry no subject.
_FUNCTION_WORDS_TEXT = (
    "a about after all also an and any are as at be because been but by can do does each "
    "for from has have he her his how i if in into is it its like may more most no not of "
    "on one only or other our out she so some such than that the their them then there "
    "these they this those to two up us use used very was we were what when where which "
    "while who why will with would you your"
)
_FUNCTION_WORDS = frozenset(_FUNCTION_WORDS_TEXT.split())


def faults(text: str) -> list[str]:
    """Say what is wrong with a text; nothing for a sane one.

    Args:
        text: What the model said.
    """
    if not text.strip():
        return ["it is empty"]
    text = text[:_MOST]
    found = [*_control(text), *_repetition(text)]
    # Of a repeating text, statistics say nothing new.
    return found or _gibberish(text)


def _control(text: str) -> list[str]:
    found = []
    tokens = Counter(match[0] for match in _CONTROL_TOKEN.finditer(text))
    if tokens:
        names = ", ".join(token for token, _ in tokens.most_common(3))
        found.append(f"it has control tokens: {names}")
    odd = Counter(c for c in text if unicodedata.category(c) in ("Cc", "Co", "Cn", "Cs"))
    odd = Counter({c: n for c, n in odd.items() if c not in "\n\t\r"})
    if odd:
        found.append(f"it has control characters: {', '.join(f'U+{ord(c):04X}' for c in odd)[:60]}")
    if "\ufffd" in text:
        found.append("it has U+FFFD: bytes that are no text")
    return found


def _repetition(text: str) -> list[str]:
    if run := _same_character(text):
        return [f"it repeats one character: {run[:12]}"]
    words = _WORD.findall(text.lower())
    if cycle := _cycle(words):
        return [f"it repeats itself: {' '.join(cycle[:6])} …"]
    if len(words) >= _TRIGRAM_WORDS:
        groups = list(zip(words, words[1:], words[2:], strict=False))
        share = len(set(groups)) / len(groups)
        if share < _DISTINCT_TRIGRAMS:
            return [f"it repeats itself: {share:.0%} of its groups of three words are different"]
    return []


def _same_character(text: str) -> str:
    for match in re.finditer(r"(\S)\1{%d,}" % (_SAME_CHARACTER - 1), text):  # noqa: UP031
        limit = _LONG_ZEROS if match[1] == "0" else _LONG_ROW
        if match[1] not in _TYPOGRAPHY or len(match[0]) >= limit:
            return match[0]
    return ""


def _cycle(words: Sequence[str]) -> Sequence[str]:
    """A group of words that stands several times one after the other, or nothing."""
    for period in range(1, min(_LONGEST_CYCLE, len(words) // _CYCLES) + 1):
        run = 0
        for place in range(period, len(words)):
            run = run + 1 if words[place] == words[place - period] else 0
            covered = run + period
            if run >= period * (_CYCLES - 1) and covered >= _CYCLE_WORDS:
                group = words[place - period + 1 : place + 1]
                # 1. 2. 3. or | - | - |: typography, not speech.
                if any(c.isalpha() for word in group for c in word):
                    return group
    return ()


def _gibberish(text: str) -> list[str]:
    letters = [c for c in text if c.isalpha()]
    found = []
    # Greek letters stand in formulas.
    scripts = {_script(c) for c in letters} - {"GREEK"}
    if len(scripts) > 2 and len(letters) >= _FEWEST_FOR_SCRIPTS:
        found.append(f"it mixes {len(scripts)} scripts: {', '.join(sorted(scripts)[:4])}")
    if len(letters) < _FEWEST_LETTERS:
        return found
    bits = _entropy(text)
    if not _ENTROPY[0] <= bits <= _ENTROPY[1]:
        found.append(f"its characters have {bits:.1f} bits each; English has 4.0 to 4.6")
    words = _LETTERS.findall(text)
    latin = [word for word in words if word.isascii()]
    share = bigram_share(latin)
    if share < _BIGRAM_SHARE:
        found.append(f"{share:.0%} of its pairs of letters are common in English")
    if len(words) >= _FUNCTION_WORDS_FROM:
        function = sum(word.lower() in _FUNCTION_WORDS for word in words) / len(words)
        if function < _FUNCTION_WORD_SHARE:
            found.append(f"{function:.0%} of its words are function words")
        odd = sum(bool(re.search(r"[a-z][A-Z]", word)) for word in words) / len(words)
        if odd > _ODD_CASE:
            found.append(f"{odd:.0%} of its words have capitals inside")
    return found


def bigram_share(words: Sequence[str]) -> float:
    """The share of pairs of letters inside words that are common in English; 0 for none."""
    pairs = [a + b for word in words for a, b in zip(word.lower(), word.lower()[1:], strict=False)]
    return sum(pair in _BIGRAMS for pair in pairs) / len(pairs) if pairs else 0.0


def _entropy(text: str) -> float:
    counts = Counter(text)
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts.values())


def _script(character: str) -> str:
    """The script of a letter, by the first word of its name: LATIN, CYRILLIC, CJK, ..."""
    return unicodedata.name(character, "UNKNOWN").partition(" ")[0]
