"""Thin wheels: deterministic, proven by RECORD, few requests."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm75.errors import FetchError
from sm75.remotezip import (
    GAP,
    Segments,
    Thin,
    coalesce,
    local_thin,
    pattern,
    remote_thin,
    select,
    thin_filename,
)
from sm75.store import AlteredError
from sm75.transfer import FileLink, Transfer
from tests.unit.badserver import BadServer
from tests.unit.fetchkit import HASTY, noise, record_line, wheel_bytes

MEMBERS = {
    "demo/__init__.py": b"",
    "demo/include/deep/x.h": b"int x;\n" * 500,
    "demo/include/y.h": b"int y;\n",
    "demo/lib/big.so": noise(1_500_000),
    "demo/lib/libc.so": noise(30_000, 2),
    "demo/zz-rs": noise(60_000, 3),
}
GLOBS = ("demo/include/**", "demo/*-rs")
WHEEL = wheel_bytes(MEMBERS)
INFO = "demo-1.0.dist-info"


def thin_of(
    content: bytes, tmp_path: Path, globs: tuple[str, ...] = GLOBS, record: str | None = None
) -> tuple[Thin, bytes]:
    wheel = tmp_path / "demo-1.0-py3-none-any.whl"
    wheel.write_bytes(content)
    out = tmp_path / "out.whl"
    thin = local_thin(wheel, members=globs, record_sha256=record, out=out)
    return thin, out.read_bytes()


def test_contents(tmp_path: Path) -> None:
    thin, content = thin_of(WHEEL, tmp_path)
    assert thin.sha256 == hashlib.sha256(content).hexdigest()
    assert thin.size == len(content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        infos = archive.infolist()
        names = [info.filename for info in infos]
        assert names == sorted(names)
        assert names == [
            f"{INFO}/METADATA",
            f"{INFO}/RECORD",
            f"{INFO}/WHEEL",
            "demo/include/deep/x.h",
            "demo/include/y.h",
            "demo/zz-rs",
        ]
        assert thin.members == len(names)
        assert {info.compress_type for info in infos} == {zipfile.ZIP_STORED}
        assert {info.date_time for info in infos} == {(1980, 1, 1, 0, 0, 0)}
        modes = {info.filename: info.external_attr >> 16 for info in infos}
        assert modes["demo/zz-rs"] == 0o100755
        assert modes["demo/include/y.h"] == 0o100644
        with zipfile.ZipFile(io.BytesIO(WHEEL)) as whole:
            for name in names:
                assert archive.read(name) == whole.read(name)
    record = zipfile.ZipFile(io.BytesIO(WHEEL)).read(f"{INFO}/RECORD")
    assert thin.record_sha256 == hashlib.sha256(record).hexdigest()


def test_bytes_are_fixed(tmp_path: Path) -> None:
    """The lock pins these bytes: a change here makes every published lock wrong."""
    content = wheel_bytes({"demo/a.h": b"a\n", "demo/b-rs": b"b\n", "demo/c": b"c\n"})
    thin, _ = thin_of(content, tmp_path, ("demo/*",))
    assert thin.size == 1139
    assert thin.sha256 == "f333716eb11b03332590f1b79ccaa4b229ae085f7d569b7cef2e1f1fa60fde62"


def test_same_members_same_bytes(tmp_path: Path) -> None:
    other = dict(reversed(MEMBERS.items()))
    first, _ = thin_of(wheel_bytes(MEMBERS), tmp_path)
    record = zipfile.ZipFile(io.BytesIO(WHEEL)).read(f"{INFO}/RECORD")
    second, _ = thin_of(wheel_bytes(other, record=record), tmp_path)
    assert first == second


def test_wrong_record(tmp_path: Path) -> None:
    with pytest.raises(AlteredError, match="another RECORD than the lock pins"):
        thin_of(WHEEL, tmp_path, record="0" * 64)
    assert not (tmp_path / "out.whl").exists()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (record_line("demo/zz-rs", b"other"), "not in its RECORD|is not what its RECORD says"),
        (b"demo/zz-rs,md5=aa,3\n", "without sha256 sums"),
        (b"\xff\xfe", "not a sound wheel"),
    ],
)
def test_lying_record(tmp_path: Path, record: bytes, expected: str) -> None:
    with pytest.raises(AlteredError, match=expected):
        thin_of(wheel_bytes(MEMBERS, record=record), tmp_path, ("demo/zz-rs",))
    assert not (tmp_path / "out.whl").exists()


@pytest.mark.parametrize("claim", [5, 10**9])
def test_size_in_record_counts_too(tmp_path: Path, claim: int) -> None:
    true = zipfile.ZipFile(io.BytesIO(WHEEL)).read(f"{INFO}/RECORD")
    record = true.replace(b",60000\n", f",{claim}\n".encode())
    assert record != true
    with pytest.raises(AlteredError, match="is not what its RECORD says"):
        thin_of(wheel_bytes(MEMBERS, record=record), tmp_path)


def test_no_wheel_at_all(tmp_path: Path) -> None:
    with pytest.raises(AlteredError, match="not a sound wheel"):
        thin_of(b"PK\x03\x04 nothing", tmp_path)
    empty = io.BytesIO()
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("demo/zz-rs", b"")
    with pytest.raises(AlteredError, match="0 RECORD files"):
        thin_of(empty.getvalue(), tmp_path, ("demo/zz-rs",))


def test_symbolic_links_and_double_names_are_refused(tmp_path: Path) -> None:
    def with_extra(name: str, mode: int) -> bytes:
        buffer = io.BytesIO(WHEEL)
        with zipfile.ZipFile(buffer, "a") as archive:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, b"demo/zz-rs")
        return buffer.getvalue()

    with pytest.raises(AlteredError, match="symbolic link"):
        thin_of(with_extra("demo/link-rs", 0o120777), tmp_path)
    with (
        pytest.raises(AlteredError, match="two members"),
        pytest.warns(UserWarning, match="Duplicate"),
    ):
        thin_of(with_extra("demo/zz-rs", 0o100644), tmp_path)
    with pytest.raises(AlteredError, match="not in its RECORD"):
        thin_of(with_extra("demo/extra-rs", 0o100644), tmp_path)


def test_select() -> None:
    names = ["a/", "a/x.py", "a/b/y.py", "a/b/c/z.py", f"{INFO}/RECORD", "top.py"]
    assert select(names, ["a/*.py"], "w") == ["a/x.py", f"{INFO}/RECORD"]
    assert select(names, ["a/**"], "w")[:3] == ["a/b/c/z.py", "a/b/y.py", "a/x.py"]
    with pytest.raises(FetchError, match=r"no member 'a/\*\.so'"):
        select(names, ["a/*.so"], "w")
    for bad in ("../a/evil.py", "/a/evil.py", "a/../evil.py", "a\\evil.py"):
        with pytest.raises(AlteredError, match="unsafe name"):
            select([*names, bad], ["**/*evil.py", "**evil.py"], "w")


@pytest.mark.parametrize(
    ("glob", "name", "hit"),
    [
        ("a/**/x.h", "a/x.h", True),
        ("a/**/x.h", "a/b/c/x.h", True),
        ("a/**/x.h", "ab/x.h", False),
        ("a/**/x.h", "a/yx.h", False),
        ("a/**", "a/bc/d.h", True),
        ("a/**", "b/a/c", False),
        ("a/*.so", "a/b.so", True),
        ("a/*.so", "a/b/c.so", False),
        ("a/?.so", "a/b.so", True),
        ("a/b.so", "a/bxso", False),
        ("a/b", "a/b\n", False),
    ],
)
def test_pattern(glob: str, name: str, hit: bool) -> None:
    assert bool(pattern(glob).match(name)) is hit


def test_coalesce() -> None:
    assert coalesce([]) == []
    assert coalesce([(10, 20), (0, 5)], 5) == [(0, 20)]
    assert coalesce([(10, 20), (0, 5)], 4) == [(0, 5), (10, 20)]
    assert coalesce([(0, 100), (10, 20), (90, 95)], 0) == [(0, 100)]


@settings(deadline=None)  # a loaded machine is no fault
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 50))), st.integers(0, 40))
def test_coalesced_ranges_cover_everything_and_little_else(
    raw: list[tuple[int, int]], gap: int
) -> None:
    ranges = [(start, start + length) for start, length in raw]
    joined = coalesce(ranges, gap)
    covered = {n for start, end in joined for n in range(start, end)}
    wanted = {n for start, end in ranges for n in range(start, end)}
    assert wanted <= covered
    assert all(b[0] - a[1] > gap for a, b in pairwise(joined))
    if gap == 0:
        assert wanted == covered


@settings(deadline=None)  # a loaded machine is no fault
@given(st.binary(min_size=1, max_size=60), st.data())
def test_segments_read_like_the_file(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("segments")
    view = Segments(len(content))
    position = st.integers(0, len(content))
    while gaps := view.missing(0, len(content)):
        start, end = gaps[0]
        end = data.draw(st.integers(start + 1, end))
        path = folder / str(start)
        path.write_bytes(content[start:end])
        view.put(start, path)
    start, end = data.draw(position), data.draw(position)
    view.seek(start)
    assert view.read(max(0, end - start)) == content[start:end]
    view.seek(-start, io.SEEK_END)
    assert view.read() == content[len(content) - start :]
    view.close()


@pytest.fixture
def server() -> Iterator[BadServer]:
    with BadServer() as running:
        running.files["demo/w.whl"] = WHEEL
        yield running


def remote(server: BadServer, tmp_path: Path, size: int = len(WHEEL)) -> tuple[Thin, int, int]:
    async def go() -> tuple[Thin, int, int]:
        async with Transfer(HASTY) as transfer:
            thin = await remote_thin(
                transfer,
                FileLink(filename="w.whl", url=server.url.replace("simple/", "files/demo/w.whl")),
                size=size,
                members=GLOBS,
                record_sha256=None,
                segments=tmp_path / "segments",
                out=tmp_path / "remote.whl",
            )
            return thin, transfer.requests, transfer.received

    return asyncio.run(go())


def test_remote_and_local_give_the_same(server: BadServer, tmp_path: Path) -> None:
    local, content = thin_of(WHEEL, tmp_path)
    thin, requests, received = remote(server, tmp_path)
    assert thin == local
    assert (tmp_path / "remote.whl").read_bytes() == content
    assert requests <= 3
    assert received < 200_000


def test_what_a_former_run_read_is_not_read_again(server: BadServer, tmp_path: Path) -> None:
    remote(server, tmp_path)
    _, requests, _ = remote(server, tmp_path)
    assert requests == 0


def test_ten_thousand_members_take_a_handful_of_requests(server: BadServer, tmp_path: Path) -> None:
    members = {f"demo/include/{n:05}.h": b"x" * (n % 40) for n in range(10_000)}
    content = wheel_bytes({"demo/aa.so": noise(3 * GAP), **members, "demo/zz-rs": b"z"})
    server.files["demo/w.whl"] = content
    thin, requests, _ = remote(server, tmp_path, len(content))
    assert thin.members == 10_004
    assert requests <= 4


def test_remote_garbage(server: BadServer, tmp_path: Path) -> None:
    server.files["demo/w.whl"] = noise(len(WHEEL))
    with pytest.raises(AlteredError, match="not a sound wheel"):
        remote(server, tmp_path)


def test_thin_filename() -> None:
    assert thin_filename("a_b-1.0-py3-none-any.whl") == "a_b-1.0-0thin-py3-none-any.whl"
    assert thin_filename("a-1-2build-py3-none-any.whl") == "a-1-0thin-py3-none-any.whl"
