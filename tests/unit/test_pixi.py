"""pixi.toml: its tasks are the orchestrator's commands, its packages are our tools."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import rattler
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import orchestrator
from sm75 import pixi, pixilock
from sm75.errors import LockError, ToolchainError
from sm75.lockfile import BUILD_PLATFORMS
from sm75.progress import SilentReporter
from sm75.store import Store, default_root
from sm75.toolchain import conda_forge
from tests.unit.projectkit import ROOT
from tests.unit.test_conda_forge import serve

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


def test_they_all_agree() -> None:
    assert list(pixi.problems(ROOT)) == []


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Manifest, lock and pip's lists, to be changed."""
    (tmp_path / "lock").mkdir()
    for name in (
        "pixi.toml",
        "pixi.lock",
        *(f"lock/{n}" for pair in pixi.LISTS.values() for n in pair),
    ):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


# (file, what is changed in it, into what, what a problem must say)
BROKEN = [
    ("pixi.toml", 'rich = ">=14"', 'rich = ">=99"', "nothing is rich >=99; pixi.toml asks for it"),
    ("pixi.toml", 'rich = ">=14"', 'rich = ">=99"', "rich >=99, but lock/tools.txt has"),
    ("pixi.toml", 'unidiff = ">=0.7.5"', 'unidiff = ">=9"', "nothing is unidiff>=9; pixi.toml"),
    ("pixi.toml", 'rich = ">=14"\n', "", "pixi.toml: it does not list rich"),
    ("pixi.toml", 'rich = ">=14"', 'rich = ">=14"\nnew = "*"', "tools.in: it does not list new"),
    ("pixi.toml", 'dev = ["dev"]', 'dev = ["dev"]\nmore = []', "no environment more"),
    ("pixi.toml", '"linux-64", ', "", "its platforms are not those that build"),
    ("pixi.toml", '"linux-64", ', "", "environment dev and linux-64: only one of the files"),
    ("pixi.toml", '"conda-forge"]', '"bioconda"]', "is no file of bioconda"),
    ("lock/tools.in", "rich\n", "", "lock/tools.in: it does not list rich"),
    ("lock/tools.in", "rich\n", "rich\nnovel\n", "pixi.toml: it does not list novel"),
    ("pixi.lock", "version: 7", "version: 77", "pixi.lock: "),
    ("pixi.lock", "  name: kaitaistruct", "  name: other", "nothing is kaitaistruct"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "said"), BROKEN)
def test_a_disagreement_is_named(project: Path, file: str, old: str, new: str, said: str) -> None:
    text = (project / file).read_text()
    assert old in text
    (project / file).write_text(text.replace(old, new))
    found = list(pixi.problems(project))
    assert any(said in problem for problem in found), found
    with pytest.raises(LockError, match="disagree"):
        pixi.check(project)


@pytest.mark.parametrize(
    ("pattern", "replacement", "said"),
    [
        # A package that others need, gone from one environment on one platform.
        (r"      - conda: \S+/noarch/markdown-it-py-\S+\n", "", "markdown-it-py"),
        (r"\n  sha256: \w+(\n  requires_dist:\n  - abi3info)", r"\1", "abi3audit has no sha256"),
        (r"https://files\.pythonhosted\.org/(\S+/unidiff)", r"https://x.org/\1", "no wheel of the"),
        (
            r"(name: unidiff\n(?:  .*\n)*?  requires_python: ).*",
            r"\1'<3'",
            "unidiff needs Python <3",
        ),
    ],
)
def test_a_lock_that_is_not_whole_is_refused(
    project: Path, pattern: str, replacement: str, said: str
) -> None:
    text = (project / "pixi.lock").read_text()
    new = re.sub(pattern, replacement, text)
    assert new != text
    (project / "pixi.lock").write_text(new)
    found = list(pixi.problems(project))
    assert any(said in problem for problem in found), found


def test_without_a_lock(project: Path) -> None:
    (project / "pixi.lock").unlink()
    assert [p for p in pixi.problems(project) if "lock --tools" in p]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('channels = ["conda-forge"]', 'channels = ["conda-forge", "nvidia"]'),
        ('rich = ">=14"', "rich = { version = '>=14' }"),
        ("[environments]", "[target.linux-64.dependencies]\nx = '*'\n[environments]"),
        ('dev = ["dev"]', 'dev = { features = ["dev"], solve-group = "one" }'),
        ('dev = ["dev"]', 'dev = ["gone"]'),
        ("[environments]", "[environments"),
    ],
)
def test_a_manifest_that_is_not_understood_is_refused(project: Path, old: str, new: str) -> None:
    text = (project / "pixi.toml").read_text()
    assert old in text
    (project / "pixi.toml").write_text(text.replace(old, new))
    with pytest.raises(LockError, match=r"pixi\.toml cannot be read"):
        pixi.load(project)


@pytest.mark.network
def test_the_lock_is_what_its_records_give(tmp_path: Path) -> None:
    """Solved anew from the records of conda-forge that were at hand, and the package index."""
    with serve(ROOT / "tests" / "data" / "pixi-forge") as url:
        base = rattler.Channel("conda-forge").base_url
        config = rattler.Config.from_toml(
            f'[mirrors]\n"{base}" = ["{url}"]\n[repodata-config]\ndisable-sharded = true\n'
        )
        source = conda_forge.source(config=config, cache_dir=tmp_path / "cache")
        shutil.copyfile(ROOT / "pixi.toml", tmp_path / "pixi.toml")
        assert pixilock.update(tmp_path, Store(default_root()), SilentReporter(), source)
    made, committed = (
        sorted(re.findall(r"(?m)^- conda: (\S+)$", (root / "pixi.lock").read_text()))
        for root in (tmp_path, ROOT)
    )
    assert made == committed
    # The package index goes on; what it gives has to fit all the same.
    (tmp_path / "lock").mkdir()
    for name in (n for pair in pixi.LISTS.values() for n in pair):
        shutil.copyfile(ROOT / "lock" / name, tmp_path / "lock" / name)
    assert list(pixi.problems(tmp_path)) == []
    text = (tmp_path / "pixi.lock").read_text()
    assert "127.0.0.1" not in text


def test_a_channel_that_cannot_be_read_changes_nothing(project: Path, tmp_path: Path) -> None:
    before = (project / "pixi.lock").read_bytes()
    with serve(tmp_path) as gone:
        pass
    base = rattler.Channel("conda-forge").base_url
    config = rattler.Config.from_toml(f'[mirrors]\n"{base}" = ["{gone}"]\n')
    source = conda_forge.source(config=config, cache_dir=tmp_path / "cache")
    with pytest.raises(ToolchainError, match="cannot be read"):
        pixilock.update(project, Store(tmp_path / "store"), SilentReporter(), source)
    assert (project / "pixi.lock").read_bytes() == before


def test_environments() -> None:
    assert MANIFEST["environments"]["dev"] in (["dev"], {"features": ["dev"]})
    version = re.search(r'__version__ = "(.+)"', (ROOT / "sm75" / "__init__.py").read_text())
    assert version is not None
    assert MANIFEST["workspace"]["version"] == version[1]
