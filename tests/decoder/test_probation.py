"""A bad promotion costs some plain steps; a good one is not taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import TRIAL, Policy
from decoder.core.guards.floor import FORMER, POLICY, WINDOW, WINDOW_CYCLES
from decoder.core.guards.probation import (
    COMPARED,
    CYCLES,
    PROBATION,
    RETURNED,
    count_request,
    update_probation,
)
from decoder.experiment.interleaver import Interleaver
from decoder.policy.first import first_policy
from decoder.policy.pricing import CostTable
from tests.decoder.simulated import Phase, Router, Run, decode, make_router, trusting_policy

DEAR = CostTable("dear", (1, 101), (1.0, 16.0))
NEVER, LONG = (replace(trusting_policy(hazard), version=2) for hazard in (0.9, 0.01))
FIRST = first_policy("s")
REQUESTS = 8


def holding(seed: int) -> list[int]:
    """Text whose copies go on."""
    return [*map(int, np.random.default_rng(seed).integers(1, 30, 40))] * 8


def breaking(seed: int) -> list[int]:
    """Text whose copies break at the sixth token."""
    draw = np.random.default_rng(seed)
    records = draw.integers(1, 30, (40, 6))
    return [int(token) for token in records[draw.integers(0, 40, 50)].ravel()]


def mixed(seed: int) -> list[int]:
    """Text of both kinds, and of neither."""
    noise = np.random.default_rng(seed).integers(1, 6, 60).tolist()
    return [*holding(seed)[:120], *breaking(seed)[:120], *noise]


def time_of(
    router: Router, texts: Sequence[list[int]], table: CostTable, name: str, batch: int = 1
) -> float:
    """Plain steps that a router takes for requests one after another."""
    run = Run()
    for index, text in enumerate(texts):
        decode(router, Phase(text, lambda at: 0, table, batch), run, [30, 31], f"{name}{index}")
    return sum(run.time)


def promoted(former: Policy, champion: Policy, table: CostTable = DEAR) -> Router:
    """A router whose former policy has served for a while."""
    router = make_router(former, has_model=False, floor=True)
    time_of(router, [breaking(1)], table, "before")
    router.policy = champion
    return router


@pytest.mark.parametrize(("champion", "batch"), [(NEVER, 1), (NEVER, 3), (LONG, 1)])
def test_a_bad_promotion_costs_some_plain_steps(champion: Policy, batch: int) -> None:
    """The former policy drafts up to where copies break, which no fixed arm does."""
    texts = [breaking(seed) for seed in range(REQUESTS)]
    best = time_of(promoted(FIRST, FIRST), texts, DEAR, "x", batch)
    costs = []
    for version in (2, FIRST.version):  # one that is no newer is not on probation
        published = replace(champion, version=version)
        router = promoted(FIRST, published)
        costs.append(time_of(router, texts, DEAR, "x", batch) - best)
        assert (router.probation.serving(published) is FIRST) == (version == 2)
    print(f"\n{batch} at a time: {costs[0]:.0f} plain steps, {costs[1]:.0f} without probation")
    assert costs[0] < min(60.0, costs[1] / 2.0)


@pytest.mark.parametrize("seed", range(12))
def test_a_good_promotion_is_never_taken_back(seed: int) -> None:
    router = promoted(replace(LONG, version=1), replace(FIRST, version=2))
    time_of(router, [mixed(100 * seed + each) for each in range(6)], DEAR, "x")
    assert router.probation.state["left"] > 0
    draw = np.random.default_rng(seed)
    for gain, spread in ((0.01, 0.05), (0.03, 0.1), (0.05, 0.2)):
        gains = STEPS * draw.normal(gain, spread, 1000)
        assert probation(gains)[0] == 0, (gain, spread)


STEPS = 40.0
"""Plain steps of a request."""


def probation(gains: np.ndarray) -> tuple[int, float]:
    """After how many requests, that gain so many plain steps each, the former policy is back, 0 if
    never; and what was gained until then."""
    state, window = np.zeros(1, PROBATION), np.zeros(1, WINDOW)
    state["left"], gained, windows = CYCLES, 0.0, int(STEPS) // WINDOW_CYCLES
    for number, gain in enumerate(gains.tolist(), 1):
        compared = np.zeros(1, COMPARED)
        for _ in range(windows):
            steps = window["steps"][0]
            steps[POLICY], steps[FORMER] = WINDOW_CYCLES, WINDOW_CYCLES + gain / windows
            window["weight"], gained = WINDOW_CYCLES, gained + gain / windows
            update_probation(state[0], compared[0], window[0], 1)
            if state["left"] <= 0:
                return (number if state["left"] == RETURNED else 0), gained
        count_request(state[0], compared[0])
    return 0, gained


def test_a_rare_and_large_loss_is_cut_off() -> None:
    """One request in a hundred loses 99 plain steps, all others gain one."""
    draw = np.random.default_rng(1)
    lost = draw.random((40, 1000)) < 0.01
    for gains in np.where(lost, -99.0, draw.uniform(0.5, 1.5, lost.shape)):
        number, gained = probation(gains)
        assert 0 < number == 1 + int((gains < 0.0).argmax())
        assert gained - gains[: number - 1].sum() > -60.0


def test_a_probation_ends() -> None:
    assert probation(np.zeros(CYCLES // int(STEPS) + 1)) == (0, 0.0)


def test_a_champion_that_comes_meanwhile_is_compared_with_what_served() -> None:
    router = promoted(FIRST, LONG)
    router.choose([])
    assert router.probation.state["left"] == CYCLES
    router.policy = again = replace(LONG, publication=7)  # the same under another number
    router.choose([])
    time_of(router, [breaking(seed) for seed in range(2, 6)], DEAR, "a")
    assert router.probation.serving(again) is FIRST
    router.policy = replace(LONG, publication=8)
    router.choose([])
    assert router.probation.serving(router.policy) is FIRST
    router.policy = third = replace(trusting_policy(0.02), version=3)
    time_of(router, [breaking(seed) for seed in range(6, 14)], DEAR, "b")
    assert router.probation.serving(third) is FIRST  # not the one that had fallen behind
    router.policy = replace(trusting_policy(0.2), version=0)
    router.choose([])
    assert router.probation.state["left"] == 0  # gone back to: nothing is compared


def test_a_worker_without_a_floor_has_no_probation() -> None:
    router = make_router(FIRST, has_model=False, floor=False)
    time_of(router, [breaking(1)], DEAR, "before")
    router.policy = LONG
    time_of(router, [breaking(seed) for seed in range(REQUESTS)], DEAR, "x")
    assert router.probation.serving(LONG) is LONG


@pytest.mark.parametrize("batch", [4, 12])
def test_a_trial_at_the_same_time_changes_nothing_of_it(batch: int) -> None:
    """Neither do the trial's steps count, nor does it stop when the former policy is back; and two
    workers that see the same decide the same in the same step."""
    routers = []
    for _ in range(2):
        router = promoted(FIRST, LONG)
        held = {TRIAL: replace(NEVER, version=3, role=TRIAL, share=0.3)}
        router.interleaver = Interleaver((), 0.0, held, FIRST, seed=3)
        for index in range(60):
            time_of(router, [breaking(index)], DEAR, f"x{index}/", batch)
            if router.probation.serving(LONG) is FIRST:
                break
        routers.append((index, router.interleaver.number, router.probation.state.tolist()))
        rounds = router.interleaver.rounds_made
        time_of(router, [breaking(index) for index in range(8)], DEAR, "y", batch)
        assert router.interleaver.rounds_made > rounds
        assert {each.variant.policy.version for round_ in [*router.interleaver.rounds][rounds:]
                for each in round_.blocks} == {FIRST.version, 3}  # fmt: skip
    assert routers[0] == routers[1] and routers[0][0] < 59
