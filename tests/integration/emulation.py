"""Run programs of the installed environment under qemu-user, as on a box of its kind."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Seconds. What takes longest takes about a quarter of it on two cores.
_TIMEOUT = 3600


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """An installed environment and what is around it.

    Attributes:
        qemu: The emulator.
        sysroot: The C library of the machine.
        prefix: The environment.
        home: HOME, kept between runs (vLLM's caches).
    """

    qemu: str
    sysroot: Path
    prefix: Path
    home: Path

    @property
    def python(self) -> Path:
        """Its Python, a program of the other architecture."""
        return self.prefix / "bin" / "python3.11"

    def starter(self) -> Path:
        """A program of this machine that starts that Python, for programs that start others."""
        path = self.home / "python"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\nexec "{self.qemu}" -L "{self.sysroot}" "{self.python}" "$@"\n')
        path.chmod(0o755)
        return path

    def run(
        self, *arguments: str | Path, image: Path, driver: Path | None = None,
        accept: str = "arch", **more: str,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run its Python.

        Args:
            arguments: As Python takes them.
            image: The place of the image's torch.
            driver: Where the driver's libraries are; none: there is no driver.
            accept: Checks of the adapter that are waived.
            more: Further environment.
        """
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM", "LD_"))}
        kept |= {
            "DLAMI_TORCH_PATH": str(image),
            "DLAMI_TORCH_ACCEPT": accept,
            "HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **({"LD_LIBRARY_PATH": str(driver)} if driver else {}),
            **more,
        }
        return subprocess.run(
            # -P: programs beside the one that is run are not to be found by what it imports
            [self.qemu, "-L", str(self.sysroot), str(self.python), "-P", *map(str, arguments)],
            check=False, capture_output=True, text=True, env=kept, timeout=_TIMEOUT,
        )  # fmt: skip
