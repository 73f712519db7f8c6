"""Whether a release's kernels are those that were proved: hashes of their sources.

Cheap, for ``lock --check``: no Triton, no compilation. The verdict on each variant is that of
``proofs``, by its PTX; a changed source says only that the proofs are to be looked at.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import msgspec

from sm75 import atomic
from sm75.aot.adapt import is_kernel
from sm75.aot.record import HELPERS
from sm75.errors import UsageError
from sm75.smem.cases import ATTENTION, ENCODER
from sm75.trees import open_tree

FILE = Path("recipes") / "vllm-sm75-kernels" / "sources.json"
MODULES = (ATTENTION, HELPERS, ENCODER)


def digests(tree: Path) -> dict[str, str]:
    """sha256 of each module's kernels, without comments and layout; "" where there are none.

    Args:
        tree: An unpacked tree or an sdist. The patches change no kernel.

    Raises:
        PatchError: It cannot be read.
    """
    places = {name: f"{name.replace('.', '/')}.py" for name in MODULES}
    found = open_tree(tree).load(places.values())
    made = {}
    for name, place in places.items():
        try:
            nodes = ast.parse(found[place] or b"").body
        except (SyntaxError, ValueError):
            nodes = []
        text = "\n".join(ast.unparse(node) for node in nodes if is_kernel(node))
        made[name] = hashlib.sha256(text.encode()).hexdigest() if text else ""
    return made


def load(root: Path) -> dict[str, str]:
    """The hashes of what was proved.

    Raises:
        UsageError: The file is damaged.
    """
    try:
        return msgspec.json.decode((root / FILE).read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"cannot read {FILE}", why=str(error), fix="restore the file") from error


def save(root: Path, tree: Path) -> None:
    """Record a tree's kernels as those that were proved."""
    text = msgspec.json.format(msgspec.json.encode(digests(tree), order="sorted"), indent=1)
    atomic.write_bytes(root / FILE, text + b"\n")


def note(root: Path, tree: Path) -> str:
    """What ``lock --check`` says of them.

    Raises:
        PatchError: The tree cannot be read.
        UsageError: The record of what was proved is damaged.
    """
    known, here = load(root), digests(tree)
    changed = [name for name in MODULES if known.get(name) != here[name]]
    if not changed:
        return "the attention kernels are those that were proved"
    return (
        f"the kernels of {', '.join(changed)} are not those that were proved; `kernels build` says "
        "how many variants stay with Triton (docs/turing-attention.md)"
    )
