"""Patches, locks and channels of others are data: refused or taken literally, and never run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sm75 import channel as channels
from sm75 import closure, series
from sm75.channel import index, publish, verify_channel
from sm75.channelcheck import SUMS, is_inside, read_sums
from sm75.condapkg import FileSource, read_info, write_conda
from sm75.errors import ChannelError, LockError, PatchError, Sm75Error
from sm75.fetch import plan_artifacts
from sm75.lockfile import Artifact, dump_release, load_release, load_target, parse_release
from sm75.store import Store
from tests.unit import channelkit
from tests.unit.badserver import BadServer
from tests.unit.fetchkit import run as fetch_now
from tests.unit.projectkit import RELEASE, ROOT
from tests.unit.test_patching import CHANGE, A, Kit

COMMANDS = ["$(touch CANARY)", "`touch CANARY`", "; touch CANARY", "| touch CANARY", "x\ntouch"]
DIGITS = "9" * 5000
REAL = load_release(ROOT, RELEASE)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No process may be started by any of these, and no file made where a command would."""
    work = tmp_path / "cwd"
    work.mkdir()
    monkeypatch.chdir(work)

    def started(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", started)
    for name in ("system", "popen", "posix_spawn", "execv", "execve", "fork"):
        monkeypatch.setattr(os, name, started)
    yield
    assert list(work.iterdir()) == []


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path / "kit")


# patches


@pytest.mark.parametrize("text", COMMANDS)
def test_commands_in_a_series_are_text(kit: Kit, text: str) -> None:
    quoted = json.dumps(text)
    kit.patch(CHANGE)
    kit.rows[-1] = kit.rows[-1].replace('purpose = "p"', f"purpose = {quoted}")
    kit.apply()
    assert kit.files()["pkg/a.py"] == A.replace(b"three", b"THREE")
    assert kit.series().patches[0].purpose == text


@pytest.mark.parametrize("name", ["$(touch CANARY).py", "a;touch CANARY", "-rf", "~", "%s{x}"])
def test_commands_in_a_patched_name_are_a_name(kit: Kit, name: str) -> None:
    patch = f"--- /dev/null\n+++ b/pkg/{name}\n@@ -0,0 +1 @@\n+x = 1\n"
    kit.patch(patch.encode())
    try:
        kit.apply()
    except PatchError:
        assert set(kit.files()) == {"pkg/a.py"}
    else:
        assert kit.files()[f"pkg/{name}"] == b"x = 1\n"


@pytest.mark.parametrize(
    "old",
    ["@@ -DIGITS,3 +2,3 @@", "@@ -2,DIGITS +2,3 @@", "@@ -2,3 +2,DIGITS @@",
     "@@ -99999999999999999999,3 +2,3 @@", "@@ -2,3 +99999999999999999999,3 @@",
     "@@ -2,99999999999 +2,3 @@"],
)  # fmt: skip
def test_giant_numbers_in_a_patch(kit: Kit, old: str) -> None:
    kit.patch(CHANGE.replace(b"@@ -2,3 +2,3 @@", old.replace("DIGITS", DIGITS).encode()))
    with pytest.raises(PatchError):
        kit.apply()
    assert kit.files() == {"pkg/a.py": A}


@pytest.mark.parametrize("number", [DIGITS, "-1", "1e999", "nan", "0x" + "f" * 6000])
def test_giant_numbers_in_a_series(kit: Kit, number: str) -> None:
    kit.patch(CHANGE)
    kit.rows = [row.replace("schema = 1", f"schema = {number}") for row in kit.rows]
    with pytest.raises(PatchError):
        kit.series()


def test_a_deeply_nested_series(kit: Kit) -> None:
    kit.patch(CHANGE)
    kit.rows[0] += "x = " + "[" * 20_000 + "]" * 20_000 + "\n"
    with pytest.raises(PatchError):
        kit.series()


def test_links_among_the_patches_lead_nowhere(kit: Kit, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret\n")
    kit.patch(CHANGE)
    (kit.dir / "0001-x.patch").unlink()
    (kit.dir / "0001-x.patch").symlink_to(outside)
    with pytest.raises(PatchError, match="cannot be read"):
        kit.series()


def test_a_link_that_a_patch_would_write_through(kit: Kit, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (kit.tree / "new").symlink_to(tmp_path / "outside")
    kit.patch(b"--- /dev/null\n+++ b/new/x.py\n@@ -0,0 +1 @@\n+x\n")
    with pytest.raises(PatchError, match="symbolic link"):
        kit.apply()
    assert list((tmp_path / "outside").iterdir()) == []


def test_overlay_files_that_leave_their_directory(kit: Kit, tmp_path: Path) -> None:
    kit.overlay("pkg/x.py", b"ours\n", file="x.py")
    (tmp_path / "kit" / "secret").write_bytes(b"ours\n")
    kit.rows[-1] = kit.rows[-1].replace('file = "x.py"', 'file = "../../secret"')
    with pytest.raises(PatchError):
        kit.series()


# locks


def with_artifact(**changes: Any) -> str:
    first = msgspec.structs.replace(REAL.artifacts[0], **changes)
    return dump_release(msgspec.structs.replace(REAL, artifacts=(first, *REAL.artifacts[1:])))


@pytest.mark.parametrize(
    "filename",
    ["../../x-1.tar.gz", "/etc/passwd", "a/b-1.tar.gz", "..", ".x", "-x-1.tar.gz", "x\n-1.tar.gz",
     "vllm-0.33.0$(touch CANARY).tar.gz", "vllm-0.33.0;x.tar.gz", "x" * 300 + "-1.tar.gz", ""],
)  # fmt: skip
def test_file_names_of_a_lock(filename: str) -> None:
    with pytest.raises(LockError):
        parse_release(with_artifact(filename=filename))


@pytest.mark.parametrize("sha256", ["../" * 20 + "aaaa", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_hashes_of_a_lock(sha256: str) -> None:
    """A hash becomes part of a path in the store."""
    with pytest.raises(LockError):
        parse_release(with_artifact(sha256=sha256))


@pytest.mark.parametrize("project", ["../../simple/other", "vllm/../x", "vllm?x=1", "$(x)", ""])
def test_projects_of_a_lock(project: str) -> None:
    """A project becomes part of a URL."""
    with pytest.raises(LockError):
        parse_release(with_artifact(project=project))


@pytest.mark.parametrize("old", ["schema = 1", "size = "])
@pytest.mark.parametrize("number", [DIGITS, "-5", "1e999", "nan", "0x" + "f" * 6000])
def test_numbers_of_a_lock(old: str, number: str) -> None:
    lines = dump_release(REAL).splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(old))
    lines[at] = f"{old.partition('=')[0]}= {number}"
    with pytest.raises(LockError):
        parse_release("\n".join(lines))


def test_a_deeply_nested_lock() -> None:
    with pytest.raises(LockError):
        parse_release("x = " + "[" * 20_000 + "]" * 20_000)


@pytest.mark.parametrize("size", [10**15, 10**30])
def test_a_file_larger_than_any_disk(server: BadServer, store: Store, size: int) -> None:
    artifact = Artifact(
        id="demo", project="demo", version="1.0", filename="demo-1.0.tar.gz", sha256="0" * 64,
        size=size, role="source", platforms=("any",),
    )  # fmt: skip
    assert plan_artifacts([artifact], store).bytes_download == size
    with pytest.raises(Sm75Error) as caught:
        fetch_now(server, store, artifact)
    assert caught.value.exit_code == 9
    assert server.log == []


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "$(touch CANARY)"])
def test_targets_of_a_lock(name: str) -> None:
    with pytest.raises(LockError):
        load_target(ROOT, name)


# channels


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return channelkit.product(tmp_path / "channel")


@pytest.mark.parametrize(
    ("name", "inside"),
    [("noarch/a.conda", True), ("sbom.json", True), ("../x", False), ("/etc/passwd", False),
     ("a/../../x", False), ("a//b", False), ("", False), ("a/b/c", False), ("a\\b", False),
     ("a/b\n", False), (".", False), ("..", False)],
)  # fmt: skip
def test_which_names_are_a_channels(name: str, inside: bool) -> None:
    assert is_inside(name) is inside


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "noarch/../../secret"])
def test_sums_of_files_elsewhere(channel: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("x")
    with (channel / SUMS).open("a") as sums:
        sums.write(f"{'0' * 64}  {name}\n")
    with pytest.raises(ChannelError, match="names no file of the channel"):
        read_sums(channel)
    assert any(problem.path == SUMS for problem in verify_channel(channel))
    with pytest.raises(ChannelError):
        publish([], channel)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd"])
def test_an_index_of_files_elsewhere(channel: Path, tmp_path: Path, name: str) -> None:
    """Neither its size nor its hash is told."""
    (tmp_path / "secret").write_text("x")
    path = channel / channelkit.SUBDIR / "repodata.json"
    data = json.loads(path.read_bytes())
    data["packages.conda"][name] = {"size": 1, "sha256": "0" * 64}
    path.write_text(json.dumps(data))
    found = [str(problem) for problem in verify_channel(channel)]
    assert any("names no file of the channel" in text for text in found)
    assert not any("got" in text for text in found)


@pytest.mark.parametrize(
    "change",
    [{"subdir": ".."}, {"subdir": "../.."}, {"subdir": "/tmp"}, {"subdir": "a/b"}, {"subdir": ""},
     {"name": "../x"}, {"version": "1/../../x"}, {"subdir": None, "name": None}],
)  # fmt: skip
def test_a_package_that_would_lie_elsewhere(
    tmp_path: Path, channel: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = channelkit.write(tmp_path / "made", "evil")

    real = read_info

    def described(path: Path) -> dict[str, Any]:
        info = real(path)
        info["index"] |= change
        return info

    monkeypatch.setattr("sm75.channelcheck.read_info", described)
    # Named as its own index.json would have it.
    told = described(package)["index"]
    stem = f"{told['name']}-{told['version']}-{told['build']}.conda".rpartition("/")[2]
    package = package.rename(package.with_name(stem))
    before = sorted(tmp_path.rglob("*.conda"))
    with pytest.raises(ChannelError):
        publish([package], channel)
    assert sorted(tmp_path.rglob("*.conda")) == before


@pytest.mark.parametrize(
    "name", ["../precious", "/PLACE/precious", "noarch/../../precious", "../c/../precious"]
)
def test_nothing_outside_a_channel_is_removed(tmp_path: Path, channel: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    with pytest.raises(ChannelError, match="refusing to remove"):
        publish([], channel, remove=[name.replace("/PLACE", str(tmp_path))])
    assert precious.exists()


def test_a_closure_document_that_names_files_elsewhere(tmp_path: Path, channel: Path) -> None:
    """It says what an older closure had, which is withdrawn."""
    listed = ["../precious.conda", "/etc/passwd", "noarch/a.conda", "noarch/a.txt", "x/../../b"]
    (channel / closure.DOCUMENT).write_text(json.dumps({"packages": listed}))
    assert closure._former(channel) == ["noarch/a.conda"]
    for text in ("[1]", '{"packages": 3}', "null", "{"):
        (channel / closure.DOCUMENT).write_text(text)
        assert closure._former(channel) == []


def test_commands_in_the_names_of_a_package(tmp_path: Path) -> None:
    """A file with such a name is a file with such a name."""
    files = {f"share/{n}$(touch CANARY)": FileSource.from_bytes(b"x") for n in "ab"}
    package = write_conda(
        tmp_path / "made", name="odd", version="1", build="0", subdir="noarch", files=files
    )
    publish([package], tmp_path / "c")
    assert verify_channel(tmp_path / "c") == []


READERS: list[Callable[[Path], object]] = [verify_channel, index, lambda c: publish([], c)]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", ["[" * 100_000, DIGITS, '{"info": ' + DIGITS + "}", "null", ""])
def test_an_index_of_nonsense(channel: Path, reader: Callable[[Path], object], text: str) -> None:
    """It is a fault of the channel, or is made anew; it is no fault of the program."""
    (channel / channelkit.SUBDIR / "repodata.json").write_text(text)
    try:
        found = reader(channel)
    except ChannelError:
        return
    if reader is verify_channel:
        assert found
    else:
        assert verify_channel(channel) == []


def test_this_file_looks_at_what_it_means_to() -> None:
    """The modules that read data of others start no process at all."""
    for module in (channels, series, closure):
        assert not hasattr(module, "subprocess")
