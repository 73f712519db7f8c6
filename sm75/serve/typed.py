"""Whether vLLM's own parser would take the arguments after ``--``, before it is started.

Python's argparse, which vLLM's parser is made of, reads them here as well, with the flags that the
release's table names; around it what ``FlexibleArgumentParser`` does (vLLM 0.33.0,
``vllm/utils/argparse_utils.py``): underscores, ``--a.b value``, ``-O3``.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from sm75.errors import UsageError
from sm75.serve import numbers
from sm75.serve.flags import Given
from sm75.serve.known import Flag, Installed

_HELP = ("-h", "--help")
# A name of argparse's own namespace for the model, which stands before the flags.
_MODEL = "model_tag"


def check(given: Given, here: Installed) -> Given:
    """Refuse what the installed release's parser would refuse.

    Args:
        given: The user's own flags.
        here: What is installed; of a release that was not read nothing is said.

    Returns:
        The flags with abbreviations spelled out, as argparse understands them.

    Raises:
        UsageError: A flag is not there or may be several, or a value is not what it takes.
    """
    known = here.known
    if known is None or not given.arguments:
        return given
    names = dict(_names(known.flags, inverse=known.inverse))
    also = {one: name for name, flag in known.flags.items() for one in flag.also}
    spelled = tuple(_spelled(argument, names, also) for argument in given.arguments)
    if any(re.match(r"--model(=|$)", argument) for argument in spelled):
        raise UsageError(
            "--model stands behind --", why="the model is named before it, and vLLM takes one",
            fix="python3 orchestrator.py serve MODEL -- FLAGS, without --model",
        )  # fmt: skip
    parser = _Parser(here.release, known.flags, names)
    _, left = parser.parse_known_args([_MODEL, *_flat(spelled)])
    unknown = [argument for argument in left if argument.startswith("-")]
    # A package that brings methods of its own may bring flags too.
    if left and not here.plugins:
        raise _unknown(unknown, left, names, here.release)
    return Given(spelled)


def _names(flags: Mapping[str, Flag], *, inverse: bool) -> Iterator[tuple[str, str]]:
    """Every spelling that the parser registers, with the flag's own name."""
    for name, flag in flags.items():
        for one in (name, *flag.also):
            yield one, name
            if flag.takes == "pair" and one.startswith("--"):
                yield f"--no-{one[2:]}", name
                for mine, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
                    if inverse and one.startswith(mine):
                        yield other + one.removeprefix(mine), name
    yield from ((one, one) for one in _HELP)


def _spelled(argument: str, names: Mapping[str, str], also: Mapping[str, str]) -> str:
    """An abbreviation as the only name that begins so, another name as the flag's own."""
    match = re.match(r"(--[^.=]+)", argument)
    if match is None or (" " in argument and "=" not in argument):
        return argument
    typed, rest = match[1].replace("_", "-"), argument[match.end() :]
    found = [typed] if typed in names else [name for name in names if name.startswith(typed)]
    if len(found) != 1 or (found[0] == typed and typed not in also):
        return argument
    return also.get(found[0], found[0]) + rest


def _flat(arguments: tuple[str, ...]) -> list[str]:
    """What ``FlexibleArgumentParser.parse_args`` hands to argparse.

    Raises:
        UsageError: A dotted name has no value.
    """
    plain: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name == "--help" and equals:
            plain.append(name)
        elif argument.startswith("-O") and argument != "-O":
            plain += ["--optimization-level", argument[2:].removeprefix("=")]
        elif argument == "-O":
            plain.append("--optimization-level")
        elif name.startswith("--"):
            first, dot, others = name.partition(".")
            plain.append(first.replace("_", "-") + dot + others + equals + value)
        else:
            plain.append(argument)
    found: list[str] = []
    tables: dict[str, None] = {}
    rest = iter(plain)
    for argument in rest:
        name, equals, _ = argument.partition("=")
        if not name.startswith("-") or "." not in name:
            found.append(argument)
            continue
        tables[name.partition(".")[0]] = None
        if not equals and next(rest, None) is None:
            raise UsageError(f"{name} has no value", fix=f"{name} VALUE")
    for key in tables:
        found += [key, "{}"]
    return found


class _Parser(argparse.ArgumentParser):
    """A release's flags, for argparse."""

    def __init__(self, release: str, flags: Mapping[str, Flag], names: Mapping[str, str]) -> None:
        super().__init__(add_help=False)
        self._release = release
        self.add_argument(_MODEL)
        self.add_argument(*_HELP, action="store_true")
        spellings: dict[str, list[str]] = {}
        for spelling, name in names.items():
            spellings.setdefault(name, []).append(spelling)
        for name, flag in flags.items():
            more: dict[str, Any] = {"dest": name}
            if flag.takes in ("switch", "pair"):
                more["action"] = "store_true"
            else:
                more["type"] = self._type(name, flag)
                if flag.takes in ("maybe", "many"):
                    more["nargs"] = "?" if flag.takes == "maybe" else "+"
            self.add_argument(*spellings[name], **more)

    def _type(self, name: str, flag: Flag) -> Callable[[str], object]:
        return functools.partial(numbers.value, name, flag, self._release)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print.

        Raises:
            UsageError: Always.
        """
        said = re.sub(r"^argument ", "", message)
        raise UsageError(
            f"vLLM {self._release} would refuse the flags: {said}",
            fix="PREFIX/bin/vllm serve --help=all has them all",
        )


def _unknown(
    unknown: list[str], left: list[str], names: Mapping[str, str], release: str
) -> UsageError:  # fmt: skip
    if not unknown:
        return UsageError(
            f"{left[0]} belongs to no flag",
            why=f"vLLM {release} takes one model and flags, and the flag before it has its values",
            fix="name the flag that it is for, or leave it out",
        )  # fmt: skip
    name = unknown[0].partition("=")[0]
    like = [one for one in names if one.startswith("--") == name.startswith("--")]
    near = difflib.get_close_matches(name.replace("_", "-"), like, n=1, cutoff=0.75)
    ask = f"; did you mean {near[0]}?" if near else ""
    return UsageError(
        f"no flag of vLLM {release}: {name}{ask}",
        why="its parser would end with: unrecognized arguments",
        fix="PREFIX/bin/vllm serve --help=all has them all",
    )
