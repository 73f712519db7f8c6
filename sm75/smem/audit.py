"""Audit a tree: record and compile in the audit's environment, cache, judge.

Figures are cached by what Triton itself compiles by: the kernel's source with everything it
calls, the specialised signature, constants, options, and Triton's version.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sm75 import atomic
from sm75.errors import BuildError
from sm75.progress import Reporter

CAPABILITY = (7, 5)
SHARED_LIMIT = 65_536
"""Bytes a block can have on 7.5 with opt-in: CUDA programming guide, technical specifications."""


SAVE_EVERY = 10
"""Compiled variants between two writes of the cache."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """What one compiled variant takes. Bytes; registers and spills are a thread's."""

    kernel: str
    parameters: dict[str, int | bool | str]
    shared: int = -1
    registers: int = -1
    spill_stores: int = -1
    spill_loads: int = -1
    mma: int = -1
    fma: int = -1
    seconds: float = 0.0
    failed: str = ""


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """One launch of a case: which kernel, and which variant of it."""

    case: str
    group: str
    kernel: str
    key: str


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """All launches of a tree. ``refused`` and ``failed`` map a case to the reason."""

    uses: tuple[Use, ...]
    variants: dict[str, Variant]
    refused: dict[str, str]
    failed: dict[str, str]
    compiled: int


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One finding against a rule; ``cases`` are where it is launched."""

    rule: str
    kernel: str
    what: str
    cases: tuple[str, ...]


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """A spill that is known and accepted.

    Attributes:
        kernel: The kernel's name.
        parameters: Launch parameters it holds for.
        most: Bytes of spill stores a thread up to which it is this one.
        why: The reason, with its evidence.
    """

    kernel: str
    parameters: dict[str, int | bool]
    most: int
    why: str


EXPLAINED: tuple[Explained, ...] = (
    Explained(
        kernel="kernel_unified_attention",
        parameters={"HEAD_SIZE_PADDED": 256, "BLOCK_M": 32},
        most=6144,
        why="more than 16 queries a KV head at head 256: no released model, upstream's warps",
    ),
    Explained(
        kernel="kernel_unified_attention",
        parameters={"HEAD_SIZE_PADDED": 256, "BLOCK_M": 16, "IS_3D": False},
        most=20,
        why="Gemma 3 4B with image ranges: five registers; ahead of time it has kernels of its own",
    ),
    Explained(
        kernel="kernel_unified_attention",
        parameters={"BLOCK_M": 64},
        most=10_240,
        why="more than 32 queries a KV head (no released model but Falcon): upstream's warps",
    ),
    Explained(
        kernel="kernel_unified_attention",
        parameters={"BLOCK_M": 128},
        most=10_240,
        why="more than 64 queries a KV head (Falcon-7B): upstream's warps",
    ),
    Explained(
        kernel="_attn_packed",
        parameters={},
        most=1024,
        why="the INT4 cache's kernel holds two K and two V tiles: upstream's warps, not measured",
    ),
    Explained(
        kernel="_hadamard_mma_kernel",
        parameters={},
        most=4096,
        why="upstream's one choice of blocks and warps; runs once a token written",
    ),
    Explained(
        kernel="_fwd_kernel",
        parameters={},
        most=6144,
        why="upstream's blocks of 64 for devices below 8.0, run once an image: not tuned here",
    ),
    Explained(
        kernel="fused_moe_kernel",
        parameters={},
        most=11_000,
        why="upstream's defaults; the only Gemma 4 with experts does not fit a T4G unquantised, "
        "and quantised it takes Marlin's kernels",
    ),
    Explained(kernel="_lora_shrink_kernel", parameters={}, most=6144, why="upstream's defaults"),
    Explained(kernel="_lora_expand_kernel", parameters={}, most=11_000, why="upstream's defaults"),
)

IMPOSSIBLE: tuple[tuple[str, str, str], ...] = (
    (
        "h512",
        "int4 cache",
        "it takes 98,304 bytes with the smallest tile; refused as the model is built",
    ),
)
"""Words of a case, and why our refusal of it is right."""


def run(
    python: Path,
    root: Path,
    tree: Path,
    cache: Path,
    reporter: Reporter,
    *,
    jobs: int | None = None,
    groups: Iterable[str] = (),
    prefix: str = "",
) -> Audit:
    """Record the launches of a tree's wrappers and compile what is not cached.

    Args:
        python: Of the audit's environment (``toolenv.ensure``).
        root: The project's directory.
        tree: A directory that holds the modules (``trees``).
        cache: File of figures by variant; written.
        reporter: Shows the compilation.
        jobs: Processes; default: as many as cores.
        groups: Groups of cases; default: all.
        prefix: What the names of cases begin with; default: anything.

    Raises:
        BuildError: The worker broke off.
        DiskError: The cache cannot be written.
    """
    known = load_cache(cache)
    request = {
        "tree": str(tree),
        "capability": list(CAPABILITY),
        "groups": list(groups),
        "prefix": prefix,
        "known": sorted(known),
        "jobs": jobs or os.cpu_count() or 1,
        "compile": True,
    }
    uses: list[Use] = []
    refused: dict[str, str] = {}
    failed: dict[str, str] = {}
    task, compiled = None, 0
    try:
        for event in work(python, root, request):
            kind = event.pop("event")
            if kind == "case":
                case, group = event["case"], event["group"]
                uses += [
                    Use(case=case, group=group, kernel=kernel, key=key)
                    for kernel, key in event["launches"]
                ]
                refused |= {case: event["refused"]} if "refused" in event else {}
                failed |= {case: event["failed"]} if "failed" in event else {}
            elif kind == "plan":
                task = reporter.task("kernels", event["todo"], "kernels")
            else:
                known[event.pop("key")] = msgspec.convert(event, Variant)
                compiled += 1
                # Often enough that a killed run loses seconds of work, not minutes.
                if compiled % SAVE_EVERY == 0:
                    save_cache(cache, known)
                if task is not None:
                    task.message(f"{event['kernel']} {event['parameters']}")
                    task.advance(1)
    finally:
        if compiled:
            save_cache(cache, known)
    if task is not None:
        task.done()
    used = {use.key for use in uses}
    return Audit(
        uses=tuple(uses),
        variants={key: variant for key, variant in known.items() if key in used},
        refused=refused,
        failed=failed,
        compiled=compiled,
    )


def work(python: Path, root: Path, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give ``sm75.smem.worker`` a request, and yield its events.

    Args:
        python: Of the audit's environment (``toolenv.ensure``).
        root: The project's directory.
        request: As the worker's module says.

    Raises:
        BuildError: The worker broke off.
    """
    # Settings of the user's own vLLM or Triton must not change what the wrappers choose.
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM", "TRITON", "PYTHON", "TORCH"))
    }
    clean |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            [str(python), "-P", "-m", "sm75.smem.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=clean, cwd=root,
        )  # fmt: skip
        try:
            # Both are pipes: said for the type checker.
            assert worker.stdin is not None  # noqa: S101
            assert worker.stdout is not None  # noqa: S101
            worker.stdin.write(json.dumps(request))
            worker.stdin.close()
            for line in worker.stdout:
                yield json.loads(line)
            if worker.wait():
                errors.seek(0)
                said = errors.read().strip().splitlines()
                raise BuildError(
                    "the work on the kernels broke off",
                    why=said[-1] if said else "no message",
                    fix="run it again; what was compiled is kept",
                )
        finally:
            worker.kill()
            worker.wait()


def load_cache(path: Path) -> dict[str, Variant]:
    """The figures known so far; an unreadable file is an empty one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Variant])
    except (OSError, msgspec.DecodeError):
        return {}


def save_cache(path: Path, known: dict[str, Variant]) -> None:
    """Write the figures, whole or not at all. Failures are not kept: they are tried again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {key: known[key] for key in sorted(known) if not known[key].failed}
    atomic.write_bytes(path, msgspec.json.encode(kept))


def explanation(variant: Variant) -> Explained | None:
    """Why this spill is accepted, if it is."""
    for entry in EXPLAINED:
        same = all(variant.parameters.get(k) == v for k, v in entry.parameters.items())
        if entry.kernel == variant.kernel and same and variant.spill_stores <= entry.most:
            return entry
    return None


def problems(audit: Audit) -> list[Problem]:
    """What is against the limits, one finding a variant."""
    where: dict[str, list[str]] = {}
    for use in audit.uses:
        where.setdefault(use.key, []).append(use.case)
    found = []
    for key, variant in audit.variants.items():
        rule = what = ""
        if variant.failed:
            rule, what = "compiles", variant.failed
        elif variant.shared > SHARED_LIMIT:
            rule = "shared memory"
            what = f"{variant.shared} bytes of shared memory, the limit is {SHARED_LIMIT}"
        elif variant.spill_stores > 0 and explanation(variant) is None:
            rule = "spills"
            what = f"{variant.spill_stores} bytes of registers spilled a thread, unexplained"
        if rule:
            cases = tuple(dict.fromkeys(where[key]))
            found.append(Problem(rule=rule, kernel=variant.kernel, what=what, cases=cases))
    for case, reason in audit.refused.items():
        if any(one in case and two in case for one, two, _ in IMPOSSIBLE):
            continue
        found.append(Problem(rule="refused", kernel="", what=reason, cases=(case,)))
    for case, reason in audit.failed.items():
        found.append(Problem(rule="audited", kernel="", what=reason, cases=(case,)))
    return sorted(found, key=lambda p: (p.rule, p.kernel, p.cases))
