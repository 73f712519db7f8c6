"""A real server: ``transformers serve``, with one model, on a free port of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import httpx

# Seconds until it answers: 10 on an idle machine, most of them to import torch.
_START = 1800.0


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Served:
    """``transformers serve`` as a process of its own; a context manager that starts and ends it.

    Args:
        python: A Python with torch and ``transformers[serving]``.
        models: The directory of ``tests.realserver.make``.
        name: One of its models.
        log: What the server says.

    """

    def __init__(self, python: str, models: Path, name: str, log: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._command = [
            python, "-m", "transformers.cli.transformers", "serve", f"sm75/{name}", "--host",
            "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32",
            "--default-seed", "1",
        ]  # fmt: skip
        self._environment = {
            **os.environ,
            "HF_HUB_CACHE": str(models / name),
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            # Two cores are enough for a tiny model, and threads that wait for others are slower.
            "OMP_NUM_THREADS": "1",
        }
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, as what ``url`` names, but do not wait."""
        with self._log.open("ab") as handle:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=handle, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        """Until it answers.

        Raises:
            RuntimeError: It ended, or took too long.
        """
        end = time.monotonic() + _START
        while time.monotonic() < end and self.process and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.3)
        self.kill()
        said = self._log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{' '.join(self._command)} did not start:\n{said}")

    def __enter__(self) -> Served:
        self.start()
        self.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End it at once, as the kernel does when memory runs out; wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def pause(self) -> None:
        """Let it have no processor time at all."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End :meth:`pause`."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
