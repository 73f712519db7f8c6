"""Installing from a channel: what is chosen, what is refused, and that a refusal leaves nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rattler
from rattler import exceptions

from sm75 import install, newprefix
from sm75.errors import ChannelError, DiskError, UsageError
from sm75.install import Box
from sm75.lockfile import TargetContract, load_target
from tests.unit import channelkit
from tests.unit.projectkit import ROOT

DOCS = (ROOT / "docs" / "installing.md").read_text()
CONTRACT = load_target(ROOT, "dlami-pytorch-2.12-ubuntu24.04")


@pytest.fixture
def box() -> Box:
    return install.box_of(CONTRACT)


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    """Whole: python is in it."""
    made = channelkit.python(tmp_path / "p")
    return channelkit.product(tmp_path / "channel", ("3.12",), made)


def changed(contract: TargetContract, **changes: object) -> TargetContract:
    import msgspec

    return msgspec.structs.replace(contract, **changes)


# What a machine is


def smi(place: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """A machine whose nvidia-smi says that; none at all: ``-``."""
    tool = place / "nvidia-smi"
    place.mkdir()
    if said != "-":
        tool.write_text(f"#!/bin/sh\n[ $1 = --query-gpu=compute_cap ] && printf '{said}'\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("said", "capability"),
    [
        ("7.5\\n", "7.5"),
        ("8.0\\n7.5\\n", "7.5"),
        ("10.0\\n9.0\\n", "9.0"),
        ("No devices were found\\n", None),
        ("[N/A]\\n", None),
        ("-", None),
    ],
)
def test_this_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, capability: str | None
) -> None:
    """The lowest of several GPUs; without one there is no such package (CEP 46)."""
    smi(tmp_path / "bin", monkeypatch, said)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    found = install.this_box()
    assert found.platform == "linux-aarch64"
    assert found.virtual.get("__cuda_arch") == capability
    told = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    assert found.virtual["__glibc"] == told
    assert {"__unix", "__linux"} <= set(found.virtual)


@pytest.mark.parametrize(
    ("machine", "subdir"),
    [("x86_64", "linux-64"), ("riscv64", "unknown"), ("aarch64", "linux-aarch64")],
)
def test_platform_of_this_box(monkeypatch: pytest.MonkeyPatch, machine: str, subdir: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert install.this_box().platform == subdir


def test_box_of_a_contract() -> None:
    """An image builder has no GPU, and must not need one."""
    found = install.box_of(changed(CONTRACT, glibc="2.39"))
    assert (found.platform, found.virtual["__glibc"]) == ("linux-aarch64", "2.39")
    assert not {"__cuda", "__cuda_arch"} & set(found.virtual)
    assert install.box_of(changed(CONTRACT, glibc="")).virtual["__glibc"] == "2.34"
    archspec = [p for p in found.packages() if p.name.normalized == "__archspec"]
    assert [str(p.build_string) for p in archspec] == ["neoverse_n1"]


# Which Python


def make_image(place: Path, minor: str) -> Path:
    (place / "lib" / f"python{minor}" / "site-packages" / "torch").mkdir(parents=True)
    return place


def test_pythons_that_a_channel_serves(tmp_path: Path) -> None:
    made = channelkit.product(tmp_path / "c", ("3.12", "3.9", "3.11"))
    assert install.pythons(made) == ["3.9", "3.11", "3.12"]
    assert install.pythons(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("asked", "image", "contract", "chosen"),
    [
        ("3.11", "3.12", ("3.13",), "3.11"),
        ("", "3.12", ("3.13",), "3.12"),
        ("", "", ("3.13",), "3.13"),
    ],
)
def test_python_by_request_image_contract(
    tmp_path: Path, asked: str, image: str, contract: tuple[str, ...], chosen: str
) -> None:
    made = channelkit.product(tmp_path / "c", ("3.11", "3.12", "3.13"))
    place = make_image(tmp_path / "image", image) if image else tmp_path / "none"
    found = install.choose_python(made, changed(CONTRACT, python=contract), place, asked)
    assert found == chosen


def test_python_that_cannot_be_told_or_served(tmp_path: Path) -> None:
    made = channelkit.product(tmp_path / "c", ("3.11", "3.12"))
    with pytest.raises(UsageError, match="not known") as caught:
        install.choose_python(made, CONTRACT, tmp_path / "none", "")
    assert "3.11, 3.12" in caught.value.fix
    with pytest.raises(UsageError, match=r"no packages for Python 3\.14") as caught:
        install.choose_python(made, CONTRACT, tmp_path / "none", "3.14")
    assert "3.11, 3.12" in caught.value.why
    with pytest.raises(UsageError) as caught:
        install.choose_python(tmp_path / "void", CONTRACT, tmp_path / "none", "3.12")
    assert "channel build" in caught.value.fix


# Solving


def solved(channels: list[Path], box: Box, *specs: str) -> set[str]:
    return {r.name.normalized for r in install.solve(channels, specs or ("vllm-sm75",), box)}


def test_chooses_what_is_needed(channel: Path, box: Box) -> None:
    assert solved([channel], box) == {"vllm-sm75", "dlami-torch", "numpy", "python"}


@pytest.mark.parametrize(
    ("fact", "value", "words"),
    [
        ("__glibc", "2.31", "this machine has glibc 2.31; vllm-sm75 needs >=2.34"),
        ("__cuda_arch", "8.0", "a GPU of compute capability 8.0; vllm-sm75 needs >=7.5,<8"),
        ("__cuda", "12.8", "a driver for CUDA 12.8; vllm-sm75 needs >=13"),
    ],
)
def test_wrong_machine(channel: Path, box: Box, fact: str, value: str, words: str) -> None:
    wrong = dataclasses.replace(box, virtual={**box.virtual, fact: value})
    with pytest.raises(ChannelError) as caught:
        install.solve([channel], ["vllm-sm75"], wrong)
    assert words in caught.value.what
    assert f"`{caught.value.what}`" in DOCS
    assert "g5g" in caught.value.fix


def test_right_machine(channel: Path, box: Box) -> None:
    right = dataclasses.replace(box, virtual={**box.virtual, "__cuda_arch": "7.5", "__cuda": "13"})
    assert "vllm-sm75" in solved([channel], right)


def test_no_python_is_said(tmp_path: Path, box: Box) -> None:
    made = channelkit.product(tmp_path / "c")
    with pytest.raises(ChannelError, match="has no python for linux-aarch64") as caught:
        install.solve([made], ["vllm-sm75"], box)
    assert f"`{caught.value.what}`" in DOCS
    assert "--extra-channel" in caught.value.fix


def test_what_else_is_missing_is_said(channel: Path, box: Box) -> None:
    with pytest.raises(
        ChannelError, match="no set of packages gives vllm-sm75, nonsense"
    ) as caught:
        install.solve([channel], ["vllm-sm75", "nonsense"], box)
    assert "nonsense" in caught.value.why
    with pytest.raises(UsageError, match="malformed"):
        install.solve([channel], ["vllm-sm75 >>1"], box)


def test_conflicting_packages_cannot_be_beside_it(tmp_path: Path, box: Box) -> None:
    more = [channelkit.python(tmp_path / "p")]
    more += [channelkit.write(tmp_path / "p", name, "2.14.0") for name in ("pytorch", "vllm")]
    made = channelkit.product(tmp_path / "c", ("3.12",), *more)
    for name in ("pytorch", "vllm"):
        assert solved([made], box, name) == {name}
        with pytest.raises(ChannelError):
            install.solve([made], ["vllm-sm75", name], box)


def test_first_channel_wins(tmp_path: Path, channel: Path, box: Box) -> None:
    """A newer package of another channel is not taken for one that ours has."""
    newer = channelkit.write(tmp_path / "n", "numpy", "9.9")
    other = channelkit.bare(tmp_path / "other", newer)
    records = install.solve([channel, other], ["vllm-sm75"], box)
    assert "numpy 2.4 py312" in install.names(records)


# Installing


def test_installs(channel: Path, tmp_path: Path, box: Box) -> None:
    prefix = tmp_path / "deep" / "env"
    done = install.install(
        channel, prefix, python="3.12", box=box, image=Path("/somewhere/pytorch")
    )
    assert done.packages == (
        "dlami-torch 2.12.0 h0_0",
        "numpy 2.4 py312",
        "python 3.12.4 0_cp312",
        "vllm-sm75 0.33.0 h0_0",
    )
    assert (prefix / "lib/python3.12/site-packages/vllm-sm75.py").is_file()
    # made for the place where it is, not for the one where it was laid out
    assert (prefix / "bin/vllm").read_text().startswith(f"#!{prefix}/bin/python3.12\n")
    assert (prefix / "etc/dlami-torch/path").read_text() == "/somewhere/pytorch\n"
    assert len(list((prefix / "conda-meta").glob("*.json"))) == 4
    assert [p.name for p in prefix.parent.iterdir()] == ["env"]


def test_empty_prefix_will_do(channel: Path, tmp_path: Path, box: Box) -> None:
    prefix = tmp_path / "env"
    prefix.mkdir()
    install.install(channel, prefix, python="3.12", box=box)
    assert not (prefix / "etc").exists()
    assert (prefix / "bin" / "vllm").exists()


def flip(where: Path) -> str:
    (package,) = where.glob("*/numpy-*.conda")
    channelkit.flip(package)
    return package.name


def remove(where: Path) -> str:
    (package,) = where.glob("*/dlami-torch-*.conda")
    package.unlink()
    return package.name


def edit(where: Path) -> str:
    channelkit.edit_index(where, "vllm-sm75", depends=[])
    return "vllm-sm75-0.33.0-h0_0.conda"


def no_sums(where: Path) -> str:
    (where / "SHA256SUMS").unlink()
    return "SHA256SUMS: missing"


def add(where: Path) -> str:
    (where / "linux-aarch64" / "extra-1-0.conda").write_bytes(b"x")
    return "extra-1-0.conda"


@pytest.mark.parametrize("damage", [flip, remove, edit, no_sums, add])
def test_damaged_channel(
    channel: Path, tmp_path: Path, box: Box, damage: Callable[[Path], str]
) -> None:
    name = damage(channel)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ChannelError, match="nothing was installed") as caught:
        install.install(channel, tmp_path / "env", python="3.12", box=box)
    assert name in caught.value.why
    assert sorted(tmp_path.iterdir()) == before


def test_no_channel(tmp_path: Path, box: Box) -> None:
    with pytest.raises(ChannelError, match="there is no channel") as caught:
        install.install(tmp_path / "void", tmp_path / "env", python="3.12", box=box)
    assert "channel build" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_another_channel_is_checked_too(tmp_path: Path, box: Box) -> None:
    """Also one without SHA256SUMS, as far as packages of it are chosen."""
    ours = channelkit.product(tmp_path / "c")
    unused = channelkit.write(tmp_path / "p", "unused")
    theirs = channelkit.bare(tmp_path / "theirs", channelkit.python(tmp_path / "p"), unused)
    settings = {"python": "3.12", "box": box, "extra_channels": [theirs]}
    channelkit.flip(theirs / "linux-aarch64" / unused.name)
    install.install(ours, tmp_path / "env", **settings)  # type: ignore[arg-type]
    (python,) = theirs.glob("*/python-*.conda")
    channelkit.flip(python)
    with pytest.raises(ChannelError, match=r"python-3\.12\.4.* is not what its index says"):
        install.install(ours, tmp_path / "env2", **settings)  # type: ignore[arg-type]
    python.unlink()
    with pytest.raises(ChannelError) as caught:
        install.install(ours, tmp_path / "env2", **settings)  # type: ignore[arg-type]
    assert "missing" in caught.value.why
    assert not (tmp_path / "env2").exists()
    whole = channelkit.bare(tmp_path / "whole", channelkit.python(tmp_path / "p"))
    (whole / "SHA256SUMS").write_text(f"{'0' * 64}  linux-aarch64/gone.conda\n")
    with pytest.raises(ChannelError) as caught:
        install.install(ours, tmp_path / "env2", python="3.12", box=box, extra_channels=[whole])
    assert "gone.conda" in caught.value.why


def test_a_directory_that_is_no_channel(channel: Path, tmp_path: Path, box: Box) -> None:
    with pytest.raises(ChannelError, match="is no channel"):
        install.install(
            channel, tmp_path / "env", python="3.12", box=box, extra_channels=[tmp_path]
        )


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_prefix_in_use(channel: Path, tmp_path: Path, box: Box, kind: str) -> None:
    prefix = tmp_path / "env"
    if kind == "directory":
        prefix.mkdir()
        (prefix / "mine").write_text("x")
    else:
        prefix.write_text("x")
    words = "is not empty" if kind == "directory" else "is not a directory"
    with pytest.raises(UsageError, match=words):
        install.install(channel, prefix, python="3.12", box=box)
    assert (prefix / "mine" if kind == "directory" else prefix).read_text() == "x"


def test_other_machine(channel: Path, tmp_path: Path) -> None:
    box = Box(platform="linux-64", virtual={})
    with pytest.raises(UsageError, match=r"is for linux-aarch64 .*; this machine is") as caught:
        install.install(channel, tmp_path / "env", python="3.12", box=box)
    assert f"`{caught.value.what}`" in DOCS
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize(
    ("message", "kind"),
    [("No space left on device (os error 28)", DiskError), ("cannot link", ChannelError)],
)
def test_a_fault_on_the_way_leaves_nothing(
    channel: Path, tmp_path: Path, box: Box, monkeypatch: pytest.MonkeyPatch, message: str,
    kind: type[Exception],
) -> None:  # fmt: skip
    prefix = tmp_path / "env"
    prefix.mkdir()

    async def fail(*_: object, target_prefix: Path, **__: object) -> None:
        target_prefix.mkdir(parents=True)
        (target_prefix / "half").write_text("x")
        raise exceptions.InstallerError(message)

    monkeypatch.setattr(rattler, "install", fail)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(kind):
        install.install(channel, prefix, python="3.12", box=box)
    assert sorted(tmp_path.iterdir()) == before
    assert list(prefix.iterdir()) == []


def test_prefix_that_another_run_has_just_filled(
    channel: Path, tmp_path: Path, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first look at it and the lock."""
    claimed = newprefix.claimed

    @contextlib.contextmanager
    def late(prefix: Path) -> Iterator[Path]:
        prefix.mkdir()
        (prefix / "theirs").write_text("x")
        with claimed(prefix) as scratch:
            yield scratch

    monkeypatch.setattr(newprefix, "claimed", late)
    monkeypatch.setattr(rattler, "install", lambda *_, **__: pytest.fail("installed"))
    with pytest.raises(UsageError, match="is not empty"):
        install.install(channel, tmp_path / "env", python="3.12", box=box)
    assert [p.name for p in (tmp_path / "env").iterdir()] == ["theirs"]
