"""Compile the launches of a tree for the target, in the audit's own environment.

    python -m sm75.smem.worker < request.json    # events as JSON lines

Triton's own launcher specialises each launch (types, alignment, constants), so what is compiled
is what the device would be given. Needs Triton, and nothing else.

The request: ``tree``, ``capability``, ``groups`` and ``prefix`` of cases, ``known`` (keys not to
compile), ``jobs``, ``compile``. Optional: ``cases`` (a module with ``all_cases``) and its
``arguments``; ``omit`` (names of kernels to pass over); ``ptx``, to be given the PTX and what a
launch of it takes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sm75.smem import standins
from sm75.smem.faketriton import plain
from sm75.smem.record import modules

# What ptxas -v says of a kernel.
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
# Tensor-core and fused multiply-add instructions in PTX.
_MMA = re.compile(r"\b(?:wmma\.mma|mma\.sync)\b")
_FMA = re.compile(r"\bfma\.rn\.")
# Parameters of an entry, by the width of their type.
_PARAM = re.compile(r"\.param \.[a-z](\d+)")
# Launch parameters worth a column; the names of the audited kernels.
_SHOWN = re.compile(r"^(BLOCK|TILE|IS_3D|HEAD_SIZE|D$|num_warps|num_stages|PACKED|PADDED)")

_variants: dict[str, dict[str, Any]] = {}


class _Driver:
    """A device that is there for questions only."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def _emit(event: dict[str, Any]) -> None:
    sys.__stdout__.write(json.dumps(event, sort_keys=True) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def _specialise(kernel: Any, grid: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """Remember the variant a launch needs; returns its key."""
    from triton import __version__

    kwargs = {**kwargs, "debug": False, "instrumentation_mode": ""}
    _, _, target, backend, binder = kernel.device_caches[0]
    bound, specialisation, options = binder(*args, **kwargs)
    options, signature, constants, attributes = kernel._pack_args(
        backend, kwargs, bound, specialisation, options
    )
    identity = [
        __version__, str(target), kernel.cache_key, signature,
        sorted((str(path), str(value)) for path, value in constants.items()),
        sorted((str(path), str(value)) for path, value in attributes.items()),
        sorted((name, str(value)) for name, value in vars(options).items()
               if name != "extern_libs"),
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps(identity, default=str).encode()).hexdigest()
    names = list(bound)
    if made_up := [names[p[0]] for p, v in constants.items() if isinstance(v, standins.Unknown)]:
        raise TypeError(f"{kernel.__name__} is given stand-ins for {', '.join(made_up)}")
    shown = {
        names[path[0]]: value
        for path, value in constants.items()
        if len(path) == 1 and _SHOWN.match(names[path[0]]) and isinstance(value, int)
    }
    _variants.setdefault(
        key,
        {
            "kernel": kernel, "signature": signature, "constants": constants,
            "attributes": attributes, "options": options, "target": target,
            "parameters": shown | {"num_warps": options.num_warps},
        },
    )  # fmt: skip
    return key


def _hook(found: list[tuple[str, str]]) -> None:
    """Make launches of real Triton kernels a record."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append((self.__name__, _specialise(self, grid, args, kwargs)))

    def tune(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs):
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    JITFunction.run = run
    Autotuner.run = tune


def _record(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    groups, omitted = set(request["groups"]), set(request.get("omit", ()))
    prefix = request["prefix"]
    source = importlib.import_module(request.get("cases", "sm75.smem.cases"))
    cases = [
        case
        for case in source.all_cases(*request.get("arguments", ()))
        if (not groups or case.group in groups) and case.name.startswith(prefix)
    ]
    major, minor = request["capability"]
    standins.install(Path(request["tree"]), modules(cases), (major, minor), compiler=True)
    from triton.runtime import driver

    driver.set_active(_Driver(10 * major + minor))
    found: list[tuple[str, str]] = []
    _hook(found)
    for case in cases:
        found.clear()
        event: dict[str, Any] = {"event": "case", "case": case.name, "group": case.group}
        try:
            case.call()
        except (ValueError, AssertionError) as error:
            event["refused"] = str(error)
        except Exception as error:
            # A wrapper that the stand-ins do not carry is said, never passed over.
            event["failed"] = f"{type(error).__name__}: {error}"
        event["launches"] = [list(pair) for pair in found if pair[0] not in omitted]
        yield event


def _width(kind: str) -> str:
    return "64" if kind.startswith("*") else kind.lstrip("abcdefghijklmnopqrstuvwxyz")


def _launching(variant: dict[str, Any], metadata: Any, ptx: str) -> dict[str, Any]:
    """What it takes to launch a variant without Triton: its PTX, and which argument is what."""
    names = list(variant["signature"])
    kinds = [kind for kind in variant["signature"].values() if kind != "constexpr"]
    # Triton's own two stand behind the kernel's: global and profiling scratch.
    entry = ptx.partition(".entry")[2].partition(")")[0]
    if _PARAM.findall(entry) != [_width(kind) for kind in [*kinds, "*i8", "*i8"]]:
        raise TypeError(f"the entry's parameters are not {kinds} and two pointers")
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise TypeError("it takes scratch memory, which the launcher does not give")
    return {
        "ptx": ptx,
        "entry": metadata.name,
        "warps": metadata.num_warps,
        # Pairs: the order is that of the parameters, and events are sorted by name.
        "types": list(variant["signature"].items()),
        "constants": {names[path[0]]: plain(value) for path, value in variant["constants"].items()},
        "aligned": [
            names[path[0]]
            for path, value in variant["attributes"].items()
            if ["tt.divisibility", 16] in [list(pair) for pair in value]
        ],
    }


def _compile(key: str, ptx_too: bool) -> dict[str, Any]:
    """Compile one variant and measure it. Runs in a forked process."""
    from triton import knobs
    from triton.compiler import ASTSource
    from triton.compiler import compile as build

    variant = _variants[key]
    started = time.monotonic()
    log = io.StringIO()
    result: dict[str, Any] = {
        "event": "variant", "key": key, "kernel": variant["kernel"].__name__,
        "parameters": variant["parameters"],
    }  # fmt: skip
    knobs.compilation.always_compile = True
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.disable_line_info = True
    try:
        source = ASTSource(
            variant["kernel"], variant["signature"], variant["constants"], variant["attributes"]
        )
        with contextlib.redirect_stdout(log), tempfile.TemporaryDirectory() as cache:
            knobs.cache.dir = cache
            built = build(source, target=variant["target"], options=vars(variant["options"]))
            ptx = built.asm["ptx"]
        if ptx_too:
            result |= _launching(variant, built.metadata, ptx)
    except Exception as error:
        result["failed"] = f"{type(error).__name__}: {str(error).strip()[:400]}"
        return result
    spills = [tuple(map(int, found)) for found in _SPILL.findall(log.getvalue())]
    registers = [int(found) for found in _REGISTERS.findall(log.getvalue())]
    return result | {
        "shared": built.metadata.shared,
        "registers": max(registers, default=-1),
        "spill_stores": max((s[1] for s in spills), default=-1),
        "spill_loads": max((s[2] for s in spills), default=-1),
        "mma": len(_MMA.findall(ptx)),
        "fma": len(_FMA.findall(ptx)),
        "seconds": round(time.monotonic() - started, 2),
    }


def main() -> None:
    """Record, then compile what the request does not know yet."""
    request = json.load(sys.stdin)
    for event in _record(request):
        _emit(event)
    known, omitted = set(request["known"]), set(request.get("omit", ()))
    todo = [
        key
        for key, variant in _variants.items()
        if key not in known and variant["kernel"].__name__ not in omitted
    ]
    _emit({"event": "plan", "variants": len(_variants), "todo": len(todo)})
    if not request["compile"]:
        return
    compiler = functools.partial(_compile, ptx_too=request.get("ptx", False))
    context = multiprocessing.get_context("fork")
    with context.Pool(min(request["jobs"], len(todo) or 1), maxtasksperchild=20) as pool:
        for result in pool.imap_unordered(compiler, todo):
            _emit(result)


if __name__ == "__main__":
    main()
