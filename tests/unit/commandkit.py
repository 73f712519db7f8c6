"""The command line, run in the test's own process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from sm75.cli import box, building, channels, locking, options, patching, reporting


def take_for_project(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Have the command line take a directory for the project that it is of."""
    for module in (box, building, channels, locking, options, patching, reporting):
        if hasattr(module, "ROOT"):
            monkeypatch.setattr(module, "ROOT", root)


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Runner:
    """Runs the command line in this process, as ``orchestrator.py`` does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *arguments: str | Path) -> Ended:
        self.monkeypatch.setattr(sys, "argv", ["orchestrator.py", *map(str, arguments)])
        self.capsys.readouterr()
        try:
            code = orchestrator.main()
        except SystemExit as end:
            code = int(str(end.code or 0))
        out, err = self.capsys.readouterr()
        return Ended(code, out, err)
