"""The part of ``verify --gpu`` that needs no GPU: record, compile, pack.

Launches are recorded and compiled as in the audit of shared memory, by the same worker in the same
environment; here the PTX is kept.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm75 import atomic
from sm75.aot import manifest
from sm75.aot.files import MODULE, Files
from sm75.errors import CheckFailed
from sm75.gpu import bundles, trials
from sm75.gpu.launcher import Prepared
from sm75.lockfile import ReleaseLock
from sm75.progress import Reporter
from sm75.smem import audit, toolenv
from sm75.smem import trees as sources
from sm75.smem.cases import OVERLAY
from sm75.smem.standins import ALWAYS_REAL
from sm75.store import Store


def make(
    root: Path,
    lock: ReleaseLock,
    store: Store,
    package: Path | None,
    kernels: Files | None,
    reporter: Reporter,
) -> bytes:
    """Make the bundle of a package, or of the patched sources, beside the unpatched ones.

    Args:
        root: The project's directory.
        lock: The release.
        store: Where the pinned sdist is.
        package: A built ``.conda`` or a directory; None: the sdist with the patches applied.
        kernels: Those that were compiled ahead of time; None: none, and their
            side is left out.
        reporter: Shows the compilation.

    Raises:
        FetchError: The sdist is not in the store.
        ToolchainError: The audit's environment cannot be made.
        BuildError: The worker broke off.
        CheckFailed: A variant does not compile, or a wrapper is not carried.
    """
    python = toolenv.ensure(root)
    triton = toolenv.pinned_triton(root)
    with tempfile.TemporaryDirectory(prefix="sm75-gpu-") as scratch:
        trees = {name: Path(scratch, name) for name in ("patched", "unpatched")}
        sdist = store.get(lock.artifact("vllm-sdist"))
        sources.from_sdist(sdist, trees["unpatched"], series=None)
        if package is None:
            series = sources.python_series(root / "patches" / lock.vllm)
            sources.from_sdist(sdist, trees["patched"], series=series)
        else:
            sources.from_package(package, trees["patched"])
        cache = Cache(root / ".sm75" / "gpu" / f"triton-{triton}")
        plan: dict[str, Mapping[str, list[str] | str]] = {}
        for side, kind in trials.SIDES.items():
            if kind.ahead and kernels is None:
                continue
            omit = [one.name for one in manifest.load(root).kernel] if kind.ahead else []
            recorded = _record(python, root, trees[kind.tree], side, omit, cache, reporter)
            plan[side] = {**(plan["patched"] if kind.ahead else {}), **recorded}
        keys = {key for side in plan.values() for one in side.values()
                if not isinstance(one, str) for key in one}  # fmt: skip
        for tree in trees.values():
            _trim(tree)
        about = {
            "vllm": lock.vllm,
            "subject": package.name if package else f"vllm {lock.vllm} with patches/{lock.vllm}",
            "triton": triton,
            "target": "sm_75",
            "kernels": len(kernels.index.variants) if kernels else 0,
        }
        variants = (cache.get(key) for key in sorted(keys))
        ahead = {"__init__.py": b"", **kernels.named()} if kernels else {}
        named = {f"{MODULE}/{name}": content for name, content in ahead.items()}
        return bundles.pack(root, trees, about, plan, variants, named)


def _trim(tree: Path) -> None:
    # Only what the trials take; the audit's other modules would triple the size.
    names = {name for trial in trials.trials() for name in trials.modules_of(trial)}
    names |= {*OVERLAY, *ALWAYS_REAL}
    keep = {name.replace(".", "/") for name in names}
    for path in tree.rglob("*.py"):
        stem = path.relative_to(tree).as_posix().removesuffix(".py").removesuffix("/__init__")
        if stem not in keep:
            path.unlink()


@dataclasses.dataclass(frozen=True)
class Cache:
    """Compiled variants on the disk, a file each."""

    home: Path

    def known(self) -> list[str]:
        """Keys that need not be compiled."""
        return sorted(path.stem for path in self.home.glob("*.json"))

    def put(self, event: Mapping[str, Any]) -> None:
        """Keep what the worker compiled."""
        self.home.mkdir(parents=True, exist_ok=True)
        kept = {name: event[name] for name in (*_KEPT, "ptx")} | {"types": dict(event["types"])}
        atomic.write_bytes(self.home / f"{event['key']}.json", json.dumps(kept).encode())

    def get(self, key: str) -> Prepared:
        """A variant."""
        facts = json.loads((self.home / f"{key}.json").read_bytes())
        return Prepared(
            key=key, aligned=frozenset(facts.pop("aligned")), ptx=facts.pop("ptx").encode(),
            spills=facts.pop("spill_stores"), **facts,
        )  # fmt: skip


_KEPT = ("kernel", "entry", "types", "constants", "aligned", "shared", "warps", "registers",
         "spill_stores", "parameters")  # fmt: skip


def _record(
    python: Path, root: Path, tree: Path, side: str, omit: list[str], cache: Cache,
    reporter: Reporter,
) -> dict[str, list[str] | str]:  # fmt: skip
    request = {
        "tree": str(tree), "capability": list(audit.CAPABILITY), "groups": [], "prefix": "",
        "cases": "sm75.gpu.trials", "arguments": [side], "ptx": True, "omit": omit,
        "known": cache.known(), "jobs": os.cpu_count() or 1, "compile": True,
    }  # fmt: skip
    plan: dict[str, list[str] | str] = {}
    faults: list[str] = []
    task = None
    for event in audit.work(python, root, request):
        kind = event["event"]
        if kind == "case":
            launches = [key for _, key in event["launches"]]
            plan[event["case"]] = event.get("refused", launches)
            faults += [f"{event['case']}: {event['failed']}"] if "failed" in event else []
        elif kind == "plan":
            task = reporter.task(f"PTX, {side}", event["todo"], "kernels")
        else:
            if "failed" in event:
                faults.append(f"{event['kernel']} {event['parameters']}: {event['failed']}")
            else:
                cache.put(event)
            if task is not None:
                task.advance(1)
    if task is not None:
        task.done()
    if faults:
        raise CheckFailed(
            f"{len(faults)} launches of {side} cannot be prepared",
            why="; ".join(faults[:3]),
            fix="python3 orchestrator.py verify --smem shows what the audit says of them",
        )
    return plan
