"""Sizes, gaps and the tar of a channel."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from rich.console import Console

from sm75 import channel as channels
from sm75 import channelcheck, channelcommands, channeltools, install
from sm75.basepython import BasePython
from sm75.errors import ChannelError, UsageError
from sm75.install import Box
from sm75.lockfile import load_release, load_target
from sm75.store import hash_file
from tests.unit import channelkit
from tests.unit.projectkit import RELEASE, ROOT

LOCK = load_release(ROOT, RELEASE)


@pytest.fixture
def box() -> Box:
    return install.box_of(load_target(ROOT, LOCK.target))


def show(found: list[channeltools.PackageSize], rows: int = 20) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(channeltools.size_table(found, rows=rows))
    return out.getvalue()


def test_sizes_and_totals(tmp_path: Path) -> None:
    older = channelkit.write(tmp_path / "p", "dlami-torch", "2.11.0", "h9_0", noarch=True)
    made = channelkit.product(tmp_path / "c", ("3.11", "3.12"), older)
    found = channeltools.sizes(made)
    size = {p.file: p.size for p in found}
    assert size == {
        f"linux-aarch64/{p.name}": p.stat().st_size for p in made.glob("linux-aarch64/*.conda")
    }
    assert list(size.values()) == sorted(size.values(), reverse=True)
    assert {p.name: p.python for p in found if p.name == "numpy"}["numpy"] in ("3.11", "3.12")
    totals = channeltools.totals(found)
    assert totals["whole closure"] == sum(size.values())
    assert totals["vllm-sm75"] == size["linux-aarch64/vllm-sm75-0.33.0-h0_0.conda"]
    # of two builds one is installed, of two minors too
    adapter = max(n for f, n in size.items() if "dlami-torch" in f)
    for minor in ("3.11", "3.12"):
        numpy = size[f"linux-aarch64/numpy-2.4-py{minor.replace('.', '')}.conda"]
        expected = totals["vllm-sm75"] + adapter + numpy
        assert totals[f"one installation, Python {minor}"] == expected


def test_table(tmp_path: Path) -> None:
    found = channeltools.sizes(channelkit.product(tmp_path / "c", ("3.11", "3.12")))
    text = show(found, rows=2)
    assert "2 more" in text
    assert "of 1024" in text
    assert "of 60" in text
    assert "any" in text
    assert "more" not in show(found)


def test_no_channel_and_a_broken_index(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match="there is no channel"):
        channeltools.sizes(tmp_path / "void")
    made = channelkit.product(tmp_path / "c")
    (made / "linux-aarch64" / "repodata.json").write_text("{")
    with pytest.raises(ChannelError, match="cannot be read"):
        channeltools.sizes(made)


def test_export(tmp_path: Path) -> None:
    """The same bytes whoever made it when, all files, and nothing that is only lying about."""
    made = channelkit.product(tmp_path / "c")
    first = channeltools.export(made, tmp_path / "a.tar")
    for path in channeltools.exported(made):
        os.utime(path, (1, 1))
        path.chmod(0o600)
    (made / ".sm75-tmp-left").write_text("x")
    (made / ".lock").write_text("")
    again = tmp_path / "b.tar"
    assert channeltools.export(made, again) == first == hash_file(again)
    with tarfile.open(tmp_path / "a.tar") as tar:
        tar.extractall(tmp_path / "out", filter="data")
    assert channelcheck.verify_channel(tmp_path / "out" / "channel") == []
    there = {p.relative_to(made) for p in channeltools.exported(made)}
    out = tmp_path / "out" / "channel"
    assert there == {p.relative_to(out) for p in out.rglob("*") if p.is_file()}


def test_export_of_a_damaged_channel(tmp_path: Path) -> None:
    made = channelkit.product(tmp_path / "c")
    channelkit.flip(next(made.glob("*/numpy-*.conda")))
    with pytest.raises(ChannelError, match="nothing was written") as caught:
        channeltools.export(made, tmp_path / "a.tar")
    assert "numpy-" in caught.value.why
    assert not (tmp_path / "a.tar").exists()


def gaps(made: Path, box: Box, tmp_path: Path) -> dict[str, tuple[str, ...]]:
    base = BasePython(ROOT, LOCK, install.pythons(made))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return {gap.python: gap.missing for gap in channeltools.gaps(made, box, scratch, base)}


def test_nothing_is_missing(tmp_path: Path, box: Box) -> None:
    made = channelkit.product(tmp_path / "c", ("3.12",), channelkit.python(tmp_path / "p"))
    assert gaps(made, box, tmp_path) == {"3.12": ()}


def test_python_is_missing(tmp_path: Path, box: Box) -> None:
    """Named to the file, out of the lock; for another minor it is there."""
    made = channelkit.product(tmp_path / "c", ("3.12", "3.13"), channelkit.python(tmp_path / "p"))
    found = gaps(made, box, tmp_path)
    assert found["3.12"] == ()
    (text,) = found["3.13"]
    assert text.startswith("python 3.13 and its libraries: ")
    assert "python-3.13." in text


def test_more_than_python_is_missing(tmp_path: Path, box: Box) -> None:
    needy = channelkit.write(
        tmp_path / "p", "dlami-torch", "2.13.0", "h1_0", noarch=True, depends=["nowhere-to-be-had"]
    )
    made = channelkit.product(tmp_path / "c", ("3.12",), needy)
    (made / "linux-aarch64" / "dlami-torch-2.12.0-h0_0.conda").unlink()
    channelkit.edit_index(made, "dlami-torch", depends=["nowhere-to-be-had"])
    python, other = gaps(made, box, tmp_path)["3.12"]
    assert python.startswith("python 3.12 and its libraries")
    assert "nowhere-to-be-had" in other


def test_something_else_is_missing(tmp_path: Path, box: Box) -> None:
    made = channelkit.product(tmp_path / "c", ("3.12",), channelkit.python(tmp_path / "p"))
    channelkit.edit_index(made, "dlami-torch", depends=["nowhere-to-be-had"])
    (text,) = gaps(made, box, tmp_path)["3.12"]
    assert "nowhere-to-be-had" in text
    assert "libraries" not in text


def test_export_of_links(tmp_path: Path) -> None:
    """A link to a package, two names of one file, a linked directory: the same tar as of files."""
    made = channelkit.product(tmp_path / "c")
    whole = channeltools.export(made, tmp_path / "whole.tar")
    first, second, *_ = sorted(made.glob("*/*.conda"))
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    os.link(second, tmp_path / "second name")
    os.link(made / "SHA256SUMS", tmp_path / "third name")
    (made / channelkit.SUBDIR).rename(tmp_path / "subdir")
    (made / channelkit.SUBDIR).symlink_to(tmp_path / "subdir")
    assert channeltools.export(made, tmp_path / "linked.tar") == whole
    with tarfile.open(tmp_path / "linked.tar") as tar:
        assert all(member.isreg() and member.size for member in tar)
        tar.extractall(tmp_path / "out", filter="data")
    assert channelcheck.verify_channel(tmp_path / "out" / "channel") == []


def test_export_of_two_names_of_one_file(tmp_path: Path) -> None:
    """Both in the channel: tar would make the second a link, of no size."""
    made = channelkit.product(tmp_path / "c")
    channels.publish([], made, documents={"one.json": b"{}", "two.json": b"{}"})
    (made / "two.json").unlink()
    os.link(made / "one.json", made / "two.json")
    channeltools.export(made, tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert [m.size for m in tar if m.name.endswith(("one.json", "two.json"))] == [2, 2]
        tar.extractall(tmp_path / "out", filter="data")
    assert channelcheck.verify_channel(tmp_path / "out" / "channel") == []


PLACES: dict[str, tuple[str, str]] = {
    "in the channel": ("c/a.tar", "would lie in the channel"),
    "over the sums": ("c/SHA256SUMS", "is there already"),
    "in a directory of it": ("c/noarch/new/a.tar", "would lie in the channel"),
    "through a link": ("link/a.tar", "would lie in the channel"),
    "in a linked directory of it": ("away/a.tar", "would lie in the channel"),
    "a file": ("file", "is there already"),
    "a link to one": ("to-file", "is there already"),
    "a link to nothing": ("to-nothing", "link to nothing"),
    "a directory": (".", "is no file to write to"),
    "a link to itself": ("loop", "link to nothing"),
    "below a file": ("file/a.tar", "is no file to write to"),
    "far below a file": ("file/b/a.tar", "is no file to write to"),
    "a long name": ("x" * 300, "is no file to write to"),
    "a name that is too long for its other": ("x" * 245, "is no file to write to"),
}


@pytest.mark.parametrize("place", PLACES)
def test_where_no_export_goes(tmp_path: Path, place: str) -> None:
    made = channelkit.product(tmp_path / "c")
    (tmp_path / "link").symlink_to("c")
    (made / channelkit.SUBDIR).rename(tmp_path / "away")
    (made / channelkit.SUBDIR).symlink_to("../away")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "to-file").symlink_to("file")
    (tmp_path / "to-nothing").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    before = {p: p.lstat() for p in tmp_path.rglob("*")}
    name, said = PLACES[place]
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=said) as caught:
            channelcommands.export(made, tmp_path / name, dry_run=dry_run)
        assert caught.value.exit_code == 2
        assert caught.value.fix.startswith("name another file")
    after = {p: p.lstat() for p in tmp_path.rglob("*")}
    assert {p: s.st_mtime_ns for p, s in after.items()} == {
        p: s.st_mtime_ns for p, s in before.items()
    }


def test_sizes_of_a_channel_with_a_pipe(tmp_path: Path) -> None:
    made = channelkit.product(tmp_path / "c")
    (made / "noarch" / "repodata.json").unlink()
    os.mkfifo(made / "noarch" / "repodata.json")
    with pytest.raises(ChannelError, match="cannot be read"):
        channeltools.sizes(made)


def test_export_writes_over_no_device(tmp_path: Path) -> None:
    """As root a rename would put a file in its place."""
    channel = tmp_path / "channel"
    channels.publish([], channel)
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match="is no file to write to"):
            channeltools.export(channel, out)
