"""The one wheel-to-conda converter.

* a pure wheel becomes ``noarch: python``: one package for every platform and Python it supports;
* a wheel with compiled code that any Python can use (stable ABI, or a program) becomes a package of
  its subdirectory for every Python it supports (CEP 20);
* other wheels with compiled code become packages of their subdirectory, for one Python;
* a wheel that only wraps tools, headers or libraries (cmake, nvidia-cuda-nvcc, …) is laid out by a
  table of ``(glob, destination)`` rules, and needs no Python at all.

Members are streamed from the wheel into the package and checked against the wheel's RECORD on the
way. The result depends on the wheel's bytes and the options only.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from sm75 import wheelmeta
from sm75.condapkg import (
    EPOCH,
    LOCAL_LEVEL,
    PREFIX_PLACEHOLDER,
    FileSource,
    canonical_json,
    write_conda,
)
from sm75.errors import ChannelError, FetchError
from sm75.wheelfile import Wheel
from sm75.words import counted

# Part of every build string's hash: raise it when the same wheel would give another package.
CONVERTER_VERSION = 2

# Members of *.dist-info that speak of the wheel or of pip, not of what is installed.
_NOT_INSTALLED = {"RECORD", "RECORD.jws", "RECORD.p7s", "INSTALLER", "REQUESTED", "direct_url.json"}

Layout = Sequence[tuple[str, str | None]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to convert one wheel.

    Args:
        subdir: Target platform, ``linux-64`` or ``linux-aarch64``. Markers are evaluated for it,
            also for noarch results.
        python: Target ``major.minor``; ``None`` for a package that holds no Python code: every
            member must then be placed (or dropped) by ``layout``, and ``Requires-Dist`` is ignored.
        name: Conda name; default: the project's, through ``names``.
        version: Conda version; default: the wheel's.
        build: Whole build string; default: made of the Python and a hash of wheel and options.
        build_number: Build number.
        depends_extra: Further run dependencies.
        constrains: Run constraints.
        drop: Project names whose requirement is left out.
        names: PyPI-to-conda name overrides, by normalised name.
        extras: Extras of the wheel whose requirements are included.
        layout: Rules ``(glob, destination)`` on member names, first match wins. In a glob ``**``
            matches anything, ``*`` and ``?`` stop at ``/``. The destination is relative to the
            prefix, with ``{0}``, ``{1}``, … for what the wildcards matched and ``{site}`` for
            site-packages; ``None`` leaves the member out. A rule that matches nothing is an error:
            the wheel is not what the table was written for.
        extra_files: Further payload files (links, activation scripts) by path in the prefix.
        noarch: ``"generic"`` makes a package for every platform out of a wheel without Python code,
            whatever its platform tag (headers and libraries of the *target*, as conda-forge's
            ``*_linux-aarch64`` packages are).
        run_exports: As in :func:`sm75.condapkg.write_conda`.
        epoch: Date of the package, seconds since 1970.
        level: zstd level.
    """

    subdir: str
    python: str | None
    name: str | None = None
    version: str | None = None
    build: str | None = None
    build_number: int = 0
    depends_extra: Sequence[str] = ()
    constrains: Sequence[str] = ()
    drop: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    extras: Sequence[str] = ()
    layout: Layout = ()
    extra_files: Mapping[str, FileSource] = field(default_factory=dict)
    noarch: Literal["generic"] | None = None
    run_exports: Mapping[str, list[str]] | None = None
    epoch: int = EPOCH
    level: int = LOCAL_LEVEL


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A wheel's package, not yet written. The sources read from the open :class:`Wheel`.

    Args:
        name: Conda name.
        version: Conda version.
        build: Build string.
        noarch: Kind of noarch package, or ``None``.
        compiled: It has compiled code: noarch as to the Python only, and kept in its subdirectory.
        depends: Run dependencies.
        entry_points: Commands, for ``noarch: python`` (others carry them in ``files``).
        files: Payload by path in the prefix.
        licence_files: Licence texts by path relative to ``info/licenses``.
        about: ``about.json``, with the wheel's name, sha256 and purl under ``extra``.
        licence: Licence of the wheel.
        extras_wanted: Extras asked of other packages, by conda name.
    """

    name: str
    version: str
    build: str
    noarch: Literal["python", "generic"] | None
    compiled: bool
    depends: tuple[str, ...]
    entry_points: tuple[str, ...]
    files: Mapping[str, FileSource]
    licence_files: Mapping[str, FileSource]
    about: Mapping[str, Any]
    licence: str
    extras_wanted: Mapping[str, frozenset[str]]


def _compile_glob(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    wild = {"**": "(.*)", "*": "([^/]*)", "?": "([^/])"}
    return re.compile("".join(wild.get(p, re.escape(p)) for p in parts), re.DOTALL)


class _Placer:
    """Decides where each member goes in the prefix."""

    def __init__(self, wheel: Wheel, options: Options, site: str, noarch_python: bool) -> None:
        self._rules = [(_compile_glob(g), g, dest) for g, dest in options.layout]
        self._used: set[str] = set()
        self._wheel = wheel
        self._site = site
        self._scripts = "python-scripts" if noarch_python else "bin"
        self._data = f"{wheel.dist_info.removesuffix('.dist-info')}.data/"
        self._python = options.python
        self.unplaced: list[str] = []

    def place(self, member: str) -> tuple[str | None, bool]:
        """Give the destination (``None``: left out) and whether it is a ``.data`` script."""
        for pattern, glob, dest in self._rules:
            found = pattern.fullmatch(member)
            if found is None:
                continue
            self._used.add(glob)
            if dest is None:
                return None, False
            return dest.format(*found.groups(), site=self._site), False
        return self._default(member)

    def _default(self, member: str) -> tuple[str | None, bool]:
        if member.startswith(self._data):
            scheme, _, rest = member.removeprefix(self._data).partition("/")
            if scheme == "scripts":
                return f"{self._scripts}/{rest}", True
            if scheme == "data":
                return rest, False
            if scheme == "headers" and self._python:
                return f"include/python{self._python}/{self._wheel.project}/{rest}", False
            if scheme in ("purelib", "platlib") and self._python:
                return f"{self._site}/{rest}", False
        elif self._python:
            return f"{self._site}/{member}", False
        elif member.startswith(f"{self._wheel.dist_info}/"):
            return None, False
        self.unplaced.append(member)
        return None, False

    def check(self) -> None:
        """Refuse members without a place and rules without a member."""
        if self.unplaced:
            raise ChannelError(
                f"{self._wheel.path.name}: no layout rule places "
                f"{counted(len(self.unplaced), 'member')}",
                why=", ".join(self.unplaced[:5]),
                fix="add rules for them, or give python=",
            )
        if idle := [glob for _, glob, _ in self._rules if glob not in self._used]:
            raise ChannelError(
                f"{self._wheel.path.name}: layout rules match nothing",
                why=", ".join(idle),
                fix="the wheel's contents have changed: look at them and adapt the table",
            )


def _script_source(wheel: Wheel, member: str) -> FileSource:
    """Give a ``.data/scripts`` member; ``#!python`` becomes the prefix's Python (PEP 427)."""
    with wheel.open(member) as raw:
        head = raw.read(len(b"#!pythonw"))
        if not head.startswith(b"#!python"):
            return wheel.source(member, executable=True)
        data = head + raw.read()
    _, _, rest = data.partition(b"\n")
    return FileSource.from_bytes(
        f"#!{PREFIX_PLACEHOLDER}/bin/python\n".encode() + rest,
        executable=True,
        placeholder=PREFIX_PLACEHOLDER,
    )


def _entry_point_script(entry: str) -> tuple[str, FileSource]:
    command, _, target = entry.partition(" = ")
    module, _, attribute = target.partition(":")
    text = (
        f"#!{PREFIX_PLACEHOLDER}/bin/python\n"
        f"import sys\n\nfrom {module} import {attribute.partition('.')[0]}\n\n"
        f'if __name__ == "__main__":\n    sys.exit({attribute}())\n'
    )
    return f"bin/{command}", FileSource.from_bytes(
        text.encode(), executable=True, placeholder=PREFIX_PLACEHOLDER
    )


def _record(files: Mapping[str, FileSource], site: str, dist_info: str) -> bytes:
    """Write RECORD for the files as they will lie in ``lib/pythonX.Y/site-packages``."""
    out = io.StringIO(newline="")
    rows = csv.writer(out, lineterminator="\n")
    for path, source in sorted(files.items()):
        if path.startswith(f"{site}/"):
            rel = path.removeprefix(f"{site}/")
        else:
            # installers move python-scripts/ of a noarch package to bin/
            rel = "../../../" + re.sub(r"^python-scripts/", "bin/", path)
        if source.placeholder or source.sha256 is None:
            rows.writerow([rel, "", ""])
        else:
            digest = base64.urlsafe_b64encode(bytes.fromhex(source.sha256)).rstrip(b"=").decode()
            rows.writerow([rel, f"sha256={digest}", source.size])
    rows.writerow([f"{dist_info}/RECORD", "", ""])
    return out.getvalue().encode()


def _check_fits(wheel: Wheel, options: Options) -> None:
    if options.noarch == "generic":
        if options.python is not None:
            raise ValueError("noarch='generic' needs python=None")
        return
    fits = [t for t in wheel.tags if wheelmeta.runs_on(t, options.subdir)]
    if options.python is not None:
        fits = [t for t in fits if wheelmeta.accepts_python(t, options.python)]
    if not fits:
        raise ChannelError(
            f"{wheel.path.name} is not for {options.subdir}"
            + (f", CPython {options.python}" if options.python else ""),
            why=f"its tags are {', '.join(sorted(map(str, wheel.tags)))}",
            fix="lock the wheel of this platform and Python",
        )


def _python_depends(wheel: Wheel, options: Options, python: str, noarch: bool) -> list[str]:
    """Give the dependency on Python itself."""
    try:
        requires = SpecifierSet(wheel.metadata["Requires-Python"] or "")
        if floor := wheelmeta.abi3_floor(wheel.tags):
            requires &= SpecifierSet(f">={floor}")
    except InvalidSpecifier as err:
        raise ChannelError(f"{wheel.path.name}: bad Requires-Python", why=str(err)) from err
    if not requires.contains(f"{python}.99"):
        raise ChannelError(
            f"{wheel.path.name} does not support Python {python}", why=f"it says {requires}"
        )
    names = {"names": options.names, "extras": options.extras, "drop": _dropped(options)}
    # files of a subdirectory package lie below lib/pythonX.Y, so it serves one minor only
    pinned = not noarch or wheelmeta.depends_on_minor(
        wheel.metadata,
        subdir=options.subdir,
        **names,  # type: ignore[arg-type]
    )
    if any(t.interpreter.startswith("cp") and t.abi != "abi3" for t in wheel.tags) and noarch:
        pinned = True
    if pinned:
        return [f"python {python}.*"]
    return [f"python {wheelmeta.conda_spec(requires)}".strip()]


def _dropped(options: Options) -> frozenset[str]:
    return frozenset(canonicalize_name(d) for d in options.drop)


def _build_string(wheel: Wheel, options: Options, noarch: str | None, content: object) -> str:
    digest = hashlib.sha256(canonical_json(content)).hexdigest()[:7]
    if options.python is None:
        prefix = ""
    elif noarch:
        prefix = "py"
    else:
        prefix = f"py{options.python.replace('.', '')}"
    return options.build or f"{prefix}h{digest}_{options.build_number}"


def plan(wheel: Wheel, options: Options) -> Plan:
    """Work out the package of a wheel without writing it.

    Several plans' ``files`` can be merged into one :func:`sm75.condapkg.write_conda` call while
    their wheels are open.

    Args:
        wheel: An open wheel.
        options: How to convert it.

    Raises:
        ChannelError: The wheel does not fit the target, or the layout does not fit the wheel.
        FetchError: The wheel is damaged.
    """
    _check_fits(wheel, options)
    python = options.python
    headers = any(
        f"{wheel.dist_info.removesuffix('.dist-info')}.data/headers/" in m for m in wheel.members
    )
    # headers go below include/pythonX.Y, which a noarch package cannot name
    noarch: Literal["python", "generic"] | None = options.noarch
    if python and wheel.any_python and not headers:
        noarch = "python"
    site = "site-packages" if noarch == "python" else f"lib/python{python}/site-packages"

    placer = _Placer(wheel, options, site, noarch == "python")
    files: dict[str, FileSource] = {}
    for member in sorted(wheel.members):
        if member.removeprefix(f"{wheel.dist_info}/") in _NOT_INSTALLED:
            continue
        dest, script = placer.place(member)
        if dest is None:
            continue
        if dest in files:
            raise ChannelError(f"{wheel.path.name}: two members would become {dest}")
        files[dest] = _script_source(wheel, member) if script else wheel.source(member)
    placer.check()

    points: list[str] = []
    depends = list(options.depends_extra)
    wanted: Mapping[str, frozenset[str]] = {}
    if python:
        points = wheelmeta.entry_points(wheel.text("entry_points.txt"))
        if noarch is None:
            files.update(map(_entry_point_script, points))
            points = []
        translated = wheelmeta.dependencies(
            wheel.metadata,
            subdir=options.subdir,
            python=python,
            names=options.names,
            extras=options.extras,
            drop=_dropped(options),
        )
        depends += translated.depends
        depends += _python_depends(wheel, options, python, noarch == "python")
        wanted = translated.extras
        files[f"{site}/{wheel.dist_info}/INSTALLER"] = FileSource.from_bytes(b"conda\n")
    if not wheel.pure and not options.noarch and (floor := wheelmeta.glibc_floor(wheel.tags)):
        depends.append(f"__glibc >={floor[0]}.{floor[1]},<3.0.a0")
    for path, source in options.extra_files.items():
        if path in files:
            raise ChannelError(f"{wheel.path.name}: the wheel and extra_files both have {path}")
        files[path] = source
    if python:
        record = _record(files, site, wheel.dist_info)
        files[f"{site}/{wheel.dist_info}/RECORD"] = FileSource.from_bytes(record)

    sha256 = wheel.sha256
    content = {
        "converter": CONVERTER_VERSION,
        "wheel": sha256,
        "depends": sorted(set(depends)),
        "constrains": sorted(set(options.constrains)),
        "entry_points": points,
        "files": {p: [s.sha256, s.link, s.executable] for p, s in files.items()},
        "run_exports": options.run_exports,
    }
    return Plan(
        name=options.name or wheelmeta.conda_name(wheel.project, options.names),
        version=options.version or str(wheel.version),
        build=_build_string(wheel, options, noarch, content),
        noarch=noarch,
        compiled=noarch == "python" and not wheel.pure,
        depends=tuple(sorted(set(depends))),
        entry_points=tuple(points),
        files=files,
        licence_files=wheel.licence_files(),
        about={
            "summary": wheel.metadata["Summary"] or "",
            "home": wheelmeta.home_page(wheel.metadata),
            "extra": {
                "wheel": wheel.path.name,
                "wheel_sha256": sha256,
                "purl": f"pkg:pypi/{wheel.project}@{wheel.version}",
            },
        },
        licence=wheelmeta.licence(wheel.metadata),
        extras_wanted=wanted,
    )


def convert_with(wheel: Path, out_dir: Path, options: Options) -> Path:
    """Convert one wheel to ``<out_dir>/<subdir or noarch>/<name>-<version>-<build>.conda``.

    Args:
        wheel: A ``.whl`` file whose sha256 the caller has checked.
        out_dir: Channel root.
        options: How to convert it.

    Returns:
        The package.

    Raises:
        FetchError: The wheel is damaged, or a member is not what RECORD says.
        ChannelError: The wheel does not fit the target, or the layout does not fit the wheel.
        DiskError: The package cannot be written.
    """
    with Wheel(wheel) as opened:
        planned = plan(opened, options)
        try:
            return write_conda(
                out_dir,
                name=planned.name,
                version=planned.version,
                build=planned.build,
                build_number=options.build_number,
                subdir=options.subdir,
                files=planned.files,
                depends=planned.depends,
                constrains=options.constrains,
                noarch=planned.noarch,
                compiled=planned.compiled,
                entry_points=planned.entry_points,
                about=planned.about,
                license=planned.licence,
                license_files=planned.licence_files,
                run_exports=options.run_exports,
                epoch=options.epoch,
                level=options.level,
            )
        except zipfile.BadZipFile as err:
            raise FetchError(
                f"{wheel.name} is damaged", why=str(err), fix="fetch it again"
            ) from err


def convert(wheel: Path, out_dir: Path, *, subdir: str, python: str | None, **options: Any) -> Path:
    """Convert one wheel; the keyword arguments are the fields of :class:`Options`.

    See :func:`convert_with` for the result and the errors.
    """
    return convert_with(wheel, out_dir, Options(subdir=subdir, python=python, **options))
