"""Where two packages differ, and what a second build says about it."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from sm75 import adapter, condapkg, rebuild
from sm75.closurelock import load_runtime
from sm75.condapkg import FileSource
from sm75.errors import CheckFailed
from sm75.lockfile import load_release, load_target
from sm75.pkgdiff import Difference, compare
from tests.unit.elfkit import (
    DEVICE,
    MODULE,
    extension,
    library_bytes,
    package,
    with_device_code,
)
from tests.unit.projectkit import ROOT

KERNELS = "vllm/_C_stable_libtorch.abi3.so"
HERE = "lib/python3.12/site-packages/"


def _pair(tmp_path: Path, changes: dict[str, bytes | None]) -> tuple[Path, Path]:
    return package(tmp_path / "one"), package(tmp_path / "other", changes)


def _places(tmp_path: Path, changes: dict[str, bytes | None]) -> set[tuple[str, str]]:
    found = compare(*_pair(tmp_path, changes))
    return {(d.file.removeprefix(HERE), d.where) for d in found if d.file.startswith(HERE)}


def test_the_same_bytes_differ_nowhere(tmp_path: Path) -> None:
    assert compare(*_pair(tmp_path, {})) == ()


def test_a_line_of_text_is_named(tmp_path: Path) -> None:
    changes: dict[str, bytes | None] = {"vllm/__init__.py": b"scratch = '/tmp/vllm'\nmore = 1\n"}
    assert _places(tmp_path, changes) == {("vllm/__init__.py", "line 2")}


def test_a_file_of_one_package_alone_is_named(tmp_path: Path) -> None:
    one, other = _pair(tmp_path, {"vllm/new.py": b""})
    said = [str(d) for d in compare(one, other) if d.file.endswith("new.py")]
    assert said == [f"{HERE}vllm/new.py: only the second package has it"]


def test_the_manifest_is_told_apart_by_key(tmp_path: Path) -> None:
    one = package(tmp_path / "one", rust="none")
    other = package(tmp_path / "other", rust="prebuilt")
    assert ("info/about.json", "extra.rust_frontend") in {
        (d.file, d.where) for d in compare(one, other)
    }


def test_a_section_of_a_library_is_named(tmp_path: Path) -> None:
    other = extension("spinloop", 'const char said[] = "it";\n')
    found = _places(tmp_path, {"vllm/spinloop.abi3.so": other})
    assert ("vllm/spinloop.abi3.so", ".rodata") in found
    assert {file for file, _ in found} == {"vllm/spinloop.abi3.so"}


def test_a_kernel_in_device_code_is_named(tmp_path: Path) -> None:
    code = (DEVICE / "plain.fatbin").read_bytes()
    library = library_bytes(MODULE + with_device_code("plain.fatbin"))
    cubin = library.index(b"\x7fELF", library.index(code))
    sections = ELFFile(io.BytesIO(library[cubin:])).iter_sections()
    kernel = next(s for s in sections if s.name.startswith(".text."))
    altered = bytearray(library)
    altered[cubin + kernel["sh_offset"]] ^= 1
    one = package(tmp_path / "one", {KERNELS: library})
    other = package(tmp_path / "other", {KERNELS: bytes(altered)})
    found = [d for d in compare(one, other) if d.file == HERE + KERNELS]
    assert [d.where for d in found] == [f"sm_75 sass of source 0, {kernel.name}"]


def test_a_mode_is_named(tmp_path: Path) -> None:
    one, other = (
        condapkg.write_conda(
            tmp_path / str(flag), name="a", version="1", build="0", subdir="linux-64",
            files={"bin/a": FileSource.from_bytes(b"x", executable=flag)},
        )
        for flag in (True, False)
    )  # fmt: skip
    assert [(d.file, d.where, d.detail) for d in compare(one, other)] == [
        ("bin/a", "mode", "493 and 420")
    ]


@pytest.mark.parametrize("level", [1, 19])
def test_compression_alone_is_told(tmp_path: Path, level: int) -> None:
    files = {f"a/{n}": FileSource.from_bytes(os.urandom(64).hex().encode() * 9) for n in range(9)}
    one, other = (
        condapkg.write_conda(
            tmp_path / str(used), name="a", version="1", build="0", subdir="linux-64",
            files=files, level=used,
        )
        for used in (3, level)
    )  # fmt: skip
    found = compare(one, other)
    assert [d.where.partition("-")[0] for d in found] == ["pkg"]


def test_the_zip_alone_is_told(tmp_path: Path) -> None:
    one = package(tmp_path / "one")
    other = tmp_path / one.name
    with zipfile.ZipFile(one) as source, zipfile.ZipFile(other, "w") as out:
        for member in source.infolist():
            content = source.read(member)
            member.date_time = (2025, 1, 1, 0, 0, 0)
            out.writestr(member, content)
    assert [d.detail for d in compare(one, other)] == ["the zip's own headers differ"]


def _result(*differences: Difference) -> rebuild.Result:
    one = rebuild.Compared(package="linux-aarch64/a-1-0.conda", differences=differences)
    return rebuild.Result(compared=(one,), skipped=("b: why",), jobs=3, seconds=61.0)


def test_sameness_is_said(tmp_path: Path) -> None:
    rebuild.require(_result())
    said = rebuild.describe(_result())
    assert "1 package came out the same" in said
    assert "not compared: b: why" in said
    assert rebuild.to_json(_result())["identical"] is True


def test_a_difference_fails_and_names_the_place() -> None:
    result = _result(Difference(file="x.so", where=".text", detail="8 bytes"))
    with pytest.raises(CheckFailed, match="1 of 1 packages came out otherwise") as caught:
        rebuild.require(result)
    assert "linux-aarch64/a-1-0.conda: x.so: .text: 8 bytes" in caught.value.why
    assert rebuild.to_json(result)["identical"] is False


@pytest.mark.parametrize(("first", "cores", "second"),
                         [(0, 1, 2), (0, 2, 3), (0, 16, 15), (1, 2, 2), (4, 2, 3)])  # fmt: skip
def test_the_second_build_has_another_job_count(
    first: int, cores: int, second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert rebuild.other_jobs(first) == second
    assert second != (first or cores)


def test_the_copy_has_what_the_other_packages_read(tmp_path: Path) -> None:
    """The adapter and the closure's lock are read from the project as well."""
    rebuild.copy_project(ROOT, tmp_path / "copy")
    lock = load_release(tmp_path / "copy", None)
    made = adapter.build(tmp_path / "copy", load_target(tmp_path / "copy", lock.target), tmp_path)
    here = adapter.build(ROOT, load_target(ROOT, lock.target), tmp_path / "here")
    assert compare(made, here) == ()
    assert load_runtime(tmp_path / "copy", lock.vllm) == load_runtime(ROOT, lock.vllm)
