"""Fixtures of the unit tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sm75.store import Store
from tests.unit.badserver import BadServer
from tests.unit.commandkit import Runner
from tests.unit.fetchkit import CONTENT, Case, offer, sdist


@pytest.fixture
def server() -> Iterator[BadServer]:
    """A package index that misbehaves on demand."""
    with BadServer() as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


@pytest.fixture
def case(server: BadServer) -> Case:
    """A file of 3 MB on the server."""
    artifact = sdist(CONTENT)
    return Case(artifact, offer(server, artifact, CONTENT))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Runner]:
    """The command line; it sets the process's signal handlers, which are put back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Runner(monkeypatch, capsys)
    for number, handler in handlers.items():
        signal.signal(number, handler)
