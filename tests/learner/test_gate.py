"""Only a candidate that is better on held-out traffic passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import Policy, frequency_policy
from learner import train
from learner.costs import NOMINAL, measure
from learner.gate import judge
from learner.rows import from_events
from tests.learner.traffic import Traffic

ROWS = from_events(Traffic(seed=4).events(30))
LEARNED = from_events(Traffic(seed=5).events(60))
GOOD = train.export(
    train.fit(LEARNED, "payoff", 10),
    "s", 4.0, LEARNED.features,
)  # fmt: skip
COSTS = measure(ROWS) or NOMINAL


def test_the_better_wins_and_the_worse_does_not() -> None:
    verdict = judge(GOOD, frequency_policy("s"), ROWS, COSTS)
    assert verdict.promote and verdict.gain > 0.05 and verdict.mae < verdict.champion_mae
    assert "faster" in verdict.reason and verdict.drafts == len(ROWS) and verdict.requests == 30
    assert not judge(frequency_policy("s"), GOOD, ROWS, COSTS).promote


def test_a_tie_stays_with_the_champion() -> None:
    verdict = judge(replace(GOOD, version=2), GOOD, ROWS, COSTS)
    assert not verdict.promote and verdict.decided and verdict.gain == 0.0


def test_equal_rate_and_less_error_wins() -> None:
    weight, bias = GOOD.layers[-1]
    worse = replace(GOOD, layers=(*GOOD.layers[:-1], (weight, bias + np.float32(3.0))))
    never = 1e6  # neither ever verifies, so the rates are the same
    verdict = judge(replace(GOOD, threshold=never), replace(worse, threshold=never), ROWS, NOMINAL)
    assert verdict.promote and verdict.gain == 0.0 and "closer" in verdict.reason


def broken(value: float) -> Policy:
    weight, bias = GOOD.layers[0]
    return replace(GOOD, layers=((weight, np.full_like(bias, value)), *GOOD.layers[1:]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_lose(value: float) -> None:
    verdict = judge(broken(value), frequency_policy("s"), ROWS, COSTS)
    assert not verdict.promote and "finite" in verdict.reason
    assert not judge(replace(GOOD, threshold=value), frequency_policy("s"), ROWS, COSTS).promote
    assert judge(GOOD, broken(value), ROWS, COSTS).promote


def test_no_verdict_on_two_requests() -> None:
    few = ROWS.take(np.isin(ROWS.request, np.unique(ROWS.request)[:2]))
    verdict = judge(GOOD, frequency_policy("s"), few, COSTS)
    assert not verdict.promote and not verdict.decided


def test_the_same_evidence_gives_the_same_verdict() -> None:
    assert judge(GOOD, frequency_policy("s"), ROWS, COSTS) == judge(
        GOOD, frequency_policy("s"), ROWS, COSTS
    )
