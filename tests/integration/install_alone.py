"""Install one package of a channel without its dependencies: ``CHANNEL FILE PREFIX TOOLCHAIN``.

It serves every Python, so that a python of the environment must say where it goes; here that is the
toolchain's stand-in, which holds nothing but C headers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import rattler

from sm75 import rattler_rt
from sm75.channelcheck import REPODATA


def _records(channel: Path, name: str) -> list[rattler.RepoDataRecord]:
    index = rattler.SparseRepoData(
        rattler.Channel(channel.as_uri()), "linux-aarch64", channel / "linux-aarch64" / REPODATA
    )
    return list(index.load_records(name))


async def install(channel: Path, file: str, prefix: Path, toolchain: Path) -> None:
    """Do it with py-rattler, from the index that users read."""
    ours = [record for record in _records(channel, "vllm-sm75") if record.file_name == file]
    await rattler.install(
        [*ours, *_records(toolchain, "python")],
        target_prefix=prefix,
        platform=rattler.Subdir("linux-aarch64"),
        cache_dir=prefix.with_name("cache"),
        show_progress=False,
    )


if __name__ == "__main__":
    rattler_rt.run(install(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])))
    rattler_rt.exit_process(0)
