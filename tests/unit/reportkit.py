"""A small channel with everything that a report shows, and a page read as a browser reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import html5lib
import msgspec
from markupsafe import Markup

from sm75 import channel as channels
from sm75 import condapkg, inputs, rules, sbom, verify
from sm75.condapkg import FileSource
from sm75.lockfile import G5G, load_release
from sm75.report import records, timeline
from sm75.series import load_series
from sm75.store import hash_file
from tests.unit import channelkit
from tests.unit.projectkit import ROOT

LOCK = load_release(ROOT)
NATIVE = "ab" * 32
# Two runs of ninja: the second began 1000 s later and made one object anew. ninja 1.13's format.
LOG = """# ninja log v7
2	9000	1796080224914053792	CMakeFiles/_C.dir/csrc/a.cu.o	e0c8ef583ce38dfb
9001	12000	1796080233913000000	CMakeFiles/_C.dir/csrc/c.cpp.o	1ac223197c748d9e
3	61000	1796080224915000000	CMakeFiles/_C.dir/csrc/b.cu.o	3ac223197c748d9e
61000	61900	1796080285912000000	_C.abi3.so	2ac223197c748d9e
5	70005	1796081224917000000	CMakeFiles/_C.dir/csrc/b.cu.o	3ac223197c748d9f
70006	71000	1796081294918000000	_C.abi3.so	2ac223197c748d9e
"""
NINJA = """rule CUDA
  command = nvcc
build CMakeFiles/_C.dir/csrc/a.cu.o: CUDA /x/csrc/a.cu || order
build CMakeFiles/_C.dir/csrc/b.cu.o: CUDA /x/csrc/b.cu | /x/header.h || order
build CMakeFiles/_C.dir/csrc/c.cpp.o: CXX /x/csrc/c.cpp
build order: phony
build _C.abi3.so: LINK CMakeFiles/_C.dir/csrc/a.cu.o CMakeFiles/_C.dir/csrc/b.cu.o $
    CMakeFiles/_C.dir/csrc/c.cpp.o
build all: phony _C.abi3.so
"""


def package(where: Path, elf: bytes) -> Path:
    """A vllm-sm75 that says what it was made of: this release's real inputs."""
    made_of = inputs.collect(
        ROOT, LOCK, load_series(ROOT / "patches" / LOCK.vllm), toolchain={"provider": "bootstrap"},
        build_platform="linux-64", target_platform=G5G, rust="none",
    )  # fmt: skip
    return condapkg.write_conda(
        where, name="vllm-sm75", version=LOCK.vllm, build=made_of.build_string, subdir=G5G,
        license="Apache-2.0", depends=["python >=3.11", "numpy"],
        about={"extra": {"provenance": made_of.facts, "native_hash": NATIVE}},
        files={
            "site-packages/vllm/spinloop.abi3.so": FileSource.from_bytes(elf),
            "site-packages/vllm/v1/core.py": FileSource.from_bytes(b"x = 1\n"),
        },
    )  # fmt: skip


def project(where: Path) -> Path:
    """A directory with the project's documents, and no records."""
    for name in ("patches", "lock", "docs"):
        (where / name).symlink_to(ROOT / name)
    return where


def whole(root: Path, channel: Path, elf: bytes) -> Path:
    """A channel and records for every section; gives the package in the channel."""
    made = package(root / "made", elf)
    rest = [
        channelkit.write(root / "made", "numpy", "2.4", "py312", depends=["python 3.12.*"]),
        channelkit.write(root / "made", "dlami-torch", "2.12.0", noarch=True),
    ]
    channels.publish(
        [made, *rest], channel,
        derived={sbom.SBOM: lambda tree: sbom.make(tree, root, LOCK)},
    )  # fmt: skip
    published = channel / G5G / made.name
    records.keep(root, published, verify.verify(published, rules.Policy(version=LOCK.vllm)))
    build = root / ".sm75" / "native" / NATIVE[:16] / "build"
    build.mkdir(parents=True)
    (build / ".ninja_log").write_text(LOG)
    (build / "build.ninja").write_text(NINJA)
    assert timeline.read(build) is not None
    records.keep_smem(
        root,
        records.SmemRecord(
            package="", series=hash_file(root / "patches" / LOCK.vllm / "series.toml"),
            vllm=LOCK.vllm, triton="3.7.0", summary="smem: 2 kernel variants", passed=True,
            chart=records.Chart(
                limit=65_536, unit="bytes",
                bars=(records.Bar(label="h512, decode", before=98_304, after=65_536),
                      records.Bar(label="h256, prefill", after=32_768)),
            ),
        ),
    )  # fmt: skip
    return published


def parse(page: bytes) -> Element:
    """Read a page; any error of its syntax is raised."""
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    tree: Element = parser.parse(page.decode())
    return tree


def elements(tree: Element, *names: str) -> list[Element]:
    """Elements of those names, in the order of the page; svg's without their namespace."""
    return [e for e in tree.iter() if isinstance(e.tag, str) and tag(e) in names]


def tag(element: Element) -> str:
    """An element's name, without its namespace."""
    return str(element.tag).rpartition("}")[2]


def text(element: Element) -> str:
    """All text of an element, white space collapsed."""
    return " ".join("".join(element.itertext()).split())


def attributes(tree: Element) -> Iterator[tuple[Element, str, str]]:
    """Every attribute of a page."""
    for element in tree.iter():
        if isinstance(element.tag, str):
            for name, value in element.attrib.items():
                yield element, str(name).rpartition("}")[2], value


def poison(value: Any, text: str) -> Any:
    """The same facts with other text in every place of theirs that has any."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, str):
        return f"{value}{text}"
    if isinstance(value, tuple | list):
        return type(value)(poison(item, text) for item in value)
    if isinstance(value, dict):
        return {poison(k, text): poison(v, text) for k, v in value.items()}
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return type(value)(**{name: poison(v, text) for name, v in fields.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: poison(getattr(value, f.name), text)
                      for f in dataclasses.fields(value) if f.init}
        )  # fmt: skip
    return value
