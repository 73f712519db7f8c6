"""Launches of the kernels that were compiled ahead of time, by the package's own launcher."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from typing import Any

from sm75.gpu.launcher import Launch, Launcher, Prepared
from sm75.smem.cases import AHEAD

SWITCH = "SM75_KERNELS"
"""As in ``vllm.sm75.kernels``."""


class Watch:
    """Sees what the package's launcher launches, in place of the launches that were recorded.

    Args:
        launcher: Of the launches that go to the JIT.
    """

    def __init__(self, launcher: Launcher) -> None:
        kernels = importlib.import_module(AHEAD)
        self.own: Any = kernels.launcher()
        if self.own is None:
            raise RuntimeError("the package of kernels is not used: see the log above")
        self.found: list[tuple[Any, Sequence[int], Sequence[Any]]] = []
        run = type(self.own).run

        def watched(variant: Any, grid: Sequence[int], values: Sequence[Any]) -> None:
            launcher.skip(variant.fact["kernel"])
            self.found.append((variant, tuple(grid), tuple(values)))
            run(self.own, variant, grid, values)

        self.own.run = watched

    def names(self) -> list[str]:
        """sha256 of the PTX of each launch."""
        return [
            hashlib.sha256(self.own.package.code(variant.fact, "ptx")).hexdigest()
            for variant, _, _ in self.found
        ]

    def launches(self, others: Sequence[Launch], backend: Any) -> list[Launch]:
        """What was launched here, and the others, as launches that can be timed."""
        made = []
        for variant, grid, values in self.found:
            fact = variant.fact
            if not hasattr(variant, "here"):
                variant.here = backend.load(self.own.package.code(fact, "ptx"), fact["entry"])
                backend.reserve(variant.here, variant.shared)
            kinds = [kind for _, kind in fact["parameters"]] + ["*i8"] * fact["extra"]
            prepared = Prepared(
                key=fact["cubin"][2], kernel=fact["kernel"], entry=fact["entry"], ptx=b"",
                types=dict(fact["parameters"]), constants={}, aligned=frozenset(fact["aligned"]),
                shared=variant.shared, warps=variant.warps, registers=fact["registers"],
                spills=fact["spills"],
                parameters=fact["launch"] | {"num_warps": variant.warps, "mma": fact["mma"]},
            )  # fmt: skip
            pairs = list(zip(kinds, (*values, *variant.extra), strict=True))
            made.append(
                Launch(prepared=prepared, function=variant.here, grid=tuple(grid), values=pairs,
                       keep=[])
            )  # fmt: skip
        return [*made, *others]
