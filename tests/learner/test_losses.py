"""What became of drafts, how likely it was, and the slope of that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.bundle import BUCKETS, MAX_DRAFT
from decoder.policy.survival import BUCKET_OF
from learner.losses import (
    SURVIVED,
    faced,
    foresight_of,
    payoff_loss,
    residuals,
    survival_likelihood,
    survival_loss,
)
from learner.rows import from_events
from tests.learner.traffic import Traffic

ROWS = from_events(Traffic(seed=1).events(10))


@given(st.integers(0, MAX_DRAFT))
def test_positions_lived_through_are_counted_by_bucket(accepted: int) -> None:
    naive = np.bincount(BUCKET_OF[:accepted], minlength=BUCKETS)
    assert SURVIVED[accepted].tolist() == naive.tolist()


def naive_cache(logits: np.ndarray, length: int, accepted: int, censored: bool) -> float:
    """What was seen of one cache draft, one position at a time."""
    breaking = 1 / (1 + np.exp(-logits[BUCKET_OF].astype(float)))
    total = sum(np.log(1 - breaking[j]) for j in range(accepted))
    return total + (0.0 if censored or accepted == length else np.log(breaking[accepted]))


def test_the_likelihood_is_that_of_what_was_seen() -> None:
    outputs = np.random.default_rng(0).normal(size=(200, BUCKETS)).astype(np.float32)
    found = faced(ROWS)
    naive = [
        naive_cache(outputs[i], ROWS.draft_len[i], int(ROWS.accepted[i]), ROWS.censored[i])
        for i in range(200)
    ]
    assert survival_likelihood(outputs, found) == pytest.approx(naive, rel=1e-4)
    loss, _ = survival_loss(outputs, found)
    assert loss == pytest.approx(-np.mean(naive), rel=1e-4)


def test_gradients_are_the_slopes_of_their_losses() -> None:
    rows = ROWS.take(np.arange(6))
    draw = np.random.default_rng(1)
    for loss_of, width in ((survival_loss, BUCKETS), (payoff_loss, 1)):
        outputs = draw.normal(2.0, 3.0, (6, width)).astype(np.float32)
        _, gradient = loss_of(outputs.copy(), faced(rows))
        for i, j in np.ndindex(outputs.shape):
            step = np.zeros_like(outputs)
            step[i, j] = 0.02
            above, below = (loss_of(outputs + sign * step, faced(rows))[0] for sign in (1, -1))
            assert gradient[i, j] == pytest.approx((above - below) / 0.04, abs=2e-3)


@settings(max_examples=50, deadline=None)
@given(st.floats(-20, 40, width=16), st.floats(0, 30, width=16))
def test_a_censored_label_is_a_lower_bound(output: float, bound: float) -> None:
    accepted, censored = np.float32([bound]), np.array([True])
    rows = replace(ROWS.take(np.arange(1)), accepted=accepted, censored=censored)
    value, slope = payoff_loss(np.float32([[output]]), faced(rows))
    if output >= bound:
        assert value == 0 and slope[0, 0] == 0
    else:
        assert value > 0 and slope[0, 0] < 0


def test_a_mean_is_taken_for_the_geometric_law_that_has_it() -> None:
    draw = np.random.default_rng(2)
    n, length, chance = 4_000, 12, 0.8
    accepted = np.minimum(draw.geometric(1 - chance, n) - 1, length).astype(np.float32)
    rows = ROWS.take(np.zeros(n, np.int64))
    rows = replace(
        rows, accepted=accepted, draft_len=np.full(n, length, np.int32), censored=np.zeros(n, bool)
    )
    said = {
        mean: foresight_of("payoff", np.full((n, 1), mean, np.float32), rows, faced(rows))
        for mean in (0.0, 1.0, float(accepted.mean()), 9.0, 1e9)
    }
    best = max(said, key=lambda mean: said[mean].mean())
    assert best == float(accepted.mean()) and all(np.isfinite(s).all() for s in said.values())
    entropy = np.log(chance) * accepted + np.log(1 - chance) * (accepted < length)
    assert said[best].mean() == pytest.approx(entropy.mean(), rel=1e-3)


def test_residuals_of_bounds_are_one_sided() -> None:
    predicted, accepted = np.float32([5, 5, 2]), np.float32([3, 3, 6])
    censored = np.array([False, True, True])
    assert residuals(predicted, accepted, censored).tolist() == [2, 0, 4]
