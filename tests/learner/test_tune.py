"""Costs come back from noisy steps, and the one-pass scan equals trying every threshold."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.policy.estimate import PAPER_THRESHOLD
from decoder.policy.rule import CACHE, MODEL, NONE
from learner import train
from learner.measured import Costs, measure, robust_line
from learner.rows import from_events
from learner.tune import Stretches, scan, stretches, tuned
from tests.learner.traffic import FIXED_US, MODEL_US, TOKEN_US, Traffic

ROWS = from_events(Traffic(seed=2).events(100))


@cache
def network() -> Policy:
    return train.export(train.fit(ROWS, "payoff", 5), "s", 6.0, ROWS.features)


def rate_at(threshold: float, predicted: np.ndarray, arms: list[np.ndarray], s: Stretches) -> float:
    """Stretch by stretch, in plain Python."""
    time = 0.0
    for part, tokens in enumerate(s.tokens):
        sums = np.zeros(2)
        for i in np.flatnonzero(s.of_draft == part):
            sums += arms[0][:, i] if predicted[i] >= threshold else arms[1][:, i]
        time += tokens * sums[1] / sums[0]
    return float(s.tokens.sum() / time)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 12), st.integers(1, 6))
def test_scan_equals_brute_force(seed: int, n: int, distinct: int, parts: int) -> None:
    rng = np.random.default_rng(seed)
    predicted = (rng.integers(0, distinct, n) / 3).astype(np.float32)
    cache = np.stack([1 + rng.integers(0, 20, n), rng.uniform(1, 3, n)])
    other = np.stack([np.full(n, 2.5), rng.uniform(1, 2, n)])
    of_draft = np.unique(rng.integers(0, parts, n), return_inverse=True)[1]
    count = of_draft.max() + 1
    cut = Stretches(of_draft, rng.uniform(1, 50, count))
    found = scan(predicted, (cache[0], cache[1]), (other[0], other[1]), cut)
    every = [*predicted, np.float32(np.inf), np.float32(-1)]
    assert found.rate == pytest.approx(
        max(rate_at(t, predicted, [cache, other], cut) for t in every)
    )
    assert found.rate == pytest.approx(rate_at(found.threshold, predicted, [cache, other], cut))


def test_stretches_are_runs_of_one_request() -> None:
    request = np.array([7, 9] * 10 + [9], np.uint64)
    rows = replace(ROWS.take(np.arange(21)), request=request)
    cut = stretches(rows)
    assert [request[cut.of_draft == part][0] for part in range(4)] == [7, 7, 9, 9]
    assert np.bincount(cut.of_draft).tolist() == [8, 2, 8, 3]
    for part in range(4):
        assert len(set(request[cut.of_draft == part])) == 1
    verified = np.where(rows.arm == CACHE, rows.accepted, np.nan_to_num(rows.model_accepted))
    verified[rows.arm == NONE] = 0
    assert cut.tokens.sum() == pytest.approx(21 + verified.sum())


def test_adjacent_floats_are_told_apart() -> None:
    low = np.float32(3.0)
    high = np.nextafter(low, np.float32(4))
    cache, other = (np.array([9.0, 0.0]), np.ones(2)), (np.ones(2), np.ones(2))
    one = Stretches(np.zeros(2, np.int64), np.ones(1))
    found = scan(np.array([high, low]), cache, other, one)
    assert (np.array([high, low]) >= found.threshold).tolist() == [True, False]


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
    _, time = costs.always(rows, MODEL)
    assert time.tolist() == [124.0, 64.0, 34.0]


def test_tunes_between_good_and_bad_drafts() -> None:
    policy, _ = tuned(network(), ROWS, measure(ROWS), frequency_policy("s"))
    assert 1.0 < policy.threshold < 8.0 and policy.use_model
    assert policy.model_payoff == pytest.approx(2.0, abs=0.15)


def test_leaves_a_drafter_that_does_not_pay() -> None:
    rows = from_events(Traffic(seed=3, model_accepted=0.1).events(100))
    assert not tuned(network(), rows, measure(rows), frequency_policy("s"))[0].use_model


def test_an_arm_never_seen_needs_a_margin() -> None:
    costs = Costs(100.0, 0.0, (0.0, 3.0, 0.0), seen=(0, 50, 50))
    champion = frequency_policy("s")
    for other, use_model in (
        (costs, True),
        (replace(costs, extra_us=(0.0, 30.0, 0.0)), False),
        (replace(costs, seen=(50, 50, 50)), False),
    ):
        assert tuned(network(), ROWS, other, champion)[0].use_model is use_model


@pytest.mark.parametrize("use_model", [True, False])
def test_keeps_what_the_champion_does_where_nothing_was_seen(use_model: bool) -> None:
    champion = replace(network(), threshold=4.5, use_model=use_model)
    only_cache = ROWS.take(ROWS.arm == CACHE)
    assert measure(ROWS.take(ROWS.arm != CACHE)) is None
    for costs in (None, measure(only_cache)):
        policy, _ = tuned(network(), ROWS, costs, champion)
        assert (policy.threshold, policy.use_model) == (4.5, use_model)
        other, _ = tuned(network(), ROWS, costs, frequency_policy("s"))
        assert other.threshold == PAPER_THRESHOLD


def test_a_survival_policy_has_nothing_to_tune_but_what_its_drafter_brings() -> None:
    network = train.export(train.fit(ROWS, "survival", 5), "s", 6.0, ROWS.features)
    policy, note = tuned(network, ROWS, measure(ROWS), frequency_policy("s"))
    assert policy == replace(network, model_payoff=policy.model_payoff) and "live" in note
    assert policy.model_payoff == pytest.approx(2.0, abs=0.15)
