"""The release's own FlexibleArgumentParser, run, against ours: thousands of command lines."""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
import sys
import tarfile
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sm75.errors import UsageError
from sm75.serve import numbers, typed
from sm75.serve.flags import Given
from sm75.serve.known import Flag, Installed, Known
from sm75.store import default_root

VALUES = ("1", "0", "-1", "2.5", "4k", "4K", "1.5K", "auto", "None", "", "x y", "foo", '{"a":1}',
          "-x", "--", "a.b", "-0.5", "float16", "1,2", "-O3", "-O=2")  # fmt: skip


def module(release: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """``vllm/utils/argparse_utils.py`` of the sdist. What it imports beside the standard library
    is not installed here: ``re`` does for ``regex``, and its logger says nothing."""
    found = sorted(default_root().glob(f"sha256/*/*/vllm-{release}.tar.gz"))
    if not found:
        pytest.skip("the sdist is not in the store")
    with tarfile.open(found[0]) as archive:
        member = archive.extractfile(f"vllm-{release}/vllm/utils/argparse_utils.py")
        assert member is not None
        source = member.read()
    quiet: Any = types.ModuleType("vllm.logger")
    quiet.init_logger = lambda _: types.SimpleNamespace(
        warning=lambda *_: None, warning_once=lambda *_: None, error=lambda *_: None
    )
    for name, stand_in in (("regex", re), ("yaml", types.ModuleType("yaml")),
                           ("vllm", types.ModuleType("vllm")), ("vllm.logger", quiet)):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, stand_in)
    space: dict[str, Any] = {"__name__": "argparse_utils"}
    exec(compile(source, "argparse_utils.py", "exec"), space)  # noqa: S102 (a pinned sdist's)
    return space


def option(flag: Flag, space: dict[str, Any]) -> dict[str, Any]:
    if flag.takes == "switch":
        return {"action": "store_true"}
    if flag.takes == "pair":
        return {"action": argparse.BooleanOptionalAction}
    kinds = {"int": int, "float": float, "human": space["human_readable_int"],
             "auto": space["human_readable_int_or_auto"]}  # fmt: skip
    kind: Callable[[str], Any] = kinds.get(flag.takes, str)
    found: dict[str, Any] = {
        "type": (lambda text: None if text in ("", "None") else kind(text)) if flag.none else kind
    }
    if flag.takes in ("maybe", "many"):
        found["nargs"] = "?" if flag.takes == "maybe" else "+"
    if flag.choices:
        found["choices"] = [*flag.choices, *([None] if flag.none else [])]
    return found


def takes(arguments: list[str], known: Known, space: dict[str, Any]) -> bool:
    """Whether vLLM's parser takes them, as ``vllm serve`` builds it; then the fields' bounds."""
    main = space["FlexibleArgumentParser"]()
    main.add_argument("-v", "--version", action="version", version="")
    serve = main.add_subparsers(required=False, dest="subparser").add_parser("serve")
    serve.add_argument("model_tag", nargs="?")
    for name, flag in known.flags.items():
        serve.add_argument(name, *flag.also, **option(flag, space))
    nowhere = io.StringIO()
    try:
        with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
            parsed = main.parse_args(["serve", "MODEL", *arguments])
    except SystemExit as ended:
        return not ended.code  # --help
    except IndexError:  # a dotted name that is the last
        return False
    values = vars(parsed)
    return all(
        numbers._within(flag, value)
        for name, flag in known.flags.items()
        if type(value := values.get(name[2:].replace("-", "_"))) in (int, float)
    )


def lines(known: Known) -> Iterator[list[str]]:
    """Command lines with whole, shortened, mistyped and dotted names, and all kinds of values."""
    draw = random.Random(7)
    # Help ends the program before what is wrong is seen.
    names = [name for name, of in typed._names(known.flags, inverse=known.inverse)
             if of not in typed._HELP]  # fmt: skip
    for _ in range(600):
        made: list[str] = []
        for _ in range(draw.randint(1, 3)):
            name, how = draw.choice(names), draw.random()
            if how < 0.25 and name.startswith("--"):
                name = name[: draw.randint(4, len(name))]
            elif how < 0.35:
                name = name.replace("-", "_").replace("__", "--", 1)
            elif how < 0.42 and len(name) > 5:
                at = draw.randint(3, len(name) - 2)
                name = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
            elif how < 0.5:
                name += draw.choice([".a", ".a_b", ".a.b+"])
            made += draw.choice([[name], [name, draw.choice(VALUES)],
                                 [f"{name}={draw.choice(VALUES)}"]])  # fmt: skip
        made += draw.choice([[]] * 8 + [[one] for one in ("-O3", "-O", "-qawq", "-n2", "stray")])
        # Files that are read, and a second model, which is refused with words of its own.
        if not any(one.startswith(("--model", "--config")) for one in made):
            yield made


@pytest.mark.integration
@pytest.mark.parametrize("release", ["0.28.0", "0.33.0"])
def test_ours_takes_what_vllms_takes(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    space, here = module(release, monkeypatch), Installed(release=release)
    known = here.known
    assert known is not None
    taken = 0
    for arguments in lines(known):
        theirs = takes(arguments, known, space)
        try:
            spelled = typed.check(Given(tuple(arguments)), here).arguments
        except UsageError:
            ours = False
        else:
            ours = True
            # Spelling it out changes nothing for vLLM.
            assert takes(list(spelled), known, space), (arguments, spelled)
        assert ours == theirs, arguments
        taken += theirs
    assert taken > 30
