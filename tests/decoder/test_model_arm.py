"""The model arm follows what was verified: place by place."""

from __future__ import annotations

import numpy as np
import pytest

from decoder.core.guards.controller import PROBE_EVERY
from decoder.core.payoff.model_arm import FURTHEST, ModelArm, chance_at, chance_of
from decoder.policy.loops import yields_of_places
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


def pass_steps(arm: ModelArm, steps: int) -> None:
    """Steps without a model draft."""
    for _ in range(steps):
        arm.age()


def test_a_look_after_a_long_while_counts_for_much() -> None:
    arm = ModelArm(1.0, 4)
    for _ in range(300):
        arm.observe(0, 4)
    assert arm.payoff(4) < 0.1
    pass_steps(arm, 64)
    arm.observe(3, 4)
    assert arm.payoff(4) > 0.5


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("steps", [20, 80, 300, 10_000])
def test_one_refusal_after_a_long_while_sinks_no_place(place: int, steps: int) -> None:
    """What holds in 77 of 100 drafts is refused now and then; copying takes hundreds of steps."""
    arm, rng = ModelArm(2.0, 4), np.random.default_rng(0)
    for _ in range(1000):
        arm.observe(drawn(rng, [0.77] * 4), 4)
    pass_steps(arm, steps)
    arm.observe(place, 4)
    arm.age()
    assert chance_at(arm.odds[place]) > 0.35
    assert best_length(arm) == 4


def best_length(arm: ModelArm, token: float = 0.036) -> int:
    """Tokens of a draft that pay best in a step that is 1 long, by what a choice believes."""
    yields = yields_of_places(arm.odds, len(arm.odds)).tolist()
    return max(range(1, 5), key=lambda k: (1 + yields[k - 1]) / (1.02 + token * k))


def decode(arm: ModelArm, chances: list[float], steps: int, rng: np.random.Generator) -> float:
    """The rate of so many model drafts as long as pays, but for looks of full length."""
    tokens = time = 0.0
    for step in range(steps):
        arm.age()
        k = best_length(arm) if step % PROBE_EVERY else 4
        accepted = drawn(rng, chances[:k])
        arm.observe(accepted, k)
        tokens, time = tokens + 1 + accepted, time + 1.02 + 0.036 * k
    return tokens / time


@pytest.mark.parametrize("seed", range(12))
def test_drafts_grow_back_when_later_places_are_mended(seed: int) -> None:
    """A draft cut before them tells nothing of them."""
    arm, rng = ModelArm(2.0, 4), np.random.default_rng(seed)
    good, broken = [0.77] * 4, [0.77, 0.02, 0.02, 0.02]
    best = (1 + yields_of(0.77, 4)[-1]) / (1.02 + 4 * 0.036)
    for _ in range(3):
        decode(arm, good, 300, rng)
        assert decode(arm, good, 1000, rng) > 0.93 * best
        assert decode(arm, broken, 1000, rng) > 0.95 * 1.77 / 1.056


@pytest.mark.parametrize("mean", [3, 20, 60, 200])
def test_who_drafts_seldom_knows_what_its_drafts_bring(mean: int) -> None:
    """Between copied stretches of any length no place is flattered, and none sunk."""
    rng, told = np.random.default_rng(1), []
    arm, places = ModelArm(1.0, 4), [0.8, 0.5, 0.6, 0.3]
    for _ in range(4000):
        pass_steps(arm, 1 + int(rng.geometric(1 / mean)))
        arm.observe(drawn(rng, places), 4)
        told.append([chance_at(odds) for odds in arm.odds])
    assert np.mean(told[200:], axis=0) == pytest.approx(places, abs=0.08)
    assert (np.std(told[200:], axis=0) < 0.2).all()


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
        arm.age()
        for _ in range(64):
            arm.observe(drawn(rng, [0.8] * 4), 4, 64)
    before = arm.payoff(4)
    assert before == pytest.approx(yields_of(0.8, 4)[-1], abs=0.15)
    arm.age()
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
