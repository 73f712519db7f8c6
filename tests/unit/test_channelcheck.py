"""An index that says what ours never does is not ours, however right its sums are."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sm75 import install
from sm75.channelcheck import holds, verify_channel
from sm75.condapkg import canonical_json
from sm75.errors import ChannelError
from tests.unit import channelkit
from tests.unit.channelkit import SUBDIR

NUMPY = "numpy-2.4-py312.conda"
INDEX = f"{SUBDIR}/repodata.json"


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    made = channelkit.product(tmp_path / "c")
    assert verify_channel(made) == []
    return made


def edit(channel: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((channel / INDEX).read_bytes())
    change(data)
    (channel / INDEX).write_bytes(canonical_json(data))


def _foreign(data: dict[str, Any]) -> dict[str, Any]:
    return {**data["packages.conda"][NUMPY], "sha256": "0" * 64, "version": "99"}


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "base_url": (lambda d: d["info"].update(base_url="https://x/"), INDEX, "base_url"),
    "no subdir": (lambda d: d["info"].clear(), INDEX, "info: expected only subdir"),
    "other subdir": (lambda d: d["info"].update(subdir="noarch"), INDEX, "info: expected only"),
    "shadowed": (
        lambda d: d["packages"].update({NUMPY: _foreign(d)}), INDEX, f"under packages, .*{NUMPY}",
    ),
    "tar.bz2": (
        lambda d: d["packages"].update({"numpy-99-0.tar.bz2": _foreign(d)}), INDEX, "under packages"
    ),
    "v3": (lambda d: d["v3"].update(conda={NUMPY: _foreign(d)}), INDEX, "under v3"),
    "v3, no table": (lambda d: d.update(v3=[1]), INDEX, "under v3"),
    "v3.conda": (lambda d: d.update({"v3.conda": {NUMPY: _foreign(d)}}), INDEX, "has 'v3.conda'"),
    "unknown": (lambda d: d.update(whl={}), INDEX, "has 'whl'"),
    "removed": (lambda d: d.update(removed=[NUMPY]), INDEX, "has 'removed'"),
    "version": (lambda d: d.update(repodata_version=2), INDEX, "repodata_version"),
    "a name elsewhere": (
        lambda d: d["packages.conda"].update({f"../../x/{NUMPY}": _foreign(d)}),
        f"{SUBDIR}/../../x/{NUMPY}", "names no file of the channel",
    ),
    "a name below": (
        lambda d: d["packages.conda"].update({f"x/{NUMPY}": _foreign(d)}),
        f"{SUBDIR}/x/{NUMPY}", "names no file of the channel",
    ),
    "a name that is no package's": (
        lambda d: d["packages.conda"].update({"repodata.json": _foreign(d)}),
        f"{SUBDIR}/repodata.json", "names no file of the channel",
    ),
    "a record that says more": (
        lambda d: d["packages.conda"][NUMPY].update(url="https://x/y.conda"),
        f"{SUBDIR}/{NUMPY}", "url: index 'https://x/y.conda', package None",
    ),
    "a record without md5": (
        lambda d: d["packages.conda"][NUMPY].pop("md5"), f"{SUBDIR}/{NUMPY}", "md5: index None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_index(channel: Path, name: str) -> None:
    change, path, said = EDITS[name]
    edit(channel, change)
    found = [p for p in verify_channel(channel) if p.path == path]
    assert found
    with pytest.raises(ChannelError) as caught:
        install.check_channel(channel)
    assert re.search(said, caught.value.why)


def test_a_key_twice(channel: Path) -> None:
    """Readers differ in which of the two they take."""
    text = (channel / INDEX).read_text()
    (channel / INDEX).write_text(text.replace('"packages": {}', '"packages": {}, "packages": {}'))
    (found,) = verify_channel(channel)
    assert (found.path, found.kind) == (INDEX, "index")
    assert "a key twice" in found.detail


@pytest.mark.parametrize("name", ["base_url", "v3.conda", "shadowed"])
def test_what_a_build_believes_is_there(channel: Path, name: str) -> None:
    assert holds(channel, f"{SUBDIR}/{NUMPY}")
    edit(channel, EDITS[name][0])
    with pytest.raises(ChannelError, match="is damaged, or what the channel says of it"):
        holds(channel, f"{SUBDIR}/{NUMPY}")


def _late(*_: object) -> None:
    raise TimeoutError(0, "it waits", "")


@pytest.mark.parametrize("name", ["noarch/repodata.json", "SHA256SUMS", f"{SUBDIR}/{NUMPY}"])
def test_a_pipe(channel: Path, name: str) -> None:
    """To read one is to wait for ever."""
    (channel / name).unlink()
    os.mkfifo(channel / name)
    before = signal.signal(signal.SIGALRM, _late)
    signal.alarm(20)
    try:
        assert any(p.path == name for p in verify_channel(channel))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["repodata.json", f"{SUBDIR}/x/repodata.json", "x/y.json"])
def test_a_stray_file(channel: Path, name: str) -> None:
    """Also one that is called as an index is."""
    (channel / name).parent.mkdir(exist_ok=True)
    (channel / name).write_text("{}")
    shown = name.rpartition("/")[0] if name.count("/") == 2 else name
    assert any(p.path == shown and p.kind == "extra" for p in verify_channel(channel))


def test_a_pipe_beside_the_packages(channel: Path) -> None:
    os.mkfifo(channel / "pipe")
    (channel / "to-nothing").symlink_to("nothing")
    assert [(p.path, p.detail) for p in verify_channel(channel)] == [
        ("pipe", "no regular file"), ("to-nothing", "no regular file")
    ]  # fmt: skip


def test_a_file_that_cannot_be_read(channel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> str:
        raise PermissionError(13, "x", str(path))

    monkeypatch.setattr("sm75.channelcheck.hash_file", refused)
    with pytest.raises(ChannelError, match="cannot be read") as caught:
        verify_channel(channel)
    assert "Permission denied" in caught.value.why


def test_a_linked_directory_is_looked_into(channel: Path, tmp_path: Path) -> None:
    (channel / SUBDIR).rename(tmp_path / "away")
    (channel / SUBDIR).symlink_to(tmp_path / "away")
    assert verify_channel(channel) == []
    (channel / SUBDIR / "stray").write_text("")
    assert [p.path for p in verify_channel(channel)] == [f"{SUBDIR}/stray"]
