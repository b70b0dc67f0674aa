"""Costs come back from noisy steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import frequency_policy
from decoder.policy.rule import CACHE, MODEL, NONE, Choice
from learner.measured import Costs, measure, robust_line
from learner.rows import from_events
from learner.tune import tuned
from tests.learner.traffic import FIXED_US, MODEL_US, TOKEN_US, Traffic

ROWS = from_events(Traffic(seed=2).events(100))


def test_costs_come_back_from_noisy_steps() -> None:
    costs = measure(ROWS)
    assert costs is not None and costs.measured and costs.has_model
    assert costs.fixed_us == pytest.approx(FIXED_US, rel=0.03)
    assert costs.token_us == pytest.approx(TOKEN_US, rel=0.15)
    assert costs.extra_us[MODEL] == pytest.approx(MODEL_US, rel=0.1)
    assert abs(costs.extra_us[NONE]) < 500 and abs(costs.extra_us[CACHE]) < 500
    assert costs.model_accepted == pytest.approx(2.0, abs=0.15) and costs.model_len == 3


def test_one_stalled_step_in_ten_moves_nothing() -> None:
    x = np.arange(1.0, 201.0)
    y = 100 + 5 * x
    y[::10] += 1e6
    assert robust_line(x, y) == pytest.approx((100, 5), rel=0.06)
    assert robust_line(np.ones(50), np.ones(50)) is None


def test_a_request_pays_its_share_of_the_batch() -> None:
    costs = Costs(fixed_us=100.0, token_us=1.0, extra_us=(0.0, 20.0, 0.0), model_len=3.0)
    rows = replace(ROWS.take(np.arange(3)), batch_size=np.array([1, 2, 4], np.int32))
    choice = Choice(np.full(3, MODEL, np.int8), np.zeros(3, np.int32))
    _, time = costs.outcome(rows, choice)
    assert time.tolist() == [124.0, 64.0, 34.0]


def test_what_a_model_draft_brings_is_as_it_was_seen_or_as_the_champion_has_it() -> None:
    champion = replace(frequency_policy("s"), model_payoff=1.5)
    policy = tuned(champion, measure(ROWS), champion)
    assert policy.use_model and policy.model_payoff == pytest.approx(2.0, abs=0.15)
    assert tuned(champion, None, champion).model_payoff == 1.5
