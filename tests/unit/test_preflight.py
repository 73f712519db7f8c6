"""What a build refuses before it begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sm75 import channel, preflight
from sm75.condapkg import FileSource, write_conda
from sm75.errors import ChannelError, DiskError, UsageError


@pytest.mark.parametrize("name", ["a b", "a:b", "a;b", "a$b", "a'b", "a(b)", "a#b", "a%b", "a\tb"])
def test_project_in_a_path_that_compilers_do_not_take(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="the path of project") as err:
        preflight.check_places(tmp_path / name / ".sm75", tmp_path / "channel", None)
    assert repr(name[1]) in err.value.why
    assert not (tmp_path / name).exists()


def test_temporary_directory_in_such_a_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the path of TMPDIR"):
        preflight.check_places(tmp_path, tmp_path, str(tmp_path / "a b"))


@pytest.mark.parametrize("name", ["plain", "v1.0+x_y-z@w,~", "größe"])
def test_paths_that_they_take(tmp_path: Path, name: str) -> None:
    preflight.check_places(tmp_path / name, tmp_path / "a b", str(tmp_path / name))


def test_token_in_the_path(tmp_path: Path) -> None:
    """Of the channel, and of the project: the toolchain's channel is in it."""
    for work, place in ((tmp_path, tmp_path / "t" / "c"), (tmp_path / "t" / "w", tmp_path)):
        with pytest.raises(ChannelError, match="no channel can live in"):
            preflight.check_places(work, place, None)


def test_channel_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot be written") as err:
        preflight.check_places(tmp_path, tmp_path / "file" / "channel", None)
    assert "not a directory" in err.value.why


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_channel_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DiskError, match="cannot be written") as err:
        preflight.check_places(tmp_path, tmp_path / "channel", None)
    tmp_path.chmod(0o700)
    assert "not writable" in err.value.why


@pytest.fixture
def published(tmp_path: Path) -> Path:
    place = tmp_path / "channel"
    channel.publish([package(tmp_path / "made", "one")], place)
    preflight.check_channel(place)
    return place


def package(out: Path, name: str) -> Path:
    return write_conda(
        out, name=name, version="1", build="0", subdir="noarch",
        files={f"share/{name}": FileSource.from_bytes(b"x")},
    )  # fmt: skip


def test_no_channel_yet(tmp_path: Path) -> None:
    preflight.check_channel(tmp_path / "channel")


def test_whole_package_that_a_killed_publisher_left(published: Path) -> None:
    package(published, "two")
    preflight.check_channel(published)


def test_junk_with_a_packages_name(published: Path) -> None:
    (published / "noarch" / "junk-1-0.conda").write_bytes(b"no zip")
    with pytest.raises(ChannelError, match=r"junk-1-0\.conda does not belong") as err:
        preflight.check_channel(published)
    assert err.value.fix.startswith("move it away: mv ")


def test_package_under_another_name(published: Path) -> None:
    left = package(published, "two")
    left.rename(left.with_name("three-1-0.conda"))
    with pytest.raises(ChannelError, match=r"three-1-0\.conda does not belong") as err:
        preflight.check_channel(published)
    assert "two-1-0.conda" in err.value.why


def test_link_to_a_package(published: Path) -> None:
    (published / "noarch" / "two-1-0.conda").symlink_to(published / "noarch" / "one-1-0.conda")
    with pytest.raises(ChannelError, match=r"two-1-0\.conda does not belong") as err:
        preflight.check_channel(published)
    assert "link" in err.value.why
