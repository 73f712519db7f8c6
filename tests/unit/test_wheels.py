"""Wheel to .conda: layout, metadata, dependencies, and what must be refused."""

from __future__ import annotations

import csv
import hashlib
import io
import stat
from pathlib import Path

import pytest

from sm75.condapkg import FileSource, iter_payload, read_info, read_info_files, verify_payload
from sm75.errors import ChannelError, FetchError
from sm75.wheelfile import Wheel
from sm75.wheels import Options, convert, plan
from tests.unit.wheelkit import make_wheel

ARM = "py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64"


def payload(path: Path) -> dict[str, tuple[int, bytes]]:
    return {m.name: (m.mode, raw.read()) for m, raw in iter_payload(path)}


def test_pure_wheel_becomes_noarch(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path,
        metadata="Requires-Python: >=3.9\nRequires-Dist: typing-extensions>=4,!=4.1.*",
        entry_points="[console_scripts]\ndemo = demo.cli:main [fast]\n",
    )
    path = convert(wheel, tmp_path / "out", subdir="linux-aarch64", python="3.12")
    info = read_info(path)
    assert path.parent.name == "noarch"
    assert info["index"]["name"] == "demo-pkg"
    assert info["index"]["depends"] == ["python >=3.9", "typing_extensions !=4.1.*,>=4"]
    assert info["link"]["noarch"]["entry_points"] == ["demo = demo.cli:main"]
    assert info["about"]["extra"] == {
        "wheel": wheel.name,
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "purl": "pkg:pypi/demo-pkg@1.2.0",
    }
    assert info["about"]["license"] == "MIT"
    assert read_info_files(path)["info/licenses/LICENSE"] == b"MIT text\n"
    assert verify_payload(path) == []
    again = convert(wheel, tmp_path / "again", subdir="linux-aarch64", python="3.12")
    assert again.name == path.name
    assert again.read_bytes() == path.read_bytes()


def test_record_names_what_is_installed(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path,
        files={
            "demo/__init__.py": b"x = 1\n",
            "demo_pkg-1.2.0.data/scripts/run": b"#!python\nprint(1)\n",
            "demo_pkg-1.2.0.data/data/share/d.txt": b"d",
            "demo_pkg-1.2.0.data/purelib/more.py": b"m",
        },
    )
    files = payload(convert(wheel, tmp_path / "out", subdir="linux-64", python="3.12"))
    mode, text = files["python-scripts/run"]
    assert mode == 0o755
    assert text.startswith(b"#!/opt/placehold_")
    assert text.endswith(b"/bin/python\nprint(1)\n")
    rows = list(
        csv.reader(io.StringIO(files["site-packages/demo_pkg-1.2.0.dist-info/RECORD"][1].decode()))
    )
    listed = {r[0] for r in rows}
    assert {"demo/__init__.py", "more.py", "../../../bin/run", "../../../share/d.txt"} <= listed
    assert "demo_pkg-1.2.0.dist-info/INSTALLER" in listed
    assert files["site-packages/demo_pkg-1.2.0.dist-info/INSTALLER"][1] == b"conda\n"


def test_arch_wheel_is_pinned_to_its_python(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path,
        tag="cp39-abi3-manylinux_2_28_aarch64",
        files={"demo/_c.abi3.so": b"\x7fELF", "demo_pkg-1.2.0.data/headers/d.h": b"h"},
        entry_points="[console_scripts]\ndemo = demo:main\n",
    )
    path = convert(wheel, tmp_path / "out", subdir="linux-aarch64", python="3.12")
    info = read_info(path)
    assert path.parent.name == "linux-aarch64"
    assert info["index"]["depends"] == ["__glibc >=2.28,<3.0.a0", "python 3.12.*"]
    files = payload(path)
    assert "lib/python3.12/site-packages/demo/_c.abi3.so" in files
    assert "include/python3.12/demo-pkg/d.h" in files
    assert b"from demo import main" in files["bin/demo"][1]
    entry = next(e for e in info["paths"]["paths"] if e["_path"] == "bin/demo")
    assert entry["file_mode"] == "text"
    assert entry["prefix_placeholder"].encode() in files["bin/demo"][1]


def test_markers_are_evaluated_for_the_target(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path,
        metadata=(
            "Requires-Dist: arm-only; platform_machine == 'aarch64'\n"
            "Requires-Dist: x86-only; platform_machine == 'x86_64'\n"
            "Requires-Dist: win-only; sys_platform == 'win32'\n"
            "Requires-Dist: extra-only; extra == 'more'\n"
            "Requires-Dist: uvicorn[standard]>=0.2\n"
            "Requires-Dist: torch==2.12.*"
        ),
    )
    with Wheel(wheel) as opened:
        arm = plan(opened, Options(subdir="linux-aarch64", python="3.12", drop=("Torch",)))
        x86 = plan(
            opened,
            Options(
                subdir="linux-64", python="3.12", extras=("more",), names={"torch": "dlami-torch"}
            ),
        )
    assert arm.depends == ("arm-only", "python", "uvicorn >=0.2")
    assert arm.extras_wanted == {"uvicorn": frozenset({"standard"})}
    assert x86.depends == (
        "dlami-torch 2.12.*",
        "extra-only",
        "python",
        "uvicorn >=0.2",
        "x86-only",
    )
    assert arm.build != x86.build


def test_python_markers_pin_a_noarch_package(tmp_path: Path) -> None:
    differs = "Requires-Dist: backport; python_version < '3.13'"
    wheel = make_wheel(tmp_path, metadata=f"Requires-Python: >=3.9\n{differs}")
    path = convert(wheel, tmp_path / "out", subdir="linux-64", python="3.12")
    assert read_info(path)["index"]["depends"] == ["backport", "python 3.12.*"]
    old = make_wheel(tmp_path / "o", metadata="Requires-Dist: tomli; python_version < '3.11'")
    assert read_info(convert(old, tmp_path / "out2", subdir="linux-64", python="3.12"))["index"][
        "depends"
    ] == ["python"]


def test_layout_places_a_tool_without_python(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path,
        project="nvidia-tool",
        tag=ARM,
        files={
            "nvidia/cu13/bin/nvcc": b"\x7fELF",
            "nvidia/cu13/include/a/b.h": b"b",
            "nvidia/cu13/junk.json": b"{}",
        },
        executable=("nvidia/cu13/bin/nvcc",),
    )
    path = convert(
        wheel,
        tmp_path / "out",
        subdir="linux-64",
        python=None,
        noarch="generic",
        name="cuda-tool_linux-aarch64",
        layout=[
            ("nvidia/cu13/*.json", None),
            ("nvidia/cu13/include/**", "targets/sbsa-linux/include/{0}"),
            ("nvidia/*/bin/*", "opt/{0}/{1}"),
        ],
        extra_files={"targets/aarch64-linux": FileSource.symlink("sbsa-linux")},
        depends_extra=["cuda-base"],
    )
    files = payload(path)
    assert set(files) == {
        "opt/cu13/nvcc",
        "targets/sbsa-linux/include/a/b.h",
        "targets/aarch64-linux",
    }
    assert files["opt/cu13/nvcc"][0] == 0o755
    index = read_info(path)["index"]
    assert (index["noarch"], index["depends"]) == ("generic", ["cuda-base"])
    assert "info/licenses/LICENSE" in read_info_files(path)


def test_layout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, tag="py3-none-any", files={"a/b": b"", "c": b""})
    with pytest.raises(ChannelError, match="no layout rule places 1 member") as err:
        convert(wheel, tmp_path / "out", subdir="linux-64", python=None, layout=[("a/**", "{0}")])
    assert "c" in err.value.why
    with pytest.raises(ChannelError, match="rules match nothing"):
        convert(wheel, tmp_path / "out", subdir="linux-64", python="3.12", layout=[("z/*", "{0}")])
    with pytest.raises(ChannelError, match="refusing the package path"):
        convert(wheel, tmp_path / "out", subdir="linux-64", python="3.12", layout=[("c", "../c")])
    assert not list((tmp_path / "out").rglob("*.conda"))


@pytest.mark.parametrize(
    ("tag", "subdir", "python"),
    [
        (ARM, "linux-64", "3.12"),
        ("cp311-cp311-manylinux_2_17_aarch64", "linux-aarch64", "3.12"),
        ("cp313-cp313t-manylinux_2_17_aarch64", "linux-aarch64", "3.13"),
        ("cp313-abi3-manylinux_2_17_aarch64", "linux-aarch64", "3.12"),
        ("py3-none-musllinux_1_2_aarch64", "linux-aarch64", "3.12"),
        ("py2-none-any", "linux-64", "3.12"),
    ],
)
def test_wheels_of_another_target_are_refused(
    tmp_path: Path, tag: str, subdir: str, python: str
) -> None:
    with pytest.raises(ChannelError, match="is not for"):
        convert(make_wheel(tmp_path, tag=tag), tmp_path / "out", subdir=subdir, python=python)


def test_unsupported_python_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, metadata="Requires-Python: <3.12")
    with pytest.raises(ChannelError, match=r"does not support Python 3\.12"):
        convert(wheel, tmp_path / "out", subdir="linux-64", python="3.12")


def test_requirement_by_url_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, metadata="Requires-Dist: x @ https://example.org/x.zip")
    with pytest.raises(ChannelError, match="no version to lock"):
        convert(wheel, tmp_path / "out", subdir="linux-64", python="3.12")


@pytest.mark.parametrize("name", ["/abs", "../up", "a/../../up", "C:/x", "a\\..\\b", "a//b"])
def test_members_that_escape_are_refused(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path, files={name: b"x"})
    with pytest.raises(FetchError, match="refusing the member"):
        convert(wheel, tmp_path / "out", subdir="linux-64", python="3.12")


def test_links_in_a_wheel_are_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, files={"l": b"/etc"}, modes={"l": stat.S_IFLNK | 0o777})
    with pytest.raises(FetchError, match="refusing the member"):
        convert(wheel, tmp_path / "out", subdir="linux-64", python="3.12")


def test_member_that_is_not_what_record_says_is_refused(tmp_path: Path) -> None:
    wrong = "sha256=" + "A" * 43
    wheel = make_wheel(tmp_path, record={"demo/__init__.py": wrong})
    with pytest.raises(ChannelError, match="not what was expected"):
        convert(wheel, tmp_path / "out", subdir="linux-64", python="3.12")
    assert not list((tmp_path / "out").rglob("*.conda"))
    unhashed = make_wheel(tmp_path / "u", record={"demo/__init__.py": ""})
    assert convert(unhashed, tmp_path / "out", subdir="linux-64", python="3.12").exists()


def test_truncated_and_missing_wheels_are_named(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises(FetchError, match="is not a wheel"):
        convert(wheel, tmp_path / "out", subdir="linux-64", python="3.12")
    with pytest.raises(FetchError, match="does not exist"):
        convert(tmp_path / "a-1-py3-none-any.whl", tmp_path, subdir="linux-64", python="3.12")


def test_flipped_byte_in_a_wheel_is_found(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, files={"demo/blob": bytes(range(256)) * 64})
    data = bytearray(wheel.read_bytes())
    data[60] ^= 0xFF
    wheel.write_bytes(data)
    with pytest.raises((FetchError, ChannelError)):
        convert(wheel, tmp_path / "out", subdir="linux-64", python="3.12")
    assert not list((tmp_path / "out").rglob("*.conda"))
