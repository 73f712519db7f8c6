"""The channel as a whole: solved and installed offline, and refused when anything is wrong."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
import rattler

from sm75 import channel as channels
from sm75 import channelcheck, channeltools, condapkg, rattler_rt, recipedeps
from sm75 import install as installer
from sm75.basepython import BasePython
from sm75.closurelock import load_omissions
from sm75.errors import ChannelError, UsageError
from sm75.install import Box
from tests.integration import closurekit
from tests.integration.closurekit import LOCK, STORE
from tests.integration.conftest import ROOT, Built

CONDA_FORGE = ROOT / "tests" / "data" / "conda-forge"


def test_package_depends_on_what_the_closure_serves(built: Built) -> None:
    """Spelled in the same way, after everything that reads and writes the specs."""
    depends = condapkg.read_info(built.package)["index"]["depends"]
    wanted = recipedeps.wanted(ROOT, LOCK, STORE.get(LOCK.artifact("vllm-sdist")))
    own = ["python >=3.11,<3.15", "dlami-torch >=2.11"]
    assert sorted(depends) == sorted([*own, *wanted])


@pytest.mark.parametrize("minor", ["3.12", "3.13"])
def test_existing_conda_forge_environment(product: Path, box: Box, minor: str) -> None:
    """python and native libraries of conda-forge, all else ours; no torch or vllm from there."""
    records = installer.solve(
        [product, CONDA_FORGE], ["vllm-sm75", f"python {minor}.*", "ca-certificates"], box
    )
    names = {r.name.normalized for r in records}
    assert not names & {"pytorch", "libtorch", "vllm", "triton"}
    theirs = {r.name.normalized for r in records if product.as_uri() not in r.url}
    assert {"python", "libgcc", "openssl"} <= theirs
    assert len(names - theirs) > 140


@pytest.mark.parametrize("minor", ["3.12", "3.13"])
def test_mixed_into_an_environment_of_conda_forge(product: Path, box: Box, minor: str) -> None:
    """What is installed stays but for what vLLM does not allow, and that comes from our channel."""
    history = [f"python {minor}.*", "pip", "ca-certificates"]
    there = installer.solve([CONDA_FORGE], history, box)
    before = {r.name.normalized: r for r in there}

    async def add() -> list[rattler.RepoDataRecord]:
        return await rattler.solve(
            sources=[rattler.Channel(path.as_uri()) for path in (product, CONDA_FORGE)],
            specs=[*history, "vllm-sm75"],
            platforms=[rattler.Subdir("linux-aarch64"), rattler.Subdir("noarch")],
            virtual_packages=box.packages(),
            locked_packages=there,
        )

    after = {r.name.normalized: r for r in rattler_rt.run(add())}
    assert not set(after) & {"pytorch", "libtorch", "vllm", "triton"}
    assert after["python"].url == before["python"].url
    assert set(before) <= set(after)
    changed = {n for n, r in before.items() if after[n].url != r.url}
    # vLLM asks for setuptools below 81
    assert changed <= {"setuptools"}
    new = {n for n in after if n not in before} | changed
    assert {"vllm-sm75", "dlami-torch", "transformers"} <= new
    assert all(after[n].url.startswith(product.as_uri()) for n in new)


def test_channel_alone_lacks_python_and_says_so(product: Path, box: Box, tmp_path: Path) -> None:
    base = BasePython(ROOT, LOCK, installer.pythons(product))
    found = {gap.python: gap.missing for gap in channeltools.gaps(product, box, tmp_path, base)}
    assert set(found) == {"3.11", "3.12", "3.13"}
    for minor, missing in found.items():
        assert len(missing) == 1, missing
        assert missing[0].startswith(f"python {minor} and its libraries: 2")
        assert f"python-{minor}." in missing[0]


@pytest.mark.parametrize(
    ("fact", "value", "words"),
    [
        ("__glibc", "2.31", "this machine has glibc 2.31; vllm-sm75 needs >=2.34"),
        ("__cuda_arch", "8.0", "has a GPU of compute capability 8.0; vllm-sm75 needs >=7.5,<8"),
        ("__cuda", "12.8", "has a driver for CUDA 12.8; "),
    ],
)
def test_wrong_box(product: Path, box: Box, fact: str, value: str, words: str) -> None:
    wrong = dataclasses.replace(box, virtual={**box.virtual, fact: value})
    with pytest.raises(ChannelError) as caught:
        installer.solve([product, CONDA_FORGE], ["vllm-sm75", "python 3.12.*"], wrong)
    assert words in caught.value.what


def test_other_platform(product: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is for linux-aarch64"):
        installer.install(
            product, tmp_path / "p", python="3.12", box=Box(platform="linux-64", virtual={})
        )
    assert list(tmp_path.iterdir()) == []


def flip(where: Path) -> str:
    package = max(where.glob("linux-aarch64/numpy-*.conda"))
    data = bytearray(package.read_bytes())
    data[len(data) // 2] ^= 1
    package.unlink()
    package.write_bytes(data)
    return package.name


def remove(where: Path) -> str:
    package = max(where.glob("noarch/transformers-*.conda"))
    package.unlink()
    return package.name


def edit(where: Path) -> str:
    index = where / "noarch" / channelcheck.REPODATA
    data = json.loads(index.read_bytes())
    name = next(n for n in data["packages.conda"] if n.startswith("transformers-"))
    data["packages.conda"][name]["depends"] = []
    index.unlink()
    index.write_text(json.dumps(data))
    return str(name)


@pytest.mark.parametrize("damage", [flip, remove, edit])
def test_damaged_channel_is_refused(
    product: Path, python: Path, box: Box, tmp_path: Path, damage: object
) -> None:
    where = closurekit.copy_channel(product, tmp_path / "channel")
    assert callable(damage)
    name = damage(where)
    assert any(name in p.path for p in channelcheck.verify_channel(where))
    target = tmp_path / "prefix"
    target.mkdir()
    with pytest.raises(ChannelError) as caught:
        installer.install(where, target, python="3.11", box=box, extra_channels=[python])
    assert name in caught.value.why
    assert list(target.iterdir()) == []
    assert {p.name for p in tmp_path.iterdir()} == {"channel", "prefix"}


def test_prefix_in_use_is_left_alone(product: Path, box: Box, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError, match="is not empty"):
        installer.install(product, tmp_path, python="3.11", box=box)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_sizes(product: Path) -> None:
    totals = channeltools.totals(channeltools.sizes(product))
    for name, limit in channeltools.LIMITS.items():
        assert 0 < totals[name] < limit


def test_export_carries_all(product: Path, tmp_path: Path) -> None:
    first = channeltools.export(product, tmp_path / "a.tar")
    assert first == channeltools.export(product, tmp_path / "b.tar")
    subprocess.run(["tar", "-xf", "a.tar"], cwd=tmp_path, check=True)
    subprocess.run(
        ["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=tmp_path / "channel", check=True
    )
    assert channelcheck.verify_channel(tmp_path / "channel") == []
    assert len(channels.packages_in(tmp_path / "channel")) == len(channels.packages_in(product))


def test_installed_environment_holds_no_omission(prefix: Path) -> None:
    site = prefix / "lib" / "python3.11" / "site-packages"
    absent = load_omissions(ROOT, LOCK.vllm).absent_imports
    assert {n for n in absent if list(site.glob(f"{n}*/__init__.py"))} == set()
    assert not (site / "torch").exists()
    assert (site / "dlami_torch.pth").exists()
    scripts = (prefix / "bin" / "vllm").read_text()
    assert scripts.startswith(f"#!{prefix}/bin/python3.11\n")
