"""What the documents tell people to type is typed here: parsed, and run where that does no harm."""

from __future__ import annotations

import configparser
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import orchestrator
from sm75 import explain
from sm75.errors import CheckFailed
from tests.unit import channelkit, docskit
from tests.unit.commandkit import Runner
from tests.unit.docskit import PAGES, Block, Call
from tests.unit.elfkit import DEVICE
from tests.unit.projectkit import ROOT

BLOCKS = [block for page in PAGES for block in docskit.blocks(page)]
CALLS = docskit.calls()
UNITS = sorted((ROOT / "docs" / "systemd").glob("*.service"))
TASKS = tomllib.loads((ROOT / "pixi.toml").read_text())


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def named(block: Block) -> str:
    return block.where


# Every command line of ours is one that click takes.


def test_there_is_something_to_test() -> None:
    assert len(of(*docskit.SHELLS)) > 20
    assert len({call.words for call in CALLS}) > 40
    assert {call.where.partition(":")[0] for call in CALLS} >= {"README.md", "docs/g5g.md"}


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_command_line_takes_it(call: Call) -> None:
    try:
        docskit.parse(orchestrator.cli, call.words)
    except click.ClickException as error:
        pytest.fail(f"{call.where}: {shlex.join(call.words)}: {error.format_message()}")


@pytest.mark.parametrize(
    "line",
    ["build --nonsense", "nonsense", "channel", "channel nonsense", "inspect", "build --jobs many",
     "health --watch extra", "install --channel x", "fetch --rust maybe"],
)  # fmt: skip
def test_what_it_does_not_take_is_seen(line: str) -> None:
    with pytest.raises(click.ClickException):
        docskit.parse(orchestrator.cli, tuple(shlex.split(line)))


def test_no_command_line_is_overlooked() -> None:
    """Each mention of the program in a block of commands is one that is parsed."""
    for block in of(*docskit.SHELLS):
        text = "\n".join(line.partition("#")[0] for line in block.text.splitlines())
        mentioned = len(re.findall(r"orchestrator\.py ", text))
        parsed = sum(1 for call in CALLS if call.where == block.where)
        assert parsed == mentioned, block.where
    for block in BLOCKS:
        if not block.language:
            assert "orchestrator.py" not in block.text, f"{block.where} is taken for output"


def test_every_command_that_a_message_names_exists() -> None:
    """In the code, command lines are parts of sentences: their names are looked at alone."""
    seen = 0
    for path in sorted((ROOT / "sm75").rglob("*.py")):
        for found in re.finditer(r"orchestrator\.py ([a-z][a-z ]*)", path.read_text()):
            first, *rest = found[1].split()
            command = orchestrator.cli.commands.get(first)
            assert command is not None, f"{path.name}: {found[0]}"
            if isinstance(command, click.Group) and rest:  # else it goes on with a variable
                assert rest[0] in command.commands, f"{path.name}: {found[0]}"
            seen += 1
    assert seen > 10


def test_pixi_tasks_and_benchmarks_that_are_named_exist() -> None:
    tasks = {"default": TASKS["tasks"], "dev": TASKS["tasks"] | TASKS["feature"]["dev"]["tasks"]}
    seen = set()
    scripts = [block.text for block in of(*docskit.SHELLS)]
    scripts += [code for page in PAGES for _, code in docskit.inline_code(page)]
    for script in scripts:
        if not re.search(r"\bpixi run\b|python3 (-m )?benchmarks\b", script):
            continue
        for words in docskit.simple_commands(script):
            match words:
                case ["pixi", "run", "-e", environment, task, *_]:
                    assert task in tasks[environment]
                case ["pixi", "run", task, *_]:
                    assert task in tasks["default"]
                case ["python3", "-m", module, *_] if module.startswith("benchmarks"):
                    assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
                case ["python3", path, *_] if path.startswith("benchmarks"):
                    assert (ROOT / path).is_file(), path
                case _:
                    continue
            seen.add(words[0])
    assert seen == {"pixi", "python3"}


# Blocks are well formed.


@pytest.mark.parametrize("block", of(*docskit.SHELLS), ids=named)
def test_shell(block: Block) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=block.text, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), block.where


@pytest.mark.parametrize("block", of("toml", "yaml", "json"), ids=named)
def test_data(block: Block) -> None:
    read: dict[str, Callable[[str], Any]] = {
        "toml": tomllib.loads, "yaml": yaml.safe_load, "json": json.loads,
    }  # fmt: skip
    assert read[block.language](block.text)


def test_languages_are_known() -> None:
    known = {*docskit.SHELLS, "toml", "yaml", "json", "python", "", "cmake", "diff", "text"}
    assert {block.language for block in BLOCKS} <= known


def _lists(data: object) -> Iterator[list[Any]]:
    if isinstance(data, list):
        yield data
    children = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    for child in children:
        yield from _lists(child)


def test_commands_in_yaml() -> None:
    found = 0
    for block in of("yaml"):
        for words in _lists(yaml.safe_load(block.text)):
            arguments = docskit.ours(tuple(map(str, words)))
            if arguments is not None:
                docskit.parse(orchestrator.cli, arguments)
                found += 1
    assert found


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_call_what_there_is(unit: Path) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    assert parser["Service"]["ExecStart"]
    calls = [
        docskit.ours(tuple(shlex.split(value)))
        for key, value in parser["Service"].items()
        if key.startswith("Exec")
    ]
    for words in filter(None, calls):
        docskit.parse(orchestrator.cli, words)
    assert any(calls)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
def test_units_are_units(tmp_path: Path) -> None:
    for unit in UNITS:
        # Programs that are not here are faults to systemd-analyze.
        text = re.sub(r"(?<==)/opt/\S+|/usr/bin/python3", "/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))],
        check=False, capture_output=True, text=True,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert (done.returncode, said) == (0, []), done.stderr


# Links lead somewhere.


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links(page: Path) -> None:
    for line, target in docskit.links(page):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), f"{page.name}:{line}: {target}"
            continue
        name, _, anchor = target.partition("#")
        at = (page.parent / name).resolve() if name else page
        assert at.is_relative_to(ROOT), f"{page.name}:{line}: {target}"
        assert at.exists(), f"{page.name}:{line}: {target}"
        if anchor:
            assert anchor in docskit.anchors(at), f"{page.name}:{line}: {target}"


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {target.partition("#")[0] for _, target in docskit.links(ROOT / "README.md")}
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= linked


def test_anchors_are_as_github_makes_them(tmp_path: Path) -> None:
    page = tmp_path / "x.md"
    page.write_text(
        "# A `b` & c\n\n## 8 GiB of RAM\n\n## Same\n\n## Same\n\n```\n# no heading\n```\n"
    )
    assert docskit.anchors(page) == {"a-b--c", "8-gib-of-ram", "same", "same-1"}


# Run, in this process and a directory of their own, with what they name made for them.


def _harmless(call: Call) -> bool:
    """Whether a command reads only, here only, and in seconds: a rule, no list of lines."""
    words = call.words
    try:
        path = docskit.parse(orchestrator.cli, words)
    except click.ClickException:  # another test says so
        return False
    if any(re.fullmatch(r"[A-Z][A-Z-]+", word) for word in words):
        return False  # it has a place to fill
    if {"--help", "-h", "--version"} & set(words):
        return True
    match path:
        case ("explain",):
            return "--write-page" not in words
        case ("lock",):
            return words == ("lock",)
        case ("fetch",) | ("build",):  # --offline wants a store that is filled
            return "--dry-run" in words and "--offline" not in words
        case ("doctor",):
            return words == ("doctor",)
        case ("channel", "verify" | "sizes" | "export"):
            return True
        case ("inspect",):
            return words[-1] != "-"  # an image's description, from a registry
        case ("patches", "releases"):
            return "--check" in words
        case _:
            return False


HARMLESS = sorted({call.words for call in CALLS if _harmless(call)})


def test_some_are_harmless() -> None:
    ran = {docskit.parse(orchestrator.cli, words) for words in HARMLESS}
    assert ran >= {("explain",), ("doctor",), ("fetch",), ("inspect",), ("channel", "verify"),
                   ("channel", "export")}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the documents name: a channel, a log, a wheel."""
    channelkit.product(tmp_path / "channel")
    shutil.rmtree(tmp_path / "channel-made")
    (tmp_path / "serve.log").write_text(
        "RuntimeError: CUDA error: no kernel image is available for execution on the device\n"
    )
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.write(DEVICE / "two.so", "some/two.so")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SM75_STORE", str(tmp_path / "store"))
    return tmp_path


@pytest.mark.parametrize("words", HARMLESS, ids=" ".join)
def test_it_runs(
    words: tuple[str, ...], here: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = docskit.parse(orchestrator.cli, words)
    arguments = list(words)
    if path[:1] == ("channel",):
        # The project's own channel is not there on a clean clone, and a page's is elsewhere.
        if "--channel" in arguments:
            del arguments[(at := arguments.index("--channel")) : at + 2]
        arguments += ["--channel", str(here / "channel")]
    log = (here / "serve.log").read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(log)))
    ended = run(*arguments)
    match path:
        case ("doctor",):  # whether this machine is right is not the question here
            assert ended.code in (0, 1), ended.err
        case ("inspect",):  # a library for x86-64
            assert ended.code == CheckFailed.exit_code, ended.err
            assert "unusable" in ended.out
        case ("explain",):
            assert ended.code == 0, ended.err
            known = words[-1] in explain.names(ROOT)
            assert ("constraint" if known else "no kernel image") in ended.out
        case _:
            assert ended.code == 0, ended.err
    assert ended.out
