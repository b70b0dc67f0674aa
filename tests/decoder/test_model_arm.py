"""The model arm's memory follows what was verified, and corrects the network by its own errors."""

from __future__ import annotations

import pytest

from decoder.payoff.model_arm import ModelArm


def test_the_mean_follows_and_an_observation_ends_the_wait() -> None:
    arm = ModelArm(mean=3.0, unseen=40)
    for _ in range(200):
        arm.observe(1, None)
    assert arm.mean == pytest.approx(1.0, abs=0.01) and arm.unseen == 0


def test_an_estimate_twice_too_high_is_halved() -> None:
    arm = ModelArm()
    assert arm.ratio == 1.0
    for _ in range(300):
        arm.observe(2, 4.5)
    assert arm.ratio == pytest.approx((2 + 0.5) / (4.5 + 0.5), abs=0.01)


def test_drafts_that_no_network_judged_leave_the_ratio_alone() -> None:
    arm = ModelArm()
    for accepted, predicted in ((0, 2.0), (0, 2.0), (4, None), (4, None)):
        arm.observe(accepted, predicted)
    corrected = ModelArm()
    corrected.observe(0, 2.0)
    corrected.observe(0, 2.0)
    assert arm.ratio == corrected.ratio < 1.0
