"""What a CMake file declares for a CUDA build, without running CMake.

The text is split into commands by ``cmake-parser``. Commands behind a condition that is certainly
false for a CUDA build (ROCm, CPU, another toolkit version, a local source directory) are left out;
a condition that cannot be known beforehand, such as one on the architecture list, counts as true,
so that nothing that could be built is overlooked.

Of the CMake parsers on the package index, ``cmakelang`` and ``cmakeast`` are abandoned,
``gersemi``'s parser is an internal part of a formatter, and ``tree-sitter-cmake`` skips what it
cannot read instead of refusing it. ``cmake-parser`` is pure Python and refuses bad text; it is
old (2023), but CMake's grammar is older.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cmake_parser.error import CMakeParseError
from cmake_parser.parser import parse_raw
from packaging.version import InvalidVersion, Version

from sm75.errors import LockError
from sm75.treefiles import refusal

# CMake's false constants; a string that ends in -NOTFOUND is one too.
_FALSE = {"", "0", "OFF", "NO", "FALSE", "N", "IGNORE", "NOTFOUND"}
_TRUE = {"1", "ON", "YES", "TRUE", "Y"}
# Overrides that developers set; the build starts with a clean environment and sets none.
_NEVER_SET = re.compile(r"\w+_SRC_DIR")
_UNARY = {
    "EXISTS",
    "IS_DIRECTORY",
    "IS_ABSOLUTE",
    "IS_SYMLINK",
    "TARGET",
    "COMMAND",
    "POLICY",
    "TEST",
}
_BINARY = re.compile(
    r"MATCHES|IN_LIST|IS_NEWER_THAN|PATH_EQUAL|(STR|VERSION_)?(EQUAL|LESS|GREATER)(_EQUAL)?"
)
_REFERENCE = re.compile(r"\$\{(\w[\w.+-]*)\}")


@dataclass(frozen=True, kw_only=True)
class Word:
    """One argument as written; a quoted one is never the name of a variable."""

    text: str
    quoted: bool


@dataclass(frozen=True, kw_only=True)
class Call:
    """One command that a CUDA build may run.

    Attributes:
        name: In lower case.
        args: As written, variables not replaced.
        line: Where it stands.
        conditions: Of all ``if`` and ``elseif`` whose branch it is in, as written; an ``else`` has
            none.
    """

    name: str
    args: tuple[str, ...]
    line: int
    conditions: tuple[tuple[str, ...], ...]


@dataclass
class _Branch:
    """The branch being read of an open ``if``.

    ``own`` is what its condition is, ``none_before`` whether all earlier ones are false; ``None``
    stands for unknown.
    """

    condition: tuple[str, ...]
    own: bool | None
    line: int
    none_before: bool | None = True

    @property
    def taken(self) -> bool | None:
        return _and(self.none_before, self.own)


@dataclass(frozen=True, kw_only=True)
class Script:
    """The commands of one file.

    Attributes:
        file: Its path in the tree.
        calls: What a CUDA build may run, in order.
        facts: The variables known beforehand.
    """

    file: str
    calls: tuple[Call, ...]
    facts: Mapping[str, str] = field(default_factory=dict)

    def named(self, *names: str) -> list[Call]:
        """The calls of these commands."""
        return [call for call in self.calls if call.name in names]

    def values(self, variable: str) -> tuple[str, ...]:
        """What ``set(variable …)`` gives it, variables replaced.

        Raises:
            LockError: It is not set, or set to several different values.
        """
        found = {_set_values(call.args) for call in self._sets(variable)}
        if len(found) != 1:
            raise self.refuse(
                f"set({variable} …)",
                "a CUDA build sets it to "
                + (" and to ".join(sorted(map(str, found))) if found else "nothing"),
            )
        return tuple(self.expand(value) for value in next(iter(found)))

    def value(self, variable: str) -> str:
        """The one value that ``set(variable …)`` gives it.

        Raises:
            LockError: Not set, set to several values, or to a list.
        """
        values = self.values(variable)
        if len(values) != 1 or not values[0]:
            raise self.refuse(f"set({variable} VALUE)", f"its value is {' '.join(values)!r}")
        return values[0]

    def expand(self, text: str) -> str:
        """Replace ``${NAME}`` by the known or set value.

        Raises:
            LockError: A variable has no single value in this file.
        """

        def known(hit: re.Match[str]) -> str:
            name = hit[1]
            if name in self.facts:
                return self.facts[name]
            if any(hit[0] in arg for call in self._sets(name) for arg in call.args):
                raise self.refuse(f"the value of {name}", "it is set from its own value")
            return self.value(name)

        return _REFERENCE.sub(known, text)

    def _sets(self, variable: str) -> list[Call]:
        return [call for call in self.named("set") if call.args[:1] == (variable,)]

    def refuse(self, looked_for: str, why: str) -> LockError:
        """The error that says what was looked for here and why it will not do."""
        return refusal(self.file, looked_for, why)


def read_script(file: str, text: str, facts: Mapping[str, str]) -> Script:
    """Read a CMake file.

    Args:
        file: Its path in the tree, for errors.
        text: Its content.
        facts: Values of variables, as a CUDA build would have them.

    Raises:
        LockError: It is not CMake, or its blocks are not balanced.
    """
    return Script(file=file, calls=tuple(_calls(file, text, facts)), facts=facts)


def _calls(file: str, text: str, facts: Mapping[str, str]) -> Iterator[Call]:
    open_branches: list[_Branch] = []
    definitions = 0
    for name, line, words in _commands(file, text):
        if name == "if":
            condition = tuple(word.text for word in words)
            open_branches.append(_Branch(condition, evaluate(words, facts), line))
        elif name in ("elseif", "else", "endif"):
            if not open_branches:
                raise refusal(file, "balanced if() and endif()", f"line {line}: stray {name}()")
            if name == "endif":
                open_branches.pop()
            else:
                _next_branch(open_branches[-1], words if name == "elseif" else None, facts)
        elif any(branch.taken is False for branch in open_branches):
            continue
        elif name == "return" and not definitions and all(b.taken for b in open_branches):
            return
        else:
            definitions += name in ("function", "macro")
            definitions -= name in ("endfunction", "endmacro")
            yield Call(
                name=name,
                args=tuple(word.text for word in words),
                line=line,
                conditions=tuple(branch.condition for branch in open_branches),
            )
    if open_branches:
        line = open_branches[-1].line
        raise refusal(file, "balanced if() and endif()", f"the if() of line {line} has no endif()")


def _next_branch(branch: _Branch, words: Sequence[Word] | None, facts: Mapping[str, str]) -> None:
    """Go on to an ``elseif`` (its words) or to ``else`` (``None``)."""
    branch.none_before = _and(branch.none_before, _not(branch.own))
    branch.own = True if words is None else evaluate(words, facts)
    branch.condition = tuple(word.text for word in words or ())


def _commands(file: str, text: str) -> Iterator[tuple[str, int, list[Word]]]:
    try:
        for command in parse_raw(text, skip_comments=True):
            words = []
            for token in command.args:
                if token.kind == "COMMENT":
                    continue
                if token.kind not in ("RAW", "QUOTED", "BRACKETED", "LPAREN", "RPAREN"):
                    raise refusal(
                        file, "CMake", f"line {token.line}: {token.kind.lower().replace('_', ' ')}"
                    )
                words.append(Word(text=token.value, quoted=token.kind in ("QUOTED", "BRACKETED")))
            yield command.identifier.lower(), command.line, words
    except CMakeParseError as error:
        raise refusal(file, "CMake", str(error)) from error


def _set_values(args: tuple[str, ...]) -> tuple[str, ...]:
    values = args[1:]
    for end in ("CACHE", "PARENT_SCOPE"):
        if end in values:
            values = values[: values.index(end)]
    return values


def evaluate(words: Sequence[Word], facts: Mapping[str, str]) -> bool | None:
    """Whether a condition holds.

    ``NOT`` binds tightest, then ``AND`` and ``OR`` from left to right, as in CMake.

    Args:
        words: The arguments of ``if``.
        facts: The variables known.

    Returns:
        ``None`` when that depends on something not known.
    """
    reader = _Condition(list(words), facts)
    result = reader.expression()
    return None if reader.rest else result


class _Condition:
    """Reads a condition from left to right; ``rest`` is what has not been read."""

    def __init__(self, words: list[Word], facts: Mapping[str, str]) -> None:
        self.rest = words
        self.facts = facts

    def expression(self) -> bool | None:
        result = self.term()
        while (operator := self.peek()) in ("AND", "OR"):
            self.rest.pop(0)
            result = (_and if operator == "AND" else _or)(result, self.term())
        return result

    def term(self) -> bool | None:
        first = self.peek()
        if first == "NOT":
            self.rest.pop(0)
            return _not(self.term())
        if first == "(":
            self.rest.pop(0)
            result = self.expression()
            if self.peek() == ")":
                self.rest.pop(0)
                return result
            return None
        if first == "DEFINED" and len(self.rest) > 1:
            return self.defined(self.rest[1].text)
        if first in _UNARY and len(self.rest) > 1:
            del self.rest[:2]
            return None
        if not self.rest:
            return None
        left = self.rest.pop(0)
        operator = self.peek() or ""
        if _BINARY.fullmatch(operator) and len(self.rest) > 1:
            self.rest.pop(0)
            return self.compare(left, operator, self.rest.pop(0))
        return self.truth(left)

    def peek(self) -> str | None:
        """The next word, unless it is quoted and so no keyword."""
        return self.rest[0].text if self.rest and not self.rest[0].quoted else None

    def defined(self, name: str) -> bool | None:
        del self.rest[:2]
        if name in self.facts:
            return True
        return False if name.startswith("ENV{") or _NEVER_SET.fullmatch(name) else None

    def truth(self, word: Word) -> bool | None:
        if not word.quoted and word.text in self.facts:
            return not _is_false(self.facts[word.text])
        if _is_false(word.text) or (not word.quoted and _NEVER_SET.fullmatch(word.text)):
            return False
        return True if word.text.upper() in _TRUE else None

    def compare(self, left: Word, operator: str, right: Word) -> bool | None:
        one, two = self.operand(left), self.operand(right)
        if one is None or two is None:
            return None
        if operator == "STREQUAL":
            return one == two
        if not operator.startswith("VERSION_"):
            return None
        try:
            a, b = Version(one), Version(two)
        except InvalidVersion:
            return None
        match operator.removeprefix("VERSION_"):
            case "EQUAL":
                return a == b
            case "LESS":
                return a < b
            case "LESS_EQUAL":
                return a <= b
            case "GREATER":
                return a > b
            case _:
                return a >= b

    def operand(self, word: Word) -> str | None:
        if word.text in self.facts and not word.quoted:
            return self.facts[word.text]
        if hit := _REFERENCE.fullmatch(word.text):
            return self.facts.get(hit[1])
        if "$" in word.text:
            return None
        return word.text if word.quoted or re.fullmatch(r"[\d.]+", word.text) else None


def _is_false(text: str) -> bool:
    return text.upper() in _FALSE or text.upper().endswith("-NOTFOUND")


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _and(one: bool | None, two: bool | None) -> bool | None:
    if one is False or two is False:
        return False
    return None if one is None or two is None else True


def _or(one: bool | None, two: bool | None) -> bool | None:
    return _not(_and(_not(one), _not(two)))
