"""The part of ``verify --gpu`` that runs where the GPU is: the main program of a bundle.

    python3 BUNDLE [--json FILE] [--only TEXT]... [--seed N] [--no-times]

Needs Python 3.11 or newer, torch and cuda.bindings; no network, no Triton, no vLLM. For each side
it runs the tree's own wrappers with random numbers, compares with ``reference``, and times what was
launched. Exit code 1: a result is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sm75.errors import Sm75Error, UsageError
from sm75.gpu import ahead, bundles, trials
from sm75.gpu.launcher import Launch, Launcher
from sm75.smem import faketriton, standins
from sm75.smem.cases import OVERLAY


@contextmanager
def pretended(torch: Any, capability: tuple[int, int]) -> Iterator[None]:
    """Let torch say the pretended capability, as the recorder's stand-in did."""
    real = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda *_: capability
    try:
        yield
    finally:
        torch.cuda.get_device_capability = real


def facts(launch: Launch) -> dict[str, Any]:
    """What a launch was."""
    prepared = launch.prepared
    return {
        "kernel": prepared.kernel,
        "parameters": dict(prepared.parameters),
        "grid": list(launch.grid),
        "shared": prepared.shared,
        "registers_sm75": prepared.registers,
        "spill_stores_sm75": prepared.spills,
        "registers_here": getattr(launch.function, "registers", -1),
        "local_here": getattr(launch.function, "local", -1),
    }


def run_side(
    side: str, home: Path, backend: Any, device: str, *, only: Sequence[str] = (), seed: int = 0,
    timed: bool = True,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Run the trials of one side, once a process: the tree's modules stay loaded.

    Args:
        side: One of ``trials.SIDES``.
        home: An unpacked bundle.
        backend: Launches (``driver.Driver``).
        device: Where tensors are.
        only: Parts of the names of trials to run; all without any.
        seed: Of the random numbers.
        timed: Whether to time the timed trials.

    Yields:
        A result a trial.
    """
    import torch

    from sm75.gpu.timing import Timer
    from sm75.gpu.values import Numbers, compare

    torch.backends.cuda.matmul.allow_tf32 = False
    bundle = bundles.load(home)
    every = trials.of_side(side)
    chosen = [one for one in every if not only or any(part in one.name for part in only)]
    kind = trials.SIDES[side]
    os.environ[ahead.SWITCH] = "ptx" if kind.ahead else "off"
    if kind.ahead:
        sys.path.insert(0, str(home / bundles.KERNELS))
    # The kernels' package wants to see all that it was made of, whatever is chosen.
    modules = {name for trial in every for name in trials.modules_of(trial)}
    standins.install(
        home / "trees" / kind.tree, [*modules, *OVERLAY], (7, 5),
        compiler=False, torch=torch,
    )  # fmt: skip
    trials.arrange(kind)
    loaded: dict[str, Any] = {}
    for trial in chosen:
        recorded = bundle.launches(side, trial.name)
        result: dict[str, Any] = {"side": side, "trial": trial.name, "timed": trial.timed}
        if isinstance(recorded, str):
            yield result | {"refused": recorded}
            continue
        limit = getattr(getattr(backend, "device", None), "shared_block", 1 << 30)
        if (most := max((one.shared for one in recorded), default=0)) > limit:
            yield result | {"refused": f"{most} bytes of shared memory, this device has {limit}"}
            continue
        launcher = Launcher(backend=backend, expected=recorded, loaded=loaded)
        faketriton.Kernel.sink = launcher
        own = ahead.Watch(launcher) if kind.ahead else None
        numbers = Numbers(trial, device, seed)
        with pretended(torch, (7, 5)):
            if trial.cache != "none":
                numbers.write()
            wrote = len(launcher.done)
            numbers.run()
        result |= compare(numbers)
        launches = launcher.done[wrote:]
        if own is not None:
            launches = own.launches(launches, backend)
            result["kernels"] = own.names()
            if trial.ahead and not own.found:
                result |= {"passed": False, "error": "the JIT would have compiled it"}
        result["launches"] = [facts(launch) for launch in launches]
        if launcher.place < len(recorded):
            result |= {"passed": False, "missing": len(recorded) - launcher.place}
        if timed and trial.timed and hasattr(backend, "blocks"):
            result |= Timer(launcher, backend).figures(launches)
        yield result
        del numbers, launches, launcher
        faketriton.Kernel.sink = None
        gc.collect()


def line(result: dict[str, Any]) -> str:
    """A result as a line of text."""
    head = f"{result['side']:16} {result['trial']:58}"
    if "refused" in result:
        return f"{head} not run: {result['refused'][:90]}"
    warps = "/".join(str(one["parameters"].get("num_warps", "")) for one in result["launches"][:1])
    shared = max(one["shared"] for one in result["launches"])
    error = result["max_error"]
    text = f"{head} {shared:6} B {warps:>2} warps  " + (
        "not a number" if error is None else f"max {error:.1e} mean {result['mean_error']:.1e}"
    )
    if "ms" in result:
        text += f"  {result['ms']:8.3f} ms, {result['ms_blocks_as_t4g']:8.3f} with a T4G's blocks"
    return text + ("" if result["passed"] else "  WRONG")


def main(arguments: Sequence[str] | None = None) -> int:
    """Unpack the bundle, run each side in a process of its own, and judge."""
    parser = argparse.ArgumentParser(prog="python3 BUNDLE", description=(__doc__ or "")[:100])
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT",
                        help="only trials whose name holds this, or another --only")  # fmt: skip
    parser.add_argument("--side", choices=sorted(trials.SIDES), action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-times", action="store_true", help="compare numbers only")
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    try:
        if given.home is not None:
            return _child(given)
        return _parent(given)
    except Sm75Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _child(given: argparse.Namespace) -> int:
    from sm75.gpu.driver import Driver

    driver = Driver()
    print(json.dumps({"environment": environment(driver.device)}), flush=True)
    for side in given.side:
        for result in run_side(
            side, given.home, driver, "cuda", only=given.only, seed=given.seed,
            timed=not given.no_times,
        ):  # fmt: skip
            print(json.dumps(result), flush=True)
    return 0


def environment(device: Any) -> dict[str, Any]:
    """Where this ran."""
    import importlib.metadata

    import torch

    return {
        "gpu": device.name,
        "capability": ".".join(map(str, device.capability)),
        "multiprocessors": device.multiprocessors,
        "driver": device.driver,
        "cuda": device.cuda,
        "torch": torch.__version__,
        "cuda_bindings": importlib.metadata.version("cuda-bindings"),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def surroundings(home: Path) -> dict[str, str]:
    """The environment of a side: settings of the user's own vLLM would change the launches."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM", "TRITON", "PYTHON"))
    }
    return kept | {"PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1"}


def _parent(given: argparse.Namespace) -> int:
    started = time.monotonic()
    source = Path(sys.argv[0]).resolve()
    results: list[dict[str, Any]] = []
    where: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="sm75-gpu-") as scratch:
        home = Path(scratch)
        if not zipfile.is_zipfile(source):
            raise UsageError(
                f"{source.name} is no bundle", why="this program runs out of one",
                fix="python3 orchestrator.py verify --gpu --bundle FILE",
            )  # fmt: skip
        with zipfile.ZipFile(source) as archive:
            archive.extractall(home)
        about = bundles.load(home).about
        for side in given.side or trials.SIDES:
            command = [sys.executable, "-m", "sm75.gpu.runner", "--home", str(home)]
            command += ["--side", side, "--seed", str(given.seed)]
            command += [word for part in given.only for word in ("--only", part)]
            command += ["--no-times"] if given.no_times else []
            child = subprocess.Popen(
                command, cwd=home, env=surroundings(home), stdout=subprocess.PIPE, text=True
            )
            for text in child.stdout or ():
                event = json.loads(text)
                if "environment" in event:
                    if not where:
                        print(", ".join(f"{k} {v}" for k, v in event["environment"].items()))
                    where = event["environment"]
                    continue
                results.append(event)
                print(line(event), flush=True)
            if code := child.wait():
                # What is known so far is written all the same.
                results.append({"side": side, "trial": "(this side broke off)", "passed": False,
                                "broke": code})  # fmt: skip
                if not where:
                    return code
    report = {
        "schema": 1,
        "kind": "sm_75 PTX, compiled by the driver of another GPU",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": given.seed,
        **about,
        **where,
        "seconds": round(time.monotonic() - started, 1),
        "passed": bundles.passed(results),
        "results": results,
    }
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(bundles.summary(report))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
