"""The commands around the channel, from their command line on."""

from __future__ import annotations

import io
import json
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rattler

from sm75 import channel as channels
from sm75 import channelcommands, closure, closurelock, closureresolve, fetch, install, recipedeps
from sm75.basepython import BasePython
from sm75.cli import box
from sm75.install import Box
from sm75.lockfile import ReleaseLock, load_release, load_target
from sm75.progress import PlainReporter, SilentReporter
from sm75.store import Store
from tests.unit import channelkit
from tests.unit.commandkit import Runner, take_for_project
from tests.unit.projectkit import RELEASE, ROOT, copy_project
from tests.unit.test_contract import _FAKE, make_image
from tests.unit.test_recipedeps import make_sdist

LOCK = load_release(ROOT, RELEASE)
RUNTIME = closurelock.load_runtime(ROOT, RELEASE)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project, which the command line takes for its own."""
    root = copy_project(tmp_path / "project")
    take_for_project(monkeypatch, root)
    return root


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return channelkit.product(tmp_path / "channel", ("3.12",), channelkit.python(tmp_path / "p"))


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is taken for a g5g without a GPU driver."""
    box = Box(platform="linux-aarch64", virtual={"__linux": "0", "__unix": "0", "__glibc": "2.39"})
    monkeypatch.setattr(install, "this_box", lambda: box)


# channel lock


@pytest.fixture
def sdist(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The store has an sdist that requires alpha, and the closure is resolved at once."""
    asked: list[str] = []
    made = make_sdist(tmp_path, "alpha>=1", "tilelang==0.1.12")
    monkeypatch.setattr(Store, "has", lambda *_: True)
    monkeypatch.setattr(Store, "get", lambda *_: made)

    def resolve(*_: Any, check: bool, upgrade: bool) -> closurelock.RuntimeLock:
        asked.append(f"check={check} upgrade={upgrade}")
        return RUNTIME

    monkeypatch.setattr(closure, "make_lock", resolve)
    return asked


def test_lock_writes_the_recipes_list(run: Runner, project: Path, sdist: list[str]) -> None:
    ended = run("channel", "lock", "--json")
    assert (ended.code, ended.err) == (0, "")
    assert ended.json == {
        "wheels": len(RUNTIME.packages),
        "bytes": sum(p.size for p in RUNTIME.packages),
        "python": list(closureresolve.MINORS),
        "run_dependencies": 1,
        "recipe_changed": True,
    }
    text = (project / recipedeps.RECIPE).read_text()
    assert recipedeps.listed(text, RELEASE) == ("alpha >=1",)
    again = run("channel", "lock", "--upgrade")
    assert "1 run dependency in the recipe\n" in again.out
    assert sdist == ["check=False upgrade=False", "check=False upgrade=True"]


def test_lock_check_writes_nothing(run: Runner, project: Path, sdist: list[str]) -> None:
    before = (project / recipedeps.RECIPE).read_bytes()
    ended = run("channel", "lock", "--check")
    assert ended.code == 1
    assert "does not list alpha >=1" in ended.err
    assert "next: run: python3 orchestrator.py channel lock" in ended.err
    assert (project / recipedeps.RECIPE).read_bytes() == before
    assert sdist == []
    run("channel", "lock")
    assert run("channel", "lock", "--check").code == 0


def test_lock_without_uv(
    run: Runner, project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = make_sdist(tmp_path, *(name for name in _omitted() if name != "triton"))
    monkeypatch.setattr(Store, "has", lambda *_: True)
    monkeypatch.setattr(Store, "get", lambda *_: made)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    ended = run("channel", "lock")
    assert ended.code == 6
    assert "uv is not installed" in ended.err


# channel build


def test_build_says_what_it_would_fetch(run: Runner, tmp_path: Path) -> None:
    place = ("--store", tmp_path / "store", "--channel", tmp_path / "channel")
    ended = run("channel", "build", "--dry-run", "--json", *place)
    assert ended.code == 0
    assert ended.json["wheels"] == len(ended.json["files"]) == len(RUNTIME.packages)
    assert ended.json["download_bytes"] == sum(p.size for p in RUNTIME.packages)
    text = run("channel", "build", "--dry-run", *place).out
    assert (
        f"channel: {len(RUNTIME.packages)} wheels, {len(RUNTIME.packages)} of them to fetch" in text
    )
    assert list(tmp_path.iterdir()) == []


def test_build_refuses_an_image_before_it_fetches(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "fetch", lambda *_: pytest.fail("fetched"))
    ended = run("channel", "build", "--target", "dlami-pytorch-2.7", "--channel", tmp_path / "c",
                "--store", tmp_path / "store")  # fmt: skip
    assert ended.code == 3
    assert "torch 2.7.0+cu128" in ended.err
    assert "stable ABI of 2.11" in ended.err


def test_build_offline_names_what_the_store_lacks(run: Runner, tmp_path: Path) -> None:
    ended = run("channel", "build", "--offline", "--channel", tmp_path / "c", "--store", tmp_path)
    assert ended.code == 4
    assert ".whl" in ended.err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("reason", ["", "no route to host"])
def test_build_fetches_builds_and_says_it(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """With python where conda-forge answers, else without it, and that is said."""
    done: list[str] = []
    outcome = closure.Outcome(packages=("a", "b"), published=("a",), withdrawn=())

    def made(*_: Any, base: list[Path]) -> closure.Outcome:
        done.append(f"built with {[p.name for p in base]}")
        return outcome

    def mirror(*_: Any) -> str:
        done.append("mirrored")
        return reason

    monkeypatch.setattr(fetch, "fetch", lambda *_: done.append("fetched"))
    monkeypatch.setattr(BasePython, "mirror", mirror)
    monkeypatch.setattr(BasePython, "packages", lambda *_: [] if reason else [Path("python.conda")])
    monkeypatch.setattr(closure, "build", made)
    place = ("--channel", tmp_path / "c", "--store", tmp_path / "store")
    ended = run("channel", "build", *place)
    assert ended.code == 0
    base = [] if reason else ["python.conda"]
    assert done == ["fetched", "mirrored", f"built with {base}"]
    assert ended.out == "channel: 2 packages of the closure, 1 of them new, 0 withdrawn\n"
    said = f"goes without python, for conda-forge is out of reach: {reason}"
    assert (said in ended.err) is bool(reason)
    done.clear()
    ended = run("channel", "build", "--offline", "--json", *place)
    assert ended.json == {"packages": 2, "published": ["a"], "withdrawn": []}
    assert done == [f"built with {base}"]


def test_build_warns_of_the_closure_of_another_release(
    run: Runner, channel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = msgspec.structs.replace(LOCK, vllm="0.28.0")
    gone: tuple[str, ...] = ("numpy",)
    monkeypatch.setattr(
        closure, "build",
        lambda *_, **__: closure.Outcome(packages=(), published=(), withdrawn=gone),
    )  # fmt: skip
    monkeypatch.setattr(BasePython, "packages", lambda *_: [])

    def said(lock: ReleaseLock) -> str:
        out = io.StringIO()
        channelcommands.build(
            ROOT, lock, Store(tmp_path / "s"), channel, PlainReporter(out), offline=True
        )
        return out.getvalue()

    assert said(LOCK) == ""
    assert "it also has vllm-sm75 0.33.0, whose dependencies may be among" in said(older)
    gone = ()
    assert said(older) == ""


# channel sizes, missing, export


def test_sizes(run: Runner, channel: Path, tmp_path: Path) -> None:
    ended = run("channel", "sizes", "--json", "--channel", channel)
    assert ended.json["totals"]["vllm-sm75"] > 0
    assert len(ended.json["packages"]) == 4
    assert "vllm-sm75" in run("channel", "sizes", "--channel", channel).out
    assert run("channel", "sizes", "--channel", tmp_path / "void").code == 8


def test_missing(run: Runner, channel: Path, tmp_path: Path) -> None:
    ended = run("channel", "missing", "--channel", channel)
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    less = channelkit.product(tmp_path / "less", ("3.12", "3.13"))
    ended = run("channel", "missing", "--channel", less)
    assert ended.code == 1
    assert ended.out.startswith("python 3.12: python 3.12 and its libraries: ")
    assert len(ended.out.splitlines()) == 2
    assert f"python3 orchestrator.py channel build --channel {less};" in ended.err
    ended = run("channel", "missing", "--json", "--channel", less)
    assert ended.code == 1
    assert [len(texts) for texts in ended.json.values()] == [1, 1]


def test_export(run: Runner, channel: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.tar"
    ended = run("channel", "export", "--dry-run", "--json", "--channel", channel, out)
    assert ended.json["files"] == 7  # four packages, two indexes, SHA256SUMS
    assert ended.json["bytes"] == sum(
        p.stat().st_size for p in channel.rglob("*") if p.is_file() and p.name != ".lock"
    )
    assert not out.exists()
    ended = run("channel", "export", "--channel", channel, out)
    digest, name = ended.out.split()
    assert name == str(out)
    ended = run("channel", "export", "--channel", channel, out)
    assert ended.code == 2
    assert "name another file, or remove it" in ended.err
    again = tmp_path / "again.tar"
    assert run("channel", "export", "--json", "--channel", channel, again).json == {
        "file": str(again), "sha256": digest
    }  # fmt: skip
    (channel / "noarch" / "repodata.json").write_text("{}")
    for dry in ((), ("--dry-run",)):
        ended = run("channel", "export", *dry, "--channel", channel, tmp_path / "d.tar")
        assert ended.code == 8
        assert "noarch/repodata.json" in ended.err
    assert not (tmp_path / "d.tar").exists()


def test_verify(run: Runner, channel: Path, tmp_path: Path) -> None:
    assert run("channel", "verify", "--channel", channel).code == 0
    stray = channel / "noarch" / "x"
    stray.write_text("")
    ended = run("channel", "verify", "--channel", channel)
    assert ended.code == 8
    assert f"{channel} has a fault" in ended.err
    assert "move the named files away" in ended.err
    stray.unlink()
    next(channel.glob("*/numpy-*.conda")).unlink()
    ended = run("channel", "verify", "--channel", channel)
    assert ended.code == 8
    assert "2 faults" in ended.err  # of the sums and of the index
    assert "next: copy the channel anew" in ended.err
    (tmp_path / "empty").mkdir()
    for place in ("/", tmp_path / "empty"):
        ended = run("channel", "verify", "--channel", place)
        assert ended.code == 8
        assert "next: name one (--channel DIR)" in ended.err


# install


def add_kernels(channel: Path, version: str) -> None:
    """Attention compiled ahead of time, of some release."""
    made = channelkit.write(
        channel.with_name("kernels"), "vllm-sm75-kernels", version, "h0_0", noarch=True,
        depends=["python >=3.11", f"vllm-sm75 {version}.*"],
    )  # fmt: skip
    channels.publish([made], channel)


@pytest.mark.usefixtures("arm")
def test_install(run: Runner, channel: Path, tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "lib" / "python3.12" / "site-packages" / "torch").mkdir(parents=True)
    place = ("--channel", channel, "--prefix", tmp_path / "env", "--image", image)
    ended = run("install", "--dry-run", *place)
    assert ended.code == 0
    assert ended.err.startswith("warning: the channel has no vllm-sm75-kernels of this release")
    first, *rest = ended.out.splitlines()
    assert first == f"install: would install 4 packages for Python 3.12 in {tmp_path / 'env'}"
    assert "  vllm-sm75 0.33.0 h0_0" in rest
    assert not (tmp_path / "env").exists()
    add_kernels(channel, "0.28.0")  # of another release: of no use
    assert run("install", "--dry-run", *place).out == ended.out
    add_kernels(channel, "0.33.0")
    ended = run("install", "--json", *place)
    assert (ended.code, ended.err) == (0, "")
    assert ended.json["python"] == "3.12"
    assert any(name.startswith("vllm-sm75-kernels 0.33.0") for name in ended.json["packages"])
    assert ended.json["warning"] == ""
    assert (tmp_path / "env" / "etc" / "dlami-torch" / "path").read_text() == f"{image}\n"
    again = run("install", *place)
    assert again.code == 2
    assert "is not empty" in again.err


@pytest.mark.usefixtures("arm")
def test_install_warns_of_an_image_that_will_not_do(
    run: Runner, channel: Path, tmp_path: Path
) -> None:
    place = ("--channel", channel, "--python", "3.12", "--image", tmp_path / "image")
    ended = run("install", "--prefix", tmp_path / "one", *place)
    assert ended.code == 0
    assert ended.err.startswith(f"warning: there is no torch in {tmp_path / 'image'}: ")
    (tmp_path / "image/lib/python3.13/site-packages/torch").mkdir(parents=True)
    ended = run("install", "--dry-run", "--prefix", tmp_path / "two", *place)
    assert ended.code == 0
    assert "is for Python 3.13, this environment has 3.12" in ended.err


def test_install_for_another_machine(
    run: Runner, channel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Box(platform="linux-64", virtual={})
    monkeypatch.setattr(install, "this_box", lambda: here)
    place: tuple[str | Path, ...] = ("--channel", channel, "--prefix", tmp_path / "env")
    # before anything else, for nothing else matters there
    ended = run("install", *place)
    assert ended.code == 2
    assert "vllm-sm75 is for linux-aarch64" in ended.err
    assert "--foreign" in ended.err
    place += ("--python", "3.12")
    add_kernels(channel, "0.33.0")
    ended = run("install", "--foreign", *place)
    assert (ended.code, ended.err) == (0, "")
    assert (tmp_path / "env" / "bin" / "vllm").exists()


@pytest.mark.usefixtures("arm")
def test_install_from_a_damaged_channel(run: Runner, channel: Path, tmp_path: Path) -> None:
    channelkit.flip(next(channel.glob("*/numpy-*.conda")))
    for dry in ((), ("--dry-run",)):
        ended = run("install", *dry, "--channel", channel, "--prefix", tmp_path / "env",
                    "--python", "3.12")  # fmt: skip
        assert ended.code == 8
        assert "numpy-2.4-py312.conda: altered" in ended.err
    assert not (tmp_path / "env").exists()


@pytest.mark.usefixtures("arm")
@pytest.mark.parametrize("kind", ["nothing", "a file", "an empty directory"])
@pytest.mark.parametrize(
    "command",
    ["verify", "report", "install --prefix P", "channel verify", "channel missing",
     "channel sizes", "channel export F", "channel export F --dry-run", "channel publish D",
     "channel publish D --dry-run"],
)  # fmt: skip
def test_no_channel_is_one_fault_everywhere(
    run: Runner, tmp_path: Path, kind: str, command: str
) -> None:
    """With the exit code of channels, in the same words, and with what to type next."""
    place = tmp_path / "gone"
    if kind == "a file":
        place.write_text("")
    elif kind != "nothing":
        place.mkdir()
    words = [str(tmp_path / word) if len(word) == 1 else word for word in command.split()]
    ended = run(*words, "--channel", place)
    assert (ended.code, ended.out) == (8, "")
    assert ended.err.startswith(f"error: there is no channel {place}\n")
    assert "next: name one (--channel DIR), or make it: python3 orchestrator.py build" in ended.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gone"] * (kind != "nothing")


def spoil(channel: Path, **changes: object) -> None:
    channelkit.edit_index(channel, "numpy", **changes)


def unname(channel: Path) -> None:
    index = channel / "linux-aarch64" / "repodata.json"
    data = json.loads(index.read_bytes())
    (record,) = [r for r in data["packages.conda"].values() if r["name"] == "numpy"]
    del record["name"]
    index.write_text(json.dumps(data))


def be_a_file(channel: Path) -> None:
    shutil.rmtree(channel)
    channel.write_text("x")


def truncate(channel: Path) -> None:
    index = channel / "linux-aarch64" / "repodata.json"
    index.write_bytes(index.read_bytes()[:100])


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        lambda c: (c / "linux-aarch64" / "repodata.json").write_text("[]"),
        lambda c: (c / "linux-aarch64" / "repodata.json").unlink(),
        unname,
        lambda c: spoil(c, version="!!"),
        lambda c: spoil(c, depends=5),
        lambda c: spoil(c, depends=[None]),
        shutil.rmtree,
        be_a_file,
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.usefixtures("arm")
def test_install_checks_the_channel_before_it_reads_it(
    run: Runner, channel: Path, tmp_path: Path, damage: Callable[[Path], object],
    dry: tuple[str, ...],
) -> None:  # fmt: skip
    damage(channel)
    before = sorted(tmp_path.iterdir())
    ended = run("install", *dry, "--channel", channel, "--prefix", tmp_path / "env",
                "--python", "3.12")  # fmt: skip
    assert (ended.code, ended.out) == (8, "")
    assert str(channel) in ended.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("arm")
def test_install_of_a_release_that_the_channel_lacks(
    run: Runner, channel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = msgspec.structs.replace(LOCK, vllm="0.28.0")
    monkeypatch.setattr(box, "load_lock", lambda release: older)
    place = ("--dry-run", "--channel", channel, "--prefix", tmp_path / "env", "--python", "3.12")
    ended = run("install", "--release", "0.28.0", *place)
    assert ended.code == 8
    assert "the channel has no vllm-sm75 0.28.0" in ended.err
    assert "it has 0.33.0" in ended.err
    # not asked for: what the channel has
    assert "vllm-sm75 0.33.0" in run("install", *place).out
    monkeypatch.setattr(box, "load_lock", lambda release: LOCK)
    assert "vllm-sm75 0.33.0" in run("install", "--release", "0.33.0", *place).out


@pytest.mark.usefixtures("arm")
def test_install_takes_the_newest_release_or_none(run: Runner, tmp_path: Path) -> None:
    """Not an older one, without a word, where the newest lacks a dependency."""
    made = tmp_path / "made"
    newer = channelkit.write(made, "vllm-sm75", "0.34.0", "h0_0", depends=["python", "gone"])
    channel = channelkit.product(tmp_path / "c", ("3.12",), channelkit.python(made), newer)
    place = ("--dry-run", "--channel", channel, "--prefix", tmp_path / "env", "--python", "3.12")
    ended = run("install", *place)
    assert (ended.code, ended.out) == (8, "")
    assert "no set of packages gives vllm-sm75 ==0.34.0" in ended.err
    assert "gone" in ended.err
    assert "vllm-sm75 0.33.0" in run("install", "--release", "0.33.0", *place).out


@pytest.mark.usefixtures("arm")
def test_install_for_an_image_that_no_build_serves(
    run: Runner, channel: Path, tmp_path: Path
) -> None:
    ended = run("install", "--target", "dlami-pytorch-2.7", "--channel", channel, "--python",
                "3.12", "--prefix", tmp_path / "env")  # fmt: skip
    assert ended.code == 3
    assert "torch 2.7.0+cu128" in ended.err
    assert not (tmp_path / "env").exists()


@pytest.mark.usefixtures("arm")
def test_foreign_does_not_look_at_this_machine(run: Runner, channel: Path, tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "lib/python3.12/site-packages/torch").mkdir(parents=True)
    place = ("--dry-run", "--image", image, "--channel", channel, "--prefix", tmp_path / "env")
    assert run("install", *place).code == 0
    ended = run("install", "--foreign", *place)
    assert ended.code == 2
    assert "give --python, one of 3.12" in ended.err


@pytest.mark.usefixtures("arm")
def test_install_from_another_index_that_is_damaged(
    run: Runner, channel: Path, tmp_path: Path
) -> None:
    """No list of hashes goes with such a channel, so only the reader can tell."""
    other = channelkit.bare(tmp_path / "other", channelkit.write(tmp_path / "o", "other"))
    (other / "linux-aarch64" / "repodata.json").write_text("[]")
    ended = run("install", "--channel", channel, "--extra-channel", other, "--python", "3.12",
                "--prefix", tmp_path / "env")  # fmt: skip
    assert ended.code == 8
    assert "an index cannot be read" in ended.err


@pytest.mark.usefixtures("arm")
def test_interrupted_install_does_not_promise_to_resume(
    run: Runner, channel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupt(*_: object, target_prefix: Path, **__: object) -> None:
        target_prefix.mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(rattler, "install", interrupt)
    before = sorted(tmp_path.iterdir())
    ended = run("install", "--channel", channel, "--python", "3.12", "--prefix", tmp_path / "env")
    assert ended.code == 130
    assert "nothing was installed" in ended.err
    assert "it starts anew" in ended.err
    assert "resume" not in ended.err
    assert sorted(tmp_path.iterdir()) == before


# doctor


def test_contract(run: Runner, project: Path, tmp_path: Path) -> None:
    image = make_image(tmp_path / "image", _FAKE)
    asked = ("doctor", "--write-contract", "--path", image, "--name", "mine")
    ended = run(*asked, "--dry-run")
    assert (ended.code, ended.err) == (0, "")
    assert 'torch = "2.12.0+cu132"' in ended.out
    path = project / "lock" / "targets" / "mine.toml"
    assert not path.exists()
    ended = run(*asked)
    assert ended.out == f"doctor: wrote {path}\n"
    assert load_target(project, "mine").torch_arches == ("sm_75", "sm_80")
    ended = run(*asked)
    assert ended.code == 2
    assert "already" in ended.err
    ended = run(*asked, "--replace", "--json")
    assert ended.json["contract"] == str(path)
    assert ended.json["text"] == path.read_text()


def test_contract_that_no_build_serves(run: Runner, project: Path, tmp_path: Path) -> None:
    """It is written, for it is what the machine has; and one is told."""
    old = _FAKE.replace("2.12.0+cu132", "2.7.0+cu128")
    image = make_image(tmp_path / "image", old)
    ended = run("doctor", "--write-contract", "--path", image, "--name", "old")
    assert ended.code == 0
    assert "warning: no build serves old: it has torch 2.7.0+cu128" in ended.err
    assert (project / "lock" / "targets" / "old.toml").exists()


def test_contract_of_nothing(run: Runner, tmp_path: Path) -> None:
    ended = run("doctor", "--name", "x")
    assert ended.code == 2
    assert "--write-contract" in ended.err
    ended = run("doctor", "--write-contract", "--path", tmp_path)
    assert ended.code == 2
    assert "there is no Python environment" in ended.err


def _omitted() -> list[str]:
    return sorted(closurelock.load_omissions(ROOT, RELEASE).projects)


def test_functions_alone(channel: Path, tmp_path: Path) -> None:
    """Without the command line: what is returned is what --json prints."""
    found = channelcommands.missing(ROOT, LOCK, channel)
    assert json.loads(json.dumps(found)) == {"3.12": []}
    wanted = channelcommands.build(
        ROOT, LOCK, Store(tmp_path / "s"), tmp_path / "c", SilentReporter(), dry_run=True
    )
    assert wanted["cached_bytes"] == 0
