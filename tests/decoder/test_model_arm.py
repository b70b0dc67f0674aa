"""The model arm's memory follows what was verified, and corrects the network by its own errors."""

from __future__ import annotations

import numpy as np
import pytest

from decoder.payoff.model_arm import ModelArm, chance_of
from decoder.policy.survival import yields_of


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_it_begins_from_the_payoff_it_is_given(chance: float) -> None:
    payoff = yields_of(chance, 4)[-1]
    assert chance_of(payoff, 4) == pytest.approx(chance, abs=1e-6)
    assert ModelArm(payoff, 4).payoff(4) == pytest.approx(payoff, abs=1e-5)
    assert ModelArm(payoff, 4).payoff(0) == 0.0


def test_it_follows_what_is_verified_and_an_observation_ends_the_wait() -> None:
    arm = ModelArm(3.0, 4)
    arm.unseen = 40
    for _ in range(200):
        arm.observe(0, 4, None)
    assert arm.payoff(4) < 0.01 and arm.unseen == 0


@pytest.mark.parametrize("length", [1, 2, 4, 8])
def test_the_chance_can_be_told_from_drafts_of_any_length(length: int) -> None:
    """A draft accepted whole says only that it held so far."""
    rng, arm, told = np.random.default_rng(0), ModelArm(1.0, 4), []
    for _ in range(4000):
        held = int(np.argmin([*(rng.random(length) < 0.6), False]))
        arm.observe(held, length, None)
        told.append(arm.chance)
    assert np.mean(told[100:]) == pytest.approx(0.6, abs=0.03)


def test_a_look_after_a_long_while_counts_for_much() -> None:
    arm = ModelArm(1.0, 4)
    for _ in range(100):
        arm.observe(0, 4, 1.5)
    assert arm.chance < 0.02 and arm.ratio < 0.3
    arm.unseen = 64
    arm.observe(3, 4, 1.5)
    assert arm.chance > 0.35 and arm.ratio > 0.7


def test_an_estimate_twice_too_high_is_halved() -> None:
    arm = ModelArm(1.0, 4)
    assert arm.ratio == 1.0
    for _ in range(300):
        arm.observe(2, 4, 4.5)
    assert arm.ratio == pytest.approx((2 + 0.5) / (4.5 + 0.5), abs=0.01)


def test_drafts_that_no_network_judged_leave_the_ratio_alone() -> None:
    arm, corrected = ModelArm(1.0, 4), ModelArm(1.0, 4)
    for accepted, predicted in ((0, 2.0), (0, 2.0), (4, None), (4, None)):
        arm.observe(accepted, 4, predicted)
    corrected.observe(0, 4, 2.0)
    corrected.observe(0, 4, 2.0)
    assert arm.ratio == corrected.ratio < 1.0


def test_the_drafts_of_a_step_count_for_one() -> None:
    """64 drafts of one bad step do not wipe out what hundreds of steps have shown."""
    arm = ModelArm(1.0, 4)
    rng = np.random.default_rng(0)
    for _ in range(200):
        arm.unseen += 1
        for _ in range(64):
            held = int(np.argmin([*(rng.random(4) < 0.8), False]))
            arm.observe(held, 4, 2.4, drafts=64)
    before = arm.chance, arm.ratio
    assert before[0] == pytest.approx(0.8, abs=0.02)
    arm.unseen += 1
    for _ in range(64):
        arm.observe(0, 4, 2.4, drafts=64)
    assert arm.chance > 0.9 * before[0] and arm.ratio > 0.9 * before[1]


def test_a_look_after_a_long_while_counts_for_much_however_many_look() -> None:
    arm = ModelArm(1.0, 4)
    for _ in range(100):
        arm.observe(0, 4, 1.5)
    arm.unseen = 64
    for _ in range(8):
        arm.observe(3, 4, 1.5, drafts=8)
    assert arm.chance > 0.3 and arm.ratio > 0.6
