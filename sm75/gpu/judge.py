"""The verdict on a result of ``verify --gpu``, from its numbers and from what must be in it.

A result file comes from another machine. Neither its own verdict nor its own tolerances count, and
a part of the trials is no whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sm75.gpu import bundles, trials
from sm75.smem.audit import SHARED_LIMIT
from sm75.words import counted

TARGET = "sm_75"


def judge(report: dict[str, Any]) -> list[str]:
    """Judge a result anew.

    Args:
        report: As a bundle wrote it; ``passed`` of each trial and of the whole, and ``tolerance``,
            are set to what is found here.

    Returns:
        What is wrong with the whole; faults of single trials are told by their ``fault``.

    Raises:
        KeyError, TypeError, ValueError: It is no result.
    """
    faults = list(_header(report))
    results: Sequence[dict[str, Any]] = report["results"]
    own = {trial.name for trial in trials.ahead_trials()}
    known = {trial.name: trial for trial in (*trials.trials(), *trials.ahead_trials())}
    for one in results:
        trial = known.get(one["trial"])
        if trial is not None:
            one["tolerance"] = trials.tolerance(trial)
        one["fault"] = _fault(one, one.get("tolerance", 0.0))
        if trials.SIDES[one["side"]].ahead and one["trial"] in own and not one.get("kernels"):
            one["fault"] = one["fault"] or "no kernel that was compiled ahead of time was launched"
        one["passed"] = not one["fault"] and "refused" not in one
    faults += _completeness(results, ahead=bool(report.get("kernels")))
    report["passed"] = not faults and bundles.passed(results)
    report["faults"] = faults
    return faults


def _header(report: Mapping[str, Any]) -> Iterator[str]:
    if report["schema"] != bundles.SCHEMA:
        yield f"it is of schema {report['schema']!r}, not {bundles.SCHEMA}"
    if report.get("target") != TARGET:
        yield f"its kernels are for {report.get('target')!r}, not {TARGET}"
    for name in ("gpu", "driver", "triton", "vllm", "date"):
        value = report.get(name)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            yield f"it does not say its {name}"


def _completeness(results: Sequence[Mapping[str, Any]], *, ahead: bool) -> Iterator[str]:
    wanted = {
        (side, trial.name)
        for side, kind in trials.SIDES.items()
        if ahead or not kind.ahead
        for trial in trials.of_side(side)
    }
    found = Counter((one["side"], one["trial"]) for one in results)
    missing, unknown = sorted(wanted - found.keys()), sorted(found.keys() - wanted)
    twice = sorted(pair for pair, count in found.items() if count > 1)
    for pairs, said in (
        (missing, "are missing"), (unknown, "are none of this version's"), (twice, "stand twice"),
    ):  # fmt: skip
        if pairs:
            yield f"{counted(len(pairs), 'trial')} {said}, the first: {pairs[0][0]}, {pairs[0][1]}"


def _fault(one: Mapping[str, Any], allowed: float) -> str:
    if "broke" in one:
        return f"ended with code {one['broke']}"
    if "refused" in one:
        return str(one["refused"]) if one["side"] in bundles.OURS else ""
    if one.get("missing"):
        return f"{one['missing']} launches that were prepared were not made"
    launches = one["launches"]
    if not launches:
        return "nothing was launched"
    largest, mean, cache = one["max_error"], one["mean_error"], one["cache_error"]
    if not all(_finite(value) for value in (largest, mean, cache)):
        return "the result holds what is not a number"
    if cache > bundles.CACHE_ERROR:
        return f"the cache is off by {cache:.1e}"
    if largest > allowed:
        return f"off by {largest:.1e}, {allowed:.0e} is allowed"
    if mean > largest:
        return "its mean error is above its largest"
    shared = max(int(launch["shared"]) for launch in launches)
    if trials.SIDES[one["side"]].tree == "patched" and shared > SHARED_LIMIT:
        return f"{shared} bytes of shared memory, a block has {SHARED_LIMIT} on {TARGET}"
    return ""


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
