"""Values of flags: numbers as vLLM reads them, and words for those that it would refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sm75.errors import UsageError
from sm75.serve.known import Flag

# vllm/utils/argparse_utils.py, human_readable_int: small letters are decimal, large ones binary.
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # fmt: skip
_KINDS = {
    "int": "a whole number", "float": "a number",
    "human": "a whole number; 32k is 32,000 and 32K 32,768",
    "auto": "a whole number (32k is 32,000 and 32K 32,768), or auto",
}  # fmt: skip


def human(text: str) -> int:
    """A number that may end in a unit: ``25.6k``, ``32K``, ``8192``.

    Raises:
        ValueError: It is none, or has decimals before a binary unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text.strip())
    if match is None:
        return int(text)
    number, unit = match.groups()
    return int((float(number) if unit.islower() else int(number)) * _UNITS[unit])


def value(name: str, flag: Flag, release: str, text: str) -> object:
    """A flag's value.

    Args:
        name: The flag.
        flag: What it takes.
        release: vLLM's, for the words.
        text: As it was typed.

    Raises:
        UsageError: vLLM would refuse it.
    """
    if flag.none and text in ("", "None"):
        return None
    found: int | float | str = text
    try:
        if flag.takes == "int":
            found = int(text)
        elif flag.takes == "float":
            found = float(text)
        elif flag.takes == "human" or (flag.takes == "auto" and text.strip().lower() != "auto"):
            found = human(text) if text.strip() != "-1" or flag.takes == "human" else -1
    except ValueError as error:
        raise _refused(name, flag, release, text) from error
    if isinstance(found, str):
        wrong = bool(flag.choices) and text not in flag.choices
    else:
        wrong = not _within(flag, found) or (bool(flag.choices) and found not in flag.choices)
    if wrong and not (flag.takes == "auto" and isinstance(found, str)):
        raise _refused(name, flag, release, text)
    return found


def _within(flag: Flag, number: float) -> bool:
    return (
        (flag.ge is None or number >= flag.ge) and (flag.gt is None or number > flag.gt)
        and (flag.le is None or number <= flag.le) and (flag.lt is None or number < flag.lt)
    )  # fmt: skip


def _bounds(flag: Flag) -> Iterator[str]:
    for bound, words in ((flag.ge, "at least"), (flag.gt, "above"), (flag.le, "at most"),
                         (flag.lt, "below")):  # fmt: skip
        if bound is not None:
            yield f"{words} {bound:g}"


def _refused(name: str, flag: Flag, release: str, text: str) -> UsageError:
    if flag.choices:
        takes = "one of " + ", ".join(map(str, flag.choices))
    else:
        takes = ", ".join([_KINDS[flag.takes], *_bounds(flag)])
    where = f" (its {flag.of})" if flag.of else ""
    return UsageError(
        f"{text!r} is no value for {name}",
        why=f"vLLM {release} takes {takes}{where}",
        fix=f"give {name} such a value, or leave it out",
    )
