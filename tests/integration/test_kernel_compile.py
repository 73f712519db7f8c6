"""Kernels compiled here, from the pinned sdist by the pinned Triton, are those that were proved."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

from sm75.aot import lower, manifest, package, proofs, tools
from sm75.cli.options import open_store
from sm75.lockfile import load_release
from sm75.progress import make_reporter

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton 3.2 has x86-64 wheels only")
def test_what_is_compiled_here_is_what_was_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4 E2B's attention: each PTX has the sha256 of one that ran on a GPU, and was right."""
    lock = load_release(ROOT)
    store = open_store(None)
    found = tools.ensure(ROOT, lock, store)
    recorded = lower.launches

    def e2b(*arguments: Any) -> list[dict[str, Any]]:
        kept = [
            one for one in recorded(*arguments)
            if one["call"].startswith("Gemma 4 E2B") and ", auto, " in one["call"]
        ]  # fmt: skip
        assert {one["kernel"] for one in kept} == {"kernel_unified_attention", "reduce_segments"}
        return kept

    monkeypatch.setattr(lower, "launches", e2b)
    with package.patched(ROOT, lock, store) as tree, make_reporter(quiet=True) as reporter:
        made = lower.compile_all(
            ROOT, tree, manifest.load(ROOT), found, tmp_path / "kept", reporter
        )
    attention = [one for one in made if one.wanted.kernel == "kernel_unified_attention"]
    assert {one.wanted.constants["HEAD_SIZE"] for one in attention} == {256, 512}
    assert all(one.mma >= 16 for one in attention)
    assert max(one.shared for one in made) <= lower.SHARED_LIMIT
    known = proofs.load(ROOT)
    unknown = [
        (one.wanted.kernel, dict(one.wanted.launch))
        for one in attention
        if proofs.digest(one.ptx) not in known
    ]
    assert unknown == []
