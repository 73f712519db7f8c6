"""A Triton that records launches, for tests of launch parameters without the compiler."""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


class Kernel:
    """Stands for a ``@triton.jit`` function; a launch is handed to ``sink``."""

    sink: Callable[[Kernel, Any, dict[str, Any]], None] | None = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.signature = inspect.signature(function)
        self.arg_names = list(self.signature.parameters)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            own = {name: value for name, value in kwargs.items() if name in self.arg_names}
            options = {name: value for name, value in kwargs.items() if name not in own}
            bound = self.signature.bind(*args, **own)
            bound.apply_defaults()
            place = grid(bound.arguments) if callable(grid) else grid
            if Kernel.sink is not None:
                Kernel.sink(self, place, {**bound.arguments, **options})

        return launch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a kernel runs on a device")


class Config:
    """``triton.Config``."""

    def __init__(self, kwargs: dict[str, Any], **options: Any) -> None:
        self.kwargs = kwargs
        self.options = options


def jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _wrap(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def cdiv(one: int, two: int) -> int:
    return -(-one // two)


def plain(value: Any) -> Any:
    """A constant of a launch in JSON's types."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return int(value)  # an enumeration's member
    # A mock's number differs from run to run.
    return re.sub(r" id='\d+'", "", str(value))


def make(
    hollow: Callable[[str], types.ModuleType], names: Sequence[str], *, register: bool
) -> types.ModuleType:
    """A stand-in for ``triton``.

    Args:
        hollow: Makes a module with every attribute, for ``triton.language`` and the rest.
        names: Submodules to make.
        register: Put them into ``sys.modules``, for modules that import Triton themselves.
    """
    triton = hollow("triton")
    triton.__dict__.update(
        jit=jit, autotune=_wrap, heuristics=_wrap, Config=Config, cdiv=cdiv,
        next_power_of_2=next_power_of_2, __path__=[], __version__="0",
    )  # fmt: skip
    made = {"triton": triton}
    for name in names:
        made[name] = hollow(name)
        parent, _, last = name.rpartition(".")
        setattr(made[parent], last, made[name])
    if register:
        sys.modules.update(made)
    return triton
