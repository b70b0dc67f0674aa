"""What the options of the floor would have made of a step, added up over its requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.contracts.bundle import PARAMETERS, frequency_policy
from decoder.contracts.events import LIMITS
from decoder.core.events import Sink
from decoder.core.guards.floor import OPTIONS, outcomes_of
from decoder.policy.pricing import CostTable
from decoder.policy.rule import CACHE, MODEL, NONE
from decoder.telemetry.ring import STEP

COSTS = CostTable("t", (1, 8, 32), (10.0, 30.0, 50.0), draft_us=2.0, draft_row_us=0.5)
K = 3


@dataclass(frozen=True)
class Step:
    """Draft tokens wanted and cached, and requests of which some want model drafts."""

    wanted: int
    cached: int
    drafting: int
    batch: int


def outcomes(
    step: Step, wanted: int, wanted_len: int, draft_len: int, accepted: int, *, arm: int = NONE,
    verified: int = 0, drafted: int = 0, seen: int = -1,
) -> list[list[float]]:  # fmt: skip
    """Tokens and time of each option."""
    found = np.zeros((len(OPTIONS), 2))
    outcomes_of(
        arm, wanted, wanted_len, step.wanted, step.cached, step.drafting, K, 0, step.batch,
        draft_len, accepted, verified, drafted, seen, 1.5, COSTS.dense,
        (COSTS.draft_us, COSTS.draft_token_us, COSTS.draft_row_us), found,
    )  # fmt: skip
    return found.tolist()


request = st.tuples(st.sampled_from([NONE, MODEL, CACHE]), st.integers(1, 6), st.integers(0, 4))


@given(st.lists(request, min_size=1, max_size=5))
def test_the_requests_of_a_step_pay_for_it_once(requests: list[tuple[int, int, int]]) -> None:
    rows = [
        (arm, {NONE: 0, MODEL: K, CACHE: length}[arm], length + more if arm == CACHE else more)
        for arm, length, more in requests
    ]
    n, drafting = len(rows), sum(arm == MODEL for arm, *_ in rows)
    step = Step(sum(row[1] for row in rows), sum(row[2] for row in rows), drafting, n)
    made = [outcomes(step, *row, 2) for row in rows]
    times = {name: sum(m[i][1] for m in made) for i, name in enumerate(OPTIONS)}
    spent = COSTS.dense[n + step.wanted] + (COSTS.drafting(K, n) if drafting else 0.0)
    assert times["policy"] == pytest.approx(spent)
    assert times["none"] == pytest.approx(COSTS.dense[n])
    assert times["model"] == pytest.approx(COSTS.dense[n + K * n] + COSTS.drafting(K, n))
    assert times["cache"] == pytest.approx(COSTS.dense[n + step.cached])


def test_an_option_commits_what_it_would_have_verified_and_the_target_accepts() -> None:
    tokens = [committed for committed, _ in outcomes(Step(2, 5, 0, 1), CACHE, 2, 5, 4)]
    assert tokens == [3.0, 1.0, 2.5, 5.0]


@pytest.mark.parametrize("drafted", [0, K])
def test_a_model_draft_that_did_not_happen_is_no_credit_to_anybody(drafted: int) -> None:
    """It was to be made, and the drafter failed, or the scheduler had no room for what it made."""
    step = Step(K, 0, 1, 1)
    policy, none, model, _ = outcomes(step, MODEL, K, 0, 0, arm=MODEL, drafted=drafted)
    assert policy == model
    assert model[0] == none[0] == 1.0
    assert model[1] == pytest.approx(none[1] + (COSTS.drafting(K, 1) if drafted else 0.0))
    assert outcomes(step, MODEL, K, 0, 0, arm=MODEL, drafted=K, verified=K, seen=2)[0][0] == 3.0


@pytest.mark.parametrize("threshold", PARAMETERS)
def test_every_threshold_can_be_told_of(threshold: float) -> None:
    low, high = LIMITS["parameter"]
    told = Sink(None).step(frequency_policy("s"), "", threshold, 0.0, 1, 0.0)
    assert low <= told.view(STEP)[0]["parameter"] <= high
