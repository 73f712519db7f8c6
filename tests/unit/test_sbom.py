"""The channel's bill of materials."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from sm75 import channel as channels
from sm75 import condapkg, sbom
from sm75.channelcheck import verify_channel
from sm75.condapkg import FileSource
from sm75.errors import ChannelError
from sm75.lockfile import G5G
from sm75.store import hash_file
from tests.unit import channelkit, reportkit
from tests.unit.projectkit import ROOT


def make(channel: Path) -> dict[str, Any]:
    """The bill, checked against the published schema."""
    data = sbom.make(channel, ROOT, reportkit.LOCK)
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(data.decode())
    assert wrong is None, wrong
    bill: dict[str, Any] = json.loads(data)
    return bill


def add(channel: Path, name: str, **more: Any) -> Path:
    made = condapkg.write_conda(
        channel.parent / "made", name=name, version="1.0", build="0", subdir=G5G,
        files={f"share/{name}": FileSource.from_bytes(b"x")}, **more,
    )  # fmt: skip
    channels.publish([made], channel)
    return channel / G5G / made.name


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    made = [
        reportkit.package(tmp_path / "made", b"\x7fELF"),
        channelkit.write(tmp_path / "made", "numpy", "2.4", "py311", depends=["python 3.11.*"]),
        channelkit.write(tmp_path / "made", "numpy", "2.4", "py312", depends=["python 3.12.*"]),
        channelkit.write(
            tmp_path / "made", "pandas", "3.0", "py312", depends=["python 3.12.*", "numpy >=2"]
        ),
    ]
    channels.publish(made, tmp_path / "channel")
    return tmp_path / "channel"


def by_name(bill: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (c for c in bill["components"] if c["name"] == name)
    return dict(found)


def test_every_package_is_in_it_with_its_hash(channel: Path) -> None:
    bill = make(channel)
    stated = {c["bom-ref"]: c["hashes"][0]["content"] for c in bill["components"]}
    files = channels.packages_in(channel)
    assert stated == {f"{p.parent.name}/{p.name}": hash_file(p) for p in files}
    assert bill["specVersion"] == "1.6"


def test_references_are_unique_and_lead_somewhere(channel: Path) -> None:
    bill = make(channel)
    refs: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            refs.extend([value["bom-ref"]] if "bom-ref" in value else [])
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(bill)
    assert len(refs) == len(set(refs))
    for entry in bill["dependencies"]:
        assert {entry["ref"], *entry["dependsOn"]} <= set(refs)


def test_who_needs_whom_for_one_python(channel: Path) -> None:
    needs = {e["ref"]: e["dependsOn"] for e in make(channel)["dependencies"]}
    (ours,) = (ref for ref in needs if "vllm-sm75" in ref)
    one, two = (f"{G5G}/numpy-2.4-{minor}.conda" for minor in ("py311", "py312"))
    assert needs[ours] == [one, two]  # it serves both
    assert needs[f"{G5G}/pandas-3.0-py312.conda"] == [two]
    assert needs[one] == []


def test_what_the_package_is_made_of(channel: Path) -> None:
    ours = by_name(make(channel), "vllm-sm75")
    (sdist,) = ours["pedigree"]["ancestors"]
    artifact = reportkit.LOCK.artifact("vllm-sdist")
    assert sdist["purl"] == f"pkg:pypi/vllm@{artifact.version}"
    assert sdist["hashes"][0]["content"] == artifact.stored_sha256
    patches = [p["resolves"][0] for p in ours["pedigree"]["patches"]]
    files = sorted(p.name for p in (ROOT / "patches" / reportkit.LOCK.vllm).glob("*.patch"))
    assert [p["id"] for p in patches] == files
    assert any("https://github.com/" in link for p in patches for link in p.get("references", ()))
    scopes = {c["bom-ref"].partition("#")[2]: c["scope"] for c in ours["components"]}
    assert scopes["cutlass"] == "required"
    assert scopes["ninja-linux-64"] == "excluded"


def test_a_converted_wheel_goes_by_its_name_on_pypi(channel: Path) -> None:
    add(channel, "converted", about={"extra": {"purl": "pkg:pypi/conv-erted@1.0"}})
    add(channel, "odd", about={"extra": {"purl": "javascript:alert(1)"}})
    bill = make(channel)
    assert by_name(bill, "converted")["purl"] == "pkg:pypi/conv-erted@1.0"
    purl = f"pkg:conda/odd@1.0?build=0&subdir={G5G}&type=conda"
    assert by_name(bill, "odd")["purl"] == purl


@pytest.mark.parametrize(
    ("stated", "expected"),
    [("mit", [{"expression": "MIT"}]),
     ("MIT OR Apache-2.0", [{"expression": "MIT OR Apache-2.0"}]),
     ("BSD License", [{"license": {"name": "BSD License"}}]),
     ("<script>\u202e", [{"license": {"name": "<script>\u202e"}}]),
     ("", None)],
)  # fmt: skip
def test_licences(channel: Path, stated: str, expected: Any) -> None:
    add(channel, "one", license=stated)
    assert by_name(make(channel), "one").get("licenses") == expected


def test_the_same_channel_gives_the_same_bytes(channel: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for package in reversed(channels.packages_in(channel)):
        channels.publish([package], other)
    one, two = (sbom.make(c, ROOT, reportkit.LOCK) for c in (channel, other))
    assert one == two
    add(other, "more")
    changed = json.loads(sbom.make(other, ROOT, reportkit.LOCK))
    assert changed["serialNumber"] != json.loads(one)["serialNumber"]


def test_inputs_and_patches_of_another_lock_are_not_described_as_ours(
    channel: Path, tmp_path: Path
) -> None:
    facts: dict[str, Any] = {
        "vllm": "0.33.0", "artifacts": {"vllm-sdist": "0" * 64, "cutlass": "1" * 64},
        "patches": {"0001-cmake-turing-only.patch": "2" * 64},
    }  # fmt: skip
    made = condapkg.write_conda(
        tmp_path / "made", name="vllm-sm75", version="0.33.0", build="h1_0", subdir=G5G, files={},
        about={"extra": {"provenance": facts}},
    )  # fmt: skip
    channels.publish([made], tmp_path / "foreign")
    ours = by_name(make(tmp_path / "foreign"), "vllm-sm75")
    (part,) = ours["components"]
    assert (part["name"], part.get("version"), part["type"]) == ("cutlass", None, "file")
    (patch,) = ours["pedigree"]["patches"]
    assert "not described" in patch["resolves"][0]["description"]


def test_publishing_writes_it_of_the_state_that_will_be(channel: Path, tmp_path: Path) -> None:
    derived: dict[str, Callable[[Path], bytes]] = {
        sbom.SBOM: lambda tree: sbom.make(tree, ROOT, reportkit.LOCK)
    }
    gone = f"{G5G}/numpy-2.4-py311.conda"
    new = channelkit.write(tmp_path / "made", "new")
    channels.publish([new], channel, derived=derived, remove=[gone])
    assert (channel / sbom.SBOM).read_bytes() == sbom.make(channel, ROOT, reportkit.LOCK)
    names = {c["name"] for c in json.loads((channel / sbom.SBOM).read_bytes())["components"]}
    assert "new" in names
    assert gone not in (channel / sbom.SBOM).read_text()
    assert verify_channel(channel) == []


def test_a_document_is_added_alone(channel: Path) -> None:
    before = {p: p.read_bytes() for p in channel.rglob("*") if p.is_file()}
    channels.add_document(channel, sbom.SBOM, b"{}")
    assert verify_channel(channel) == []
    assert [p.name for p, data in before.items() if p.read_bytes() != data] == ["SHA256SUMS"]
    (channel / "dir").mkdir()
    with pytest.raises(ChannelError, match="directory"):
        channels.add_document(channel, "dir", b"")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [("../../x.conda", {}, "no file of the channel"), ("gone-1-0.conda", {}, "is not there"),
     ("", {"license": "\ud800"}, "surrogates"), ("", {"sha256": None}, "lacks")],
)  # fmt: skip
def test_an_index_that_is_not_ours_is_refused(
    channel: Path, name: str, change: dict[str, Any], said: str
) -> None:
    index = channel / G5G / "repodata.json"
    data = json.loads(index.read_bytes())
    key, record = next(iter(data["packages.conda"].items()))
    record = {k: v for k, v in {**record, **change}.items() if v is not None}
    data["packages.conda"][name or key] = record
    index.write_text(json.dumps(data))
    with pytest.raises(ChannelError, match=said):
        sbom.make(channel, ROOT, reportkit.LOCK)
