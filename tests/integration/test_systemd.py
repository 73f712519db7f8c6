"""The units of docs/systemd, run by a real systemd with a server of the test's in vLLM's place."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit import servekit
from tests.unit.projectkit import ROOT
from tests.unit.test_serve_run import SERVER, port

SYSTEMD = Path("/lib/systemd/systemd")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not SYSTEMD.exists() or os.geteuid() != 0 or not shutil.which("unshare"),
        reason="it takes root, unshare and systemd",
    ),
]
# Well until told otherwise, ended by TERM as vLLM is when it handles none, and it says which
# signals came.
MINE = """
import os, pathlib, signal, time
HERE = pathlib.Path({here!r})
if (HERE / "dies").exists(): raise SystemExit(1)
def ended(number, _):
    with (HERE / "signals").open("a") as log: log.write(signal.Signals(number).name + " ")
    time.sleep(0.5)  # for a second one
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
class Sick:
    def __bool__(self):
        (HERE / "answered").touch()
        return (HERE / "sick").exists()
SICK = Sick()
"""


def prepare(here: Path) -> None:
    model = servekit.model(here / "model", servekit.LLAMA1)
    server = SERVER.replace("lambda *_: sys.exit(3)", "ended")
    assert server != SERVER
    prefix = servekit.prefix(
        here / "env", f"#!{sys.executable}\n{MINE.format(here=str(here))}{server}"
    )
    number = port()
    units = here / "home/.config/systemd/user"
    units.mkdir(parents=True)
    changes = {
        r"/usr/bin/python3 /opt/vllm-sm75": f"{sys.executable} {ROOT}",
        r"/opt/vllm": str(prefix), r"/srv/model": str(model), r"--port 8000": f"--port {number}",
        r"User=vllm\n": "", r"RestartSec=10": "RestartSec=1",
        r"--interval 60": f"--interval 0.2 --url http://127.0.0.1:{number}",
        r"systemctl ": "systemctl --user ", r"=\+/bin/sh": "=/bin/sh",
        r"nvidia-persistenced.service": "", r"WantedBy=multi-user.target": "",
    }  # fmt: skip
    for unit in (ROOT / "docs/systemd").glob("*.service"):
        text = unit.read_text()
        for old, new in changes.items():
            text = re.sub(old, new, text)
        (units / unit.name).write_text(text)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    here = tmp_path_factory.mktemp("systemd")
    prepare(here)
    inside = ROOT / "tests/integration/systemd_inside.py"
    clean = {k: v for k, v in os.environ.items()
             if not k.startswith(("VLLM_", "CUDA_VISIBLE", "TORCH_CUDA"))}  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, str(inside), str(here)],
        check=False, capture_output=True, text=True, env=clean, timeout=600,
    )  # fmt: skip
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip("mounts of its own are not allowed here")
    assert done.returncode == 0, done.stderr + (here / "manager.log").read_text()[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    if "none" in found:
        pytest.skip(f"no systemd can run here: {found['none']}")
    return found


def test_started_means_that_answers_are_right(seen: dict[str, Any]) -> None:
    assert seen["start"]["code"] == 0, seen["start"]
    assert seen["start"]["ActiveState"] == "active"
    assert seen["start"]["StatusText"] == "answers are right"
    assert seen["answered_first"]
    assert seen["health"]["ActiveState"] == "active"


def test_nonsense_is_restarted(seen: dict[str, Any]) -> None:
    assert seen["restarted"]
    assert seen["well_again"]


def test_stopping_the_watch_stops_nothing_else(seen: dict[str, Any]) -> None:
    assert seen["alone"] == ["inactive", True]


def test_stopping_is_no_failure_and_one_signal(seen: dict[str, Any]) -> None:
    assert seen["signals"] == "SIGTERM "
    assert seen["stop"]["ActiveState"] == "inactive"  # not failed
    assert seen["stopped_later"] == {"vllm": "inactive", "vllm-health": "inactive"}


def test_a_server_that_dies_is_not_waited_for(seen: dict[str, Any]) -> None:
    assert seen["dies"]["code"] != 0
    assert seen["dies"]["seconds"] < 60
    assert seen["dies"]["ExecMainStatus"] == "1"
    assert seen["dies"]["SubState"] == "auto-restart"


def test_what_cannot_work_is_not_tried_again(seen: dict[str, Any]) -> None:
    assert seen["refused"]["code"] != 0
    assert seen["refused"]["ExecMainStatus"] == "2"
    assert (seen["refused_later"]["ActiveState"], seen["refused_later"]["NRestarts"]) == (
        "failed", "0")  # fmt: skip
