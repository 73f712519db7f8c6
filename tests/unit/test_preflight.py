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
        preflight.check_places(tmp_path / name / ".sm75", tmp_path, tmp_path / "channel", None)
    assert repr(name[1]) in err.value.why
    assert not (tmp_path / name).exists()


def test_temporary_directory_in_such_a_path(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    with pytest.raises(UsageError, match="the path of TMPDIR"):
        preflight.check_places(tmp_path, tmp_path, tmp_path, str(tmp_path / "a b"))


@pytest.mark.parametrize("name", ["missing", "relative", "a file"])
def test_temporary_directory_that_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").write_text("")
    given = name if name == "relative" else str(tmp_path / name)
    with pytest.raises(UsageError, match="TMPDIR is no directory"):
        preflight.check_places(tmp_path, tmp_path, tmp_path, given)


def test_store_that_a_shell_would_read_otherwise(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the path of store"):
        preflight.check_places(tmp_path, tmp_path / "a$(id)", tmp_path, None)


@pytest.mark.parametrize("name", ["plain", "v1.0+x_y-z@w,~", "größe"])
def test_paths_that_they_take(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    place = tmp_path / name
    preflight.check_places(place, place, tmp_path / "a b", str(place))


def test_token_in_the_path(tmp_path: Path) -> None:
    """Of the channel, and of the project: the toolchain's channel is in it."""
    for work, place in ((tmp_path, tmp_path / "t" / "c"), (tmp_path / "t" / "w", tmp_path)):
        with pytest.raises(ChannelError, match="no channel can live in"):
            preflight.check_places(work, tmp_path, place, None)


def test_channel_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot be written") as err:
        preflight.check_places(tmp_path, tmp_path, tmp_path / "file" / "channel", None)
    assert "not a directory" in err.value.why


def test_compiler_cache_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "ccache").write_text("")
    with pytest.raises(DiskError, match=r"the compiler cache .* cannot be written"):
        preflight.check_places(tmp_path, tmp_path / "store", tmp_path / "channel", None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_channel_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DiskError, match="cannot be written") as err:
        preflight.check_places(tmp_path, tmp_path, tmp_path / "channel", None)
    tmp_path.chmod(0o700)
    assert "not writable" in err.value.why


NEW = "linux-aarch64/new-1-0.conda"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    place = tmp_path / "channel"
    channel.publish([package(tmp_path / "made", "one")], place)
    preflight.check_channel(place, NEW)
    return place


def package(out: Path, name: str) -> Path:
    return write_conda(
        out, name=name, version="1", build="0", subdir="noarch",
        files={f"share/{name}": FileSource.from_bytes(b"x")},
    )  # fmt: skip


def test_no_channel_yet(tmp_path: Path) -> None:
    preflight.check_channel(tmp_path / "channel", NEW)


def test_whole_package_that_a_killed_publisher_left(published: Path) -> None:
    package(published, "two")
    preflight.check_channel(published, NEW)


def test_junk_with_a_packages_name(published: Path) -> None:
    (published / "noarch" / "junk-1-0.conda").write_bytes(b"no zip")
    with pytest.raises(ChannelError, match=r"junk-1-0\.conda does not belong") as err:
        preflight.check_channel(published, NEW)
    assert err.value.fix.startswith("move it away: mv ")


def test_package_under_another_name(published: Path) -> None:
    left = package(published, "two")
    left.rename(left.with_name("three-1-0.conda"))
    with pytest.raises(ChannelError, match=r"three-1-0\.conda does not belong") as err:
        preflight.check_channel(published, NEW)
    assert "two-1-0.conda" in err.value.why


def test_link_to_a_package(published: Path) -> None:
    (published / "noarch" / "two-1-0.conda").symlink_to(published / "noarch" / "one-1-0.conda")
    with pytest.raises(ChannelError, match=r"two-1-0\.conda does not belong") as err:
        preflight.check_channel(published, NEW)
    assert "link" in err.value.why


def test_another_package_that_is_not_as_published(published: Path) -> None:
    """Publishing would refuse it, an hour later."""
    one = published / "noarch" / "one-1-0.conda"
    whole = one.read_bytes()
    one.write_bytes(whole[:-1] + b"x")
    with pytest.raises(ChannelError, match="is damaged; nothing could be published"):
        preflight.check_channel(published, NEW)
    one.unlink()
    with pytest.raises(ChannelError, match="is damaged; nothing could be published") as err:
        preflight.check_channel(published, NEW)
    assert "one-1-0.conda: missing" in err.value.why
    preflight.check_channel(published, "noarch/one-1-0.conda")


@pytest.mark.parametrize("name", ["SHA256SUMS", "noarch/repodata.json", ".lock", "linux-aarch64"])
@pytest.mark.parametrize("kind", ["link", "other"])
def test_something_else_where_a_file_of_the_channel_goes(
    published: Path, name: str, kind: str
) -> None:
    path = published / name
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to("/nowhere")
    elif name == "linux-aarch64":
        path.write_text("")
    else:
        path.mkdir()
    with pytest.raises(ChannelError, match="does not belong into the channel"):
        preflight.check_channel(published, NEW)
