"""Ending a session, whatever process groups it holds."""

from __future__ import annotations

import subprocess
import sys
import time

from sm75 import session

# A leader that does as ninja does: each child in a process group of its own, and one of them
# starts another. Then it says so and waits.
LEADER = """
import os, subprocess, sys, time
for _ in range(3):
    subprocess.Popen(["sh", "-c", "sleep 600; true"], process_group=0)
print("ready", flush=True)
time.sleep(600)
"""


def start() -> subprocess.Popen[str]:
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    assert leader.stdout.readline() == "ready\n"
    return leader


def test_every_group_of_the_session_ends() -> None:
    leader, other = start(), start()
    deadline = time.monotonic() + 10
    while len(session.members(leader.pid)) < 7 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(session.members(leader.pid)) == 7
    session.end(leader.pid)
    assert session.members(leader.pid) == []
    assert leader.wait(5) == -9
    assert len(session.members(other.pid)) == 7
    session.end(other.pid)
    other.wait(5)


def test_a_session_without_processes() -> None:
    leader = start()
    session.end(leader.pid)
    leader.wait(5)
    began = time.monotonic()
    session.end(leader.pid)
    assert time.monotonic() - began < 5
