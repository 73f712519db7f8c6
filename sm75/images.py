"""Judge a container image by its description, without pulling it.

Reads what ``docker buildx imagetools inspect --format '{{json .Image}}' IMAGE`` prints: one image
description (OCI image configuration), or a map from platform to description when the image is
built for several. Arch lists are where builders leave them: environment, labels, build arguments
in the history.

An arch list says what a build was asked for, not what its libraries hold: a list without 7.5 is a
sure no, a list with it still needs ``inspect`` on the libraries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from rich.table import Table
from rich.text import Text

from sm75 import jsontext
from sm75.errors import UsageError

# How AWS g5g is named among container platforms.
PLATFORM = "linux/arm64"
COMMAND = "docker buildx imagetools inspect --format '{{json .Image}}' IMAGE"

# Names of variables, labels and build arguments that hold an arch list: TORCH_CUDA_ARCH_LIST
# (torch), torch_cuda_arch_list (vLLM's Dockerfile), CUDAARCHS (CMake), CMAKE_CUDA_ARCHITECTURES.
_LIST_NAME = re.compile(r"(?i)(?:^|[._-])(?:cuda_?arch(?:s|es|_list|itectures)?)$")
_ITEM = r"(?:\d{1,2}\.\d[af]?(?:\+PTX)?|\d{2,3}[af]?(?:-real|-virtual)?|[A-Z][a-z]+(?:\+PTX)?)"
_IN_HISTORY = re.compile(
    rf"(?<![\w.])(?P<name>[A-Za-z_]*(?i:cuda_?arch)\w*)=(?P<quote>['\"]?)"
    rf"(?P<list>{_ITEM}(?:[ ;,]+{_ITEM})*)(?P=quote)(?=\s|$|['\"])"
)
# torch.utils.cpp_extension's names for arch lists.
_NAMED = {"Volta": "7.0+PTX", "Turing": "7.5+PTX", "Xavier": "7.2"}


class ArchList(msgspec.Struct, frozen=True, kw_only=True):
    """One arch list found in an image.

    Attributes:
        where: ``env``, ``label`` or ``history``.
        name: The variable, label or build argument.
        value: The list as written.
        fits: It asks for code that runs on compute capability 7.5.
    """

    where: Literal["env", "label", "history"]
    name: str
    value: str
    fits: bool


class ImageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one platform's image says.

    Attributes:
        platform: ``linux/arm64``, …
        lists: The arch lists in it.
        cuda: CUDA_VERSION of its environment, or empty.
        usable: False: surely not on g5g; True: its builder asked for 7.5; None: it does not say.
        reason: Why, in one sentence.
    """

    platform: str
    lists: tuple[ArchList, ...]
    cuda: str
    usable: bool | None
    reason: str


def read_images(text: str | bytes) -> tuple[ImageReport, ...]:
    """Judge every platform in buildx's output.

    Args:
        text: What the command printed.

    Raises:
        UsageError: It is not that output.
    """
    try:
        data = jsontext.loads(text)
    except ValueError as err:
        raise _not_ours(f"not JSON: {err}") from err
    if not isinstance(data, dict):
        raise _not_ours(f"a JSON {type(data).__name__} instead of an object")
    images = {_platform(data): data} if "architecture" in data else data
    for platform, image in images.items():
        if not isinstance(image, dict) or "architecture" not in image:
            raise _not_ours(f"{platform!r} has no image description")
    reports = tuple(
        _judge(platform, image)
        for platform, image in sorted(images.items())
        if image["architecture"] != "unknown"  # build attestations are listed as images too
    )
    if not reports:
        raise _not_ours("no platform is in it")
    return reports


def asks_for_turing(value: str) -> bool:
    """Whether an arch list, torch's or CMake's way of writing it, covers capability 7.5."""
    return any(_covers(item) for item in re.split(r"[\s;,]+", value) if item)


def _covers(item: str) -> bool:
    item = _NAMED.get(item.removesuffix("+PTX"), item)
    match = re.fullmatch(r"(\d{1,2})\.?(\d)(\+PTX|-real|-virtual)?", item)
    if match is None:
        return False
    built = (int(match[1]), int(match[2]))
    # SASS of 7.0 to 7.5 runs; PTX of anything up to 7.5 is compiled by the driver. CMake's bare
    # number means both.
    sass = match[3] != "-virtual" and (7, 0) <= built <= (7, 5)
    bare = "." not in item and match[3] is None
    return sass or ((match[3] in ("+PTX", "-virtual") or bare) and built <= (7, 5))


def _judge(platform: str, image: Mapping[str, Any]) -> ImageReport:
    lists = tuple(dict.fromkeys(_lists(image)))
    usable, reason = _verdict(platform, lists)
    return ImageReport(
        platform=platform,
        lists=lists,
        cuda=_environment(image).get("CUDA_VERSION", ""),
        usable=usable,
        reason=reason,
    )


def _verdict(platform: str, lists: tuple[ArchList, ...]) -> tuple[bool | None, str]:
    if not platform.startswith(PLATFORM):
        return False, f"unusable on g5g, because: it is for {platform}, g5g is {PLATFORM}"
    if not lists:
        return None, "it names no arch list: pull it and inspect its libraries"
    unfit = [found for found in lists if not found.fits]
    if not unfit:
        return True, "built for 7.5 as asked; inspect its libraries to be sure"
    names = "; ".join(f"{found.name}={found.value}" for found in unfit)
    if len(unfit) < len(lists):
        return None, f"its arch lists disagree, without 7.5: {names}; inspect its libraries"
    return False, f"unusable on g5g, because: no 7.5 in {names}"


def _lists(image: Mapping[str, Any]) -> Iterator[ArchList]:
    for name, value in _environment(image).items():
        if _LIST_NAME.search(name) and value:
            yield ArchList(where="env", name=name, value=value, fits=asks_for_turing(value))
    labels = (image.get("config") or {}).get("Labels") or {}
    for name, value in labels.items():
        if _LIST_NAME.search(name) and value:
            yield ArchList(where="label", name=name, value=value, fits=asks_for_turing(value))
    for entry in image.get("history") or ():
        for match in _IN_HISTORY.finditer(entry.get("created_by") or ""):
            value = match["list"]
            yield ArchList(
                where="history", name=match["name"], value=value, fits=asks_for_turing(value)
            )


def _environment(image: Mapping[str, Any]) -> dict[str, str]:
    pairs = (item.partition("=") for item in (image.get("config") or {}).get("Env") or ())
    return {name: value for name, _, value in pairs}


def _platform(image: Mapping[str, Any]) -> str:
    parts = (image.get("os") or "linux", image["architecture"], image.get("variant"))
    return "/".join(part for part in parts if part)


def _not_ours(why: str) -> UsageError:
    return UsageError(
        "this is not an image description", why=why, fix=f"give the output of: {COMMAND}"
    )


def to_json(reports: tuple[ImageReport, ...]) -> list[dict[str, Any]]:
    """The reports as plain JSON data."""
    data: list[dict[str, Any]] = msgspec.to_builtins(reports)
    return data


def table(reports: tuple[ImageReport, ...], title: str = "image") -> Table:
    """The reports as a table for people."""
    shown = Table(title=title)
    for column in ("platform", "arch lists", "CUDA", "verdict"):
        shown.add_column(column, overflow="fold")
    colour = {True: "green", False: "red", None: "yellow"}
    for report in reports:
        lists = [f"{found.where} {found.name}={found.value}" for found in report.lists]
        shown.add_row(
            Text(report.platform),
            Text("\n".join(lists) or "none"),
            Text(report.cuda),
            Text(report.reason, style=colour[report.usable]),
        )
    return shown
