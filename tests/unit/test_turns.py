"""Two runs at once: one waits, says so, and then does what is left to do."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest

from sm75 import build, lockcheck, lockupdate
from sm75.channel import publish, verify_channel
from sm75.errors import BusyError, DiskError
from sm75.progress import PlainReporter
from sm75.store import Store
from sm75.turns import one_at_a_time
from tests.unit import channelkit
from tests.unit.badserver import BadServer
from tests.unit.fetchkit import HASTY, index_of
from tests.unit.lockkit import EXTENSIONS, World
from tests.unit.projectkit import ROOT


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


class Second:
    """A run in a thread, what it says, how it ends."""

    def __init__(self, work: Callable[[Callable[[str], None]], object]) -> None:
        self.said: list[str] = []
        self.fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Callable[[Callable[[str], None]], object]) -> None:
        try:
            work(self.said.append)
        except BaseException as fault:
            self.fault = fault

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(30)
        assert not self.running
        assert self.fault is None


def test_a_free_lock_is_taken_without_a_word(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        with one_at_a_time(tmp_path / "a" / "b.lock", "another one", wait=9, say=said.append):
            pass
    assert said == []


def test_waiting_is_said_and_ends_with_the_other(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    done: list[int] = []

    def work(say: Callable[[str], None]) -> None:
        with one_at_a_time(path, "another one works here", wait=30, say=say):
            done.append(1)

    with filelock.FileLock(path):
        second = Second(work)
        until(lambda: bool(second.said))
        assert second.said == ["another one works here; waiting for it to end"]
        assert done == []
    second.join()
    assert done == [1]


@pytest.mark.parametrize("wait", [0, 0.1])
def test_the_wait_ends(tmp_path: Path, wait: float) -> None:
    path = tmp_path / "x.lock"
    said: list[str] = []
    with (
        filelock.FileLock(path),
        pytest.raises(BusyError, match="another one works here") as caught,
        one_at_a_time(path, "another one works here", wait=wait, say=said.append),
    ):
        pass
    assert caught.value.exit_code == 10
    assert str(path) in caught.value.why
    assert bool(said) == bool(wait)


def test_a_fault_in_the_block_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with pytest.raises(ValueError, match="x"), one_at_a_time(path, "y", wait=0):
        raise ValueError("x")
    with one_at_a_time(path, "y", wait=0):
        pass


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((DiskError, OSError)), one_at_a_time(tmp_path / "file/x", "y", wait=0):
        pass


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from sm75.turns import one_at_a_time
        with one_at_a_time(Path({str(tmp_path / "x.lock")!r}), "y", wait=0):
            print("held", flush=True)
            time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(BusyError), one_at_a_time(tmp_path / "x.lock", "y", wait=0):
            pass
        first.send_signal(signal.SIGKILL)
        first.wait()
    with one_at_a_time(tmp_path / "x.lock", "y", wait=0):
        pass


def test_a_second_publisher_says_that_it_waits(tmp_path: Path) -> None:
    channel = tmp_path / "c"
    package = channelkit.write(tmp_path / "made", "a")
    channel.mkdir()
    with filelock.FileLock(channel / ".lock"):
        second = Second(lambda say: publish([package], channel, say=say))
        until(lambda: bool(second.said))
        assert "publishing to" in second.said[0]
        assert not list(channel.glob("*/*.conda"))
    second.join()
    assert verify_channel(channel) == []
    assert len(list(channel.glob("*/*.conda"))) == 1


def test_a_second_build_says_that_it_waits(tmp_path: Path) -> None:
    settings = build.Settings(
        root=tmp_path, store=Store(tmp_path / "s"), channel=tmp_path / "c", rust="none"
    )
    out = io.StringIO()

    def work(_: Callable[[str], None]) -> None:
        with build.only_one(settings, PlainReporter(out), "build.lock"):
            out.write("turn\n")

    (tmp_path / ".sm75").mkdir()
    with filelock.FileLock(tmp_path / ".sm75" / "build.lock"):
        second = Second(work)
        until(lambda: "waiting" in out.getvalue())
        assert "turn" not in out.getvalue()
    second.join()
    assert out.getvalue().splitlines()[-1] == "turn"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(lockcheck, "EXTENSIONS", EXTENSIONS)
    with BadServer() as server:
        yield World(tmp_path, server)


def lock(world: World, out: io.StringIO, wait: float = 60) -> lockupdate.Outcome:
    return lockupdate.update(
        world.root,
        lockupdate.Request(vllm="0.33.0", with_closure=False),
        world.store,
        PlainReporter(out),
        index=index_of(world.server),
        options=HASTY,
        wait=wait,
    )


def test_a_second_lock_says_that_it_waits(world: World) -> None:
    out = io.StringIO()
    (world.root / ".sm75").mkdir()
    with filelock.FileLock(world.root / ".sm75" / "lock.lock"):
        second = Second(lambda _: lock(world, out))
        until(lambda: "another run is making a lock" in out.getvalue())
        time.sleep(0.2)
        assert not (world.root / "lock" / "0.33.0").exists()
        # One that only looks does not wait.
        assert world.lock("0.33.0", dry_run=True).changed
        with pytest.raises(BusyError):
            lock(world, io.StringIO(), wait=0)
    second.join()
    assert (world.root / "lock" / "0.33.0" / "release.toml").exists()


def test_leftovers_of_a_killed_lock_are_removed(world: World) -> None:
    left = world.root / "lock" / "0.33.0" / ".sm75-tmp-release.toml.x"
    left.parent.mkdir()
    left.write_text("half")
    world.lock("0.33.0")
    assert not left.exists()
    assert not list((world.root / "lock").rglob(".sm75-tmp-*"))
