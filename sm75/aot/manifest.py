"""The manifest of kernels that are compiled ahead of time: ``kernels.toml`` of their recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from sm75.errors import UsageError

FILE = Path("recipes") / "vllm-sm75-kernels" / "kernels.toml"


class Kernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel to compile.

    Attributes:
        name: The function.
        module: Where it is.
        chosen: Constants that a variant sets itself; they are no part of its key.
        floats: Parameters without annotation that are float32.
    """

    name: str
    module: str
    chosen: tuple[str, ...]
    floats: tuple[str, ...]


class Left(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel that stays with the JIT, and why."""

    name: str
    why: str


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Blocks of the attention kernel for a head size.

    Attributes:
        head: Padded head size.
        split: For decode with split KV.
        block_m: Query rows a block.
        tile: Keys a step.
        warps: A block.
        queries: Mean query tokens a request from which it holds.
        cache: "auto" (float16) or "int8".
    """

    head: int
    split: bool
    block_m: int
    tile: int
    warps: int
    queries: int = 0
    cache: Literal["auto", "int8"] = "auto"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    schema: int
    kernel: tuple[Kernel, ...]
    left: tuple[Left, ...]
    tuning: tuple[Tuning, ...]

    def named(self, name: str) -> Kernel | None:
        """The kernel of this name."""
        return next((one for one in self.kernel if one.name == name), None)


def load(root: Path) -> Manifest:
    """Read the manifest.

    Raises:
        UsageError: It is not of this schema, or has two rows for one thing.
    """
    path = root / FILE
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"cannot read {FILE}", why=str(error), fix="restore the file") from error
    if found.schema != 1:
        raise UsageError(f"{FILE} is of schema {found.schema}", fix="this program reads 1")
    rows = [(one.head, one.split, one.queries, one.cache) for one in found.tuning]
    if len(rows) != len(set(rows)):
        raise UsageError(f"{FILE} has two rows of tuning for one head, split, queries and cache")
    return found
