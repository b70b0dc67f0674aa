"""Who chooses better wins where it is faster by enough; the word on it names its figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import Policy, frequency_policy
from learner import train
from learner.gate import DEPTHS, calibrate, error_of, judge
from learner.measured import NOMINAL, measure
from learner.rows import from_events
from tests.learner.traffic import Traffic

ROWS = from_events(Traffic(seed=4).events(30))
LEARNED = from_events(Traffic(seed=5).events(60))
GOOD = train.export(train.fit(LEARNED, "survival", 20), "s", 4.0, LEARNED.features)
COSTS = measure(ROWS) or NOMINAL


def test_the_faster_passes_and_the_slower_does_not() -> None:
    verdict = judge(GOOD, frequency_policy("s"), ROWS, COSTS, evidence=5.0, clusters=20)
    assert verdict.promote and verdict.gain > 0.05 and verdict.mae < verdict.champion_mae
    assert "faster" in verdict.reason and "e^5.0 of 20 clusters" in verdict.reason
    other = judge(frequency_policy("s"), GOOD, ROWS, COSTS, evidence=99.0, clusters=20)
    assert not other.promote and other.gain < 0


def test_a_tie_is_not_worth_a_swap() -> None:
    verdict = judge(replace(GOOD, version=2), GOOD, ROWS, COSTS, evidence=99.0, clusters=20)
    assert not verdict.promote and verdict.gain == 0.0


def test_no_word_on_a_few_drafts() -> None:
    few = ROWS.take(np.arange(30))
    verdict = judge(GOOD, frequency_policy("s"), few, COSTS, evidence=99.0, clusters=20)
    assert not verdict.promote and "30 drafts" in verdict.reason


def test_the_rate_in_force_is_what_contestants_are_simulated_at() -> None:
    rates = []
    for rate in (0.5, 8.0):
        rows = replace(ROWS, rate=np.full(len(ROWS), rate, np.float32))
        rates.append(judge(GOOD, frequency_policy("s"), rows, COSTS, 5.0, 20).rate)
    unknown = judge(GOOD, frequency_policy("s"), ROWS, COSTS, 5.0, 20).rate
    assert rates[0] != rates[1] and unknown > 0.98 * max(rates)


def broken(value: float) -> Policy:
    weight, bias = GOOD.layers[0]
    return replace(GOOD, layers=((weight, np.full_like(bias, value)), *GOOD.layers[1:]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_champion_whose_numbers_are_not_finite_can_be_beaten(value: float) -> None:
    assert np.isfinite(error_of(broken(value), ROWS))
    verdict = judge(GOOD, broken(value), ROWS, COSTS, evidence=99.0, clusters=20)
    assert verdict.promote and np.isfinite(list(verdict.metrics().values())).all()


def test_calibration_sets_what_was_expected_beside_what_came() -> None:
    found = calibrate(GOOD, ROWS)
    expected, real = found.deciles.T
    assert (np.diff(expected) >= 0).all() and real[-1] > 5 * real[0]
    assert np.abs(found.depths[:, 0] - found.depths[:, 1]).max() < 0.15
    metrics = found.metrics()
    assert metrics["decile_10_real"] == real[-1] and f"survival_{DEPTHS[-1]}_expected" in metrics


def test_a_mean_has_no_survival_to_calibrate() -> None:
    found = calibrate(frequency_policy("s"), ROWS)
    assert np.isnan(found.depths).all() and np.isfinite(found.deciles).all()
    assert not any(name.startswith("survival") for name in found.metrics())


def test_few_drafts_leave_deciles_open() -> None:
    rows = ROWS.take(np.flatnonzero(~ROWS.censored)[:4])
    found = calibrate(GOOD, rows)
    assert np.isfinite(found.deciles[:4]).all() and np.isnan(found.deciles[4:]).all()
