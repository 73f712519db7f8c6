"""The command line: exit codes, JSON, messages, and what its start costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

import orchestrator
from sm75 import build, condapkg, errors, fetch, inputs, lockfile
from sm75.aot.package import Made
from sm75.channel import publish
from sm75.cli.options import open_store
from sm75.condapkg import FileSource
from sm75.errors import UsageError
from sm75.lockfile import ReleaseLock, artifacts_for, load_release
from sm75.progress import amount
from sm75.store import Store
from sm75.toolchain.host import build_platform
from tests.unit.commandkit import Ended, Runner
from tests.unit.projectkit import RELEASE, ROOT


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command and subcommand."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


COMMANDS = dict(commands(orchestrator.cli))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help(run: Runner, path: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        ended = run(*path, flag)
        assert ended.code == 0
        assert ended.out.startswith("Usage: ")
    assert COMMANDS[path].help
    for option in COMMANDS[path].params:
        if isinstance(option, click.Option):
            assert option.help, option.name


def test_version(run: Runner) -> None:
    from sm75 import __version__

    assert run("--version") == Ended(0, f"vllm-sm75, version {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("patches", "nonsense"), ("build", "--nonsense"), ("build", "--jobs", "-1"),
     ("fetch", "--rust", "maybe"), ("inspect",), ("channel", "verify", "x")],
)  # fmt: skip
def test_wrong_command_line(run: Runner, arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert "Usage: " in ended.err


@pytest.mark.parametrize(
    "arguments",
    [("fetch",), ("build",), ("build", "--dry-run", "--json"), ("verify",), ("toolchain",),
     ("inspect", "."), ("patches", "check"), ("patches", "seal"), ("lock",), ("lock", "--check")],
    ids=" ".join,
)  # fmt: skip
def test_unknown_release(run: Runner, arguments: tuple[str, ...]) -> None:
    ended = run(*arguments, "--release", "9.9.9")
    assert ended.code == 3
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert "9.9.9" in ended.err
    assert RELEASE in ended.err


def test_default_release_is_taken(run: Runner, tmp_path: Path) -> None:
    named = (ROOT / "lock" / "default").read_text().strip()
    ended = run("lock", "--json")
    assert ended.code == 0
    assert named in ended.json.values()
    assert run("lock", "--json", "--release", named) == ended
    assert named in run("lock").out


def _wanted() -> tuple[ReleaseLock, int]:
    lock = load_release(ROOT, None)
    artifacts = artifacts_for(lock, build_platform(), lock.rust.default)
    return lock, sum(artifact.download_size for artifact in artifacts)


def test_fetch_says_what_it_would_download(run: Runner, tmp_path: Path) -> None:
    lock, total = _wanted()
    artifacts = artifacts_for(lock, build_platform(), lock.rust.default)
    store = tmp_path / "store"
    ended = run("fetch", "--dry-run", "--json", "--store", store)
    assert ended.code == 0
    assert ended.json == {
        "download_bytes": total,
        "cached_bytes": 0,
        "files": [a.stored_filename for a in artifacts],
        "store": str(store),
    }
    text = run("fetch", "--dry-run", "--store", store).out
    first, *rest = text.splitlines()
    assert first.startswith(f"fetch: {amount(total, 'B')} in {len(artifacts)} files")
    assert [line.split()[-1] for line in rest] == [a.stored_filename for a in artifacts]
    assert not store.exists()


def test_fetch_without_the_rust_binary(run: Runner, tmp_path: Path) -> None:
    lock, total = _wanted()
    ended = run("fetch", "--dry-run", "--json", "--rust", "none", "--store", tmp_path / "s")
    binary = lock.artifact("vllm-rs")
    assert ended.json["download_bytes"] == total - binary.download_size


def test_readme_says_how_much_is_fetched() -> None:
    lock = load_release(ROOT, None)
    artifacts = artifacts_for(lock, "linux-64", lock.rust.default)
    total = sum(artifact.download_size for artifact in artifacts)
    assert f"fetch {round(total / 1e6)} MB" in (ROOT / "README.md").read_text()


class _Provider:
    """Identity only."""

    name = "stub"

    def identity(self, *_: object) -> dict[str, str]:
        return {"provider": "stub"}

    def rust(self, *_: object) -> str:
        return "it has no Rust"


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build's tools are taken for present."""
    monkeypatch.setattr("sm75.toolchain.choice.choose", lambda *_, install: _Provider())


@pytest.mark.parametrize("option", ["--dry-run", "--offline"])
def test_no_compiler_is_installed_where_nothing_may_be_fetched(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    allowed: list[bool] = []

    def choose(*_: object, install: bool) -> _Provider:
        allowed.append(install)
        return _Provider()

    monkeypatch.setattr("sm75.toolchain.choice.choose", choose)
    run("build", option, "--channel", tmp_path / "channel", "--store", tmp_path / "store")
    assert allowed == [False]


@pytest.mark.usefixtures("no_tools")
def test_build_says_what_it_would_do(run: Runner, tmp_path: Path) -> None:
    place = ("--channel", tmp_path / "channel", "--store", tmp_path / "store")
    ended = run("build", "--dry-run", "--json", *place)
    assert ended.code == 0
    assert ended.json["build"] is True
    name = ended.json["package"]
    assert re.fullmatch(rf"vllm-sm75-{re.escape(RELEASE)}-h[0-9a-f]{{12}}_0\.conda", name)
    ended = run("build", "--dry-run", *place)
    assert ended.code == 0
    assert f"build: {name} would be built" in ended.out
    assert "fetch: " in ended.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_tools")
def test_rust_from_source_is_refused(run: Runner, tmp_path: Path) -> None:
    ended = run("build", "--dry-run", "--rust", "source", "--channel", tmp_path / "c")
    assert ended.code in (2, 6)
    assert "prebuilt" in ended.err


def test_rust_sources_that_the_lock_does_not_pin_are_not_fetched(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is downloaded."""
    lock = load_release(ROOT)
    rust = msgspec.structs.replace(lock.rust, git_sha256={})
    unpinned = msgspec.structs.replace(lock, rust=rust)
    monkeypatch.setattr("sm75.cli.building.load_lock", lambda _: unpinned)
    ended = run("fetch", "--rust", "source", "--store", tmp_path / "store")
    assert ended.code == 3
    assert "lock --rust" in ended.err
    assert "harmony@" in ended.err
    assert not (tmp_path / "store").exists()
    ended = run("fetch", "--rust", "source", "--store", tmp_path / "store", "--dry-run")
    assert ended.code == 0
    assert "its crates are known once the sdist is in the store" in ended.out


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_tools: None) -> list[str]:
    """A build that takes no time; gives the list of what was called."""
    called: list[str] = []
    package = tmp_path / "vllm-sm75.conda"
    package.write_bytes(b"x")

    def done(*arguments: Any) -> build.Outcome:
        called.append("build")
        arguments[5](package)  # looks at it before it is published
        made_of = inputs.Inputs(facts={}, input_hash="1" * 64, native_hash="2" * 64)
        return build.Outcome(
            package=package, inputs=made_of, built=True, compiled=("a.cu",), seconds=1.26
        )

    monkeypatch.setattr(build, "build", done)
    monkeypatch.setattr(fetch, "fetch", lambda *_: called.append("fetch"))
    monkeypatch.setattr("sm75.cli.building._verify", lambda *_, **__: called.append("verify"))
    monkeypatch.setattr("sm75.aot.tools.build_platform", lambda: "linux-64")
    monkeypatch.setattr("sm75.aot.tools.installed", lambda _: True)

    def kernels(*_: Any) -> Made:
        called.append("kernels")
        return Made(package=tmp_path / "kernels.conda", packed=[], unknown=[], wrong=[])

    monkeypatch.setattr("sm75.aot.package.build", kernels)
    monkeypatch.setattr("sm75.aot.package.current", lambda *_: None)
    monkeypatch.setattr("sm75.aot.package.remember", lambda *_: None)
    return called


def test_build_fetches_builds_and_checks(run: Runner, built: list[str], tmp_path: Path) -> None:
    place = ("--channel", tmp_path / "channel", "--store", tmp_path / "store")
    ended = run("build", *place)
    assert ended.code == 0
    assert built == ["fetch", "build", "verify", "kernels"]
    assert "Rust frontend: prebuilt" in ended.out
    assert str(tmp_path / "kernels.conda") in ended.out
    built.clear()
    assert run("build", "--offline", "--no-verify", "--no-kernels", *place).code == 0
    assert built == ["build"]


@pytest.mark.parametrize(
    ("platform", "present", "given", "said"),
    [
        ("linux-aarch64", True, (), "kernels are compiled on linux-64, this is linux-aarch64"),
        ("linux-64", False, ("--offline",), "the compiler of the attention kernels is not here"),
    ],
)
def test_a_build_without_kernels_is_a_build(
    run: Runner, built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    platform: str, present: bool, given: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    """It says that attention goes without tensor cores; only --kernels makes that an error."""
    monkeypatch.setattr("sm75.aot.tools.build_platform", lambda: platform)
    monkeypatch.setattr("sm75.aot.tools.installed", lambda _: present)
    place = ("--channel", str(tmp_path / "channel"), "--store", str(tmp_path / "store"), *given)
    ended = run("build", *place)
    assert ended.code == 0
    assert "kernels" not in built
    assert "warning: attention goes without tensor cores" in ended.err
    assert said in ended.err
    asked = run("build", "--kernels", *place)
    assert asked.code != 0
    assert said in asked.err
    assert asked.err.count("next:") == 1


def test_there_are_no_kernels_for_another_target(run: Runner, built: list[str]) -> None:
    ended = run("build", "--target", "linux-64", "--ptx", "--kernels")
    assert ended.code == 2
    assert built == []
    assert "there are no kernels for linux-64" in ended.err


def test_json_of_a_build_is_all_that_is_printed(
    run: Runner, built: list[str], tmp_path: Path
) -> None:
    """It fetches as the other does; only what it prints differs."""
    ended = run("build", "--json", "--channel", tmp_path / "c", "--store", tmp_path / "store")
    assert ended.code == 0
    assert built == ["fetch", "build", "verify", "kernels"]
    assert ended.json == {
        "package": str(tmp_path / "vllm-sm75.conda"),
        "kernels": str(tmp_path / "kernels.conda"),
        "built": True,
        "withdrawn": [],
        "input_hash": "1" * 64,
        "native_hash": "2" * 64,
        "compiled": 1,
        "rust_frontend": "prebuilt",
        "seconds": 1.3,
    }


def test_channel(run: Runner, tmp_path: Path) -> None:
    channel = tmp_path / "channel"
    package = condapkg.write_conda(
        tmp_path / "built", name="demo", version="1", build="0", subdir="linux-aarch64",
        files={"share/demo": FileSource.from_bytes(b"x")},
    )  # fmt: skip
    publish([package], channel)
    assert run("channel", "verify", "--channel", channel).code == 0
    assert run("channel", "verify", "--channel", channel, "--json").json == []
    (channel / "linux-aarch64" / package.name).write_bytes(b"y")
    ended = run("channel", "verify", "--channel", channel, "--json")
    assert ended.code == 8
    assert {problem["kind"] for problem in ended.json} == {"altered"}
    assert package.name in ended.err


def test_images(run: Runner, tmp_path: Path) -> None:
    image = tmp_path / "image.json"
    image.write_text(
        json.dumps({"os": "linux", "architecture": "arm64",
                    "config": {"Env": ["TORCH_CUDA_ARCH_LIST=8.0 9.0"]}})
    )  # fmt: skip
    ended = run("inspect", "--json", image)
    assert ended.code == 0
    assert "8.0 9.0" in json.dumps(ended.json)
    assert run("inspect", image).code == 0


def test_patches_against_a_tree_without_them(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    ended = run("patches", "check", "--json", "--against", tmp_path / "tree")
    assert ended.code == 1
    assert {entry["name"] for entry in ended.json} >= {"0001-cmake-turing-only.patch"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("verify", "{tmp}/no.conda"), 2, "no.conda"),
        (("verify", "--channel", "{tmp}/no"), 8, "orchestrator.py build"),
        (("verify", "--channel", "{tmp}/file"), 8, "orchestrator.py build"),
        (("verify", "{tmp}/file"), 8, "file"),
        (("inspect", "{tmp}/no.whl"), 2, "no.whl"),
        (("inspect", "{tmp}/no.json"), 2, "no.json"),
        (("inspect", "{tmp}/bad.json"), 2, "next:"),
        (("inspect", "--target", "nonsense", "{tmp}"), 3, "nonsense"),
        (("patches", "check", "--against", "{tmp}/no"), 2, "neither a path nor a release"),
    ],
)
def test_faults_are_explained(
    run: Runner, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    (tmp_path / "file").write_text("no package")
    (tmp_path / "bad.json").write_text("{")
    store = () if arguments[0] == "channel" else ("--store", str(tmp_path / "store"))
    ended = run(*(a.replace("{tmp}", str(tmp_path)) for a in arguments), *store)
    assert ended.code == code, ended.err
    assert words in ended.err
    assert ended.err.startswith("error: ")
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "the same command resumes"),
        (OSError(28, "No space left on device", "/full/x"), 9, "No space left on device: /full/x"),
        (errors.BusyError("busy", why="because", fix="wait"), 10, "busy\n  why:  because\n  next:"),
    ],
)
def test_faults_anywhere(
    run: Runner, monkeypatch: pytest.MonkeyPatch, fault: BaseException, code: int, words: str
) -> None:
    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(lockfile, "load_release", fail)
    ended = run("lock")
    assert ended.code == code
    assert words in ended.err


def test_exit_codes_are_documented() -> None:
    documented = {int(n) for n in re.findall(r"(?m)^(\d+) ", errors.__doc__ or "")}
    kinds: list[type[errors.Sm75Error]] = [errors.Sm75Error, *errors.Sm75Error.__subclasses__()]
    assert documented == {kind.exit_code for kind in kinds} | {0, 130}
    assert len({kind.exit_code for kind in kinds}) == len(kinds)


def test_store_from_the_environment(
    run: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SM75_STORE", str(tmp_path / "elsewhere"))
    ended = run("fetch", "--dry-run", "--json")
    assert ended.json["store"] == str(tmp_path / "elsewhere")
    assert open_store(Path("given")).root == Path.cwd() / "given"
    assert open_store(Path("~/given")).root == Path.home() / "given"
    assert isinstance(open_store(None), Store)


def _start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], check=False, capture_output=True, text=True)


def test_a_start_imports_little() -> None:
    done = _start("-X", "importtime", str(ROOT / "orchestrator.py"), "--version")
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"click", "sm75", "sm75.errors"} <= imported
    heavy = {"httpx", "rattler", "rattler_build", "rich", "msgspec", "tomlkit", "zstandard"}
    assert imported & heavy == set()


def test_as_a_program() -> None:
    done = _start(str(ROOT / "orchestrator.py"), "lock", "--release", "9.9.9")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    """As some supervisors start programs; the next file opened must not become a stream."""
    error = tmp_path / "error"
    command = f'exec "$0" "$1" lock {closed}' + ("" if "2>" in closed else f' 2>"{error}"')
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, str(ROOT / "orchestrator.py")], check=False
    )
    assert done.returncode == 0
    assert not error.exists() or error.read_text() == ""


def test_image_description_that_is_no_text(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "image.json").write_bytes(b"\xff\xfe{")
    ended = run("inspect", str(tmp_path / "image.json"))
    assert ended.code == 2
    assert "not JSON" in ended.err


@pytest.mark.usefixtures("no_tools")
def test_build_for_proofs_goes_elsewhere(run: Runner, tmp_path: Path) -> None:
    ended = run("build", "--dry-run", "--json", "--target", "linux-64", "--ptx",
                "--store", tmp_path / "store")  # fmt: skip
    assert ended.code == 0
    assert ended.json["package"].startswith(f"vllm-sm75-ptx-{RELEASE}-h")
    for arguments in (("--ptx",), ("--target", "linux-64")):
        refused = run("build", "--dry-run", *arguments, "--channel", tmp_path / "channel")
        assert refused.code == UsageError.exit_code
        assert "--ptx" in refused.err


def test_fetch_for_proofs_takes_the_counterparts(run: Runner, tmp_path: Path) -> None:
    files = run("fetch", "--dry-run", "--json", "--target", "linux-64", "--store", tmp_path).json[
        "files"
    ]
    assert not [name for name in files if name.startswith("nvidia_") and "aarch64" in name]
    torch = load_release(ROOT, None).artifact("torch-dev-for-linux-64")
    assert torch.stored_filename in files
