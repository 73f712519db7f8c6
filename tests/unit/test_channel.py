"""Publishing: the same bytes each time, all or nothing, and checks that find every damage."""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import rattler

from sm75 import channel as channel_module
from sm75 import rattler_rt
from sm75.atomic import fsync_dir
from sm75.channel import index, publish, verify_channel
from sm75.channelcheck import holds
from sm75.condapkg import FileSource, write_conda
from sm75.errors import BusyError, ChannelError, DiskError
from sm75.wheels import convert
from tests.unit.wheelkit import make_wheel


def package(out: Path, name: str = "demo", content: bytes = b"x", size: int = 0) -> Path:
    return write_conda(
        out,
        name=name,
        version="1.0",
        build="h0_0",
        subdir="linux-aarch64",
        files={f"share/{name}": FileSource.from_bytes(content + bytes(size))},
        depends=["__glibc >=2.17"],
    )


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name != ".lock"
    }


def problems(channel: Path) -> list[tuple[str, str]]:
    return [(p.path.rpartition("/")[2], p.kind) for p in verify_channel(channel)]


REL = "linux-aarch64/demo-1.0-h0_0.conda"


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """A channel with one package and its document."""
    place = tmp_path / "channel"
    assert not holds(place, REL)
    publish(
        [package(tmp_path / "built")], place, documents={f"{Path(REL).name}.provenance.json": b"{}"}
    )
    assert holds(place, REL)
    return place


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_bytes())
    change(data)
    path.write_text(json.dumps(data))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "package": lambda c: (c / REL).write_bytes((c / REL).read_bytes()[:-1] + b"x"),
    "sums": lambda c: (c / "SHA256SUMS").write_text("0" * 64 + f"  {REL}\n"),
    "no sums": lambda c: (c / "SHA256SUMS").unlink(),
    "malformed sums": lambda c: (c / "SHA256SUMS").write_text("junk\n"),
    "no provenance": lambda c: (c / f"{Path(REL).name}.provenance.json").unlink(),
    "other provenance": lambda c: (c / f"{Path(REL).name}.provenance.json").write_bytes(b"[]"),
    "depends": lambda c: edit(
        c / "linux-aarch64/repodata.json",
        lambda data: data["packages.conda"][Path(REL).name].update(depends=["other"]),
    ),
    "index: no JSON": lambda c: (c / "linux-aarch64/repodata.json").write_text("{"),
    "index: a list": lambda c: (c / "linux-aarch64/repodata.json").write_text("[]"),
    "index: null": lambda c: (c / "linux-aarch64/repodata.json").write_text("null"),
    "index: packages a list": lambda c: (c / "linux-aarch64/repodata.json").write_text(
        '{"info": {"subdir": "linux-aarch64"}, "packages": [], "packages.conda": []}'
    ),
    "index: a record of text": lambda c: edit(
        c / "linux-aarch64/repodata.json",
        lambda data: data["packages.conda"].update({Path(REL).name: "text"}),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_channel_holds_what_is_whole(held: Path, damage: str) -> None:
    DAMAGES[damage](held)
    with pytest.raises(ChannelError):
        holds(held, REL)
    assert verify_channel(held) != []


def test_a_channel_without_the_package_or_its_record(held: Path) -> None:
    """A killed publisher leaves this; the next one completes it."""
    index_file = held / "linux-aarch64/repodata.json"
    edit(index_file, lambda data: data["packages.conda"].clear())
    assert not holds(held, REL)
    index_file.unlink()
    assert not holds(held, REL)
    (held / REL).unlink()
    assert not holds(held, REL)


def test_publishing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    built = [package(tmp_path / "built", "a"), package(tmp_path / "built", "b")]
    publish(built, tmp_path / "one", documents={"sbom.json": b"{}"})
    publish(built[:1], tmp_path / "two")
    publish(built[1:], tmp_path / "two", documents={"sbom.json": b"{}"})
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")
    assert verify_channel(tmp_path / "one") == []
    text = (tmp_path / "one/linux-aarch64/repodata.json").read_text()
    assert "indexed_timestamp" not in text
    assert (tmp_path / "one/noarch/repodata.json").exists()
    assert not list((tmp_path / "one").rglob("*.zst"))
    before = snapshot(tmp_path / "one")
    publish(built, tmp_path / "one")
    assert snapshot(tmp_path / "one") == before


def test_sums_are_sha256sums(tmp_path: Path) -> None:
    publish([package(tmp_path / "built")], tmp_path / "c")
    subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=tmp_path / "c", check=True)


def test_every_damage_is_found(tmp_path: Path) -> None:
    channel = tmp_path / "c"
    files = publish([package(tmp_path / "built", "a"), package(tmp_path / "built", "b")], channel)
    good = snapshot(channel)

    def damaged(change: Callable[[], object]) -> list[tuple[str, str]]:
        change()
        found = problems(channel)
        for rel, data in good.items():
            (channel / rel).write_bytes(data)
        for rel in snapshot(channel).keys() - good.keys():
            (channel / rel).unlink()
        return found

    a = files[0]
    flipped = bytearray(a.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    repodata = channel / "linux-aarch64/repodata.json"
    assert (a.name, "altered") in damaged(lambda: a.write_bytes(flipped))
    assert (a.name, "missing") in damaged(a.unlink)
    assert ("c-1.0-h0_0.conda", "extra") in damaged(
        lambda: (a.parent / "c-1.0-h0_0.conda").write_bytes(a.read_bytes())
    )
    assert (a.name, "index") in damaged(
        lambda: repodata.write_text(repodata.read_text().replace("2.17", "2.99"))
    )
    assert ("repodata.json", "index") in damaged(lambda: repodata.write_text("{"))
    assert ("repodata.json", "missing") in damaged(repodata.unlink)
    assert ("SHA256SUMS", "missing") in damaged((channel / "SHA256SUMS").unlink)
    assert ("SHA256SUMS", "altered") in damaged(
        lambda: (channel / "SHA256SUMS").write_text("nonsense\n")
    )
    assert problems(channel) == []


def test_index_that_lags_behind_the_sums_is_found(tmp_path: Path) -> None:
    """SHA256SUMS alone being right is not enough: clients go by the index."""
    channel = tmp_path / "c"
    (a,) = publish([package(tmp_path / "built", "a")], channel)
    sums = channel / "SHA256SUMS"
    flipped = bytearray(a.read_bytes())  # of the same size
    flipped[len(flipped) // 2] ^= 1
    a.write_bytes(flipped)
    digest = hashlib.sha256(a.read_bytes()).hexdigest()
    sums.write_text(f"{digest}  linux-aarch64/{a.name}\n")
    assert (a.name, "altered") in problems(channel)
    (b,) = publish([package(tmp_path / "built", "b")], tmp_path / "d")
    (channel / "linux-aarch64" / b.name).write_bytes(b.read_bytes())
    digest = hashlib.sha256(b.read_bytes()).hexdigest()
    sums.write_text(sums.read_text() + f"{digest}  linux-aarch64/{b.name}\n")
    assert (b.name, "extra") in problems(channel)


def test_package_whose_payload_is_not_its_own_is_refused(tmp_path: Path) -> None:
    good, other = package(tmp_path / "a"), package(tmp_path / "b", content=b"evil")
    mixed = tmp_path / good.name
    with (
        zipfile.ZipFile(good) as g,
        zipfile.ZipFile(other) as o,
        zipfile.ZipFile(mixed, "w") as out,
    ):
        for name in g.namelist():
            out.writestr(name, (o if name.startswith("pkg-") else g).read(name))
    with pytest.raises(ChannelError, match="is damaged"):
        publish([mixed], tmp_path / "c")
    assert snapshot(tmp_path / "c") == {}


def test_damaged_package_is_refused(tmp_path: Path) -> None:
    channel = tmp_path / "c"
    publish([package(tmp_path / "built", "a")], channel)
    before = snapshot(channel)
    bad = package(tmp_path / "built", "b")
    bad.write_bytes(bad.read_bytes()[:-30])
    with pytest.raises(ChannelError, match="not a readable"):
        publish([bad], channel)
    with pytest.raises(ChannelError, match="does not exist"):
        publish([tmp_path / "none-1-0.conda"], channel)
    wrong = package(tmp_path / "built", "d")
    with pytest.raises(ChannelError, match="misnamed"):
        publish([wrong.rename(wrong.with_name("e-1.0-h0_0.conda"))], channel)
    assert snapshot(channel) == before


def test_altered_channel_is_not_published_over(tmp_path: Path) -> None:
    channel = tmp_path / "c"
    (published,) = publish([package(tmp_path / "built", "a")], channel)
    published.write_bytes(package(tmp_path / "evil", "a", b"evil").read_bytes())
    with pytest.raises(ChannelError, match="is damaged; nothing was published"):
        publish([package(tmp_path / "built", "b")], channel)


def test_same_name_other_content_needs_replace(tmp_path: Path) -> None:
    channel = tmp_path / "c"
    publish([package(tmp_path / "one")], channel)
    other = package(tmp_path / "two", content=b"y")
    with pytest.raises(ChannelError, match="already published with other content"):
        publish([other], channel)
    (published,) = publish([other], channel, replace=True)
    assert published.read_bytes() == other.read_bytes()
    assert verify_channel(channel) == []


def test_withdrawn_packages_go_last(tmp_path: Path) -> None:
    channel = tmp_path / "c"
    publish([package(tmp_path / "built", "a"), package(tmp_path / "built", "b")], channel)
    publish([], channel, remove=["linux-aarch64/a-1.0-h0_0.conda"])
    assert [p.name for p in channel.glob("*/*.conda")] == ["b-1.0-h0_0.conda"]
    publish([], channel, remove=["linux-aarch64/b-1.0-h0_0.conda"])
    assert json.loads((channel / "linux-aarch64/repodata.json").read_text())["packages.conda"] == {}
    assert verify_channel(channel) == []


def test_a_fault_at_any_move_leaves_the_channel_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = tmp_path / "c"
    publish([package(tmp_path / "one", "a")], channel, documents={"sbom.json": b"old"})
    before = snapshot(channel)
    new = [package(tmp_path / "two", "a", b"new"), package(tmp_path / "two", "b")]
    faults = 0
    for fail_at in range(1, 20):
        calls = 0

        def failing(directory: Path, fail_at: int = fail_at) -> None:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise OSError(28, "No space left on device")
            fsync_dir(directory)

        monkeypatch.setattr(channel_module, "fsync_dir", failing)
        try:
            publish(new, channel, replace=True, documents={"sbom.json": b"new"})
        except DiskError:
            faults += 1
            assert snapshot(channel) == before
            continue
        break
    assert faults == 6  # two packages, a document, SHA256SUMS, two indexes
    assert verify_channel(channel) == []


def test_a_killed_publisher_leaves_a_usable_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Die (no clean-up at all) after each move: the index never names what is not there."""
    new = [package(tmp_path / "new", "b"), package(tmp_path / "new", "c")]
    for die_after in range(1, 6):
        channel = tmp_path / f"c{die_after}"
        publish([package(tmp_path / "one", "a")], channel)

        def half(moves: list[tuple[Path, Path]], _: Path, count: int = die_after) -> None:
            for source, target in moves[:count]:
                source.replace(target)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(channel_module, "_commit", half)
            with pytest.raises(KeyboardInterrupt):
                publish(new, channel)
        (channel / ".sm75-tmp-left-behind").mkdir()
        assert {p.kind for p in verify_channel(channel)} <= {"extra"}
        publish(new, channel)
        assert verify_channel(channel) == []
        assert not list(channel.glob(".sm75-tmp-*"))


def test_a_record_of_what_is_published_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any move, the former one still says what is to be withdrawn."""
    new = [package(tmp_path / "new", "b")]
    old = "linux-aarch64/a-1.0-h0_0.conda"
    moved: list[str] = []

    def watch(moves: list[tuple[Path, Path]], backup: Path) -> None:
        for source, target in moves:
            moved.append(target.relative_to(channel).as_posix())
            if target.name == "list.json" and target.exists():
                assert target.read_bytes() == b"a"
                assert not (channel / old).exists()
            source.replace(target)

    channel = tmp_path / "c"
    publish([package(tmp_path / "one", "a")], channel, record={"list.json": b"a"})
    monkeypatch.setattr(channel_module, "_commit", watch)
    publish(new, channel, record={"list.json": b"b"}, remove=[old])
    assert moved[-1] == "list.json"
    assert (channel / "list.json").read_bytes() == b"b"
    assert verify_channel(channel) == []


def test_full_disk_leaves_the_channel_as_it_was(tmp_path: Path) -> None:
    channel = tmp_path / "c"
    publish([package(tmp_path / "one", "a")], channel)
    before = snapshot(channel)
    noise = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(250)) * 4
    big = package(tmp_path / "built", "big", noise)
    assert big.stat().st_size > 4_000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, hard))  # a true EFBIG from the kernel
    try:
        with pytest.raises(DiskError, match="cannot write"):
            publish([big], channel)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert snapshot(channel) == before
    assert not list(channel.glob(".sm75-tmp-*"))


@pytest.mark.parametrize("number", [28, 122])
def test_full_disk_while_indexing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The indexer is Rust: it has words for it, and its own kind of error."""
    channel = tmp_path / "c"
    publish([package(tmp_path / "one", "a")], channel)
    before = snapshot(channel)

    def full(*_: object, **__: object) -> None:
        raise RuntimeError(f"at write => no storage space (os error {number})")

    monkeypatch.setattr(channel_module, "index_fs", full)
    with pytest.raises(DiskError, match="cannot write") as caught:
        publish([package(tmp_path / "two", "b")], channel)
    assert caught.value.exit_code == 9
    assert snapshot(channel) == before


def test_two_publishers_take_turns(tmp_path: Path) -> None:
    channel = tmp_path / "c"
    built = [package(tmp_path / "built", name) for name in "abcd"]
    errors: list[BaseException] = []

    def one(path: Path) -> None:
        try:
            publish([path], channel)
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=one, args=(p,)) for p in built]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(list(channel.glob("*/*.conda"))) == 4
    assert verify_channel(channel) == []


def test_a_held_lock_is_reported(tmp_path: Path) -> None:
    channel = tmp_path / "c"
    channel.mkdir()
    with filelock.FileLock(channel / ".lock"), pytest.raises(BusyError, match="another run"):
        publish([package(tmp_path / "built")], channel, wait=0.1)
    assert snapshot(channel) == {}


def test_a_path_that_conda_would_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match="no channel can live in"):
        publish([package(tmp_path / "built")], tmp_path / "t" / "c")


def test_index_takes_rebuilt_packages(tmp_path: Path) -> None:
    package(tmp_path, content=b"one")
    index(tmp_path, subdirs=["linux-64"])
    assert (tmp_path / "linux-64/repodata.json").exists()
    package(tmp_path, content=b"two")
    (tmp_path / "linux-aarch64/repodata.json.zst").write_bytes(b"stale")
    assert verify_channel(tmp_path) != []
    index(tmp_path)
    assert verify_channel(tmp_path) == []


def test_rattler_installs_what_the_converter_makes(tmp_path: Path) -> None:
    """Solve and install for the foreign platform: noarch, scripts, links, placeholder."""
    channel = tmp_path / "channel"
    write_conda(
        channel,
        name="python",
        version="3.12.9",
        build="h0_0_cpython",
        subdir="linux-aarch64",
        files={
            "bin/python3.12": FileSource.from_bytes(b"#!/bin/sh\n", executable=True),
            "bin/python": FileSource.symlink("python3.12"),
        },
    )
    noarch = make_wheel(
        tmp_path,
        files={"demo/__init__.py": b"", "demo_pkg-1.2.0.data/scripts/run": b"#!python\n1\n"},
        entry_points="[console_scripts]\ndemo = demo:main\n",
        metadata="Requires-Dist: native>=2",
    )
    native = make_wheel(
        tmp_path,
        project="native",
        version="2.1",
        tag="cp312-cp312-manylinux_2_17_aarch64",
        files={"native.so": b"\x7fELF"},
        entry_points="[console_scripts]\nnat = native:main\n",
    )
    for wheel in (noarch, native):
        convert(wheel, channel, subdir="linux-aarch64", python="3.12")
    index(channel)
    glibc = rattler.GenericVirtualPackage(
        rattler.PackageName("__glibc"), rattler.Version("2.34"), rattler.BuildString("0")
    )
    prefix = tmp_path / "prefix"

    async def install() -> None:
        records = await rattler.solve(
            sources=[rattler.Channel(channel.as_uri())],
            specs=["demo-pkg"],
            gateway=rattler.Gateway(cache_dir=tmp_path / "cache"),
            platforms=[rattler.Subdir("linux-aarch64"), rattler.Subdir("noarch")],
            virtual_packages=[glibc],
        )
        await rattler.install(
            records,
            target_prefix=prefix,
            platform=rattler.Subdir("linux-aarch64"),
            cache_dir=tmp_path / "cache",
            show_progress=False,
        )

    rattler_rt.run(install())
    site = prefix / "lib/python3.12/site-packages"
    assert (site / "native.so").exists()
    assert (site / "demo/__init__.py").exists()
    assert (prefix / "bin/python").readlink() == Path("python3.12")
    shebang = f"#!{prefix}/bin/python"
    for script in ("run", "nat", "demo"):
        assert (prefix / "bin" / script).read_text().startswith(shebang)
        assert (prefix / "bin" / script).stat().st_mode & 0o111
    installed = {
        line.partition(",")[0]
        for line in (site / "demo_pkg-1.2.0.dist-info/RECORD").read_text().splitlines()
    }
    assert all((site / name).exists() for name in installed)


def test_rattler_does_not_crash_at_exit(tmp_path: Path) -> None:
    """Eight short processes; unmended, about half die of a signal."""
    package(tmp_path)
    code = (
        "import sys; from pathlib import Path; from rattler.index import index_fs;"
        "from sm75 import rattler_rt; rattler_rt.run(index_fs(Path(sys.argv[1]), force=True))"
    )
    root = Path(__file__).parents[2]
    for _ in range(8):
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=root)
