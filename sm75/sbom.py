"""The bill of materials of a channel: CycloneDX 1.6, JSON.

https://cyclonedx.org/docs/1.6/json/ : every package of the channel is a component; what
``vllm-sm75`` is made of (sources, headers, prebuilt files, patches, tools) stands inside it. The
same channel gives the same bytes: there is no time in it, and the serial number is derived from the
content (RFC 9562, version 5).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from sm75 import __version__
from sm75.channelcheck import REPODATA, is_inside
from sm75.condapkg import canonical_json, read_info
from sm75.errors import ChannelError, PatchError
from sm75.lockfile import Artifact, ReleaseLock
from sm75.series import Patch, load_series

SBOM = "sbom.cdx.json"
# Packages that this project builds from sources; what they are made of is in their about.json.
OURS = ("vllm-sm75", "vllm-sm75-ptx")
# Any namespace of one's own serves (RFC 9562, 6.5): this one is uuid5(DNS, "vllm-sm75").
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "vllm-sm75")
# Roles of the lock whose content ends in the package; the others only make it.
_INSIDE = ("source", "target", "prebuilt")


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One package of the channel, as a row for people.

    Attributes:
        file: ``subdir/file``.
        name: Conda name.
        version: Its version.
        license: As the index has it; empty: not stated.
        spdx: It is a valid SPDX expression.
        purl: Package URL.
        sha256: Of the file.
        size: Of the file, bytes.
    """

    file: str
    name: str
    version: str
    license: str
    spdx: bool
    purl: str
    sha256: str
    size: int


def items(tree: Path) -> list[Item]:
    """The packages of a channel, sorted by name, version and file.

    Args:
        tree: The channel's root.

    Raises:
        ChannelError: An index or a package cannot be read.
    """
    found = []
    for rel, record in _records(tree).items():
        licence = str(record.get("license") or "")
        found.append(
            Item(
                file=rel, name=str(record["name"]), version=str(record["version"]),
                license=licence, spdx=_spdx(licence) is not None,
                purl=_purl(tree / rel, record), sha256=str(record["sha256"]),
                size=int(record["size"]),
            )
        )  # fmt: skip
    return sorted(found, key=lambda item: (item.name, item.version, item.file))


def make(tree: Path, root: Path, lock: ReleaseLock) -> bytes:
    """Write the bill of a channel.

    Args:
        tree: The channel's root, with its indexes.
        root: The project's directory: patches are described from there, where their hashes agree.
        lock: The release; what an artifact is called is told from there, where its hash agrees.

    Raises:
        ChannelError: An index or a package cannot be read.
    """
    listed = items(tree)
    records = _records(tree)
    components = [_component(item, tree, root, lock) for item in listed]
    by_name: dict[str, list[Item]] = {}
    for item in listed:
        by_name.setdefault(item.name, []).append(item)
    body: dict[str, Any] = {
        "metadata": {
            "tools": {
                "components": [
                    {"type": "application", "name": "vllm-sm75 orchestrator",
                     "version": __version__}
                ]
            },
            "component": {
                "type": "application",
                "bom-ref": "channel",
                "name": "vllm-sm75 channel",
                "version": lock.vllm,
            },
        },
        "components": components,
        "dependencies": [
            {"ref": "channel", "dependsOn": sorted(item.file for item in listed)},
            *(
                {"ref": item.file, "dependsOn": _needs(item, records, by_name)}
                for item in sorted(listed, key=lambda item: item.file)
            ),
        ],
    }  # fmt: skip
    serial = uuid.uuid5(_NAMESPACE, canonical_json(body).decode())
    return canonical_json(
        {
            "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "serialNumber": f"urn:uuid:{serial}",
            "version": 1,
            **body,
        }
    )


def _records(tree: Path) -> dict[str, Mapping[str, Any]]:
    out: dict[str, Mapping[str, Any]] = {}
    for index in sorted(tree.glob(f"*/{REPODATA}")):
        try:
            records = json.loads(index.read_bytes())["packages.conda"]
            for name, record in records.items():
                rel = f"{index.parent.name}/{name}"
                out[rel] = _sound(tree, rel, record)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
            raise ChannelError(
                f"{index} cannot be read", why=str(err),
                fix="python3 orchestrator.py channel verify says what else is wrong",
            ) from err  # fmt: skip
    return out


def _sound(tree: Path, rel: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record whose file is the channel's and there, and whose text can be written."""
    if not is_inside(rel) or not rel.endswith(".conda"):
        raise ValueError(f"{rel[:200]!r} is no file of the channel")
    if not (tree / rel).is_file():
        raise ValueError(f"{rel} is not there")
    if not all(key in record for key in ("name", "version", "sha256", "size")):
        raise ValueError(f"the record of {rel} lacks name, version, sha256 or size")
    json.dumps(record, ensure_ascii=False).encode()  # a lone surrogate is a ValueError
    return record


def _spdx(text: str) -> str | None:
    try:
        return canonicalize_license_expression(text) if text else None
    except InvalidLicenseExpression:
        return None


def _purl(package: Path, record: Mapping[str, Any]) -> str:
    """The wheel's own, where it was converted from one: scanners know those; else conda's."""
    about = read_info(package).get("about") or {}
    stated = (about.get("extra") or {}).get("purl")
    if isinstance(stated, str) and re.fullmatch(r"pkg:pypi/[^\s/?#]+@[^\s/?#]+", stated):
        return stated
    build, subdir = (quote(str(record.get(key, "")), safe="") for key in ("build", "subdir"))
    name, version = (quote(str(record[key]), safe="") for key in ("name", "version"))
    return f"pkg:conda/{name}@{version}?build={build}&subdir={subdir}&type=conda"


def _licenses(text: str) -> dict[str, Any]:
    if not text:
        return {}
    if spdx := _spdx(text):
        return {"licenses": [{"expression": spdx}]}
    return {"licenses": [{"license": {"name": text}}]}


def _sha256(digest: str) -> dict[str, Any]:
    return {"hashes": [{"alg": "SHA-256", "content": digest}]}


def _component(item: Item, tree: Path, root: Path, lock: ReleaseLock) -> dict[str, Any]:
    out = {
        "type": "application" if item.name in OURS else "library",
        "bom-ref": item.file,
        "name": item.name,
        "version": item.version,
        "purl": item.purl,
        **_sha256(item.sha256),
        **_licenses(item.license),
        "properties": [
            {"name": "vllm-sm75:file", "value": item.file},
            {"name": "vllm-sm75:bytes", "value": str(item.size)},
        ],
    }
    if item.name in OURS:
        out |= _made_of(item, tree, root, lock)
    return out


def provenance(package: Path) -> dict[str, Any]:
    """What a package of ours says of its inputs (``sm75.inputs``); empty when it says nothing.

    Raises:
        ChannelError: It is damaged.
    """
    about = read_info(package).get("about") or {}
    facts = (about.get("extra") or {}).get("provenance")
    return facts if isinstance(facts, dict) else {}


def artifacts_of(facts: Mapping[str, Any], lock: ReleaseLock) -> list[tuple[str, str, Any]]:
    """The input files of a provenance: id, sha256, and the lock's entry where the hash agrees."""
    known: dict[tuple[str, str], Artifact] = {(a.id, a.stored_sha256): a for a in lock.artifacts}
    stated = facts.get("artifacts") or {}
    return [(name, str(stated[name]), known.get((name, str(stated[name])))) for name in
            sorted(stated)]  # fmt: skip


def patches_of(facts: Mapping[str, Any], root: Path) -> list[tuple[str, str, Patch | None]]:
    """The patches of a provenance: file, sha256, and the series' entry where the hash agrees."""
    try:
        series = load_series(root / "patches" / str(facts.get("vllm", "")).replace("/", "_"))
        known = {(p.file, p.sha256): p for p in series.patches}
    except (PatchError, OSError, ValueError):
        known = {}
    stated = facts.get("patches") or {}
    return [(name, str(stated[name]), known.get((name, str(stated[name])))) for name in
            sorted(stated)]  # fmt: skip


def _made_of(item: Item, tree: Path, root: Path, lock: ReleaseLock) -> dict[str, Any]:
    facts = provenance(tree / item.file)
    inside, ancestors = [], []
    for name, digest, entry in artifacts_of(facts, lock):
        part: dict[str, Any] = {
            "type": "file" if entry is None else "library",
            "bom-ref": f"{item.file}#{name}",
            "name": name if entry is None else entry.project,
            **_sha256(digest),
        }
        if entry is not None:
            part["version"] = entry.version
            part["purl"] = f"pkg:pypi/{quote(entry.project)}@{quote(entry.version)}"
            part["scope"] = "required" if entry.role in _INSIDE else "excluded"
            part["description"] = entry.why or entry.role
        if name == "vllm-sdist":
            ancestors.append(part)
        else:
            inside.append(part)
    patches = [_patch(name, entry) for name, _, entry in patches_of(facts, root)]
    out: dict[str, Any] = {"components": inside} if inside else {}
    if ancestors or patches:
        out["pedigree"] = {
            **({"ancestors": ancestors} if ancestors else {}),
            **({"patches": patches} if patches else {}),
        }
    return out


def _patch(name: str, entry: Patch | None) -> dict[str, Any]:
    purpose = entry.purpose if entry else "not described by the patches at hand"
    links = list(entry.upstream) if entry else []
    return {
        "type": "unofficial",
        "resolves": [
            {"type": "defect", "id": name, "description": purpose,
             **({"references": links} if links else {})}
        ],
    }  # fmt: skip


def _needs(
    item: Item, records: Mapping[str, Mapping[str, Any]], by_name: Mapping[str, Iterable[Item]]
) -> list[str]:
    """The packages of the channel that meet a dependency by name, for one Python where tied."""
    asked = [str(spec).split(" ")[0] for spec in records[item.file].get("depends") or ()]
    minors = {"", _minor(records[item.file])}
    found = {
        other.file
        for name in asked
        for other in by_name.get(name, ())
        if other.file != item.file and (minors == {""} or _minor(records[other.file]) in minors)
    }
    return sorted(found)


def _minor(record: Mapping[str, Any]) -> str:
    for spec in record.get("depends") or ():
        if found := re.fullmatch(r"python (3\.\d+)\.\*", str(spec)):
            return found[1]
    return ""
