"""Live costs follow the machine, and the rate what is committed; no single step moves them long."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from decoder.core.costs import GRID, GUESS, REFRESH, LiveCosts
from decoder.core.rate import LEAST, LiveRate
from decoder.policy.pricing import FEW, NOMINAL, CostTable

PROFILE = CostTable("here", (1, 65), (10_000.0, 42_000.0), draft_us=0.0, draft_token_us=900.0)


def feed(costs: LiveCosts, tokens: int, us: float, times: int = REFRESH, drafted: int = 0) -> None:
    for _ in range(times):
        costs.observe(tokens, 1, drafted, us)


def serve(
    costs: LiveCosts, time: Callable[[int], float], drafting: float, steps: int, seed: int = 0
) -> None:
    """Steps as eight requests make them, on a machine that wanders, stalls and is measured badly.

    Args:
        time: of a step by its tokens; ``drafting`` comes on top of each sixth.
    """
    generator, pace = np.random.default_rng(seed), 1.6
    for index in range(steps):
        pace *= np.exp(generator.normal(0.0, 0.02))
        tokens, drafted = 8 + int(generator.choice([0, 2, 4, 8, 12, 16, 24])), index % 6 == 0
        us = (time(tokens) + drafted * drafting) * pace * np.exp(generator.normal(0.0, 0.1))
        stalled = generator.random() < 0.05
        costs.observe(tokens, 8, int(drafted), us * (1 + stalled * generator.exponential()))


@pytest.mark.parametrize("seed", range(4))
def test_a_profile_of_a_busy_moment_is_mended_by_service(seed: int) -> None:
    """What decisions are made of is what tokens and drafting cost beside a plain step."""

    def true(tokens: int) -> float:
        return 48_000.0 + 3_600.0 * tokens

    busy = (50e3, 60e3, 102e3, 102e3, 102e3, 158e3, 300e3)
    costs = LiveCosts(CostTable("busy", (1, 2, 4, 8, 16, 32, 64), busy, draft_token_us=2_700.0))
    serve(costs, true, 9_000.0, 300, seed)
    plain = costs.table.dense[8]
    for more in (8, 16, 24):
        share = (true(8 + more) - true(8)) / true(8)
        assert costs.table.dense[8 + more] / plain - 1 == pytest.approx(share, abs=0.2)
    assert costs.table.drafting(1, 8) / plain == pytest.approx(9_000.0 / true(8), abs=0.08)


@pytest.mark.parametrize("stall", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_senseless_time_is_ignored(stall: float) -> None:
    costs = LiveCosts(PROFILE)
    feed(costs, 1, 10_000.0)
    before = costs.table
    feed(costs, 1, stall)
    assert costs.table is before
    feed(costs, 10 * GRID[-1], 1e6)  # nor does a step beyond the grid do any harm
    assert np.isfinite(costs.table.dense).all()


def test_a_stalled_step_moves_no_size_beside_the_others() -> None:
    costs, calm = LiveCosts(PROFILE), LiveCosts(PROFILE)
    for one in (costs, calm):
        for tokens in (1, 8, 16) * REFRESH:
            one.observe(tokens, 1, 0, float(PROFILE.dense[tokens]))
    feed(costs, 8, 1e9, 1)
    for one in (costs, calm):
        feed(one, 8, float(PROFILE.dense[8]), REFRESH - 1)
    for tokens in (1, 8, 16):
        assert costs.table.dense[tokens] == pytest.approx(calm.table.dense[tokens], rel=0.02)


def true_time(tokens: int, drafted: int = 0) -> float:
    return 20_000.0 + 500.0 * tokens + 1_500.0 * drafted


SIZES = (*range(1, 9), 12, 16, 24, 32, 48, 64)
PRIORS = {
    "profiled": CostTable("right", SIZES, tuple(map(true_time, SIZES)), draft_token_us=1_500.0),
    "of a start that stalled": CostTable("stalled", (1,), (11 * true_time(1),)),
    "nominal": NOMINAL,
}
SERVED = ((1, 0), (17, 0), (5, 4), (1, 0), (9, 0), (5, 4))
"""Tokens of steps in turn, and of them drafted."""


def serve_true(costs: LiveCosts, steps: Iterable[tuple[int, int]], slower: float = 1.0) -> None:
    noise = np.random.default_rng(0)
    for tokens, drafted in steps:
        us = true_time(tokens, drafted) * slower * float(np.exp(noise.normal(0.0, 0.1)))
        costs.observe(tokens, 1, drafted, us)


@pytest.mark.parametrize("stalled", [*SERVED[:3]], ids=["plain", "cache", "model"])
@pytest.mark.parametrize("warm", [6, 300])
@pytest.mark.parametrize("prior", PRIORS)
def test_steps_that_stalled_make_no_draft_free_and_none_dear(
    prior: str, warm: int, stalled: tuple[int, int]
) -> None:
    """For thirty steps of one kind the machine is five times slower: something else has it."""
    costs = LiveCosts(PRIORS[prior])
    serve_true(costs, itertools.islice(itertools.cycle(SERVED), warm))
    serve_true(costs, [stalled] * 30, slower=5.0)
    serve_true(costs, [(1, 0)] * 30)
    table, plain = costs.table, costs.table.time(1)
    assert plain == pytest.approx(true_time(1), rel=0.15)
    for tokens in (5, 17):
        ratio = table.time(tokens) / plain / (true_time(tokens) / true_time(1))
        assert 0.6 < ratio < 1.7 + (prior != "profiled" and warm < 100), (tokens, ratio)
    drafting = table.drafting(4, 1) / plain / (6_000.0 / true_time(1))
    assert 0.5 < drafting < 3.0, drafting


@pytest.mark.parametrize("at", [0, 40])
def test_what_proposing_takes_is_what_it_usually_takes(at: int) -> None:
    """The first step brings caches in, and the process stands still now and then."""
    costs = LiveCosts(PROFILE)
    for step in range(at + 8):
        costs.proposed(4, 4e6 if step == at else 400.0 + 100.0 * (step % 3))
        costs.observe(4, 4, 0, PROFILE.time(4))
    assert costs.own_us == pytest.approx(125.0, rel=0.4)
    assert costs.table.own_us == pytest.approx(125.0, rel=0.4)
    for _ in range(32):
        costs.proposed(4, 4_000.0)
    assert costs.own_us == pytest.approx(1_000.0), "what lasts is no stall"


def test_where_drafting_seems_to_save_time_longer_drafts_still_cost_more() -> None:
    """The profile was taken in a busy moment, and steps with drafts now take less than it says that
    verifying alone takes. Their sum is right; a token of a draft does not become a gain."""
    costs = LiveCosts(PROFILE)
    feed(costs, 1, 10_000.0)
    feed(costs, 5, float(PROFILE.dense[5]) - 2_000.0, 8 * REFRESH, drafted=4)
    step = float(costs.table.dense[5]) + costs.table.drafting(4, 1)
    assert step == pytest.approx(float(PROFILE.dense[5]) - 2_000.0, rel=0.05)
    each = [costs.table.drafting(k, 1) for k in range(1, 5)]
    assert all(b > a for a, b in itertools.pairwise(each))


def test_without_a_profile_the_first_steps_set_the_unit() -> None:
    costs = LiveCosts()
    assert costs.table is NOMINAL
    feed(costs, 1, 30_000.0, 3)
    assert costs.table.dense[1] == pytest.approx(30_000.0)
    assert costs.table.drafting(1, 1) == pytest.approx(GUESS * 30_000.0)


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=len(GRID)))
def test_many_more_tokens_never_cost_less_and_one_bad_time_does_not_raise_the_rest(
    times: list[float],
) -> None:
    table = CostTable("any", tuple(range(1, len(times) + 1)), tuple(times))
    few, more = times[: FEW - 1], times[FEW - 1 :]
    nearest = isotonic_regression(more).x if more else []
    assert table.dense[1 : len(times) + 1] == pytest.approx([*few, *nearest])
    assert (np.diff(table.dense[len(times) :]) >= 0).all(), "what was not measured ascends"


def test_what_few_tokens_take_is_followed_where_it_does_not_ascend() -> None:
    """Two tokens take longer than one or six: no draft is to be one token long."""
    few = dict(enumerate((35.1, 43.0, 37.3, 36.5, 36.4, 36.3, 39.0, 40.5), start=1))
    costs = LiveCosts(
        CostTable("profiled before", (1, 2, 4, 8, 16), (35.0, 36.0, 38.0, 41.0, 51.0))
    )
    for step in range(400):
        tokens = 1 + step % 8
        costs.observe(tokens, 1, 0, few[tokens])
    found = [costs.table.time(n) for n in few]
    assert found[1] > 1.1 * max(found[2:6]) and found[1] > 1.1 * found[0]


def test_a_step_counts_by_its_requests() -> None:
    """One step of eight requests and eight steps of one weigh the same."""
    together, alone = LiveRate(1.0), LiveRate(1.0)
    for _ in range(50):
        together.observe(committed=16, cycles=8, time=1.0)
        for _ in range(8):
            alone.observe(committed=2, cycles=1, time=1.0)
    assert together.value == pytest.approx(alone.value, rel=0.02)


def test_no_batch_is_too_large_and_no_rate_too_small() -> None:
    rate = LiveRate(2.0)
    rate.observe(committed=5000, cycles=5000, time=1.0)
    assert rate.value == pytest.approx(1.0, abs=0.01)
    rate.observe(committed=0, cycles=5000, time=1.0)
    assert rate.value == pytest.approx(LEAST, abs=0.01)


@pytest.mark.parametrize(
    ("steps", "low", "high"),
    [
        # of as many steps whatever the batch: after 128 of a rate of 1, 512 of 3 are not forgotten
        ([(512, 3, 1), (128, 1, 1)], 1.9, 2.4),
        ([(512, 192, 64), (128, 64, 64)], 1.9, 2.4),
        # a lone request does not follow the batch before it for long
        ([(512, 64, 64), (512, 3, 1)], 2.5, 3.0),
        # one step of few among steps of many forgets nothing
        ([(512, 192, 64), (1, 1, 1), (16, 64, 64)], 2.8, 3.0),
    ],
)
def test_so_many_steps_are_remembered(
    steps: list[tuple[int, int, int]], low: float, high: float
) -> None:
    rate = LiveRate(1.0)
    for times, committed, cycles in steps:
        for _ in range(times):
            rate.observe(committed=committed, cycles=cycles, time=1.0)
    assert low < rate.value <= high
