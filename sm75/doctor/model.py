"""Whether a model can be served here, by ``serve``'s own sum and looks at its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sm75.doctor.rules import Line
from sm75.errors import CheckFailed, UsageError
from sm75.serve import place, start
from sm75.words import counted

# Variables that say where a model is, or what serve may do with it; the others have lines of
# their own.
_READ = ("HF_", "XDG_", "VLLM_ALLOW_")


def lines(name: str, environment: Mapping[str, str]) -> Iterator[Line]:
    """What ``serve`` would say of a model.

    Args:
        name: A directory, or a hub's id whose files are in Hugging Face's cache.
        environment: Variables.

    Raises:
        UsageError: There is no such model.
    """
    read = {key: value for key, value in environment.items() if key.startswith(_READ)}
    place.model(name, read)  # that it is not there is a mistake of the command line
    try:
        plan = start.plan(name, (), prefix=None, environment=read, dry_run=True)
    except (CheckFailed, UsageError) as error:
        why = error.why.partition("\n")[0]
        yield Line(name="model", status="fail", says=f"{error.what}: {why}" if why else error.what,
                   fix=error.fix)  # fmt: skip
        return
    weights, sums = plan.weights, plan.sums()
    card, on_card = (
        next(row.mib for row in plan.budget.rows if row.what == what)
        for what in ("card", "- weights")
    )
    files = counted(len(weights.files), "file")
    yield Line(
        name="weights", status="ok",
        says=f"{weights.disk_bytes / 2**30:.1f} GiB in {files}; on the card {on_card:,.0f} MiB of "
        f"{card:,.0f}",
    )  # fmt: skip
    fits = (
        f"requests of {plan.length:,} tokens, {sums['requests_of_full_length']:.2f} at once"
        if sums else f"how many tokens fit is not told here: {plan.shape.unknown}"
    )  # fmt: skip
    yield Line(name="model", status="ok", says=f"fits by serve's sum: {fits}")
    for note in plan.host:
        yield Line(name="RAM for it", status=note.status, says=note.says, fix=note.fix)
    for warning in plan.warnings:
        yield Line(name="model", status="warn", says=warning,
                   fix=f"python3 orchestrator.py serve {name} --dry-run")  # fmt: skip
