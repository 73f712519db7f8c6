"""Walking packages: every kind gives the same members, and none can reach outside."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from sm75.archives import walk
from sm75.condapkg import FileSource, write_conda
from sm75.errors import ChannelError, UsageError

CONTENT = {"a/one.so": b"first", "a/two.txt": b"second" * 1000, "b": b""}


def as_directory(root: Path) -> Path:
    for name, data in CONTENT.items():
        (root / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "tree" / name).write_bytes(data)
    (root / "tree" / "link").symlink_to("/etc/passwd")
    return root / "tree"


def as_wheel(root: Path) -> Path:
    with zipfile.ZipFile(root / "it-1-py3-none-any.whl", "w") as archive:
        archive.writestr("a/", b"")
        for name, data in CONTENT.items():
            archive.writestr(name, data)
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    return root / "it-1-py3-none-any.whl"


def as_tar(root: Path, name: str = "it.tar.gz", mode: str = "w:gz", prefix: str = "./") -> Path:
    with tarfile.open(root / name, mode) as archive:  # type: ignore[call-overload]
        for member, data in CONTENT.items():
            info = tarfile.TarInfo(prefix + member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return root / name


def as_tar_zst(root: Path) -> Path:
    plain = as_tar(root, "it.tar", "w", "")
    (root / "it.tar.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    return root / "it.tar.zst"


def as_conda(root: Path) -> Path:
    return write_conda(
        root,
        name="it",
        version="1",
        build="0",
        subdir="linux-aarch64",
        files={name: FileSource.from_bytes(data) for name, data in CONTENT.items()},
    )


KINDS: list[Callable[[Path], Path]] = [as_directory, as_wheel, as_tar, as_tar_zst, as_conda]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__[3:])
def test_every_kind_gives_the_same_members(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    seen = {}
    for member in walk(make(tmp_path)):
        assert member.size == len(CONTENT[member.name])
        assert member.path().name == member.name.rpartition("/")[2]
        assert member.path().read_bytes() == CONTENT[member.name]
        seen[member.name] = member.read()
    assert seen == CONTENT


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__[3:])
def test_members_can_be_read_without_the_disk(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    for member in walk(make(tmp_path), want=lambda name: name.endswith(".txt")):
        assert member.name == "a/two.txt"
        assert member.read() == member.read() == CONTENT["a/two.txt"]
        assert member.path().read_bytes() == CONTENT["a/two.txt"]


def test_only_what_is_asked_for_is_extracted_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = as_wheel(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    for member in walk(archive):
        if member.name == "a/one.so":
            member.path()
        files = [path.name for path in scratch.rglob("*") if path.is_file()]
        assert files == (["one.so"] if member.name == "a/one.so" else [])
    assert list(scratch.iterdir()) == []


def test_a_file_is_its_own_only_member(tmp_path: Path) -> None:
    (tmp_path / "lib.so.1").write_bytes(b"x")
    assert [member.name for member in walk(tmp_path / "lib.so.1")] == ["lib.so.1"]


BAD_NAMES = [
    "../evil.so",
    "/etc/evil.so",
    "a/../../evil.so",
    "a\\..\\evil.so",
    "C:/evil.so",
    "a\nb",
]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("kind", ["zip", "tar", "link"])
def test_names_that_lead_outside_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / ("bad.whl" if kind == "zip" else "bad.tar")
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("good", b"")
            archive.writestr(name, b"x")
    else:
        with tarfile.open(path, "w") as tar:
            info = tarfile.TarInfo(name)
            if kind == "link":
                info.type, info.linkname = tarfile.SYMTYPE, "target"
            tar.addfile(info)
    with pytest.raises(ChannelError, match="outside its directory"):
        list(walk(path, want=lambda _: False))


@pytest.mark.parametrize("name", ["x.conda", "x.whl", "x.tar", "x.tar.gz", "x.tar.zst"])
@pytest.mark.parametrize("content", [b"", b"not an archive"])
def test_damaged_archives_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ChannelError, match=name):
        list(walk(tmp_path / name))


@pytest.mark.parametrize(("ending", "mode"), [("gz", "w:gz"), ("bz2", "w:bz2"), ("xz", "w:xz")])
@pytest.mark.parametrize("how", ["read", "path"])
def test_a_cut_off_tar_is_damaged(tmp_path: Path, ending: str, mode: str, how: str) -> None:
    path = as_tar(tmp_path, f"it.tar.{ending}", mode)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ChannelError, match=rf"it\.tar\.{ending} is damaged"):
        [getattr(member, how)() for member in walk(path)]


def test_a_wheel_with_altered_bytes_is_damaged(tmp_path: Path) -> None:
    path = as_wheel(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"secondsecond", b"secondsecxnd"))
    with pytest.raises(ChannelError, match=r"it-1-py3-none-any\.whl is damaged"):
        [member.path() for member in walk(path)]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no"):
        list(walk(tmp_path / "absent.whl"))
