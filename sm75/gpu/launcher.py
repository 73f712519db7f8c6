"""Launches that a wrapper makes, carried out with the sm_75 PTX that was prepared for them.

The wrapper runs with real tensors, and where it launches a Triton kernel it comes here: grid and
arguments are its own. What was compiled ahead of time must be what this launch needs, constant by
constant and type by type; otherwise it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sm75.errors import CheckFailed
from sm75.smem.faketriton import plain

# Triton's names of element types.
_ELEMENTS = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
    "int8": "i8", "uint8": "u8", "int16": "i16", "int32": "i32", "int64": "i64", "bool": "i1",
}  # fmt: skip


class Backend(Protocol):
    """What is asked of ``driver.Driver``; tests have another."""

    def load(self, ptx: bytes, entry: str) -> Any:
        """Compile for the device."""

    def reserve(self, function: Any, shared: int) -> None:
        """Allow so many bytes of dynamic shared memory."""

    def launch(
        self, function: Any, grid: Sequence[int], threads: int, shared: int,
        values: Sequence[tuple[str, Any]],
    ) -> None:  # fmt: skip
        """Launch."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A variant that was compiled ahead of time.

    Attributes:
        key: Names it.
        kernel: The kernel's name.
        entry: Its name in the PTX.
        ptx: The text.
        types: Triton's type of each parameter, in order; "constexpr" is compiled in.
        constants: Values of those.
        aligned: Parameters that are multiples of 16.
        shared: Bytes of shared memory.
        warps: A block.
        registers: A thread's, by ptxas for sm_75.
        spills: Bytes of spill stores a thread, likewise.
        parameters: For people.
    """

    key: str
    kernel: str
    entry: str
    ptx: bytes
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: frozenset[str]
    shared: int
    warps: int
    registers: int
    spills: int
    parameters: Mapping[str, Any]


@dataclass(kw_only=True)
class Launch:
    """A launch as it was carried out. ``keep`` holds the tensors whose addresses it has."""

    prepared: Prepared
    function: Any
    grid: tuple[int, ...]
    values: list[tuple[str, Any]]
    keep: list[Any]

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.prepared.warps


@dataclass(kw_only=True)
class Launcher:
    """Takes the launches of one trial in the order in which they were recorded."""

    backend: Backend
    expected: Sequence[Prepared]
    loaded: dict[str, Any]
    done: list[Launch] = field(default_factory=list)
    passed: int = 0

    def skip(self, kernel: str) -> None:
        """Pass over launches up to one of this kernel, which something else carries out.

        Nothing is passed over where the kernel was not recorded.
        """
        names = [one.kernel for one in self.expected[self.place :]]
        if kernel in names:
            self.passed += names.index(kernel) + 1

    @property
    def place(self) -> int:
        """Of the next launch among those recorded."""
        return len(self.done) + self.passed

    def __call__(self, kernel: Any, grid: Any, arguments: dict[str, Any]) -> None:
        """``faketriton.Kernel.sink``."""
        place = self.place
        if place == len(self.expected):
            raise CheckFailed(
                f"{kernel.__name__} is launched, which was not recorded",
                why=f"the trial was prepared with {place} launches",
                fix="make the bundle anew: python3 orchestrator.py verify --gpu --bundle FILE",
            )
        prepared = self.expected[place]
        values, keep = bind(prepared, kernel.__name__, arguments)
        if prepared.key not in self.loaded:
            function = self.backend.load(prepared.ptx, prepared.entry)
            self.backend.reserve(function, prepared.shared)
            self.loaded[prepared.key] = function
        launch = Launch(
            prepared=prepared, function=self.loaded[prepared.key], grid=tuple(grid),
            values=values, keep=keep,
        )  # fmt: skip
        self.done.append(launch)
        self.repeat(launch)

    def repeat(self, launch: Launch, shared: int | None = None) -> None:
        """Launch again, with more shared memory where it is given."""
        self.backend.launch(
            launch.function, launch.grid, launch.threads,
            launch.prepared.shared if shared is None else shared, launch.values,
        )  # fmt: skip


def bind(
    prepared: Prepared, kernel: str, arguments: Mapping[str, Any]
) -> tuple[list[tuple[str, Any]], list[Any]]:
    """The values to launch a prepared variant with.

    Returns:
        Type and value of each parameter of the PTX's entry, and the tensors among them.

    Raises:
        CheckFailed: The variant was compiled for another launch.
    """
    if kernel != prepared.kernel:
        raise _other(prepared, f"{kernel} is launched")
    if arguments.get("num_warps", prepared.warps) != prepared.warps:
        raise _other(prepared, f"{arguments['num_warps']} warps, compiled for {prepared.warps}")
    values: list[tuple[str, Any]] = []
    keep = []
    for name, kind in prepared.types.items():
        given = arguments[name]
        if kind == "constexpr":
            if plain(given) != prepared.constants[name]:
                raise _other(prepared, f"{name} is {given}, compiled {prepared.constants[name]}")
            continue
        number = given.data_ptr() if hasattr(given, "data_ptr") else given
        if kind.startswith("*"):
            element = _ELEMENTS.get(str(getattr(given, "dtype", "")).removeprefix("torch."))
            if element != kind[1:]:
                raise _other(prepared, f"{name} is of type {element}, compiled for {kind}")
            keep.append(given)
        if name in prepared.aligned and number % 16:
            raise _other(prepared, f"{name} is no multiple of 16")
        values.append((kind, number))
    # Two more parameters of Triton's own: global and profiling scratch, which none of these has.
    values += [("*i8", 0), ("*i8", 0)]
    return values, keep


def _other(prepared: Prepared, what: str) -> CheckFailed:
    return CheckFailed(
        f"{prepared.kernel} was prepared for another launch: {what}",
        why="the wrapper chose otherwise with real tensors than with the recorder's",
        fix="make the bundle anew; if it stays, report it",
    )
