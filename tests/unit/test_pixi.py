"""pixi.toml: its tasks are the orchestrator's commands, its packages are our tools."""

from __future__ import annotations

import re
import shlex
import tomllib
from typing import Any

import click
import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import orchestrator
from sm75.lockfile import BUILD_PLATFORMS
from tests.unit.projectkit import ROOT

MANIFEST: dict[str, Any] = tomllib.loads((ROOT / "pixi.toml").read_text())
DEV = MANIFEST["feature"]["dev"]
TASKS: dict[str, dict[str, str]] = {**MANIFEST["tasks"], **DEV["tasks"]}


def listed(name: str) -> set[str]:
    """Projects of a list of tools."""
    lines = (ROOT / "lock" / name).read_text().splitlines()
    return {canonicalize_name(line) for line in lines if line and line[0] not in "#-"}


def packages(table: dict[str, Any]) -> dict[str, str]:
    """Names and version bounds, from conda and from the package index."""
    both = {**table.get("dependencies", {}), **table.get("pypi-dependencies", {})}
    return {canonicalize_name(name): bound for name, bound in both.items()}


def pinned(name: str) -> dict[str, str]:
    """The versions that a pinned list has."""
    text = (ROOT / "lock" / name).read_text()
    return {canonicalize_name(n): v for n, v in re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", text)}


def test_tasks() -> None:
    assert set(TASKS) >= {"build-vllm", "verify", "update-lock", "test", "lint"}


@pytest.mark.parametrize("name", TASKS)
def test_task_is_a_command_of_the_orchestrator(name: str) -> None:
    task = TASKS[name]
    assert task["description"]
    python, program, *arguments = shlex.split(task["cmd"])
    assert (python, program) == ("python", "orchestrator.py")
    command: click.Command = orchestrator.cli
    values = 0
    for argument in arguments:
        if isinstance(command, click.Group):
            assert argument in command.commands
            command = command.commands[argument]
        elif values:
            values -= 1
        else:
            options = {flag: option for option in command.params for flag in option.opts}
            assert argument in options
            option = options[argument]
            values = 0 if isinstance(option, click.Option) and option.is_flag else option.nargs
    assert not values


def test_platforms_are_those_that_build() -> None:
    assert set(MANIFEST["workspace"]["platforms"]) == set(BUILD_PLATFORMS)
    assert MANIFEST["workspace"]["channels"] == ["conda-forge"]


def test_every_tool_is_there() -> None:
    """Where one is missing, the orchestrator would fail in pixi's environment only."""
    assert set(packages(MANIFEST)) - {"python"} == listed("tools.in")
    assert set(packages(DEV)) == listed("dev-tools.in")


@pytest.mark.parametrize(
    ("table", "pins"), [(MANIFEST, "tools.txt"), (DEV, "dev-tools.txt")], ids=["default", "dev"]
)
def test_bounds_admit_the_pinned_versions(table: dict[str, Any], pins: str) -> None:
    versions = pinned(pins)
    for name, bound in packages(table).items():
        if name != "python":
            assert versions[name] in SpecifierSet(bound), name


def test_python_is_what_the_package_and_the_lock_allow() -> None:
    allowed = SpecifierSet(MANIFEST["dependencies"]["python"])
    minors = [n for n in range(8, 20) if f"3.{n}" in allowed]
    assert minors == [11, 12, 13, 14]


def test_environments() -> None:
    assert MANIFEST["environments"]["dev"] in (["dev"], {"features": ["dev"]})
    version = re.search(r'__version__ = "(.+)"', (ROOT / "sm75" / "__init__.py").read_text())
    assert version is not None
    assert MANIFEST["workspace"]["version"] == version[1]
