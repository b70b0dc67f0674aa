"""The model arm follows what was verified: place by place."""

from __future__ import annotations

import numpy as np
import pytest

from decoder.core.payoff.model_arm import FURTHEST, ModelArm, chance_at, chance_of
from tests.decoder.simulated import yields_of


def drawn(rng: np.random.Generator, chances: list[float]) -> int:
    """Accepted length of a draft whose places hold with these chances, given those before."""
    return int(np.argmin([*(rng.random(len(chances)) < chances), False]))


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_it_begins_from_the_payoff_it_is_given(chance: float) -> None:
    payoff = yields_of(chance, 4)[-1]
    assert chance_of(payoff, 4) == pytest.approx(chance, abs=1e-6)
    assert ModelArm(payoff, 4).payoff(4) == pytest.approx(payoff, abs=1e-5)
    assert ModelArm(payoff, 4).payoff(0) == 0.0
    assert ModelArm(1.0, 0).payoff(4) == 0.0


@pytest.mark.parametrize("length", [1, 2, 4])
def test_each_place_is_told_from_drafts_of_any_length(length: int) -> None:
    """A draft that is refused at one place says nothing of those behind it."""
    rng, arm, places = np.random.default_rng(0), ModelArm(1.0, 4), [0.3, 0.8, 0.6, 0.9]
    told = []
    for _ in range(6000):
        arm.observe(drawn(rng, places[:length]), length)
        told.append([chance_at(odds) for odds in arm.odds])
    assert np.mean(told[500:], axis=0)[:length] == pytest.approx(places[:length], abs=0.05)


def test_a_look_after_a_long_while_counts_for_much() -> None:
    arm = ModelArm(1.0, 4)
    for _ in range(300):
        arm.observe(0, 4)
    assert arm.payoff(4) < 0.1
    arm.unseen = 64
    arm.observe(3, 4)
    assert arm.payoff(4) > 0.5


def test_nothing_goes_so_far_that_it_cannot_come_back() -> None:
    arm = ModelArm(1.0, 4)
    for accepted in (4, 0):
        for _ in range(3000):
            arm.observe(accepted, 4)
        assert np.abs(arm.odds).max() <= FURTHEST


def test_the_drafts_of_a_step_count_for_one() -> None:
    """64 drafts of one bad step do not wipe out what hundreds of steps have shown."""
    arm, rng = ModelArm(1.0, 4), np.random.default_rng(0)
    for _ in range(200):
        arm.unseen += 1
        for _ in range(64):
            arm.observe(drawn(rng, [0.8] * 4), 4, 64)
    before = arm.payoff(4)
    assert before == pytest.approx(yields_of(0.8, 4)[-1], abs=0.15)
    arm.unseen += 1
    for _ in range(64):
        arm.observe(0, 4, 64)
    assert arm.payoff(4) > 0.85 * before


@pytest.mark.parametrize("requests", [1, 8, 64])
def test_a_drafter_is_known_after_its_first_drafts(requests: int) -> None:
    """Whatever was expected of it, and at places, too, that no draft has reached yet."""
    rng = np.random.default_rng(requests)
    for chance in (0.2, 0.5, 0.85):
        arm = ModelArm(2.0, 5)
        for _ in range(64 // requests):
            for _ in range(requests):
                arm.observe(drawn(rng, [chance] * 2), 2, requests)
        assert arm.payoff(2) == pytest.approx(yields_of(chance, 2)[-1], abs=0.3)
        assert arm.payoff(5) >= 0.8 * yields_of(chance, 5)[-1]
