"""The units of docs/systemd under a real systemd: run by test_systemd.py, in mounts of its own.

    unshare --mount PYTHON systemd_inside.py DIRECTORY

A manager as a user's, for one that is PID 1 cannot be had in a container. DIRECTORY has ``units``,
and files by which the server is told what to do. Prints what was seen, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(sys.argv[1])
RUN = Path("/run/manager")
# Seconds for what takes one.
PATIENCE = 90.0


def control(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemctl", "--user", *arguments], check=False, capture_output=True,
                          text=True, timeout=PATIENCE)  # fmt: skip


def state(unit: str) -> dict[str, str]:
    names = "ActiveState,SubState,Result,NRestarts,MainPID,StatusText,ExecMainStatus"
    text = control("show", unit, f"--property={names}").stdout
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.2)
    return met


def scenarios() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    control("enable", "vllm-health.service")
    done = control("start", "vllm.service")
    seen["start"] = {"code": done.returncode, "said": done.stderr, **state("vllm")}
    seen["answered_first"] = (HERE / "answered").exists()
    seen["health"] = state("vllm-health")
    first = state("vllm")["MainPID"]
    (HERE / "sick").touch()
    seen["restarted"] = until(lambda: state("vllm")["MainPID"] not in (first, "0"))
    (HERE / "sick").unlink()
    seen["well_again"] = until(
        lambda: {state(unit)["ActiveState"] for unit in ("vllm", "vllm-health")} == {"active"}
    )
    before = state("vllm")["MainPID"]
    control("stop", "vllm-health.service")
    time.sleep(3.0)  # longer than RestartSec
    seen["alone"] = state("vllm-health")["ActiveState"], state("vllm")["MainPID"] == before
    control("start", "vllm-health.service")
    (HERE / "signals").unlink(missing_ok=True)
    control("stop", "vllm.service")
    seen["stop"] = state("vllm")
    seen["signals"] = (HERE / "signals").read_text()
    time.sleep(3.0)  # longer than RestartSec
    seen["stopped_later"] = {unit: state(unit)["ActiveState"] for unit in ("vllm", "vllm-health")}
    (HERE / "dies").touch()
    began = time.monotonic()
    done = control("start", "vllm.service")
    seen["dies"] = {"code": done.returncode, "seconds": time.monotonic() - began, **state("vllm")}
    control("stop", "vllm.service")
    control("reset-failed", "vllm.service")
    unit = HERE / "home/.config/systemd/user/vllm.service"
    unit.write_text(unit.read_text().replace(" -- ", " -- --dtype bfloat16 "))
    control("daemon-reload")
    done = control("start", "vllm.service")
    seen["refused"] = {"code": done.returncode, **state("vllm")}
    time.sleep(3.0)  # longer than RestartSec
    seen["refused_later"] = state("vllm")
    return seen


def main() -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    Path("/run/systemd/system").mkdir(parents=True)  # that systemd runs here
    RUN.mkdir(mode=0o700)
    os.environ.update(XDG_RUNTIME_DIR=str(RUN), HOME=str(HERE / "home"))
    for name in ("DBUS_SESSION_BUS_ADDRESS", "XDG_CONFIG_HOME", "NOTIFY_SOCKET"):
        os.environ.pop(name, None)
    with (HERE / "manager.log").open("wb") as log:
        manager = subprocess.Popen(
            ["/lib/systemd/systemd", "--user", "--log-target=console"], stdout=log, stderr=log
        )
        try:
            if not until(lambda: (RUN / "systemd/private").exists() or manager.poll() is not None):
                raise SystemExit("the manager does not come up")
            if manager.poll() is not None:
                print(json.dumps({"none": (HERE / "manager.log").read_text()[-500:]}))
                return
            until(lambda: control("is-system-running").stdout.strip() in ("running", "degraded"))
            print(json.dumps(scenarios()))
        finally:
            control("stop", "vllm.service", "vllm-health.service")
            manager.terminate()
            manager.wait(timeout=PATIENCE)


if __name__ == "__main__":
    main()
