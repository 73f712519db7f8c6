"""What is compiled for the launches that were recorded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sm75.aot.manifest import Manifest, Tuning

ATTENTION, REDUCTION = "kernel_unified_attention", "reduce_segments"
# Rows of tl.dot: no fewer (https://triton-lang.org, triton.language.dot).
LEAST_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One variant to compile.

    Attributes:
        kernel: The function.
        module: Where it is.
        constants: All that are compiled in, those that the variant chooses among them.
        names: Of the constants that are part of its key, in the signature's order.
        tensors: Element types of what may be a tensor; None where it is None.
        parameters: Name and Triton's type of each that is passed.
        aligned: Of these, which must be multiples of 16.
        launch: Of the constants, those that the variant chose.
        warps: A block.
        queries: Mean query tokens a request from which it is the better one.
    """

    kernel: str
    module: str
    constants: Mapping[str, Any]
    names: tuple[str, ...]
    tensors: Mapping[str, str | None]
    parameters: tuple[tuple[str, str], ...]
    aligned: tuple[str, ...]
    launch: Mapping[str, int]
    warps: int
    queries: int = 0

    def smaller(self) -> Wanted | None:
        """The same with half the tile; None where there is none."""
        tile = self.launch.get("TILE_SIZE", 0) // 2
        if tile < LEAST_ROWS:
            return None
        return dataclasses.replace(
            self,
            constants={**self.constants, "TILE_SIZE": tile},
            launch={**self.launch, "TILE_SIZE": tile},
        )

    @property
    def identity(self) -> str:
        """Names the variant: sha256 over everything that it is compiled from but the sources."""
        facts = [self.kernel, self.module, sorted(self.constants.items()), list(self.parameters),
                 list(self.aligned), sorted(self.tensors.items()), self.warps]  # fmt: skip
        return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()

    @property
    def order(self) -> tuple[str, int, str]:
        """Sorts variants."""
        return self.kernel, self.queries, self.identity

    def request(self) -> dict[str, Any]:
        """For ``worker``."""
        absent = {name: None for name, kind in self.tensors.items() if kind is None}
        return {
            "id": self.identity, "module": self.module, "kernel": self.kernel,
            "parameters": list(self.parameters), "constants": dict(self.constants) | absent,
            "aligned": list(self.aligned), "warps": self.warps,
        }  # fmt: skip


def plan(launches: Iterable[Mapping[str, Any]], manifest: Manifest) -> list[Wanted]:
    """The variants for launches, each once, in an order that hangs on nothing else.

    Args:
        launches: As ``record`` prints them.
        manifest: What is compiled, and with which blocks.
    """
    found: dict[tuple[str, int], Wanted] = {}
    for launch in launches:
        for one in _variants(launch, manifest):
            found.setdefault((one.identity, one.queries), one)
    return sorted(found.values(), key=lambda one: one.order)


def _variants(launch: Mapping[str, Any], manifest: Manifest) -> Iterator[Wanted]:
    about = manifest.named(launch["kernel"])
    if about is None:
        return
    constants = launch["constants"]
    rows: Iterable[tuple[dict[str, int], int, int]]
    if about.name == ATTENTION:
        rows = list(_tuned(constants, manifest)) or [
            ({name: constants[name] for name in about.chosen}, launch["num_warps"], 0)
        ]
    elif about.name == REDUCTION:
        rows = [({"TILE_SIZE": tile}, launch["num_warps"], 0)
                for tile in _tiles(constants, manifest)]  # fmt: skip
    else:
        rows = [({}, launch["num_warps"], 0)]
    for chosen, warps, queries in rows:
        yield Wanted(
            kernel=about.name, module=about.module, constants=constants | chosen,
            names=tuple(name for name in constants if name not in about.chosen),
            tensors=launch["tensors"],
            parameters=tuple((name, kind) for name, kind in launch["parameters"]),
            aligned=tuple(launch["aligned"]),
            launch={name: chosen[name] for name in about.chosen if name in chosen},
            warps=warps, queries=queries,
        )  # fmt: skip


def _tuned(
    constants: Mapping[str, Any], manifest: Manifest
) -> Iterator[tuple[dict[str, int], int, int]]:
    group = constants["num_queries_per_kv"]
    cache = "int8" if constants["KV_QUANT_MODE"] else "auto"
    for row in _rows(constants["HEAD_SIZE_PADDED"], constants["IS_3D"], manifest):
        if row.cache != cache:
            continue
        rows = max(row.block_m, LEAST_ROWS)
        while rows < group:
            rows *= 2
        chosen = {"BLOCK_M": rows, "BLOCK_Q": rows // group, "TILE_SIZE": row.tile}
        yield chosen, row.warps, row.queries


def _rows(head: int, split: bool, manifest: Manifest) -> list[Tuning]:
    return [row for row in manifest.tuning if row.head == head and row.split == split]


def _tiles(constants: Mapping[str, Any], manifest: Manifest) -> list[int]:
    # The reduction is told the tile that attention took: the tuned one, or the JIT's.
    # Halved where a block does not fit.
    found = {constants["TILE_SIZE"]}
    for row in _rows(constants["HEAD_SIZE_PADDED"], True, manifest):
        tile = row.tile
        while tile >= LEAST_ROWS:
            found.add(tile)
            tile //= 2
    return sorted(found)
