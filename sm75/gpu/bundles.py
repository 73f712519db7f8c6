"""The bundle: one file that carries everything to the machine with the GPU.

A zip file that Python runs: the part of this project that is needed there, the modules of the
patched and the unpatched tree, PTX text, and ``bundle.json``, which says what each trial launches.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm75.errors import UsageError
from sm75.gpu.launcher import Prepared

SCHEMA = 1
CACHE_ERROR = 1e-6
"""How far a cache may be from what was written into it, beyond its own rounding."""
INDEX = "bundle.json"
KERNELS = "kernels"
# Sides whose trials may not be refused: what the package does.
OURS = ("patched", "ahead of time")
# What runs on the other machine; it imports nothing else of ours.
CODE = (
    "sm75/__init__.py", "sm75/errors.py",
    "sm75/gpu/__init__.py", "sm75/gpu/bundles.py", "sm75/gpu/driver.py", "sm75/gpu/launcher.py",
    "sm75/gpu/reference.py", "sm75/gpu/runner.py", "sm75/gpu/timing.py", "sm75/gpu/trials.py",
    "sm75/gpu/values.py", "sm75/gpu/ahead.py",
    "sm75/smem/__init__.py", "sm75/smem/cases.py", "sm75/smem/faketorch.py",
    "sm75/smem/faketriton.py", "sm75/smem/inputs.py", "sm75/smem/models.py",
    "sm75/smem/standins.py", "sm75/smem/models.toml",
)  # fmt: skip
_MAIN = "import sys\nfrom sm75.gpu.runner import main\nsys.exit(main())\n"
# The same bytes for the same content; zip cannot hold a moment before.
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An unpacked bundle.

    Attributes:
        about: What was prepared, and with what.
        plan: Launches (keys of variants), or the wrapper's refusal, by side and trial.
        variants: By key.
    """

    about: Mapping[str, Any]
    plan: Mapping[str, Mapping[str, list[str] | str]]
    variants: Mapping[str, Prepared]

    def launches(self, side: str, trial: str) -> list[Prepared] | str:
        """What a trial launches, in order, or why it is refused.

        Raises:
            UsageError: The bundle does not have the trial.
        """
        try:
            recorded = self.plan[side][trial]
        except KeyError:
            raise UsageError(
                f"the bundle has no trial {trial!r} for {side!r}",
                why="it was made by another version",
                fix="python3 orchestrator.py verify --gpu --bundle FILE",
            ) from None
        if isinstance(recorded, str):
            return recorded
        return [self.variants[key] for key in recorded]


def load(home: Path) -> Bundle:
    """Read an unpacked bundle.

    Raises:
        UsageError: It is none, or damaged, or of another version.
    """
    try:
        index = json.loads((home / INDEX).read_text(encoding="utf-8"))
        schema = index["schema"]
        if schema != SCHEMA:
            raise UsageError(
                f"the bundle is of schema {schema}, this program reads {SCHEMA}",
                fix="python3 orchestrator.py verify --gpu --bundle FILE",
            )
        variants = {
            key: Prepared(
                key=key, ptx=(home / "ptx" / f"{key}.ptx").read_bytes(),
                **(facts | {"aligned": frozenset(facts["aligned"])}),
            )
            for key, facts in index["variants"].items()
        }  # fmt: skip
        return Bundle(about=index["about"], plan=index["plan"], variants=variants)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "this is no bundle of verify --gpu, or a part of it is missing",
            why=f"{type(error).__name__}: {error}",
            fix="python3 orchestrator.py verify --gpu --bundle FILE",
        ) from error


def pack(
    root: Path,
    trees: Mapping[str, Path],
    about: Mapping[str, Any],
    plan: Mapping[str, Mapping[str, Sequence[str] | str]],
    variants: Iterable[Prepared],
    kernels: Mapping[str, bytes],
) -> bytes:
    """Make a bundle.

    Args:
        root: The project's directory.
        trees: Directories with vLLM's modules, by name.
        about: What was prepared.
        plan: As in ``Bundle``.
        variants: All that the plan names.
        kernels: Files of the package of kernels that were compiled ahead of time; empty: none.
    """
    index: dict[str, Any] = {"schema": SCHEMA, "about": about, "plan": plan, "variants": {}}
    files: dict[str, bytes] = {"__main__.py": _MAIN.encode()}
    for name in CODE:
        files[name] = (root / name).read_bytes()
    for name, tree in trees.items():
        for path in sorted(tree.rglob("*.py")):
            files[f"trees/{name}/{path.relative_to(tree).as_posix()}"] = path.read_bytes()
    files |= {f"{KERNELS}/{name}": content for name, content in kernels.items()}
    for one in variants:
        files[f"ptx/{one.key}.ptx"] = one.ptx
        index["variants"][one.key] = {
            "kernel": one.kernel, "entry": one.entry, "types": dict(one.types),
            "constants": dict(one.constants), "aligned": sorted(one.aligned),
            "shared": one.shared, "warps": one.warps, "registers": one.registers,
            "spills": one.spills, "parameters": dict(one.parameters),
        }  # fmt: skip
    files[INDEX] = json.dumps(index, indent=1).encode()
    out = io.BytesIO()
    out.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), files[name], zipfile.ZIP_DEFLATED)
    return out.getvalue()


def passed(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether everything that ran is right, and everything of the patched side ran."""
    if not any(result["side"] in OURS for result in results):
        return False
    return all(
        result.get("passed", False) or ("refused" in result and result["side"] not in OURS)
        for result in results
    )


def summary(report: Mapping[str, Any]) -> str:
    """One line: how many, the largest error, the verdict."""
    ran = [one for one in report["results"] if "refused" not in one]
    wrong = [
        one
        for one in report["results"]
        if not one.get("passed") and not ("refused" in one and one["side"] not in OURS)
    ]
    errors = [one["max_error"] for one in ran if one.get("max_error") is not None]
    kernels = {
        (launch["kernel"], json.dumps(launch["parameters"], sort_keys=True))
        for one in ran
        for launch in one.get("launches", ())
    }
    verdict = "all right" if report["passed"] else f"{len(wrong) or 'the whole is'} WRONG"
    return (
        f"gpu: {len(ran)} trials of {len(kernels)} kernel parameters on {report.get('gpu', '?')}: "
        f"largest error {max(errors, default=0.0):.1e}; {verdict}"
    )
