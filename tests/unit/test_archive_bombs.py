"""Hostile archives, for every reader of them: bombs, devices, links, names that lead outside.

Names are in test_archives.py, test_wheels.py, test_condapkg.py and test_patching.py as well.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from sm75 import budget, channeltools, trees
from sm75.archives import walk
from sm75.budget import Budget
from sm75.channel import publish
from sm75.condapkg import iter_payload, read_info, verify_payload
from sm75.errors import ChannelError, FetchError, LockError, PatchError, Sm75Error
from sm75.treefiles import read_sdist
from sm75.wheelfile import Wheel
from tests.unit import channelkit
from tests.unit.wheelkit import make_wheel

HUGE = 300 << 20


class Zeros(io.RawIOBase):
    """As many zeros as one reads."""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return bytes(min(size, 1 << 20) if size >= 0 else 1 << 20)


def bomb_tar(
    path: Path, wrap: Callable[[Path], object], name: str = "p/zeros", kind: bytes = tarfile.REGTYPE
) -> Path:
    """A tar with one member of 300 MiB of zeros, packed."""
    with wrap(path) as out, tarfile.open(fileobj=out, mode="w|") as tar:  # type: ignore[attr-defined]
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, HUGE
        tar.addfile(info, Zeros())
    return path


def zst(path: Path) -> object:
    return zstandard.ZstdCompressor(1).stream_writer(path.open("wb"), closefd=True)


def gz(path: Path) -> object:
    return gzip.open(path, "wb", 1)


def conda(path: Path, payload: bytes, info: bytes | None = None) -> Path:
    """A package of given tar.zst members."""
    good = io.BytesIO()
    with tarfile.open(fileobj=good, mode="w") as tar:
        for name, text in (("info/index.json", b"{}"), ("info/paths.json", b'{"paths": []}')):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", b'{"conda_pkg_format_version": 2}')
        archive.writestr("pkg-x-1-0.tar.zst", payload)
        archive.writestr("info-x-1-0.tar.zst", info or zstandard.compress(good.getvalue()))
    return path


def refused(act: Callable[[], object], kind: type[Sm75Error]) -> None:
    with pytest.raises(kind) as caught:
        act()
    assert "unpack to more than" in str(caught.value)


def test_a_budget_allows_what_software_packs_to() -> None:
    Budget("x", 0).take(budget.FLOOR)
    counted = Budget("x", 1 << 20)
    counted.take(budget.FLOOR)
    counted.take(100 << 20)
    with pytest.raises(ChannelError, match=r"refusing x: it would unpack to more than 164 MiB"):
        counted.take(1)
    with pytest.raises(ChannelError):
        Budget("x", 0).take(-1)


def test_a_conda_package_whose_payload_is_a_bomb(tmp_path: Path) -> None:
    payload = bomb_tar(tmp_path / "p", zst).read_bytes()
    assert len(payload) < 100_000
    package = conda(tmp_path / "x-1-0.conda", payload)
    refused(lambda: [raw.read() for _, raw in iter_payload(package)], ChannelError)
    refused(lambda: verify_payload(package), ChannelError)
    refused(lambda: [m.path() for m in walk(package)], ChannelError)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_conda_package_whose_metadata_are_a_bomb(tmp_path: Path, kind: bytes) -> None:
    """As a file, and as a name of 300 MiB, which tarfile reads into memory by itself."""
    info = bomb_tar(tmp_path / "i", zst, "info/index.json", kind).read_bytes()
    package = conda(tmp_path / "x-1-0.conda", zstandard.compress(bytes(10_240)), info)
    refused(lambda: read_info(package), ChannelError)
    channel = tmp_path / "channel"
    refused(lambda: publish([package], channel), ChannelError)
    assert not list(channel.glob("*/*.conda"))


@pytest.mark.parametrize("ending", ["tar.gz", "tar.zst"])
def test_a_tar_that_is_a_bomb(tmp_path: Path, ending: str) -> None:
    path = bomb_tar(tmp_path / f"x.{ending}", gz if ending == "tar.gz" else zst)
    refused(lambda: [m.read() for m in walk(path)], ChannelError)


def test_a_wheel_that_is_a_bomb(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("demo/zeros", bytes(HUGE))
    assert wheel.stat().st_size < 1 << 20
    refused(lambda: Wheel(wheel), FetchError)
    refused(lambda: [m.read() for m in walk(wheel)], ChannelError)


def test_an_sdist_that_is_a_bomb(tmp_path: Path) -> None:
    path = bomb_tar(tmp_path / "x.tar.gz", gz, "p/setup.py")
    refused(lambda: read_sdist(path, lambda name: False), LockError)
    with pytest.raises(PatchError, match="larger than"):
        trees.SdistTree(path).load(["setup.py"])


@pytest.mark.parametrize(
    "kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.LNKTYPE]
)
def test_devices_pipes_and_hard_links(tmp_path: Path, kind: bytes) -> None:
    """None is ever made: packages with them are refused, elsewhere they are passed over."""
    member = tarfile.TarInfo("p/setup.py")
    member.type, member.linkname, member.devmajor, member.devminor = kind, "/etc/passwd", 1, 5
    plain, packed = tmp_path / "x.tar", tmp_path / "x.tar.gz"
    with tarfile.open(plain, "w") as tar:
        tar.addfile(member)
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(walk(plain)) == []
    with pytest.raises(LockError, match="no regular file"):
        read_sdist(packed, lambda name: True)
    with pytest.raises(PatchError, match="not a regular file"):
        trees.SdistTree(packed).load(["setup.py"])
    package = conda(tmp_path / "x-1-0.conda", zstandard.compress(plain.read_bytes()))
    with pytest.raises(ChannelError, match="neither a file nor a symbolic link"):
        list(iter_payload(package))


def test_an_export_holds_the_files_that_links_lead_to(tmp_path: Path) -> None:
    """Never a link, and never an empty file in its place."""
    channel = channelkit.product(tmp_path / "c")
    package = next(channel.glob("*/numpy-*.conda"))
    elsewhere = package.rename(tmp_path / package.name)
    package.symlink_to(elsewhere)
    channeltools.export(channel, tmp_path / "out.tar")
    with tarfile.open(tmp_path / "out.tar") as tar:
        member = tar.getmember(f"channel/{package.parent.name}/{package.name}")
        content = tar.extractfile(member)
        assert content is not None
        assert content.read() == elsewhere.read_bytes()
        assert all(info.isreg() for info in tar)
        assert all(info.name.startswith("channel/") and ".." not in info.name for info in tar)
