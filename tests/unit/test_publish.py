"""Publishing a channel: into a real directory, and into S3 through the real client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sm75 import publish as publishing
from sm75.atomic import TMP_PREFIX
from sm75.channel import publish as add
from sm75.channelcheck import REPODATA, SUMS, verify_channel
from sm75.errors import ChannelError, DiskError, FetchError, UsageError
from sm75.progress import SilentReporter
from sm75.publish import Published
from sm75.publishtargets import Directory, Target, opened
from tests.unit import channelkit
from tests.unit.channelkit import SUBDIR
from tests.unit.commandkit import Runner
from tests.unit.projectkit import ROOT
from tests.unit.s3server import S3Server


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return channelkit.product(tmp_path / "channel")


def publish(channel: Path, target: str | Path, **options: Any) -> Published:
    dry = bool(options.get("dry_run"))
    with opened(ROOT, str(target), channel, dry_run=dry) as place:
        return publishing.publish(channel, place, SilentReporter(), **options)


def files(place: Path) -> dict[str, bytes]:
    return {
        path.relative_to(place).as_posix(): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def newer(channel: Path, tmp_path: Path, **changes: Any) -> Path:
    """Add one more package to the channel, or another one of a name that it has."""
    package = channelkit.write(tmp_path / "more", "extra", **changes)
    add([package], channel, replace=True)
    return package


def test_a_directory_gets_all_of_it(channel: Path, tmp_path: Path) -> None:
    done = publish(channel, tmp_path / "out")
    assert files(tmp_path / "out") == files(channel)
    assert set(done.sent) == set(files(channel))
    assert done.sent_bytes == sum(map(len, files(channel).values()))
    assert verify_channel(tmp_path / "out") == []


def test_packages_come_first_and_the_index_last(channel: Path, tmp_path: Path) -> None:
    add([], channel, documents={"report.html": b"x", "zz.json": b"y"})
    kinds = [
        0 if name.endswith(".conda") else 3 if name.endswith(REPODATA) else 2 if name == SUMS else 1
        for name in publish(channel, tmp_path / "out").sent
    ]
    assert kinds == sorted(kinds)
    assert set(kinds) == {0, 1, 2, 3}


def test_what_is_there_is_not_sent_again(channel: Path, tmp_path: Path) -> None:
    publish(channel, tmp_path / "out")
    before = {path: path.stat().st_ino for path in (tmp_path / "out").rglob("*")}
    assert publish(channel, tmp_path / "out").sent == ()
    assert {path: path.stat().st_ino for path in (tmp_path / "out").rglob("*")} == before
    package = newer(channel, tmp_path)
    assert publish(channel, tmp_path / "out").sent == (
        f"{SUBDIR}/{package.name}", SUMS, f"{SUBDIR}/{REPODATA}",
    )  # fmt: skip
    assert verify_channel(tmp_path / "out") == []


def test_a_dry_run_changes_nothing(channel: Path, tmp_path: Path) -> None:
    done = publish(channel, tmp_path / "out", dry_run=True)
    assert len(done.sent) == len(files(channel))
    assert not (tmp_path / "out").exists()


def test_a_damaged_channel_is_not_published(channel: Path, tmp_path: Path) -> None:
    package = next(channel.glob("*/*.conda"))
    package.write_bytes(package.read_bytes()[:-1])
    with pytest.raises(ChannelError, match="nothing was published"):
        publish(channel, tmp_path / "out")
    assert files(tmp_path / "out") == {}


def test_another_package_of_that_name_is_refused(channel: Path, tmp_path: Path) -> None:
    newer(channel, tmp_path)
    publish(channel, tmp_path / "out")
    before = files(tmp_path / "out")
    newer(channel, tmp_path, size=3)
    with pytest.raises(ChannelError, match="other content") as err:
        publish(channel, tmp_path / "out")
    assert "extra-1.0-0.conda" in err.value.why
    assert files(tmp_path / "out") == before
    publish(channel, tmp_path / "out", replace=True)
    assert files(tmp_path / "out") == files(channel)


def test_nothing_is_removed_unless_asked(channel: Path, tmp_path: Path) -> None:
    package = newer(channel, tmp_path)
    publish(channel, tmp_path / "out")
    (tmp_path / "out" / "README").write_text("somebody else's")
    name = f"{SUBDIR}/{package.name}"
    add([], channel, remove=[name])
    assert publish(channel, tmp_path / "out").removed == ()
    assert name in files(tmp_path / "out")
    assert publish(channel, tmp_path / "out", delete=True).removed == (name,)
    there = files(tmp_path / "out")
    assert there.pop("README") == b"somebody else's"
    assert there == files(channel)


def test_an_index_that_clients_would_take_before_ours(channel: Path, tmp_path: Path) -> None:
    stale = tmp_path / "out" / SUBDIR / "repodata.json.zst"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"old")
    with pytest.raises(ChannelError, match="another index"):
        publish(channel, tmp_path / "out")
    assert publish(channel, tmp_path / "out", delete=True).removed == (f"{SUBDIR}/{stale.name}",)
    assert not stale.exists()


def test_what_was_altered_there_is_found_when_asked(channel: Path, tmp_path: Path) -> None:
    publish(channel, tmp_path / "out")
    package = next((tmp_path / "out").glob("*/*.conda"))
    data = package.read_bytes()
    package.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert publish(channel, tmp_path / "out").sent == ()
    with pytest.raises(ChannelError, match="other content"):
        publish(channel, tmp_path / "out", reread=True)
    publish(channel, tmp_path / "out", reread=True, replace=True)
    assert files(tmp_path / "out") == files(channel)


class Dies:
    """A directory that fails after so many files."""

    def __init__(self, real: Target, after: int) -> None:
        self.real, self.left = real, after
        self.sizes, self.digest, self.sha256, self.read, self.delete = (
            real.sizes, real.digest, real.sha256, real.read, real.delete,
        )  # fmt: skip

    def put(self, name: str, file: Path) -> None:
        if not self.left:
            raise DiskError("killed")
        self.left -= 1
        self.real.put(name, file)


@pytest.mark.parametrize("after", range(6))
def test_an_interrupted_run_leaves_the_old_channel(
    channel: Path, tmp_path: Path, after: int
) -> None:
    """Until the index comes: and the next run goes on from there, sending nothing twice."""
    publish(channel, tmp_path / "out")
    before = (tmp_path / "out" / SUBDIR / REPODATA).read_bytes()
    for number in range(4):
        add([channelkit.write(tmp_path / "m", f"new{number}")], channel)
    with pytest.raises(DiskError):
        publishing.publish(
            channel, Dies(Directory(tmp_path / "out"), after), SilentReporter()
        )  # fmt: skip
    assert (tmp_path / "out" / SUBDIR / REPODATA).read_bytes() == before
    assert len(publish(channel, tmp_path / "out").sent) == 6 - after
    assert verify_channel(tmp_path / "out") == []


def test_an_interrupted_replacement_is_not_taken_for_the_old_one(
    channel: Path, tmp_path: Path
) -> None:
    """The list there says the old hash; going back to it must send the old package again."""
    newer(channel, tmp_path, size=2)
    publish(channel, tmp_path / "out")
    old = files(channel)
    newer(channel, tmp_path, size=2, depends=["python"])
    name = f"{SUBDIR}/extra-1.0-0.conda"
    new = (channel / name).read_bytes()
    assert new != old[name]
    with pytest.raises(DiskError):
        publishing.publish(
            channel, Dies(Directory(tmp_path / "out"), 1), SilentReporter(), replace=True
        )
    assert (tmp_path / "out" / name).read_bytes() == new
    assert not (tmp_path / "out" / SUMS).exists()


def test_leftovers_of_a_killed_run_go(channel: Path, tmp_path: Path) -> None:
    left = tmp_path / "out" / SUBDIR / f"{TMP_PREFIX}x.conda"
    left.parent.mkdir(parents=True)
    left.touch()
    publish(channel, tmp_path / "out")
    assert not left.exists()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("oci://host", "cannot publish to oci"),
        ("oci://host/Upper", "cannot publish to oci"),
        ("oci://u:secret@host/x", "has a login in it"),
        ("https://host/x", "cannot publish to https"),
        ("s3://u:secret@bucket/x", "has a login in it"),
        ("s3:///x", "cannot publish to s3"),
    ],
)
def test_targets_that_are_not_known(channel: Path, target: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as err:
        publish(channel, target)
    assert "secret" not in str(err.value)


def test_the_channel_itself_is_no_target(channel: Path) -> None:
    for place in (channel, channel / "sub", channel.as_uri()):
        with pytest.raises(UsageError, match="the channel itself"):
            publish(channel, place)


def test_command(channel: Path, tmp_path: Path, run: Runner) -> None:
    words = ("channel", "publish", "--channel", channel, tmp_path / "out")
    assert "would be sent" in run(*words, "--dry-run").out
    assert run(*words, "--json").json["removed"] == []
    assert "0 files" in run(*words).out
    assert run("channel", "publish", "--channel", tmp_path / "none", tmp_path / "x").code == 8


# --- an object store ---------------------------------------------------------------------------


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with S3Server() as server:
        for name, value in {
            "AWS_ENDPOINT": server.base, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "word",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.network
class TestS3:
    """With obstore, which the first of these installs by its hashes."""

    def test_all_of_it_in_order_and_nothing_twice(
        self, channel: Path, s3: S3Server, tmp_path: Path
    ) -> None:
        done = publish(channel, "s3://bucket/some/prefix/")
        expected = {f"some/prefix/{name}": data for name, data in files(channel).items()}
        assert s3.objects == expected
        assert [key for _, key in s3.log] == [f"some/prefix/{name}" for name in done.sent]
        s3.log.clear()
        s3.reads.clear()
        assert publish(channel, "s3://bucket/some/prefix").sent == ()
        assert s3.log == []
        assert not any(key.endswith(".conda") for key in s3.reads)
        package = newer(channel, tmp_path)
        publish(channel, "s3://bucket/some/prefix")
        add([], channel, remove=[f"{SUBDIR}/{package.name}"])
        assert publish(channel, "s3://bucket/some/prefix", delete=True).removed
        assert s3.objects == {f"some/prefix/{n}": data for n, data in files(channel).items()}

    def test_large_files_go_in_parts(self, channel: Path, s3: S3Server, tmp_path: Path) -> None:
        package = tmp_path / "big"
        package.write_bytes(os.urandom(12 << 20))
        with opened(ROOT, "s3://bucket/x", channel) as target:
            target.put("big", package)
            assert s3.objects["x/big"] == package.read_bytes()
            assert len(target.read("big")) == 12 << 20

    def test_it_is_tried_again(self, channel: Path, s3: S3Server) -> None:
        name = f"x/{next(channel.glob('*/*.conda')).relative_to(channel)}"
        s3.moods = {f"PUT {name}": [503, 500], "GET ": [503]}
        publish(channel, "s3://bucket/x")
        assert s3.moods == {f"PUT {name}": [], "GET ": []}
        assert len(s3.objects) == len(files(channel))

    def test_a_refusal_is_said(self, channel: Path, s3: S3Server) -> None:
        name = f"x/{next(channel.glob('*/*.conda')).relative_to(channel)}"
        s3.moods = {f"PUT {name}": [403] * 20}
        with pytest.raises(FetchError, match="writing") as err:
            publish(channel, "s3://bucket/x")
        assert "credentials" in err.value.fix
        assert "word" not in err.value.why
        assert not any(key.endswith((SUMS, REPODATA)) for key in s3.objects)
