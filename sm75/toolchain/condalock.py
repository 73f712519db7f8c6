"""Solve a tool environment with py-rattler, and keep the result in a lock file.

The lock is pixi's format, version 7: environment ``build`` for each build platform, ``host`` for
the target. Only remote channels are locked: the paths of a local one would mean nothing elsewhere.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import rattler
from rattler import exceptions

from sm75 import rattler_rt
from sm75.atomic import write_bytes
from sm75.errors import LockError, ToolchainError
from sm75.toolchain import ToolSpecs

Kind = Literal["build", "host"]

# What a machine must offer. glibc: the lowest of the supported images (Amazon Linux 2023), so that
# the tools run on each of them. A GPU is never asked for, and the CPU is the family's baseline.
_VIRTUAL = {"__unix": "0", "__linux": "5.10", "__glibc": "2.34"}
_ARCHSPEC = {"linux-64": "x86_64", "linux-aarch64": "aarch64"}

# Raised by the binding for a channel that cannot be read.
_CHANNEL_FAULTS = (
    exceptions.GatewayError,
    exceptions.FetchRepoDataError,
    exceptions.IoError,
    exceptions.InvalidChannelError,
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A conda channel and how to reach it.

    Args:
        channel: Channel name or URL, as in conda's ``-c``.
        config: The user's rattler configuration (mirrors, proxies, certificates).
        cache_dir: Where channel indexes are cached.
    """

    channel: str
    config: rattler.Config
    cache_dir: Path

    @property
    def url(self) -> str:
        """The channel's base URL, without a final slash."""
        return rattler.Channel(self.channel).base_url.rstrip("/")

    def urls(self, location: str) -> list[str]:
        """Give where to read a file of the channel: the user's mirrors first, then itself.

        Args:
            location: URL below the channel.
        """
        found = [
            mirror.rstrip("/") + location.removeprefix(prefix.rstrip("/"))
            for prefix, mirrors in self.config.mirrors.items()
            if location.startswith(prefix.rstrip("/") + "/")
            for mirror in mirrors
        ]
        return [*found, location]


def virtual_packages(platform: str) -> list[rattler.GenericVirtualPackage]:
    """Give the virtual packages that tools of ``platform`` may rely on."""
    triples = [(name, version, "0") for name, version in _VIRTUAL.items()]
    triples.append(("__archspec", "1", _ARCHSPEC[platform]))
    return [
        rattler.GenericVirtualPackage(
            rattler.PackageName(name), rattler.Version(version), rattler.BuildString(build)
        )
        for name, version, build in triples
    ]


def solve(source: Source, platform: str, specs: Sequence[str]) -> list[rattler.RepoDataRecord]:
    """Choose packages for one platform.

    Args:
        source: The channel.
        platform: Conda subdir.
        specs: Conda specs.

    Returns:
        Records, sorted by name.

    Raises:
        ToolchainError: The channel cannot be read, lacks a package, or the specs disagree.
    """
    return rattler_rt.run(_solve(source, platform, specs))


async def _solve(
    source: Source, platform: str, specs: Sequence[str]
) -> list[rattler.RepoDataRecord]:
    client = rattler.Client.from_config(source.config)
    gateway = rattler.Gateway.from_config(source.config, source.cache_dir, client=client)
    channel = rattler.Channel(source.channel)
    subdirs = [rattler.Subdir(platform), rattler.Subdir("noarch")]
    try:
        records = await rattler.solve(
            sources=[channel],
            specs=list(specs),
            gateway=gateway,
            platforms=subdirs,
            virtual_packages=virtual_packages(platform),
        )
    except _CHANNEL_FAULTS as err:
        raise ToolchainError(
            f"the channel {source.channel} cannot be read",
            why=str(err),
            fix="check the network and the mirrors in your rattler or pixi configuration, "
            "or use the bootstrap toolchain",
        ) from err
    except exceptions.InvalidMatchSpecError as err:
        raise ToolchainError("a tool specification is malformed", why=str(err)) from err
    except exceptions.SolverError as err:
        names = [_name(spec) for spec in specs]
        found = await gateway.query([channel], subdirs, names, recursive=False)
        known = {record.name.normalized for records in found for record in records}
        absent = [name for name in names if name not in known and not name.startswith("__")]
        if absent:
            raise ToolchainError(
                f"the channel {source.channel} has no {', '.join(absent)} for {platform}",
                why=str(err).strip(),
                fix="use a channel that carries it, or the bootstrap toolchain",
            ) from err
        raise ToolchainError(
            f"no set of packages of {source.channel} gives {', '.join(specs)} on {platform}",
            why=str(err).strip(),
            fix="loosen the specifications, or use the bootstrap toolchain",
        ) from err
    return sorted(records, key=lambda record: record.name.normalized)


def _name(spec: str) -> str:
    return spec.split()[0].rpartition("::")[2]


def resolve(
    source: Source, specs: ToolSpecs, build_platforms: Iterable[str], target_platform: str
) -> bytes:
    """Solve everything and give the text of the lock file.

    Args:
        source: The channel; a remote one.
        specs: What the recipe asks for.
        build_platforms: Subdirs of the machines that may build.
        target_platform: Subdir of the package.

    Raises:
        ToolchainError: As :func:`solve`, or the channel is a local directory.
    """
    if source.url.startswith("file:"):
        raise ToolchainError(
            f"the channel {source.channel} cannot be locked",
            why="it is a directory of this machine",
            fix="name a channel that other machines can reach",
        )
    wanted: list[tuple[Kind, str, tuple[str, ...]]] = [
        ("build", platform, specs.build) for platform in sorted(set(build_platforms))
    ]
    if specs.host:
        wanted.append(("host", target_platform, specs.host))
    platforms = {
        platform: rattler.LockPlatform(
            platform, virtual_packages=[str(v) for v in virtual_packages(platform)]
        )
        for _, platform, _ in wanted
    }
    lock = rattler.LockFile(list(platforms.values()))
    for kind in {kind for kind, _, _ in wanted}:
        lock.set_channels(kind, [rattler.LockChannel(f"{source.url}/")])
    for kind, platform, chosen in wanted:
        for record in solve(source, platform, chosen):
            # the wall clock of whoever indexed the channel; not part of the package
            record.indexed_timestamp = None
            lock.add_conda_package(kind, platforms[platform], record)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "lock"
        lock.to_path(path)
        return path.read_bytes()


def write(path: Path, text: bytes) -> None:
    """Write a lock file as a whole or not at all."""
    write_bytes(path, text)


def read(path: Path, kind: Kind, platform: str) -> list[rattler.RepoDataRecord]:
    """Read the locked packages of one environment.

    Args:
        path: The lock file.
        kind: ``build`` or ``host``.
        platform: Conda subdir.

    Returns:
        Records; empty when the lock has no such environment at all.

    Raises:
        LockError: There is no lock file, it is malformed, a record has no hash, or the environment
            was not solved for ``platform``.
    """
    if not path.exists():
        raise LockError(
            f"there is no toolchain lock {path}",
            why="the conda-forge toolchain has not been resolved for this release",
            fix="run `lock` with the conda-forge toolchain, or build with the bootstrap one",
        )
    try:
        lock = rattler.LockFile.from_path(path)
    except exceptions.ParseCondaLockError as err:
        raise LockError(f"{path} is not a lock file", why=str(err)) from err
    environment = lock.environment(kind)
    if environment is None:
        return []
    for locked in environment.platforms():
        if str(locked.subdir) == platform:
            records = environment.conda_repodata_records_for_platform(locked) or []
            _check_pinned(path, records)
            return records
    have = ", ".join(sorted(str(p.subdir) for p in environment.platforms()))
    raise LockError(
        f"{path} has no {kind} tools for {platform}",
        why=f"it was solved for {have}",
        fix="run `lock` again with this platform",
    )


def _check_pinned(path: Path, records: Iterable[rattler.RepoDataRecord]) -> None:
    for record in records:
        if record.sha256 is None or record.size is None:
            raise LockError(f"{path}: {record.file_name} has no sha256 or size")
        if "/" in record.file_name or record.url.startswith("file:"):
            raise LockError(f"{path}: {record.url} is not a package of a remote channel")


def check_specs(
    path: Path, specs: ToolSpecs, records: Mapping[Kind, Sequence[rattler.RepoDataRecord]]
) -> None:
    """Refuse a lock that no longer answers the recipe.

    Args:
        path: The lock file, for the message.
        specs: What the recipe asks for now.
        records: What is locked.

    Raises:
        LockError: Naming the specs that no locked package satisfies.
    """
    unmet = [
        f"{spec} ({kind})"
        for kind in get_args(Kind)
        for spec in getattr(specs, kind)
        if not _name(spec).startswith("__")
        if not any(rattler.MatchSpec(spec).matches(record) for record in records.get(kind, ()))
    ]
    if unmet:
        raise LockError(
            f"{path} does not have {', '.join(unmet)}",
            why="the recipe asks for it now and did not when the lock was written",
            fix="run `lock` again",
        )
