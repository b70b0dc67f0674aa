"""A worker's own rate: starts anywhere, then follows what is committed."""

from __future__ import annotations

import pytest

from decoder.core.rate import LEAST, LiveRate


def test_a_step_counts_by_its_requests() -> None:
    """One step of eight requests and eight steps of one weigh the same."""
    together, alone = LiveRate(1.0), LiveRate(1.0)
    for _ in range(50):
        together.observe(committed=16, cycles=8, time=1.0)
        for _ in range(8):
            alone.observe(committed=2, cycles=1, time=1.0)
    assert together.value == pytest.approx(alone.value, rel=0.02)


def test_no_batch_is_too_large_and_no_rate_too_small() -> None:
    rate = LiveRate(2.0)
    rate.observe(committed=5000, cycles=5000, time=1.0)
    assert rate.value == pytest.approx(1.0, abs=0.01)
    rate.observe(committed=0, cycles=5000, time=1.0)
    assert rate.value == pytest.approx(LEAST, abs=0.01)


@pytest.mark.parametrize(
    ("steps", "low", "high"),
    [
        # of as many steps whatever the batch: after 128 of a rate of 1, 512 of 3 are not forgotten
        ([(512, 3, 1), (128, 1, 1)], 1.9, 2.4),
        ([(512, 192, 64), (128, 64, 64)], 1.9, 2.4),
        # a lone request does not follow the batch before it for long
        ([(512, 64, 64), (512, 3, 1)], 2.5, 3.0),
        # one step of few among steps of many forgets nothing
        ([(512, 192, 64), (1, 1, 1), (16, 64, 64)], 2.8, 3.0),
    ],
)
def test_so_many_steps_are_remembered(
    steps: list[tuple[int, int, int]], low: float, high: float
) -> None:
    rate = LiveRate(1.0)
    for times, committed, cycles in steps:
        for _ in range(times):
            rate.observe(committed=committed, cycles=cycles, time=1.0)
    assert low < rate.value <= high
