"""Solve and install from a channel with py-rattler, as pixi does: URL, directory, names."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import rattler
from rattler.networking import Client


async def main(url: str, where: Path, names: list[str]) -> None:
    client = Client.default_client()
    arm = rattler.Platform("linux-aarch64")
    records = await rattler.solve(
        sources=[rattler.Channel(url)], specs=names, platforms=[arm, rattler.Platform("noarch")],
        gateway=rattler.Gateway(cache_dir=where / "index", client=client),
    )  # fmt: skip
    for record in records:
        print(record.url)
    await rattler.install(
        records, where / "prefix", cache_dir=where / "packages", client=client, platform=arm
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
    sys.stdout.flush()
    os._exit(0)  # py-rattler's threads may end badly
