"""Lower kernels to PTX for sm_75 with Triton 3.2, in an environment that has it.

    python -m sm75.aot.worker < request.json    # an event a variant, as JSON lines

The request: ``tree`` (of adapted modules), ``modules``, ``capability``, ``jobs`` and ``variants``,
each with ``id``, ``module``, ``kernel``, ``parameters`` (name and Triton's type of each that is
passed), ``constants``, ``aligned`` and ``warps``. The PTX is for ptxas of another toolkit: Triton's
own is not run. Needs Triton 3.2 and nothing else.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from sm75.aot.adapt import DEAD
from sm75.smem import standins

# Oldest that has all these kernels take; sm_75 came with 6.3. Older drivers read it too.
PTX_VERSION = 80
_PARAM = re.compile(r"\.param \.[a-z](\d+)")

_request: dict[str, Any] = {}


class _Driver:
    """Triton asks for a device even where it only compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 75, 32)


def _prepare(request: dict[str, Any]) -> None:
    import triton
    import triton.language as tl
    from triton.backends.nvidia.compiler import CUDABackend

    if not triton.__version__.startswith("3.2."):
        raise SystemExit(f"this is Triton {triton.__version__}; kernels are lowered with 3.2")
    for name in DEAD:
        if not hasattr(tl, name):
            setattr(tl, name, _dead)
    CUDABackend.make_cubin = lambda *_: b""
    triton.runtime.driver.set_active(_Driver())
    major, minor = request["capability"]
    standins.install(Path(request["tree"]), request["modules"], (major, minor), compiler=True)
    _request.update(request)


def _dead(*_: Any, **__: Any) -> None:
    raise TypeError("a branch that was taken for dead is compiled; Triton 3.2 has no such thing")


def _width(kind: str) -> str:
    return "64" if kind.startswith("*") else kind.lstrip("abcdefghijklmnopqrstuvwxyz")


def lower(variant: dict[str, Any]) -> dict[str, Any]:
    """Lower one variant. Runs in a forked process."""
    from triton.backends.compiler import AttrsDescriptor, GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as build

    started = time.monotonic()
    event: dict[str, Any] = {"id": variant["id"]}
    try:
        kernel = getattr(importlib.import_module(variant["module"]), variant["kernel"])
        passed = {name for name, _ in variant["parameters"]}
        defaults = {
            one.name: one.default
            for one in kernel.params
            if one.has_default and one.name not in passed
        }
        places = {name: place for place, name in enumerate(kernel.arg_names)}
        attributes = AttrsDescriptor.from_dict({
            "cls": "AttrsDescriptor",
            "arg_properties": {
                "tt.divisibility": [places[name] for name in variant["aligned"]],
                "tt.equal_to": [],
            },
        })  # fmt: skip
        source = ASTSource(
            kernel, signature=dict(variant["parameters"]),
            constants=defaults | variant["constants"],
            attrs=attributes,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as cache:
            import os

            os.environ["TRITON_CACHE_DIR"] = cache
            major, minor = _request["capability"]
            built = build(
                source, target=GPUTarget("cuda", 10 * major + minor, 32),
                options={"num_warps": variant["warps"], "num_stages": 1,
                         "ptx_version": PTX_VERSION},
            )  # fmt: skip
            ptx = built.asm["ptx"]
        entry = ptx.partition(".entry")[2].partition(")")[0]
        kinds = [_width(kind) for _, kind in variant["parameters"]]
        found = _PARAM.findall(entry)
        if found[: len(kinds)] != kinds or set(found[len(kinds) :]) - {"64"}:
            raise TypeError(f"the entry's parameters are {found}, not {kinds}")
        event |= {
            "ptx": ptx, "entry": built.metadata.name, "shared": built.metadata.shared,
            "extra": len(found) - len(kinds),
        }  # fmt: skip
    except Exception as error:
        event["failed"] = f"{type(error).__name__}: {str(error).strip()[:600]}"
    return event | {"seconds": round(time.monotonic() - started, 2)}


def _child(out: Connection, variant: dict[str, Any]) -> None:
    out.send(lower(variant))
    out.close()


def each(variants: Sequence[dict[str, Any]], jobs: int) -> Iterator[dict[str, Any]]:
    """Lower each variant in a process of its own; yields events as they come.

    Of its own, for Triton's passes order some things by address: after other variants in the same
    process, one in six came out otherwise. And forked here, where there is no thread: a pool's
    threads may hold a lock that the child then waits for without end.

    Args:
        variants: As the request has them.
        jobs: Processes at once.
    """
    context = multiprocessing.get_context("fork")
    waiting = deque(variants)
    running: dict[Connection, tuple[Any, str]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            variant = waiting.popleft()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, variant))
            process.start()
            theirs.close()
            running[ours] = (process, variant["id"])
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)  # noqa: S101
            process, name = running.pop(ready)
            try:
                yield ready.recv()
            except EOFError:
                process.join()
                yield {"id": name, "failed": f"its process ended with code {process.exitcode}"}
            ready.close()
            process.join()


def main() -> None:
    """Lower what the request names."""
    request = json.load(sys.stdin)
    _prepare(request)
    for event in each(request["variants"], max(1, request["jobs"])):
        print(json.dumps(event, sort_keys=True), flush=True)


if __name__ == "__main__":
    main()
