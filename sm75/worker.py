"""Runs the recipe through py-rattler-build, in a process of its own.

A process, because the build is to have no network (its namespace is made around it), a clean
environment and a private HOME, because Ctrl-C must end everything below it, and because rattler's
runtime does not always survive the interpreter's exit.

``python -m sm75.worker`` reads a job as one line of JSON from standard input and writes events as
JSON lines: ``{"log": "..."}``, at the end ``{"package": "..."}`` or ``{"error": "..."}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from sm75 import session


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker is to do.

    Attributes:
        recipe: The recipe file.
        variants: Variant keys and their one value.
        build_platform: Conda subdir of this machine.
        target_platform: Conda subdir of the package.
        channels: Channel URLs; local ones only.
        output: Where packages and work directories go.
        keep_work: Whether to keep the work directory of a successful build.
    """

    recipe: str
    variants: dict[str, str]
    build_platform: str
    target_platform: str
    channels: list[str]
    output: str
    keep_work: bool = False


def emit(event: dict[str, Any]) -> None:
    """Write one event."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class _Events:
    """rattler-build's callbacks."""

    def on_download_start(self, event: Any) -> None:
        """Local channels only: nothing is downloaded."""

    def on_download_progress(self, event: Any) -> None:
        """Local channels only."""

    def on_download_complete(self, event: Any) -> None:
        """Local channels only."""

    def on_build_step(self, event: Any) -> None:
        """Steps are read from the build script's own lines."""

    def on_log(self, event: Any) -> None:
        """Pass a line of the log on."""
        if event.message:
            emit({"log": event.message})


def work(job: Job) -> None:
    """Build one package and emit its path."""
    import rattler_build as rb

    platform = rb.PlatformConfig(
        target_platform=job.target_platform,
        build_platform=job.build_platform,
        host_platform=job.target_platform,
    )
    # The platforms must be variant keys too, and the recipe must use them: a build that says them
    # only here solves the host environment for this machine, without a word.
    variants = rb.VariantConfig(
        {
            "host_platform": [job.target_platform],
            "build_platform": [job.build_platform],
            **{key: [value] for key, value in job.variants.items()},
        }
    )
    rendered = rb.Stage0Recipe.from_file(Path(job.recipe)).render(
        variants, rb.RenderConfig(platform=platform)
    )
    if len(rendered) != 1:
        emit({"error": f"the recipe renders to {len(rendered)} packages, not one"})
        return
    variant = rendered[0]
    if variant.variant.get("host_platform") != job.target_platform:
        emit({"error": "the recipe no longer uses the variant key host_platform"})
        return
    result = variant.run_build(
        tool_config=rb.ToolConfiguration(
            test_strategy="skip", compression_threads=None, keep_build=job.keep_work
        ),
        output_dir=job.output,
        channels=job.channels,
        progress_callback=_Events(),
        no_build_id=True,
        no_include_recipe=False,
    )
    emit({"package": str(result.packages[0])})


def _end_with_parent() -> int:
    """Have the compilers end when the orchestrator is gone, however it went (its pipe closes).

    That is a process, not a thread: py-rattler-build holds the interpreter's lock while a compiler
    is silent.

    Returns:
        Its process id; it must be ended before this process ends by itself.
    """
    # Started by hand, it shares the session of a shell.
    leads = os.getsid(0) == os.getpid()
    watcher = os.fork()
    if watcher:
        return watcher
    for output in (1, 2):  # whoever reads them must see their end
        os.close(output)
    while os.read(0, 4096):
        pass
    if leads:
        session.end(os.getsid(0))
    else:
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


def main() -> None:
    """Read the job, do it, say how it ended."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    watcher = _end_with_parent()
    code = 0
    try:
        work(job)
    except Exception as err:  # whatever it is, the parent explains it
        emit({"error": str(err) or type(err).__name__})
        code = 1
    sys.stdout.flush()
    os.kill(watcher, signal.SIGKILL)
    os.waitpid(watcher, 0)
    # See sm75.rattler_rt: the interpreter's own exit can crash in rattler's runtime.
    os._exit(code)


if __name__ == "__main__":
    main()
