"""Install from the channel without a conda client: py-rattler, offline.

Everything is checked and solved before the prefix is touched; then the environment is laid out
beside its place, made for its final path, and renamed there. A refusal, a fault and an interrupt
leave nothing behind; what a killed run leaves, the next run for the same prefix removes.
"""

from __future__ import annotations

import platform as machine
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import rattler
from rattler import exceptions

from sm75 import newprefix, rattler_rt
from sm75.atomic import disk_errors, fsync_dir
from sm75.channelcheck import REPODATA, SUMS, count, require, verify_channel
from sm75.errors import ChannelError, UsageError
from sm75.lockfile import G5G, TargetContract
from sm75.store import hash_file

NAME = "vllm-sm75"
# Attention compiled ahead of time; without it, it does without tensor cores.
KERNELS = "vllm-sm75-kernels"
# Graviton2's cores, as archspec calls them (g5g).
_ARCHSPEC = "neoverse_n1"
# Where dlami-torch looks for the place of the image's torch, below the prefix.
_LOCATION = Path("etc", "dlami-torch", "path")
# How a sentence names a virtual package: what the machine has.
_WORDS = {
    "__glibc": "glibc",
    "__cuda": "a driver for CUDA",
    "__cuda_arch": "a GPU of compute capability",
}


@dataclass(frozen=True, kw_only=True)
class Box:
    """A machine, as solvers see it.

    Attributes:
        platform: Conda subdir.
        virtual: Versions of virtual packages by name.
    """

    platform: str
    virtual: Mapping[str, str]

    def packages(self) -> list[rattler.GenericVirtualPackage]:
        """The virtual packages as rattler wants them."""
        builds = {"__archspec": _ARCHSPEC}
        return [
            rattler.GenericVirtualPackage(
                rattler.PackageName(name),
                rattler.Version(version),
                rattler.BuildString(builds.get(name, "0")),
            )
            for name, version in self.virtual.items()
        ]


def this_box() -> Box:
    """Describe this machine; what it lacks is left out."""
    virtual = {"__unix": "0", "__linux": "0", "__archspec": "1"}
    for package in rattler.VirtualPackage.detect():
        generic = package.into_generic()
        virtual[generic.name.normalized] = str(generic.version)
    if capability := _capability():
        virtual["__cuda_arch"] = capability
    subdir = {"aarch64": "linux-aarch64", "x86_64": "linux-64"}.get(machine.machine(), "unknown")
    return Box(platform=subdir, virtual=virtual)


def _capability() -> str:
    """The lowest compute capability among the GPUs here; empty without one (CEP 46)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    done = subprocess.run(
        [tool, "--query-gpu=compute_cap", "--format=csv,noheader"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = re.findall(r"(?m)^\s*(\d+)\.(\d+)\s*$", done.stdout)
    return ".".join(map(str, min((int(a), int(b)) for a, b in found))) if found else ""


def box_of(contract: TargetContract) -> Box:
    """Describe the target of a contract, for building an image elsewhere; without a GPU."""
    virtual = {"__unix": "0", "__linux": "0", "__archspec": "1"}
    virtual["__glibc"] = contract.glibc or "2.34"
    return Box(platform=G5G, virtual=virtual)


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What was installed.

    Attributes:
        prefix: The environment.
        packages: ``name version build``, sorted.
        python: Its Python.
    """

    prefix: Path
    packages: tuple[str, ...]
    python: str


def check_platform(box: Box) -> None:
    """Refuse a machine of another kind.

    Raises:
        UsageError: It is one.
    """
    if box.platform != G5G:
        raise UsageError(
            f"{NAME} is for {G5G} (a g5g instance); this machine is {box.platform}",
            fix="run it on the g5g, or build an image for one: --foreign",
        )


def check_channel(channel: Path, instead: str = "nothing was installed") -> None:
    """Refuse a channel with any fault: no client checks the packages of a directory.

    Args:
        channel: The channel.
        instead: What did not happen because of it.

    Raises:
        ChannelError: Naming the faults.
    """
    require(channel)
    if problems := verify_channel(channel):
        raise ChannelError(
            f"{channel} has {count(problems)}; {instead}",
            why="\n        ".join(map(str, problems[:10])),
            fix="copy the channel anew, or build it again",
        )


def solve(channels: Sequence[Path], specs: Sequence[str], box: Box) -> list[rattler.RepoDataRecord]:
    """Choose packages for a machine; nothing is written.

    Args:
        channels: Channel directories, the most important first; a name that the first has is not
            taken from the next.
        specs: Conda specs.
        box: The machine.

    Raises:
        ChannelError: No set of packages will do; the message says which fact of the machine or
            which missing package stands in the way.
        UsageError: A spec is malformed.
    """
    return rattler_rt.run(_solve(channels, specs, box))


async def _solve(
    channels: Sequence[Path], specs: Sequence[str], box: Box
) -> list[rattler.RepoDataRecord]:
    with tempfile.TemporaryDirectory(prefix="vllm-sm75-solve-") as cache:
        gateway = rattler.Gateway(cache_dir=Path(cache))
        sources = [rattler.Channel(path.absolute().as_uri()) for path in channels]
        try:
            return await rattler.solve(
                sources=sources,
                specs=list(specs),
                gateway=gateway,
                platforms=[rattler.Subdir(box.platform), rattler.Subdir("noarch")],
                virtual_packages=box.packages(),
            )
        except exceptions.InvalidMatchSpecError as err:
            raise UsageError(f"a package specification is malformed: {err}") from err
        except exceptions.SolverError as err:
            raise _explain(channels, specs, box, str(err)) from err
        except exceptions.GatewayError as err:  # of a channel that is not checked as a whole
            named = ", ".join(map(str, channels))
            raise ChannelError(
                f"an index cannot be read, of {named}",
                why=str(err).strip(),
                fix="copy that channel anew",
            ) from err


def _explain(channels: Sequence[Path], specs: Sequence[str], box: Box, told: str) -> ChannelError:
    """Say in one sentence what stands in the way, where it can be told apart."""
    records = _records(channels, box.platform)
    for spec in specs:
        asked = rattler.MatchSpec(spec)
        named = [r for r in records if asked.name and r.name.normalized == asked.name.normalized]
        if named and not any(asked.matches(r) for r in named):
            return ChannelError(
                f"the channel has no {spec.replace('==', '')}",
                why=f"it has {', '.join(sorted({str(r.version) for r in named}))}",
                fix="build that release into it, or take what it has: leave --release out"
                if asked.name.normalized == NAME
                else "name another version, or add a channel that has it (--extra-channel DIR)",
            )
    # vllm-sm75 first: that is what was asked for
    ours = [r for name in (NAME, "dlami-torch") for r in records if r.name.normalized == name]
    for record in ours:
        for constraint in record.constrains:
            name, _, wanted = constraint.partition(" ")
            have = box.virtual.get(name)
            if name in _WORDS and have and not _fits(constraint, name, have):
                return ChannelError(
                    f"this machine has {_WORDS[name]} {have}; {record.name.normalized} needs "
                    f"{wanted}",
                    why=told.strip(),
                    fix="use a g5g instance with AWS's ARM64 Deep Learning AMI (PyTorch >= 2.11)",
                )
    known = {r.name.normalized for r in records}
    if "python" not in known:
        return ChannelError(
            "the channel has no python for linux-aarch64",
            why="conda-forge's is not in it: see `channel missing`",
            fix="add a channel that has one (conda-forge, or --extra-channel DIR)",
        )
    return ChannelError(f"no set of packages gives {', '.join(specs)}", why=told.strip())


def _fits(constraint: str, name: str, version: str) -> bool:
    record = rattler.PackageRecord(
        name, rattler.VersionWithSource(version), rattler.BuildString("0"), 0, G5G
    )
    return rattler.MatchSpec(constraint).matches(record)


def _records(channels: Sequence[Path], platform: str) -> list[rattler.RepoDataRecord]:
    found: list[rattler.RepoDataRecord] = []
    for path in channels:
        channel = rattler.Channel(path.absolute().as_uri())
        for subdir in (platform, "noarch"):
            index = path / subdir / REPODATA
            if index.exists():
                data = rattler.SparseRepoData(channel, subdir, index)
                for name in data.package_names():
                    found += data.load_records(name)
    return found


def with_kernels(channel: Path, version: str = "") -> tuple[str, ...]:
    """What to install: vllm-sm75, and its attention kernels where the channel has them.

    Args:
        channel: The channel.
        version: The release asked for; empty: the newest there.
    """
    try:
        records = _records([channel], G5G)
    except Exception:  # the installation checks the channel, and says what is wrong with it
        records = []
    ours = [r.version for r in records if r.name.normalized == NAME]
    chosen = version or (str(max(ours)) if ours else "")
    # named: were it not installable, a solver would take an older release, and say nothing
    wanted = f"{NAME} =={chosen}" if chosen else NAME
    kernels = {str(r.version) for r in records if r.name.normalized == KERNELS}
    return (wanted, f"{KERNELS} =={chosen}") if chosen in kernels else (wanted,)


def pythons(channel: Path) -> list[str]:
    """The Python minors that a channel's closure serves, oldest first."""
    found = set()
    for record in _records([channel], G5G):
        for spec in record.depends:
            if hit := re.fullmatch(r"python (3\.\d+)\.\*", spec):
                found.add(hit[1])
    return sorted(found, key=lambda minor: int(minor.partition(".")[2]))


def image_python(place: Path) -> str:
    """The minor of the Python that the image's torch is for; empty where there is none."""
    sites = sorted(place.glob("lib*/python3.*/site-packages/torch"))
    return sites[0].parts[-3].removeprefix("python") if sites else ""


def choose_python(channel: Path, contract: TargetContract, place: Path | None, asked: str) -> str:
    """Decide on the Python minor: asked for, the image's, or the contract's.

    Args:
        channel: The channel.
        contract: The target.
        place: The image's environment on this machine; ``None``: this is another machine.
        asked: ``--python``; may be empty.

    Raises:
        UsageError: It cannot be told, or the channel does not serve it.
    """
    minor = asked or (image_python(place) if place else "") or "".join(contract.python[:1])
    serves = pythons(channel)
    if not minor:
        raise UsageError(
            "the Python of the image's torch is not known",
            why=(f"there is no torch in {place}, and" if place else "--foreign, and")
            + f" the contract {contract.name} does not say",
            fix=f"give --python, one of {', '.join(serves)}"
            if serves
            else "bring the closure into the channel: python3 orchestrator.py channel build",
        )
    if minor not in serves:
        raise UsageError(
            f"the channel has no packages for Python {minor}",
            why=f"it serves {', '.join(serves) or 'none: it lacks the closure'}",
            fix=f"give --python, one of {', '.join(serves)}"
            if serves
            else "bring the closure in: python3 orchestrator.py channel build",
        )
    return minor


def prepare(
    channel: Path,
    prefix: Path,
    *,
    python: str | Callable[[], str],
    box: Box,
    extra_channels: Sequence[Path] = (),
    specs: Sequence[str] = (NAME,),
) -> list[rattler.RepoDataRecord]:
    """Check everything and choose the packages; nothing is written.

    Args:
        channel: The channel; checked file by file first.
        prefix: A directory that does not exist or is empty.
        python: Python minor, or what decides on it: asked once the channel is known to be whole.
        box: The machine it is for.
        extra_channels: Further channel directories, for instance one with python. Those that have a
            SHA256SUMS are checked as a whole; of the others, the packages that are chosen.
        specs: What to install besides python.

    Raises:
        ChannelError: A channel is damaged, or the machine does not fit.
        UsageError: The prefix will not do, the machine is of another kind, or there is no such
            channel.
        DiskError: The prefix cannot be looked at.
    """
    check_platform(box)
    place(prefix, channel, extra_channels)
    return _choose(channel, python, box, extra_channels, specs)


def place(prefix: Path, channel: Path, extra_channels: Sequence[Path] = ()) -> Path:
    """Give the real path of a prefix that can be one; see :func:`sm75.newprefix.resolve`.

    Raises:
        UsageError: It cannot.
        ChannelError: A further channel is none.
        DiskError: It cannot be looked at.
    """
    for path in extra_channels:
        if not any(path.glob(f"*/{REPODATA}")):
            raise ChannelError(
                f"{path} is no channel",
                why=f"it has no {REPODATA} in a directory named by platform",
                fix=f"name a directory that holds {G5G}/{REPODATA} or noarch/{REPODATA}",
            )
    return newprefix.resolve(prefix, (channel, *extra_channels))


def _choose(
    channel: Path,
    python: str | Callable[[], str],
    box: Box,
    extra_channels: Sequence[Path],
    specs: Sequence[str],
) -> list[rattler.RepoDataRecord]:
    unchecked = [path for path in extra_channels if not (path / SUMS).exists()]
    for path in (channel, *(path for path in extra_channels if path not in unchecked)):
        check_channel(path)
    minor = python if isinstance(python, str) else python()
    records = solve([channel, *extra_channels], [*specs, f"python {minor}.*"], box)
    for path in unchecked:
        _check_chosen(path, records)
    return records


def _check_chosen(channel: Path, records: Sequence[rattler.RepoDataRecord]) -> None:
    """Compare the chosen packages of one channel with its index."""
    for record in records:
        path = Path(url2pathname(urlsplit(record.url).path))
        if not path.is_relative_to(channel.absolute()):
            continue
        wanted = record.sha256.hex() if record.sha256 else ""
        got = hash_file(path) if path.is_file() else ""
        if got != wanted or not wanted:
            raise ChannelError(
                f"{path} is not what its index says; nothing was installed",
                why=f"sha256: index {wanted or 'none'}, file {got or 'missing'}",
                fix="copy that channel anew",
            )


def install(
    channel: Path,
    prefix: Path,
    *,
    python: str | Callable[[], str],
    box: Box,
    extra_channels: Sequence[Path] = (),
    specs: Sequence[str] = (NAME,),
    image: Path | None = None,
) -> Installed:
    """Install into a new prefix. No network is used.

    Args:
        channel: See :func:`prepare`, as for the others that it has.
        prefix: The prefix.
        python: See :func:`prepare`.
        box: The machine it is for.
        extra_channels: Further channels.
        specs: What to install besides python.
        image: Where the image's torch is, when not where the contract says.

    Raises:
        ChannelError: A channel is damaged, or the machine does not fit.
        UsageError: See :func:`prepare`.
        BusyError: Another run installs into that prefix.
        DiskError: The disk is full or not writable.
    """
    check_platform(box)
    prefix = place(prefix, channel, extra_channels)
    with newprefix.claimed(prefix) as scratch:
        newprefix.resolve(prefix)  # a run that has just ended may have filled it
        records = _choose(channel, python, box, extra_channels, specs)
        with disk_errors(prefix):
            scratch.mkdir(mode=0o700)
            rattler_rt.run(_install(records, scratch, prefix))
            if image is not None:
                (scratch / "env" / _LOCATION).parent.mkdir(parents=True)
                (scratch / "env" / _LOCATION).write_text(f"{image.absolute()}\n")
            if prefix.exists():
                prefix.rmdir()
            (scratch / "env").rename(prefix)
            fsync_dir(prefix.parent)
    return Installed(prefix=prefix, packages=names(records), python=minor_of(records))


def minor_of(records: Sequence[rattler.RepoDataRecord]) -> str:
    """The minor of the python among them; empty without one."""
    found = [str(r.version) for r in records if r.name.normalized == "python"]
    return ".".join(found[0].split(".")[:2]) if found else ""


def names(records: Sequence[rattler.RepoDataRecord]) -> tuple[str, ...]:
    """``name version build`` of each, sorted."""
    return tuple(sorted(f"{r.name.normalized} {r.version} {r.build}" for r in records))


async def _install(records: list[rattler.RepoDataRecord], scratch: Path, prefix: Path) -> None:
    """Lay the environment out in ``scratch``, made for ``prefix``.

    The cache is private: one that other channels share may have an altered package of the name.
    """
    try:
        await rattler.install(
            records,
            target_prefix=scratch / "env",
            platform=rattler.Subdir(G5G),
            cache_dir=scratch / "cache",
            show_progress=False,
            alternative_target_prefix=prefix,
        )
    except exceptions.InstallerError as err:
        if re.search(r"No space left|os error 28", str(err)):
            raise OSError(28, "No space left on device", str(prefix)) from err
        raise ChannelError("the packages cannot be installed", why=str(err)) from err
