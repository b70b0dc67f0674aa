"""Betting on noise wins nothing, and on an advantage it wins soon."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.evidence import Bets


def taken(numbers: Iterable[float], restarts: bool = False) -> Bets:
    bets = Bets(restarts)
    for number in numbers:
        bets.take(number)
    return bets


def first_beyond(numbers: np.ndarray, bound: float, restarts: bool) -> int | None:
    bets = Bets(restarts)
    for index, number in enumerate(numbers.tolist()):
        bets.take(number)
        if bets.evidence >= bound:
            return index
    return None


def test_noise_of_any_shape_passes_as_rarely_as_is_claimed() -> None:
    draw = np.random.default_rng(1)
    for made in (draw.normal(size=(300, 400)), draw.standard_t(2, size=(300, 400))):
        passed = [first_beyond(row, math.log(20), restarts=False) is not None for row in made]
        assert np.mean(passed) <= 0.05


@pytest.mark.parametrize(("advantage", "within"), [(0.5, 60), (1.0, 30)])
def test_an_advantage_is_found_the_sooner_the_larger_it_is(advantage: float, within: int) -> None:
    draw = np.random.default_rng(2)
    found = [first_beyond(draw.normal(advantage, 1, 200), math.log(100), False) for _ in range(50)]
    assert np.median([200 if at is None else at for at in found]) <= within


def test_a_long_bad_stretch_hides_nothing_from_bets_that_restart() -> None:
    draw = np.random.default_rng(3)
    numbers = np.concatenate([draw.normal(-1.0, 1.0, 2_000), draw.normal(1.0, 1.0, 60)])
    assert first_beyond(numbers, math.log(1_000), restarts=False) is None
    at = first_beyond(numbers, math.log(1_000), restarts=True)
    assert at is not None and at >= 2_000


def test_noise_raises_the_restarting_sum_as_rarely_as_is_claimed() -> None:
    draw = np.random.default_rng(4)
    bound, clusters = 1_000.0, 60_000
    alarms, at = 0, 0
    numbers = draw.normal(size=clusters)
    while at < clusters:
        found = first_beyond(numbers[at:], math.log(bound), restarts=True)
        if found is None:
            break
        alarms, at = alarms + 1, at + found + 1
    assert alarms <= 1.25 * clusters / bound  # two standard deviations of a count


@given(st.floats(1e-6, 1e6), st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_the_unit_of_the_numbers_changes_nothing(unit: float, numbers: list[float]) -> None:
    numbers = [n for n in numbers if abs(n) > 1e-3]
    assert math.isclose(
        taken(numbers).evidence, taken(n * unit for n in numbers).evidence, abs_tol=1e-6
    )


def test_one_cluster_costs_no_more_than_its_stake() -> None:
    before = taken([1.0, -1.0] * 5)
    after = taken([*([1.0, -1.0] * 5), -1e12])
    assert after.evidence > before.evidence + math.log(0.2) - 1e-9


def test_bets_go_on_from_a_snapshot() -> None:
    for restarts in (False, True):
        bets = taken([1.0, 0.5, -0.2, 0.7], restarts)
        again = Bets.restored(json.loads(json.dumps(bets.snapshot())))
        fresh = Bets.restored(json.loads(json.dumps(Bets(restarts).snapshot())))
        assert again.snapshot() == bets.snapshot() and fresh.snapshot() == Bets(restarts).snapshot()
        for one in (bets, again):
            one.take(0.3)
        assert bets.evidence == again.evidence
