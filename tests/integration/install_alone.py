"""Install one package of a channel, without its dependencies: ``CHANNEL FILE PREFIX``."""

from __future__ import annotations

import sys
from pathlib import Path

import rattler

from sm75 import rattler_rt
from sm75.channelcheck import REPODATA


async def install(channel: Path, name: str, prefix: Path) -> None:
    """Do it with py-rattler, from the index that users read."""
    data = rattler.SparseRepoData(
        rattler.Channel(channel.as_uri()), "linux-aarch64", channel / "linux-aarch64" / REPODATA
    )
    records = [record for record in data.load_records("vllm-sm75") if record.file_name == name]
    await rattler.install(
        records,
        target_prefix=prefix,
        platform=rattler.Subdir("linux-aarch64"),
        cache_dir=prefix.with_name("cache"),
        show_progress=False,
    )


if __name__ == "__main__":
    rattler_rt.run(install(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
    rattler_rt.exit_process(0)
