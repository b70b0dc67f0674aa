"""What the options of the floor would have made of a step, added up over its requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.contracts.bundle import PARAMETERS
from decoder.contracts.events import LIMITS
from decoder.core.guards.floor import OPTIONS
from decoder.core.events import outcomes_of, shared
from decoder.core.requests import Cycle, Step
from decoder.policy.pricing import CostTable
from decoder.policy.rule import CACHE, MODEL, NONE

COSTS = CostTable("t", (1, 8, 32), (10.0, 30.0, 50.0), draft_us=2.0, draft_row_us=0.5)
K = 3


def a_cycle(wanted: int, wanted_len: int, draft_len: int, step: Step) -> Cycle:
    mine = replace(step, model_len=K, arms=[NONE], chosen=[wanted], lengths=[wanted_len])
    return Cycle(mine, 0, 0, 0, 0, draft_len, ())


request = st.tuples(st.sampled_from([NONE, MODEL, CACHE]), st.integers(1, 6), st.integers(0, 4))


@given(st.lists(request, min_size=1, max_size=5))
def test_the_requests_of_a_step_pay_for_it_once(requests: list[tuple[int, int, int]]) -> None:
    rows = [
        (arm, {NONE: 0, MODEL: K, CACHE: length}[arm], length + more if arm == CACHE else more)
        for arm, length, more in requests
    ]
    n, drafting = len(rows), sum(arm == MODEL for arm, *_ in rows)
    step = Step(sum(row[1] for row in rows), sum(row[2] for row in rows), drafting, n)
    made = [outcomes_of(a_cycle(*row, step), 2, 1.5, COSTS) for row in rows]
    times = {name: sum(m[i][1] for m in made) for i, name in enumerate(OPTIONS)}
    spent = COSTS.dense[n + step.wanted] + (COSTS.drafting(K, n) if drafting else 0.0)
    assert times["policy"] == pytest.approx(spent)
    assert times["none"] == pytest.approx(COSTS.dense[n])
    assert times["model"] == pytest.approx(COSTS.dense[n + K * n] + COSTS.drafting(K, n))
    assert times["cache"] == pytest.approx(COSTS.dense[n + step.cached])


def test_an_option_commits_what_it_would_have_verified_and_the_target_accepts() -> None:
    cycle = a_cycle(CACHE, 2, 5, Step(2, 5, 0, 1))
    tokens = [committed for committed, _ in outcomes_of(cycle, 4, 1.5, COSTS)]
    assert tokens == [3.0, 1.0, 2.5, 5.0]


@pytest.mark.parametrize("drafted", [0, K])
def test_a_model_draft_that_did_not_happen_is_no_credit_to_anybody(drafted: int) -> None:
    """It was to be made, and the drafter failed, or the scheduler had no room for what it made."""
    step = Step(K, 0, 1, 1, model_len=K, arms=[MODEL], chosen=[MODEL], lengths=[K])
    cycle = Cycle(step, 0, -1, 0, 0, 0, (), drafted_len=drafted, committed=1)
    policy, none, model, _ = outcomes_of(cycle, 0, 1.5, COSTS)
    assert policy == model
    assert model[0] == none[0] == 1.0
    assert model[1] == pytest.approx(none[1] + (COSTS.drafting(K, 1) if drafted else 0.0))
    cycle.verified_len, cycle.model_accepted = K, 2
    assert outcomes_of(cycle, 0, 1.5, COSTS)[0][0] == 3.0


@pytest.mark.parametrize("threshold", PARAMETERS)
def test_every_threshold_can_be_told_of(threshold: float) -> None:
    low, high = LIMITS["parameter"]
    assert low <= shared(Step(0, 0, 0, 1, parameter=threshold))["parameter"] <= high
