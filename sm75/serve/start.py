"""The command ``serve``: look, plan, start, and say when it is ready."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm75.doctor import facts
from sm75.health import check
from sm75.health.client import Server
from sm75.serve import place
from sm75.serve import run as running
from sm75.serve.flags import Given
from sm75.serve.host import look
from sm75.serve.notify import READY, notify
from sm75.serve.plan import make
from sm75.serve.planned import Plan


def plan(
    model: str, arguments: Sequence[str], *, prefix: Path | None, environment: Mapping[str, str],
    dry_run: bool = False,
) -> Plan:  # fmt: skip
    """Plan a start on this machine.

    Args:
        model: As the user names it.
        arguments: The user's own flags.
        prefix: The environment; nothing: the active one.
        environment: Variables.
        dry_run: It is not started; no environment need be there.

    Raises:
        UsageError: Something that is named is not there, or cannot work.
        CheckFailed: The model does not fit, or is damaged.
    """
    program = place.program(prefix, environment, needed=not dry_run)
    gpus = facts.list_gpus()
    planned = make(
        program, model, place.model(model, environment), Given(tuple(arguments)),
        environment=environment, host=look(),
        card_mib=min(gpu.memory_mib for gpu in gpus) if gpus else 0,
    )  # fmt: skip
    place.address(planned.given)
    return planned


def run(
    planned: Plan,
    *,
    environment: Mapping[str, str],
    patience: float | None = None,
) -> int:
    """Start the server and stay until it ends.

    Args:
        planned: The plan.
        environment: Variables.
        patience: Seconds to wait for right answers; nothing: they are not asked for. Where systemd
            started us (Type=notify), it is told that we are ready when they are right, or at once.

    Returns:
        Its exit code, or 128 + n when signal n killed it.

    Raises:
        BusyError: Something has its port.
        UsageError: It cannot be started.
    """
    given = planned.given
    place.must_be_free(given)
    program = Path(planned.command[0])
    over = threading.Event()
    if patience is not None:
        key = given.value("--api-key") or environment.get("VLLM_API_KEY", "")
        watcher = Server(place.address(given), api_key=key)
        notify(environment, "STATUS=starting; READY when its answers are right")
        threading.Thread(
            target=_watch, args=(watcher, patience, over, environment), daemon=True
        ).start()
    else:
        notify(environment, READY)
    try:
        code, tail, passed = running.serve(
            planned.command, running.environment_of(program, environment)
        )
    finally:
        over.set()
    if code and not passed:
        _say("\n".join(running.explain(code, tail)))
    return code


def _watch(
    server: Server, patience: float, over: threading.Event, environment: Mapping[str, str]
) -> None:
    """Say when the server answers, and whether rightly. It goes on either way."""

    def clock() -> float:
        return float("inf") if over.is_set() else time.monotonic()

    def sleep(seconds: float) -> None:
        over.wait(seconds)

    found = check.wait(lambda: check.check(server), patience, clock=clock, sleep=sleep)
    if over.is_set():
        return
    if found.well:
        notify(environment, READY, "STATUS=answers are right")
        _say(f"serve: ready: answers are right ({server.url})")
    else:
        notify(environment, "STATUS=NOT ready: see the log")
        _say("\n".join(["serve: NOT ready:", *found.lines()]))


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
