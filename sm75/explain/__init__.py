"""What ``explain SUBJECT`` says: of a constraint by name, or of a log. Each kind is one explainer.

An explainer gets the subject as it was typed and returns ``None`` when it is not for it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from sm75 import constraints
from sm75.errors import UsageError
from sm75.explain.logs import of_log
from sm75.explain.subject import Explanation
from sm75.lockfile import known_releases, load_release

__all__ = ["EXPLAINERS", "Explainer", "Explanation", "explain", "names", "of_constraint"]


Explainer = Callable[[Path, str], Explanation | None]


def of_constraint(root: Path, subject: str) -> Explanation | None:
    """Explain a constraint by name.

    Args:
        root: The project's directory.
        subject: Perhaps such a name, in upper or lower case.

    Raises:
        LockError: ``lock/constraints.toml`` or a lock is malformed.
    """
    # As pip takes names: "PyTorch" is not known, "Torch" is.
    subject = subject.casefold()
    bounds = [bound for bound in constraints.load(root) if bound.name == subject]
    if not bounds:
        return None
    parts: list[tuple[str, str]] = []
    for bound in bounds:
        what = bound.spec or f"as {bound.declared} of vLLM's tree says"
        if bound.spec and bound.declared:
            what += f", and as {bound.declared} of vLLM's tree says"
        parts.append(("bound", what))
        parts.append(("holds for", f"vLLM {bound.vllm}" if bound.vllm else "every vLLM release"))
        parts.append(("why", bound.reason))
        parts.append(("outside it", bound.error.replace("{spec}", "")))
        parts += [("source", source) for source in bound.sources]
        if bound.unconfirmed:
            parts.append(("to note", bound.unconfirmed))
        parts.append(("checked by", bound.test))
    for release in known_releases(root):
        specs = [c.spec for c in load_release(root, release).constraints if c.name == subject]
        parts += [("in the lock", f"of vLLM {release}: {spec}") for spec in specs]
    return Explanation(subject=f"constraint {subject}", parts=tuple(parts))


EXPLAINERS: tuple[Explainer, ...] = (of_constraint, of_log)


def explain(root: Path, subject: str) -> Explanation:
    """Explain a subject by the first explainer that knows it.

    Args:
        root: The project's directory.
        subject: As it was typed.

    Raises:
        UsageError: None knows it, or it is a log that cannot be read.
    """
    for explainer in EXPLAINERS:
        if (found := explainer(root, subject)) is not None:
            return found
    known = names(root)
    near = difflib.get_close_matches(subject.casefold(), known, n=1)
    raise UsageError(
        f"nothing here explains '{subject}'",
        why="it is no file, and no constraint; constraints: " + ", ".join(known),
        fix=f"python3 orchestrator.py explain {near[0] if near else known[0]}",
    )


def names(root: Path) -> list[str]:
    """The constraints there are, in order."""
    return sorted({bound.name for bound in constraints.load(root)})
