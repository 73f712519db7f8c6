"""What a launch costs the host: vllm.sm75.kernels beside Triton's own launcher, in one run.

python3 -m benchmarks.kernel_launch KERNELS TREE [--json FILE]

KERNELS is the directory that holds ``vllm_sm75_kernels`` (``kernels build --files``), TREE a
directory with the patched ``vllm/``; our own modules are those of this checkout. With torch, Triton
and any newer GPU both sides are timed: the same call of decode attention, the same arguments. The
kernel is small enough to end before the next launch, so that no queue fills. Without a GPU our
side alone is timed, over a stand-in for the driver that does nothing (it needs a C compiler).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAUNCHES, BATCHES = 1000, 9


def measure(call: Callable[[], object], settle: Callable[[], object]) -> float:
    """Microseconds a call: the median over batches, with nothing waited for inside one."""
    found = []
    for batch in range(BATCHES + 1):
        settle()
        started = time.perf_counter_ns()
        for _ in range(LAUNCHES):
            call()
        taken = (time.perf_counter_ns() - started) / LAUNCHES / 1000
        if batch:  # the first warms up
            found.append(taken)
    settle()
    return statistics.median(found)


def captured(torch: Any, device: str, ours: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The launch of attention that vLLM's wrapper makes for one token of Gemma 4."""
    from sm75.gpu import trials

    trial = trials.Trial(
        layer=trials._FULL, batch=trials.Batch(name="one", queries=(1,), keys=(16,))
    )
    made = trials.make(trial, torch, device)
    if device == "cuda" and hasattr(made.raw, "zero_"):
        for tensor in (made.raw, made.q, made.table):
            tensor.zero_()
        made.lengths.fill_(16)
        made.starts.copy_(torch.tensor([0, 1], device=device))
    found: list[tuple[Any, Any, dict[str, Any]]] = []

    class Site:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda **arguments: found.append((self.kernel, grid, arguments))

    own, ours.kernels = ours.kernels, lambda: Site
    trials.attend(made)
    ours.kernels = own
    return found[0]


def both(tree: Path, kernels: Path) -> dict[str, Any]:
    """Time on this machine's GPU, or our side alone without one."""
    sys.path.insert(0, str(kernels))
    from sm75.aot.record import MODULES
    from sm75.smem import standins
    from sm75.smem.cases import AHEAD, OURS

    try:
        real: Any = importlib.import_module("torch")
        gpu = real.cuda.get_device_name() if real.cuda.is_available() else ""
    except ImportError:
        real, gpu = None, ""
    os.environ["SM75_KERNELS"] = "ptx"
    standins.install(
        tree, MODULES, (7, 5), compiler=bool(gpu), torch=real if gpu else None
    )  # fmt: skip
    ours: Any = importlib.import_module(OURS)
    if gpu:
        torch, settle = real, real.cuda.synchronize
        asked = torch.cuda.get_device_capability
        torch.cuda.get_device_capability = lambda *_: (7, 5)
    else:
        torch, settle = importlib.import_module("torch"), lambda: None
        torch.cuda.current_device = lambda: 0
        torch._C._cuda_getCurrentRawStream = lambda _: 0
        _stand_in()
    ahead: Any = importlib.import_module(AHEAD)
    kernel, grid, arguments = captured(torch, "cuda", ours)
    if (
        ahead.launcher() is None
        or ahead.launcher().package.find(kernel.__name__, arguments) is None
    ):
        raise SystemExit("the package has no variant for this launch: another TREE or KERNELS")
    made: dict[str, Any] = {
        "gpu": gpu, "launches": LAUNCHES, "batches": BATCHES, "python": sys.version.split()[0],
        "kernel": kernel.__name__,
    }  # fmt: skip
    made["ours_us"] = measure(lambda: ahead.session()(kernel)[grid](**arguments), settle)
    made["ours_with_the_question_us"] = measure(
        lambda: ours.kernels()(kernel)[grid](**arguments), settle
    )
    if gpu:
        made["torch"], made["triton"] = (
            real.__version__,
            importlib.import_module("triton").__version__,
        )
        torch.cuda.get_device_capability = asked  # Triton compiles for the GPU that is here
        made["triton_us"] = measure(lambda: kernel[grid](**arguments), settle)
        made["ratio"] = made["ours_us"] / made["triton_us"]
    return made


def _stand_in() -> None:
    from tests.unit.standinlaunch import StandIn

    library = StandIn(Path(tempfile.mkdtemp(prefix="sm75-standin-")))
    library.forget(remember=False)
    load = ctypes.CDLL
    ctypes.CDLL = lambda name: load(str(library.path) if "libcuda" in name else name)  # type: ignore[misc, assignment]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kernels", type=Path)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sm75-launch-") as scratch:
        tree = Path(scratch, "tree")
        shutil.copytree(given.tree / "vllm", tree / "vllm")
        overlay = ROOT / "patches" / "0.33.0" / "overlay" / "vllm"
        shutil.copytree(overlay, tree / "vllm", dirs_exist_ok=True)
        found = both(tree, given.kernels.absolute())
    text = json.dumps(found, indent=1, sort_keys=True)
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
