"""What a wheel says about itself, in conda's terms: names, specs, markers, tags, entry points.

Pure functions over names and text; :mod:`sm75.wheels` does the files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from configparser import ConfigParser
from configparser import Error as ConfigError
from dataclasses import dataclass
from email.message import Message

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import canonicalize_name
from packaging.version import Version

from sm75.errors import ChannelError

MACHINE = {"linux-64": "x86_64", "linux-aarch64": "aarch64"}

# Projects of vLLM's closure whose conda-forge package has another name than the normalised PyPI
# one. Source: grayskull's mapping as shipped in conda-pypi 0.13.0 (grayskull_pypi_mapping.json),
# reduced to what vLLM 0.33.0's requirements reach.
CONDA_NAMES: Mapping[str, str] = {
    "build": "python-build",
    "docstring-parser": "docstring_parser",
    "huggingface-hub": "huggingface_hub",
    "lazy-loader": "lazy_loader",
    "ml-dtypes": "ml_dtypes",
    "msgpack": "msgpack-python",
    "opencv-python-headless": "opencv",
    "prometheus-client": "prometheus_client",
    "ray": "ray-core",
    "semantic-version": "semantic_version",
    "soundfile": "pysoundfile",
    "soxr": "soxr-python",
    "torch": "pytorch",
    "typing-extensions": "typing_extensions",
    "tzdata": "python-tzdata",
    "xxhash": "python-xxhash",
}

# What projects write instead of SPDX's names, where it has one meaning only.
_SPDX = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
}

# The minors a noarch package may meet; markers that differ among them pin the package to one.
# Lower end: this project's own floor; upper end: the newest CPython released.
_MINORS = ("3.11", "3.12", "3.13", "3.14")

# https://peps.python.org/pep-0600/ and the aliases it lists.
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")
_MANYLINUX_ALIAS = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}


def conda_name(project: str, names: Mapping[str, str]) -> str:
    """Give the conda package name of a PyPI project.

    Args:
        project: Name in any spelling.
        names: Overrides by normalised name, looked up before :data:`CONDA_NAMES`.
    """
    key = canonicalize_name(project)
    return names.get(key, CONDA_NAMES.get(key, key))


def conda_spec(specifiers: SpecifierSet) -> str:
    """Translate a PEP 440 specifier set to a conda version spec.

    ``==1.2.*`` is ``1.2.*`` and ``===`` is ``==`` in conda; the other operators are spelled alike.

    Args:
        specifiers: May be empty.

    Returns:
        A conda spec, empty for an empty set.
    """
    out = []
    for spec in sorted(specifiers, key=str):
        number, wild = spec.version.removesuffix(".*"), spec.version.endswith(".*")
        # indexers write 2023.03.6 as 2023.3.6, and the record must be what the package says
        version = number if spec.operator == "===" else str(Version(number))
        if spec.operator == "==" and wild:
            out.append(f"{version}.*")
        else:
            operator = "==" if spec.operator == "===" else spec.operator
            out.append(f"{operator}{version}{'.*' if wild else ''}")
    return ",".join(out)


def marker_environment(subdir: str, python: str) -> dict[str, str | AbstractSet[str]]:
    """Describe the target to environment markers (PEP 508) without asking this machine.

    Args:
        subdir: ``linux-64`` or ``linux-aarch64``.
        python: ``major.minor``.
    """
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": MACHINE[subdir],
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Run dependencies of a wheel on one target.

    Args:
        depends: Conda specs, sorted.
        extras: Extras the wheel asks of other projects, by conda name. Conda has no extras: the
            caller converts that project with them, or adds their dependencies.
    """

    depends: tuple[str, ...]
    extras: Mapping[str, frozenset[str]]


def dependencies(
    meta: Message,
    *,
    subdir: str,
    python: str,
    names: Mapping[str, str],
    extras: Iterable[str] = (),
    drop: Collection[str] = (),
) -> Dependencies:
    """Translate ``Requires-Dist`` for one target.

    Args:
        meta: The wheel's METADATA.
        subdir: Target platform.
        python: Target ``major.minor``.
        names: Name overrides.
        extras: Extras of this wheel to include.
        drop: Normalised project names to leave out.

    Raises:
        ChannelError: A requirement is malformed or points to a URL, which nothing can pin.
    """
    environment = marker_environment(subdir, python)
    out: set[str] = set()
    wanted: dict[str, frozenset[str]] = {}
    for text in meta.get_all("Requires-Dist") or []:
        try:
            req = Requirement(text)
        except InvalidRequirement as err:
            raise ChannelError(f"{meta['Name']}: bad requirement {text!r}", why=str(err)) from err
        if canonicalize_name(req.name) in drop:
            continue
        if req.marker and not any(
            req.marker.evaluate(environment | {"extra": extra}) for extra in ("", *extras)
        ):
            continue
        name = conda_name(req.name, names)
        if req.url:
            raise ChannelError(
                f"{meta['Name']} requires {req.name} from {req.url}",
                why="a requirement by URL has no version to lock",
                fix=f"drop it with drop=({canonicalize_name(req.name)!r},) or name a release",
            )
        out.add(" ".join(filter(None, (name, conda_spec(req.specifier)))))
        if req.extras:
            wanted[name] = wanted.get(name, frozenset()) | req.extras
    return Dependencies(depends=tuple(sorted(out)), extras=wanted)


def depends_on_minor(
    meta: Message,
    *,
    subdir: str,
    names: Mapping[str, str],
    extras: Iterable[str],
    drop: Collection[str],
) -> bool:
    """Say whether the dependencies differ among the Python minors the wheel supports."""
    requires = SpecifierSet(meta["Requires-Python"] or "")
    results = {
        dependencies(
            meta, subdir=subdir, python=minor, names=names, extras=extras, drop=drop
        ).depends
        for minor in _MINORS
        if requires.contains(f"{minor}.99")
    }
    return len(results) > 1


def glibc_floor(tags: Iterable[Tag]) -> tuple[int, int] | None:
    """Give the lowest glibc that the wheel's manylinux tags promise to work with.

    Args:
        tags: The wheel's tags.

    Returns:
        ``(major, minor)``, or ``None`` where no tag says (``linux_aarch64``).
    """
    floors = []
    for tag in tags:
        if found := _MANYLINUX.fullmatch(tag.platform):
            floors.append((int(found[1]), int(found[2])))
        elif (alias := tag.platform.partition("_")[0]) in _MANYLINUX_ALIAS:
            floors.append(_MANYLINUX_ALIAS[alias])
    return min(floors, default=None)


def runs_on(tag: Tag, subdir: str) -> bool:
    """Say whether a tag's platform is ``subdir`` (glibc Linux) or any."""
    machine = MACHINE[subdir]
    return tag.platform == "any" or (
        tag.platform.endswith(f"_{machine}") and tag.platform.startswith(("manylinux", "linux_"))
    )


def accepts_python(tag: Tag, python: str) -> bool:
    """Say whether a tag's interpreter and ABI fit CPython ``python`` (GIL build)."""
    digits = python.replace(".", "")
    if tag.abi == "abi3":
        floor = re.fullmatch(r"cp3(\d+)", tag.interpreter)
        return floor is not None and int(floor[1]) <= Version(python).minor
    if tag.abi not in ("none", f"cp{digits}"):
        return False
    # pyXY means that version and later ones
    generic = re.fullmatch(r"py3(\d*)", tag.interpreter)
    if generic is not None:
        return int(generic[1] or 0) <= Version(python).minor
    return tag.interpreter == f"cp{digits}"


def abi3_floor(tags: Iterable[Tag]) -> str | None:
    """Give the lowest Python (``3.9``) of the wheel's abi3 tags, or ``None``."""
    minors = [int(t.interpreter[3:]) for t in tags if t.abi == "abi3" and t.interpreter[3:]]
    return f"3.{min(minors)}" if minors else None


def entry_points(text: str) -> list[str]:
    """Read console and GUI scripts out of ``entry_points.txt``.

    Args:
        text: The file; may be empty.

    Returns:
        ``command = module:function``, sorted, extras removed.

    Raises:
        ChannelError: The file is malformed, or a command is not a plain file name.
    """
    parser = ConfigParser(delimiters=("=",), strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    try:
        parser.read_string(text)
    except ConfigError as err:
        raise ChannelError("entry_points.txt cannot be read", why=str(err)) from err
    out = []
    for section in ("console_scripts", "gui_scripts"):
        if not parser.has_section(section):
            continue
        for command, value in parser.items(section):
            target = value.split("[")[0].strip()
            if not re.fullmatch(r"[\w.-]+", command) or not re.fullmatch(
                r"[\w.]+:[\w.]+", target.replace(" ", "")
            ):
                raise ChannelError(f"entry_points.txt: bad entry {command!r} = {value!r}")
            out.append(f"{command} = {target.replace(' ', '')}")
    return sorted(set(out))


def licence(meta: Message) -> str:
    """Give the wheel's licence as one line: SPDX when it says so or its words are known."""
    classifiers = [
        c.rpartition(" :: ")[2]
        for c in meta.get_all("Classifier") or []
        if c.startswith("License :: ") and not c.endswith(":: OSI Approved")
    ]
    lines = (meta["License"] or "").strip().splitlines()
    # a whole licence text, as some write there, begins with the holder
    free_text = lines[0][:80] if lines and not lines[0].startswith("Copyright") else ""
    found = meta["License-Expression"] or free_text or ", ".join(classifiers)
    return _SPDX.get(found.lower(), found)


def home_page(meta: Message) -> str:
    """Give the project's home page, or its first URL."""
    pairs = (u.partition(",") for u in meta.get_all("Project-URL") or [])
    urls = {label.strip(): url.strip() for label, _, url in pairs if url}
    wanted = {k: v for k, v in urls.items() if k.lower() in ("homepage", "home", "repository")}
    home: str = meta["Home-page"] or ""
    return home or next(iter({**wanted, **urls}.values()), "")
