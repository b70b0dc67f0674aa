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


def test_a_large_batch_is_remembered_for_as_many_steps_as_a_lone_request() -> None:
    """After 128 steps of a rate of 1, what 256 steps of 3 had shown is not forgotten."""
    for batch in (1, 64):
        rate = LiveRate(1.0)
        for _ in range(512):
            rate.observe(committed=3 * batch, cycles=batch, time=1.0)
        for _ in range(128):
            rate.observe(committed=batch, cycles=batch, time=1.0)
        assert 1.9 < rate.value < 2.4


def test_a_lone_request_does_not_follow_the_batch_before_it_for_long() -> None:
    rate = LiveRate(1.0)
    for _ in range(512):
        rate.observe(committed=64, cycles=64, time=1.0)
    for _ in range(2 * 256):
        rate.observe(committed=3, cycles=1, time=1.0)
    assert rate.value > 2.5


def test_one_step_of_few_among_steps_of_many_forgets_nothing() -> None:
    rate = LiveRate(1.0)
    for _ in range(512):
        rate.observe(committed=3 * 64, cycles=64, time=1.0)
    rate.observe(committed=1, cycles=1, time=1.0)
    for _ in range(16):
        rate.observe(committed=64, cycles=64, time=1.0)
    assert rate.value > 2.8
