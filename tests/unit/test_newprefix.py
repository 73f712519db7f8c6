"""The place of a new environment: what cannot be one, and whose turn it is."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sm75 import newprefix
from sm75.errors import BusyError, DiskError, UsageError
from tests.unit.projectkit import ROOT


def below_a_file(here: Path) -> Path:
    (here / "file").write_text("x")
    return here / "file" / "env"


def a_file(here: Path) -> Path:
    (here / "file").write_text("x")
    return here / "file"


def dangling(here: Path) -> Path:
    (here / "link").symlink_to(here / "nowhere")
    return here / "link"


def loop(here: Path) -> Path:
    (here / "link").symlink_to(here / "link")
    return here / "link" / "env"


def in_use(here: Path) -> Path:
    (here / "used").mkdir()
    (here / "used" / "mine").write_text("x")
    return here / "used"


def by_a_link(here: Path) -> Path:
    (here / "way").symlink_to(here / "channel")
    return here / "way" / "env"


def quotes_behind_a_link(here: Path) -> Path:
    (here / "it's").mkdir()
    (here / "way").symlink_to(here / "it's")
    return here / "way" / "env"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (below_a_file, "file is a file"),
        (a_file, "is not a directory"),
        (dangling, "is a link that leads nowhere"),
        (loop, "ymlink|nowhere|symbolic links"),
        (in_use, "is not empty"),
        (lambda _: Path("/dev/null"), "is not a directory"),
        (lambda here: here / ("x" * 300), "it has 300 bytes"),
        (lambda here: here.joinpath(*["y" * 200] * 30), "name too long"),
        (lambda here: here / "channel", "is not empty|inside the channel"),
        (lambda here: here / "channel" / "env", "inside the channel"),
        (lambda here: here / "x" / ".." / "channel" / "env", "inside the channel"),
        (by_a_link, "inside the channel"),
        (lambda here: here / "two\nlines", "cannot be a prefix"),
        (lambda here: here / 'a"b', "cannot be a prefix"),
        (lambda here: here / "a'b", "cannot be a prefix"),
        (lambda here: here / "a\udcffb", "cannot be a prefix"),
        (quotes_behind_a_link, "cannot be a prefix"),
        (lambda here: here / "a\0b", "cannot be a prefix"),
        (lambda _: Path("~nobody-of-this-name/env"), "cannot be a prefix"),
    ],
)
def test_what_cannot_be_a_prefix(tmp_path: Path, make: Callable[[Path], Path], words: str) -> None:
    (tmp_path / "channel").mkdir()
    (tmp_path / "channel" / "SHA256SUMS").write_text("")
    prefix = make(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError) as caught:
        newprefix.resolve(prefix, [tmp_path / "channel"])
    assert re.search(f"(?i){words}", str(caught.value)), caught.value
    assert caught.value.fix
    assert sorted(tmp_path.iterdir()) == before


def test_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for prefix in (Path(), tmp_path):
        with pytest.raises(UsageError, match="is the current directory"):
            newprefix.resolve(prefix)


def test_a_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    with pytest.raises(UsageError, match="is a mount point") as caught:
        newprefix.resolve(tmp_path)
    assert str(tmp_path / "vllm") in caught.value.fix


def test_real_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert newprefix.resolve(Path("~/env")) == tmp_path / "env"
    assert newprefix.resolve(tmp_path / "no" / ".." / "env") == tmp_path / "env"
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert newprefix.resolve(tmp_path / "link") == tmp_path / "empty"
    assert newprefix.resolve(tmp_path / ("x" * 255)) == tmp_path / ("x" * 255)


def test_directories_that_cannot_be_made() -> None:
    with pytest.raises(DiskError, match="cannot write /proc/x/y"):  # noqa: SIM117
        with newprefix.claimed(newprefix.resolve(Path("/proc/x/y"))):
            pytest.fail("claimed")


def test_one_at_a_time(tmp_path: Path) -> None:
    prefix = tmp_path / "deep" / "env"
    with newprefix.claimed(prefix) as scratch:
        scratch.mkdir()
        with pytest.raises(BusyError, match="another run installs into"):  # noqa: SIM117
            with newprefix.claimed(prefix):
                pytest.fail("claimed")
        assert scratch.is_dir()
        with newprefix.claimed(tmp_path / "deep" / "other") as other:
            assert other != scratch
    assert list(tmp_path.iterdir()) == []
    with newprefix.claimed(prefix):
        pass


def test_directories_stay_with_the_prefix(tmp_path: Path) -> None:
    prefix = tmp_path / "deep" / "env"
    with newprefix.claimed(prefix) as scratch:
        scratch.mkdir()
        prefix.mkdir()
    assert [*prefix.parent.iterdir()] == [prefix]


KILLED = """\
import os, sys
from pathlib import Path
from sm75 import newprefix
with newprefix.claimed(Path(sys.argv[1])) as scratch:
    (scratch / "cache").mkdir(parents=True)
    (scratch / "cache" / "half").write_text("x" * 10000)
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    prefix = tmp_path / "env"
    subprocess.run([sys.executable, "-c", KILLED, str(prefix)], check=False, cwd=ROOT)
    assert len(list(tmp_path.iterdir())) == 2
    with newprefix.claimed(tmp_path / "other"):  # none of its business
        pass
    assert len(list(tmp_path.iterdir())) == 2
    with newprefix.claimed(prefix) as scratch:
        assert not scratch.exists()
    assert list(tmp_path.iterdir()) == []


def test_threads_that_go_on_writing(tmp_path: Path) -> None:
    """rattler's do, after a fault and after Ctrl-C."""

    def write(scratch: Path) -> None:
        for number in range(10):
            (scratch / f"d{number}").mkdir(parents=True, exist_ok=True)
            time.sleep(0.03)

    threads = []

    def fail() -> None:
        with newprefix.claimed(tmp_path / "env") as scratch:
            scratch.mkdir()
            threads.append(threading.Thread(target=write, args=(scratch,)))
            threads[0].start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    threads[0].join()
    assert list(tmp_path.iterdir()) == []


def test_remove_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    assert not newprefix.remove(tmp_path, patience=0.1)
    assert newprefix.remove(tmp_path / "none", quiet=0)


def test_lock_that_its_holder_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held, but no longer the file of that name: others would take the new one."""
    flock = fcntl.flock
    asked: list[int] = []

    def late(handle: int, how: int) -> None:
        if not asked:
            next(tmp_path.glob("*.lock")).unlink()
        asked.append(how)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with newprefix.claimed(tmp_path / "env") as scratch:
        assert scratch.with_name(f"{scratch.name}.lock").exists()
    assert len(asked) == 2
