"""What is known of vLLM's releases: the tables are the pinned sdists' own."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sm75.errors import LockError
from sm75.lockfile import load_release
from sm75.serve import known, sdist
from sm75.serve.known import Known
from sm75.store import Store, default_root
from tests.unit import servekit
from tests.unit.projectkit import ROOT

RELEASES = sorted(path.parent.name for path in (ROOT / "lock").glob("*/release.toml"))


def table(release: str) -> Known:
    found = known.Installed(release=release).known
    assert found is not None
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_each_locked_release_has_a_table_of_its_own_sdist(release: str) -> None:
    pinned = next(one for one in load_release(ROOT, release).artifacts if one.id == "vllm-sdist")
    assert table(release).source == {"sdist": pinned.filename, "sha256": pinned.sha256}, (
        f"python3 -m sm75.serve.sdist {release}"
    )


@pytest.mark.integration
@pytest.mark.parametrize("release", RELEASES)
def test_the_tables_are_what_the_sdists_say(release: str) -> None:
    pinned = next(one for one in load_release(ROOT, release).artifacts if one.id == "vllm-sdist")
    store = Store(default_root())
    if not store.has(pinned):
        pytest.skip("the sdist is not in the store")
    source = {"sdist": pinned.filename, "sha256": pinned.sha256}
    text = sdist.dump({"source": source, **sdist.read(store.get(pinned))})
    assert text == (sdist.HERE / f"{release}.json").read_text()


@pytest.mark.parametrize("release", RELEASES)
def test_what_a_person_reads_in_the_sources(release: str) -> None:
    """Read by hand in both sdists; the reader must not find less."""
    found = table(release)
    capabilities = {name: method.capability for name, method in found.methods.items()}
    assert {name for name, least in capabilities.items() if least > 75} == {
        "experts_int8", "fbgemm_fp8", "fp_quant", "gpt_oss_mxfp4", "modelopt", "modelopt_mxfp8",
        "mxfp4", "mxfp8",
    }  # fmt: skip
    # By a base class, by another's method, and by the branch of CUDA.
    assert capabilities["gpt_oss_mxfp4"] == 80
    assert capabilities["deepseek_v4_fp8"] == capabilities["fp8"] == 75
    assert found.methods["mxfp4"].types == ("bfloat16",)
    assert found.schemes["CompressedTensorsW8A8Fp8"] == 89
    # One that inherits it; 0.28.0 does not have it.
    assert found.schemes.get("CompressedTensorsW4A8Mxfp4", 80) == 80
    assert ("kFloat16", "kFE4M3fn", "") in found.marlin
    assert ("kFloat16", "kFE2M1f", "kFE8M0fnu") not in found.marlin
    assert "Gemma4ForConditionalGeneration" in found.architectures["multimodal"]
    assert "LlamaForCausalLM" in found.architectures["generate"]
    assert "BertModel" in found.architectures["pooling"]
    assert "EagleLlamaForCausalLM" in found.architectures["draft"]
    assert found.gone["Phi3SmallForCausalLM"] == "0.9.2"
    assert found.elsewhere["BartModel"].endswith("/bart-plugin")
    assert set(found.not_in_float16) == {"gemma2", "gemma3", "gemma3_text", "glm4"}


# exponent, mantissa, signed, bias, finite, NaN (vllm/scalar_type.py, ScalarType.id).
TYPES = {
    "kFloat16": (5, 10, 1, 0, 0, 1), "kFE4M3fn": (4, 3, 1, 0, 1, 2), "kFE2M1f": (2, 1, 1, 0, 1, 0),
    "kU4": (0, 4, 0, 0, 0, 1), "kU4B8": (0, 4, 0, 8, 0, 1), "kU8B128": (0, 8, 0, 128, 0, 1),
    "kS8": (0, 7, 1, 0, 0, 1),
}  # fmt: skip


def number_of(fields: tuple[int, ...]) -> int:
    found = offset = 0
    for value, width in zip(fields, (8, 8, 1, 32, 1, 8), strict=True):
        found |= value << offset
        offset += width
    return found


@pytest.mark.integration
@pytest.mark.parametrize("release", RELEASES)
def test_the_built_package_has_marlin_for_them(release: str) -> None:
    """By the kernels' names in both extensions of the newest package in ./channel."""
    built = sorted((ROOT / "channel/linux-aarch64").glob(f"vllm-sm75-{release}-*.conda"),
                   key=lambda path: path.stat().st_mtime)  # fmt: skip
    if not built:
        pytest.skip("there is no package in ./channel")
    types = {number_of(fields): name for name, fields in TYPES.items()}
    with zipfile.ZipFile(built[-1]) as package:
        name = next(one for one in package.namelist() if one.startswith("pkg-"))
        with (
            package.open(name) as packed,
            tarfile.open(fileobj=zstandard.ZstdDecompressor().stream_reader(packed),
                         mode="r|") as archive,
        ):  # fmt: skip
            for entry in archive:
                if not entry.name.endswith("_C_stable_libtorch.abi3.so"):
                    continue
                member = archive.extractfile(entry)
                assert member is not None
                found = {
                    (types[int(a)], types[int(b)], "" if s == c else types[int(s)])
                    for a, b, c, s in re.findall(
                        rb"MarlinILl(\d+)ELl(\d+)ELl(\d+)ELl(\d+)E", member.read()
                    )
                }
                assert found == set(table(release).marlin), entry.name


def environment(directory: Path, **distributions: str) -> Path:
    """An environment's program, with packages by name: version, and entry points."""
    prefix = servekit.prefix(directory, "#!/bin/sh\n")
    site = prefix / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    for name, said in distributions.items():
        version, _, points = said.partition(" ")
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(points)
    return prefix / "bin" / "vllm"


def test_what_is_installed(tmp_path: Path) -> None:
    point = "[vllm.general_plugins]\nx = y:z\n"
    program = environment(
        tmp_path / "env", vllm=f"0.28.0 {point}", my_plugin=f"1 {point}", other="2"
    )
    found = known.look(program)
    assert (found.release, found.plugins) == ("0.28.0", ("my_plugin",))
    assert found.lacks("transformers")
    assert found.site is not None
    (found.site / "transformers").mkdir()
    assert not found.lacks("transformers")
    default = (ROOT / "lock" / "default").read_text().strip()
    assert known.look(Path("vllm")) == known.Installed(release=default)
    assert known.look(tmp_path / "none" / "bin" / "vllm").release == default
    assert known.Installed(release="9.9.9").known is None


def test_sources_that_are_built_otherwise_are_told(tmp_path: Path) -> None:
    path = tmp_path / "vllm-9.9.9.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        data = b"QuantizationMethods = 1\n"
        entry: Any = tarfile.TarInfo(
            "vllm-9.9.9/vllm/model_executor/layers/quantization/__init__.py"
        )
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    with pytest.raises(LockError, match="is not built as"):
        sdist.read(path)


def test_a_table_is_json_as_it_is_written() -> None:
    for release in RELEASES:
        text = (sdist.HERE / f"{release}.json").read_text()
        assert sdist.dump(json.loads(text)) == text
