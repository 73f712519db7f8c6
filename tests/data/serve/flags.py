"""The flags of ``vllm serve`` that a release's engine has: the truth of test_serve_flags.py.

python3 flags.py SDIST-TREE > flags-RELEASE.txt
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def flags(source: str) -> list[str]:
    """The long flags that ``add_argument`` is given, of arg_utils.py's text."""
    return sorted({
        argument.value
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "add_argument"
        for argument in call.args
        if isinstance(argument, ast.Constant)
        and isinstance(argument.value, str)
        and argument.value.startswith("--")
    })  # fmt: skip


if __name__ == "__main__":
    print("\n".join(flags((Path(sys.argv[1]) / "vllm/engine/arg_utils.py").read_text())))
