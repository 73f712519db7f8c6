"""Which launches the wrappers of a tree make on a device of some capability.

    python -m sm75.smem.record TREE 7.5 [--compiler]    # launches as JSON lines

Without ``--compiler`` no Triton is needed, and each launch is printed as the wrapper gave it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm75.smem import faketriton, standins
from sm75.smem.cases import OVERLAY, Case, all_cases
from sm75.smem.faketorch import Tensor
from sm75.smem.faketriton import plain


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: the kernel's name, the grid, and all arguments by name."""

    case: str
    group: str
    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """The same in JSON's types; tensors by type, shape and strides."""
        return {
            "case": self.case,
            "group": self.group,
            "kernel": self.kernel,
            "grid": list(self.grid),
            "arguments": {name: _plain(value) for name, value in self.arguments.items()},
        }


def _plain(value: Any) -> Any:
    return repr(value) if isinstance(value, Tensor) else plain(value)


def modules(cases: Iterable[Case]) -> list[str]:
    """The tree's modules that cases take, and our own beside them."""
    names = {name for case in cases for name in case.modules}
    return [*sorted(names), *OVERLAY]


def record(
    tree: Path, capability: tuple[int, int], cases: Callable[[], Iterable[Case]] = all_cases
) -> Iterator[Launch | tuple[str, str]]:
    """Run the wrappers among stand-ins (once a process) and yield what they launch.

    A case whose wrapper refuses yields the case and the reason instead.
    """
    wanted = list(cases())
    standins.install(tree, modules(wanted), capability, compiler=False)
    for case in wanted:
        found: list[Launch] = []

        def sink(
            kernel: Any, grid: Any, arguments: dict[str, Any], case: Case = case,
            found: list[Launch] = found,
        ) -> None:  # fmt: skip
            found.append(
                Launch(case=case.name, group=case.group, kernel=kernel.__name__,
                       grid=tuple(grid), arguments=arguments)
            )  # fmt: skip

        faketriton.Kernel.sink = sink
        try:
            case.call()
        except (ValueError, AssertionError) as error:
            yield case.name, str(error)
        yield from found


def main() -> None:
    """Print the launches of a tree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path)
    parser.add_argument("capability")
    parser.add_argument("--group", default="")
    given = parser.parse_args()
    major, _, minor = given.capability.partition(".")

    def chosen() -> list[Case]:
        return [case for case in all_cases() if given.group in ("", case.group)]

    for launch in record(given.tree, (int(major), int(minor)), chosen):
        if isinstance(launch, Launch):
            print(json.dumps(launch.plain(), sort_keys=True))
        else:
            print(json.dumps({"case": launch[0], "refused": launch[1]}))


if __name__ == "__main__":
    main()
