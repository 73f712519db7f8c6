"""The .conda writer: same input, same bytes; nothing outside the prefix; damage is seen."""

from __future__ import annotations

import errno
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sm75 import condapkg
from sm75.condanorm import normalize
from sm75.condapkg import FileSource, read_info, tree, verify_payload, write_conda
from sm75.errors import ChannelError, DiskError


def write(out: Path, files: dict[str, FileSource] | None = None, **kwargs: Any) -> Path:
    arguments: dict[str, Any] = {
        "name": "demo",
        "version": "1.0",
        "build": "h0_0",
        "subdir": "linux-64",
        "files": files
        if files is not None
        else {
            "bin/tool": FileSource.from_bytes(b"#!/bin/sh\n", executable=True),
            "lib/libx.so": FileSource.symlink("libx.so.1"),
            "lib/libx.so.1": FileSource.from_bytes(b"\x7fELF"),
        },
        "depends": ["b", "a >=1", "b"],
    }
    return write_conda(out, **(arguments | kwargs))


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = write(tmp_path / "one"), write(tmp_path / "two")
    assert first.name == "demo-1.0-h0_0.conda"
    assert first.parent.name == "linux-64"
    assert first.read_bytes() == second.read_bytes()


def test_content_and_modes_survive(tmp_path: Path) -> None:
    path = write(tmp_path)
    found = {m.name: (m.mode, m.linkname, raw.read()) for m, raw in condapkg.iter_payload(path)}
    assert found["bin/tool"] == (0o755, "", b"#!/bin/sh\n")
    assert found["lib/libx.so"][1] == "libx.so.1"
    info = read_info(path)
    assert info["index"]["depends"] == ["a >=1", "b"]
    assert info["index"]["timestamp"] == condapkg.EPOCH * 1000
    kinds = {e["_path"]: e["path_type"] for e in info["paths"]["paths"]}
    assert kinds["lib/libx.so"] == "softlink"
    assert verify_payload(path) == []


def test_tree_reads_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub/run").write_text("x")
    (root / "sub/run").chmod(0o755)
    (root / "link").symlink_to("sub/run")
    files = tree(root, dest="opt")
    assert files["opt/sub/run"].executable
    assert files["opt/link"].link == "sub/run"
    assert verify_payload(write(tmp_path / "out", files)) == []


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "a//b", "", "./a", "info/index.json", "a\nb"]
)
def test_paths_outside_the_prefix_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ChannelError, match="refusing the package path"):
        write(tmp_path, {path: FileSource.from_bytes(b"")})
    assert not list(tmp_path.rglob("*.conda"))


@pytest.mark.parametrize("target", ["/etc/passwd", "../../x", "a/../../../x", ""])
def test_links_outside_the_prefix_are_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(ChannelError, match="refusing the link"):
        write(tmp_path, {"lib/l": FileSource.symlink(target)})


def test_a_file_cannot_be_a_directory_too(tmp_path: Path) -> None:
    both = {"a": FileSource.from_bytes(b""), "a/b": FileSource.from_bytes(b"")}
    with pytest.raises(ChannelError, match="both a file and a directory"):
        write(tmp_path, both)


def test_content_that_is_not_its_hash_is_refused(tmp_path: Path) -> None:
    lying = FileSource(opener=lambda: io.BytesIO(b"abc"), size=3, sha256="0" * 64)
    with pytest.raises(ChannelError, match="not what was expected"):
        write(tmp_path, {"f": lying})
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("size", [2, 4])
def test_content_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    lying = FileSource(opener=lambda: io.BytesIO(b"abc"), size=size)
    with pytest.raises(ChannelError, match=r"than (the )?announced"):
        write(tmp_path, {"f": lying})


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskError, match="cannot write"):
        write(tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_noarch_python_has_link_json(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"site-packages/d.py": FileSource.from_bytes(b"")},
        noarch="python",
        entry_points=["d = d:main"],
    )
    info = read_info(path)
    assert path.parent.name == "noarch"
    assert info["index"]["subdir"] == "noarch"
    assert info["link"]["noarch"] == {"type": "python", "entry_points": ["d = d:main"]}


def test_truncated_package_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ChannelError, match=r"demo-1.0-h0_0.conda is not a readable"):
        read_info(path)


def test_altered_payload_is_found(tmp_path: Path) -> None:
    good = write(tmp_path / "a")
    other = write(tmp_path / "b", {"bin/tool": FileSource.from_bytes(b"evil")})
    mixed = tmp_path / "mixed.conda"
    with (
        zipfile.ZipFile(good) as g,
        zipfile.ZipFile(other) as o,
        zipfile.ZipFile(mixed, "w") as out,
    ):
        for name in g.namelist():
            out.writestr(name, (o if name.startswith("pkg-") else g).read(name))
    problems = verify_payload(mixed)
    assert "bin/tool differs from its sha256 in paths.json" in problems
    assert "lib/libx.so is missing" in problems


def _as_built(out: Path, where: str, epoch: int) -> Path:
    """A package as rattler-build leaves it: dates, build directory and machine in it."""
    old = (f"{where}/host_env" + "_placehold" * 30)[:255]
    path = write_conda(
        out,
        name="demo",
        version="1.0",
        build="h0_0",
        subdir="linux-64",
        files={
            "bin/x": FileSource.from_bytes(
                f"#!{old}/bin/python\n".encode(), executable=True, placeholder=old
            ),
            "lib/l": FileSource.symlink("../bin/x"),
            "lib/plain": FileSource.from_bytes(b"plain"),
        },
        epoch=epoch,
        extra_info={"recipe/rendered_recipe.yaml": where.encode(), "recipe/recipe.yaml": b"r"},
    )
    assert where.encode() in next(
        raw.read() for m, raw in condapkg.iter_payload(path) if m.name == "bin/x"
    )
    return path


def test_normalize_removes_time_and_place(tmp_path: Path) -> None:
    built = [_as_built(tmp_path / str(n), f"/build/{'x' * n}", 1_700_000_000 + n) for n in (1, 20)]
    assert built[0].read_bytes() != built[1].read_bytes()
    done = []
    for n, src in enumerate(built):
        dst = tmp_path / f"out{n}"
        dst.mkdir()
        digest = normalize(src, dst, 1_600_000_000, about_extra={"input_hash": "abc"})
        done.append((digest, (dst / src.name).read_bytes()))
    assert done[0] == done[1]
    final = tmp_path / "out0" / built[0].name
    assert verify_payload(final) == []
    info = read_info(final)
    assert info["index"]["timestamp"] == 1_600_000_000_000
    assert info["about"]["extra"]["input_hash"] == "abc"
    names = condapkg.read_info_files(final)
    assert "info/recipe/recipe.yaml" in names
    assert "info/recipe/rendered_recipe.yaml" not in names
    assert all(m.mtime == 1_600_000_000 for m, _ in condapkg.iter_payload(final))
