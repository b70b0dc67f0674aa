"""Live costs follow the machine, and one stalled step moves nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from decoder.contracts.costs import CostTable
from decoder.costs import GRID, REFRESH, LiveCosts

PROFILE = CostTable("here", (1, 65), (10_000.0, 42_000.0), draft_us=0.0, draft_token_us=900.0)


def feed(costs: LiveCosts, tokens: int, us: float, times: int = REFRESH, drafted: int = 0) -> None:
    for _ in range(times):
        costs.observe(tokens, 1, drafted, us)


def test_a_slower_machine_is_believed_for_cells_seen_and_their_neighbours() -> None:
    costs = LiveCosts(PROFILE)
    feed(costs, 1, 20_000.0)
    assert costs.table.dense[1] == pytest.approx(20_000.0)
    assert costs.table.dense[64] == pytest.approx(2 * PROFILE.dense[64], rel=0.01)
    feed(costs, 64, float(PROFILE.dense[64]))
    assert costs.table.dense[64] == pytest.approx(PROFILE.dense[64], rel=0.01)


def test_a_size_that_nobody_runs_any_more_keeps_pace_with_those_that_are_run() -> None:
    """Else the arm in force would look better the longer the machine has been getting faster."""
    costs = LiveCosts(PROFILE)
    for slow in (2.0, 1.0):
        for tokens in (1, 16) if slow > 1 else (1,):
            feed(costs, tokens, slow * float(PROFILE.dense[tokens]))
    assert costs.table.dense[16] == pytest.approx(PROFILE.dense[16], rel=0.01)


def test_a_size_that_deviates_from_the_profile_is_found_beside_one_that_does_not() -> None:
    costs = LiveCosts(PROFILE)
    for _ in range(REFRESH):
        feed(costs, 1, float(PROFILE.dense[1]), 3)
        feed(costs, 16, 1.5 * float(PROFILE.dense[16]), 1)
    assert costs.table.dense[1] == pytest.approx(PROFILE.dense[1], rel=0.01)
    assert costs.table.dense[16] == pytest.approx(1.5 * PROFILE.dense[16], rel=0.01)


@pytest.mark.parametrize("stall", [1e9, float("nan"), -1.0, 0.0])
def test_a_stalled_or_senseless_step_moves_nothing(stall: float) -> None:
    costs = LiveCosts(PROFILE)
    feed(costs, 1, 10_000.0, 12)
    feed(costs, 1, stall, 4)
    feed(costs, 1, 10_000.0, REFRESH)
    assert costs.table.dense[1] == pytest.approx(10_000.0)


def test_drafting_is_what_a_step_took_above_verification() -> None:
    costs = LiveCosts(PROFILE)
    feed(costs, 5, float(PROFILE.dense[5]))
    feed(costs, 5, float(PROFILE.dense[5]) + 7_200.0, drafted=4)
    assert costs.table.drafting(4, 1) == pytest.approx(7_200.0, rel=0.02)
    assert costs.table.drafting(0, 1) == 0.0


def test_where_verification_is_overrated_longer_drafts_still_cost_more() -> None:
    """The profile was taken in a busy moment, and steps with drafts now take less than it says that
    verifying alone takes. Their sum is right; a token of a draft does not become a gain."""
    costs = LiveCosts(PROFILE)
    feed(costs, 1, 10_000.0)
    feed(costs, 5, float(PROFILE.dense[5]) - 2_000.0, drafted=4)
    step = float(costs.table.dense[5]) + costs.table.drafting(4, 1)
    assert step == pytest.approx(float(PROFILE.dense[5]) - 2_000.0, rel=0.02)
    each = [costs.table.drafting(k, 1) for k in range(1, 5)]
    assert all(b - a == pytest.approx(450.0) for a, b in itertools.pairwise(each))


def test_without_a_profile_the_first_steps_set_the_unit() -> None:
    costs = LiveCosts()
    assert not costs.measured
    feed(costs, 1, 30_000.0, 3)
    assert costs.measured and costs.table.dense[1] == pytest.approx(30_000.0)


def test_fixed_costs_stay() -> None:
    costs = LiveCosts(PROFILE, live=False)
    feed(costs, 1, 1.0, 100)
    assert costs.table is PROFILE


def test_steps_beyond_the_grid_are_harmless() -> None:
    costs = LiveCosts(PROFILE)
    feed(costs, 10 * GRID[-1], 1e6)
    assert np.isfinite(costs.table.dense).all()
