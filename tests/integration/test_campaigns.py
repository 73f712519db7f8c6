"""A little of each campaign of docs/reliability.md, so that the scripts keep working."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.campaigns import disk, kill, pairs
from tests.campaigns.places import Place, places


@pytest.fixture(scope="module", params=kill.JOBS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with places([request.param]) as (made,):
        yield made


def test_killed(place: Place) -> None:
    assert sum(kill.by_time(place, 2, seed=7).values()) == 2


def test_twice_at_once(place: Place) -> None:
    assert sum(pairs.pairs(place, 1).values()) == 1


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_full_disk(place: Place, share: float) -> None:
    """From one of the process's own file-making steps on."""
    step = max(1, int(place.steps * share))
    with place.fresh() as where:
        done = place.run(where, "--full-at", str(step))
        what = f"full from step {step} of {place.steps} on"
        assert disk.judge(place, where, done, what) in ("enough", "exit code 9")
        disk.again(place, where, what)
