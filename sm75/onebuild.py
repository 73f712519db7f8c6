"""One build of a version in a channel: what a new build withdraws, and where there is a choice.

The build strings of our packages are hashes and their build number is always 0, so that a solver
that finds two builds of a version takes either. What is published therefore takes the place of

- other builds of the same name and version (releases stay beside each other);
- of ``dlami-torch``, other builds for the same contract (those of other contracts stay);
- of ``vllm-sm75``, the kernels that were compiled of other sources than the new build has: at run
  time they would all be left to Triton.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sm75.aot import beside, files
from sm75.channelcheck import indexed, read_sums, relative
from sm75.condapkg import read_info
from sm75.errors import Sm75Error

ADAPTER = "dlami-torch"
KERNELS = "vllm-sm75-kernels"
VLLM = "vllm-sm75"
# What this project makes itself, and what makes it anew.
OURS = {
    VLLM: "python3 orchestrator.py build",
    "vllm-sm75-ptx": "python3 orchestrator.py build --target linux-64 --ptx",
    KERNELS: "python3 orchestrator.py kernels build",
    ADAPTER: "python3 orchestrator.py channel build",
}
# Follows the package's file name in that of its provenance, at the top of the channel.
PROVENANCE = ".provenance.json"


class Rivals:
    """What publishing some packages withdraws; for ``remove`` of :func:`sm75.channel.publish`.

    It is asked while the channel's lock is held, and goes by the files that are there, so that what
    a killed run has left is found as well.

    Args:
        channel: Channel root.
        packages: What is published, or is to stay: ``.conda`` files of final names, which need not
            exist yet.
        also: Files of the channel that go in any case.

    Attributes:
        found: The packages (``subdir/file``) that it gave when it was asked last.
    """

    def __init__(self, channel: Path, packages: Iterable[Path], also: Iterable[str] = ()) -> None:
        self.channel = channel
        self.packages = tuple(packages)
        self.also = tuple(also)
        self.found: tuple[str, ...] = ()

    def __call__(self) -> list[str]:
        """Look.

        Raises:
            ChannelError: ``SHA256SUMS`` cannot be read.
        """
        there = {relative(self.channel, p): p for p in self.channel.glob("*/*.conda")}
        ours = {name: path for name, path in there.items() if _named(path.name)[0] in OURS}
        own = {path.name for path in self.packages}
        wanted = {_what(path) for path in self.packages}
        gone = {n for n, path in ours.items() if path.name not in own and _what(path) in wanted}
        gone |= set(self._useless(ours, own))
        # A killed run may have left a build that is not listed beside the one that is.
        listed = read_sums(self.channel)
        stay = {_what(path) for name, path in ours.items() if name in listed and name not in gone}
        gone |= {
            name for name, path in ours.items()
            if name not in listed and path.name not in own and _what(path) in stay
        }  # fmt: skip
        gone |= {name for name in self.also if (self.channel / name).exists()}
        self.found = tuple(sorted(gone))
        left = own | {path.name for name, path in there.items() if name not in gone}
        return [*self.found, *self._provenance(left)]

    def _useless(self, ours: dict[str, Path], own: Collection[str]) -> Iterator[str]:
        new = {_named(p.name)[1]: p for p in self.packages
               if _named(p.name)[0] == VLLM and p.is_file()}  # fmt: skip
        for name, path in ours.items():
            kind, version = _named(path.name)
            other = kind == KERNELS and path.name not in own and version in new
            if other and _of_others(path, new[version]):
                yield name

    def _provenance(self, left: Collection[str]) -> list[str]:
        """Documents of builds that are not there any more."""
        return sorted(
            path.name for path in self.channel.glob(f"*.conda{PROVENANCE}")
            if _named(path.name)[0] in OURS and path.name.removesuffix(PROVENANCE) not in left
        )  # fmt: skip


def _named(file: str) -> tuple[str, str]:
    """Name and version in the name of a package's file; no version has a hyphen."""
    name, _, rest = file.partition(".conda")[0].rpartition("-")[0].rpartition("-")
    return name, rest


def _build(file: str) -> str:
    return file.partition(".conda")[0].rpartition("-")[2]


def _what(package: Path) -> tuple[str, str]:
    """What there is to be one build of: a version, or for an adapter its contract."""
    name, version = _named(package.name)
    return name, (name == ADAPTER and contract_of(package)) or version


def contract_of(package: Path) -> str:
    """The contract that an adapter is for; empty where it does not say one, or is damaged."""
    try:
        about = read_info(package).get("about") or {}
        return str(about["extra"]["contract"]["contract"])
    except (Sm75Error, OSError, KeyError, TypeError):
        return ""


def _of_others(kernels: Path, vllm: Path) -> bool:
    """Whether kernels are known to be compiled of other sources than a vllm has."""
    try:
        sources = files.load(kernels).index.sources
        return bool(list(beside.differing(sources, beside.read(vllm, sources))))
    except (Sm75Error, OSError):  # `verify` says what is wrong with them
        return False


def releases(channel: Path) -> set[str]:
    """The releases of which a channel has a vllm-sm75."""
    found = {_named(path.name) for path in channel.glob(f"*/{VLLM}-*.conda")}
    return {version for name, version in found if name == VLLM}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Builds of one version that a solver has no reason to tell apart.

    Attributes:
        name: Conda name.
        version: The version.
        files: The builds, as ``subdir/file``.
        contracts: The contracts of these adapters, in the order of ``files``, where each is for
            another one; else empty.
    """

    name: str
    version: str
    files: tuple[str, ...]
    contracts: tuple[str, ...] = ()

    def __str__(self) -> str:
        many = f"the channel has {len(self.files)} builds of {self.name} {self.version}"
        if self.contracts:
            pairs = zip(self.contracts, self.files, strict=True)
            told = ", ".join(f"{contract} ({file})" for contract, file in pairs)
            return (
                f"{many}, for {told}: `install` takes that of its contract, other clients take "
                "any: name the build there"
            )
        mend = OURS.get(self.name)
        advice = f"{mend} withdraws all but the current one" if mend else "remove all but one"
        return f"{many}, and clients take any of them: {', '.join(self.files)}; {advice}"


def choices(channel: Path) -> list[Choice]:
    """Where a channel leaves a solver the choice between builds of one version.

    Builds for different Pythons are none, nor are such of different build numbers, of which solvers
    take the highest.

    Args:
        channel: A channel without faults.

    Raises:
        ChannelError: An index cannot be read.
    """
    same: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file, record in indexed(channel).items():
        name, depends = str(record.get("name", "")), record.get("depends")
        specs = [str(spec) for spec in depends] if isinstance(depends, list) else []
        tied = [spec for spec in specs if spec.partition(" ")[0] in ("python", "python_abi")]
        key = (name, str(record.get("version", "")), str(record.get("build_number", 0)))
        same[key if name in OURS else (*key, *sorted(tied))].append(file)
    found = []
    for (name, version, *_), listed in sorted(same.items()):
        if len(listed) > 1:
            builds = tuple(sorted(listed))
            contracts = tuple(contract_of(channel / file) for file in builds if name == ADAPTER)
            distinct = all(contracts) and len(set(contracts)) == len(builds)
            found.append(
                Choice(name=name, version=version, files=builds,
                       contracts=contracts if distinct else ())
            )  # fmt: skip
    return found


def warnings(channel: Path, taken: Iterable[str]) -> list[str]:
    """What an installation says of the choices that it met.

    Args:
        channel: A channel without faults.
        taken: ``name version build`` of the packages that were chosen.

    Raises:
        ChannelError: An index cannot be read.
    """
    builds = {(name, version): build for name, version, build in map(str.split, taken)}
    return [
        f"took build {builds[choice.name, choice.version]} of several: {choice}"
        for choice in choices(channel)
        # the adapter of one's own contract is named, and is no matter of chance
        if (choice.name, choice.version) in builds and not choice.contracts
    ]


def adapter_for(channel: Path, contract: str) -> tuple[str, str]:
    """Which adapter an installation for a contract takes.

    Args:
        channel: The channel.
        contract: The contract's name.

    Returns:
        A conda spec, empty where no adapter of the channel says that it is for the contract; and a
        warning, empty where there is nothing to say. Of several for the contract: the last one
        written.
    """
    there = {path: contract_of(path) for path in channel.glob(f"*/{ADAPTER}-*.conda")}
    mine = [
        path for path, said in there.items()
        # what a spec can name; ours all are
        if said == contract and re.fullmatch(r"[A-Za-z0-9_]+", _build(path.name))
    ]  # fmt: skip
    if mine:
        chosen = max(mine, key=lambda path: (path.stat().st_mtime, path.name))
        return f"{ADAPTER} =={_named(chosen.name)[1]} {_build(chosen.name)}", ""
    others = sorted({said for said in there.values() if said})
    if not others:
        return "", ""
    return "", (
        f"the channel has no {ADAPTER} for the contract {contract}, only for {', '.join(others)}: "
        "name that (--target), or make it: python3 orchestrator.py channel build "
        f"--target {contract}"
    )
