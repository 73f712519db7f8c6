"""``verify --gpu`` as a whole: make the bundle, run it here, read results, show them."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sm75 import atomic
from sm75.aot import files
from sm75.errors import CheckFailed, ToolchainError, UsageError
from sm75.gpu import bundles, judge, prepare
from sm75.lockfile import ReleaseLock, load_target
from sm75.progress import make_reporter
from sm75.store import Store

_LOG_WIDTH = 170
_ASK = "import torch; print(torch.cuda.is_available(), torch.__version__)"


def run_and_print(
    root: Path,
    lock: ReleaseLock,
    store: Store,
    package: Path | None,
    *,
    bundle: Path | None,
    result: Path | None,
    kernels: Path | None,
    as_json: bool,
) -> int:
    """Run the trials on this machine's GPU, or write the bundle, or show a result.

    Args:
        root: The project's directory.
        lock: The release.
        store: Where the pinned sdist is.
        package: A built ``.conda``; None: the sdist with the patches applied.
        bundle: Write the bundle here, and run nothing.
        kernels: The kernels that were compiled ahead of time, to try them as well: their package,
            or the directory of ``kernels build --files``.
        result: A result that a bundle wrote; show and judge it, and run nothing.
        as_json: Print JSON instead of tables.

    Returns:
        0 if all results are right, 1 if not.

    Raises:
        Sm75Error: It could not be done.
    """
    if result is not None:
        return _show(read_result(result), as_json=as_json)
    ahead = None if kernels is None else files.load(kernels)
    python = None if bundle is not None else find_python(root, lock)
    with make_reporter(quiet=as_json) as reporter:
        content = prepare.make(root, lock, store, package, ahead, reporter)
    if bundle is not None:
        atomic.write_bytes(bundle, content, mode=0o755)
        size = len(content) / 2**20
        print(
            f"gpu: {bundle} ({size:.1f} MiB). On a machine with an NVIDIA GPU, with the Python "
            f"that has torch:\n  python3 {bundle.name} --json result.json\nand here:\n"
            "  python3 orchestrator.py verify --gpu --result result.json"
        )
        return 0
    with tempfile.TemporaryDirectory(prefix="sm75-gpu-") as scratch:
        program, out = Path(scratch, "bundle.pyz"), Path(scratch, "result.json")
        program.write_bytes(content)
        output = subprocess.DEVNULL if as_json else None
        done = subprocess.run(
            [str(python), str(program), "--json", str(out)], check=False, stdout=output
        )
        if not out.exists():
            raise CheckFailed(
                "the trials broke off", why=f"{python} ended with code {done.returncode}",
                fix=f"write a bundle and run it: {_BUNDLE}",
            )  # fmt: skip
        return _show(read_result(out), as_json=as_json)


_BUNDLE = "python3 orchestrator.py verify --gpu --bundle sm75-gpu.pyz"


def find_python(root: Path, lock: ReleaseLock) -> Path:
    """A Python on this machine whose torch has a GPU.

    ``SM75_GPU_PYTHON``, the image's, ``python3``: the first that answers.

    Raises:
        ToolchainError: There is none.
    """
    tried = []
    given = os.environ.get("SM75_GPU_PYTHON")
    image = Path(load_target(root, lock.target).path) / "bin" / "python"
    for python in [given] if given else [str(image), "python3"]:
        try:
            done = subprocess.run(
                [python, "-c", _ASK], check=False, capture_output=True, text=True, timeout=120
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            tried.append(f"{python}: {getattr(error, 'strerror', None) or 'no answer'}")
            continue
        if done.stdout.startswith("True"):
            return Path(python)
        said = (done.stdout or done.stderr).strip().splitlines()
        answer = said[-1] if said else "no answer"
        tried.append(f"{python}: " + answer.replace("False", "no NVIDIA GPU, torch"))
    raise ToolchainError(
        "no Python here has a torch that finds an NVIDIA GPU",
        why="; ".join(tried),
        fix=f"name one in SM75_GPU_PYTHON, or take the trials to a machine with a GPU: {_BUNDLE}",
    )


def read_result(path: Path) -> dict[str, Any]:
    """Read what a bundle wrote, and judge it anew.

    Raises:
        UsageError: It is no such file.
    """
    try:
        report: dict[str, Any] = json.loads(path.read_bytes())
        judge.judge(report)
        bundles.summary(report)
        numbers(report)
        times(report)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", why=str(error.strerror)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is no result of verify --gpu", why=f"{type(error).__name__}: {error}",
            fix="python3 BUNDLE --json FILE writes one",
        ) from error  # fmt: skip
    return report


def _show(report: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(report, indent=2, sort_keys=True))
        return 0 if report["passed"] else 1
    console = Console()
    if not console.is_terminal:
        # A log or a pipe has no width of its own; eighty columns would break every name.
        console = Console(width=_LOG_WIDTH)
    console.print(numbers(report))
    if any("ms" in one for one in report["results"]):
        console.print(times(report))
    for one in report["results"]:
        if one["fault"]:
            console.print(
                f"wrong: {one['side']}, {one['trial']}: {one['fault']}", style="red",
                highlight=False, markup=False,
            )  # fmt: skip
    for fault in report["faults"]:
        console.print(f"wrong: {fault}", style="red", highlight=False, markup=False)
    console.print(bundles.summary(report), highlight=False, markup=False)
    return 0 if report["passed"] else 1


def _by_side(report: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for one in report["results"]:
        found.setdefault(one["trial"], {})[one["side"]] = one
    return found


def _most(one: Mapping[str, Any]) -> str:
    return str(max(launch["shared"] for launch in one["launches"])) if one.get("launches") else ""


def _warps(one: Mapping[str, Any]) -> str:
    # A split-KV trial's last launch is the reduction; attention comes before it.
    return "/".join(
        dict.fromkeys(
            str(launch["parameters"].get("num_warps", ""))
            for launch in one.get("launches", ())
            if launch["kernel"] != "reduce_segments"
        )
    )


def _error(one: Mapping[str, Any], name: str) -> str:
    if "refused" in one or name not in one:
        return "not run"
    value = one[name]
    text = "NaN" if value is None else f"{value:.1e}"
    return text if one.get("passed") else f"[red]{text}[/]"


def numbers(report: Mapping[str, Any]) -> Table:
    """A row a trial: bytes, warps and errors, patched beside unpatched."""
    title = (
        f"{report.get('subject', '')}: sm_75 PTX of Triton {report.get('triton', '')} on "
        f"{report.get('gpu', '?')}, driver {report.get('driver', '?')}"
    )
    out = Table(title=Text(title), header_style="bold", box=None, pad_edge=False)
    out.add_column("trial", no_wrap=True)
    for side in ("patched", "unpatched"):
        for name in ("shared B", "warps", "max error", "mean error"):
            out.add_column(f"{side}\n{name}", justify="right")
    out.add_column("allowed", justify="right")
    for trial, sides in _by_side(report).items():
        row = [trial]
        for side in ("patched", "unpatched"):
            one = sides.get(side, {"refused": ""})
            row += [_most(one), _warps(one), _error(one, "max_error"), _error(one, "mean_error")]
        allowed = next((one["tolerance"] for one in sides.values() if "tolerance" in one), None)
        out.add_row(*row, "" if allowed is None else f"{allowed:.0e}")
    return out


def times(report: Mapping[str, Any]) -> Table:
    """A row a timed trial and side."""
    title = "milliseconds: as launched, and with no more blocks a multiprocessor than on a T4G"
    out = Table(title=title, header_style="bold", box=None, pad_edge=False)
    for name in ("trial", "side"):
        out.add_column(name, no_wrap=True)
    for name in ("shared B", "warps", "spill B (sm_75)", "local B (here)", "ms", "ms as T4G",
                 "blocks here", "as T4G"):  # fmt: skip
        out.add_column(name, justify="right")
    for trial, sides in _by_side(report).items():
        for side, one in sides.items():
            if "ms" not in one or not one["launches"]:
                continue
            main = _attention(one["launches"])
            held = one["blocks"][one["launches"].index(main)]
            out.add_row(
                trial, side, str(main["shared"]), _warps(one), str(main["spill_stores_sm75"]),
                str(main["local_here"]), f"{one['ms']:.3f}", f"{one['ms_blocks_as_t4g']:.3f}",
                str(held["here"]), str(held["bound"]),
            )  # fmt: skip
    return out


def _attention(launches: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(launches, key=lambda launch: int(launch["shared"]))
