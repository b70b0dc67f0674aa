"""Never slower, for long, than the best fixed arm; and back by itself when the cause is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.contracts.bundle import PARAMETERS, frequency_policy
from decoder.contracts.features import FEATURE_ROW, FEATURES, NUM_FEATURES
from decoder.contracts.fields import LIMITS, ROW, STEP
from decoder.core.costs import LiveCosts
from decoder.core.events import Sink
from decoder.core.guards.controller import PROBE_EVERY
from decoder.core.guards.floor import (
    OPTIONS,
    WINDOW,
    WINDOW_CYCLES,
    Floor,
    Option,
    add_cycle,
    cache_arm_lengths,
    outcomes_of,
)
from decoder.core.router import RequestOptions
from decoder.core.table import CYCLE
from decoder.experiment.variants import Variant
from decoder.policy.first import first_policy
from decoder.policy.pricing import CostTable
from decoder.policy.rule import CACHE, MODEL, NONE
from tests.decoder.simulated import (
    Committed,
    K,
    Phase,
    Run,
    decode,
    fixed,
    make_router,
    trusting_policy,
)

PROMPT = [30, 31, 32]
WITHIN_CYCLES = 200
RELIEVED_WITHIN = 100
BAND = 0.97
LUCK = np.random.default_rng(0).random(3000) < 0.35
MILD = CostTable("mild", (1, 101), (1.0, 1.6), draft_us=0.2)
POISON = CostTable("poison", (1, 101), (1.0, 6.0))
MIDDLING = CostTable("middling", (1, 101), (1.0, 16.0))
STEEP = CostTable("steep", (1, 101), (1.0, 81.0), draft_us=0.2)


def copied(n: int) -> list[int]:
    """Text that a cache draft foresees."""
    phrase = np.random.default_rng(5).integers(1, 30, 40).tolist()
    return [phrase[i % 40] for i in range(n)]


def scattered(n: int, seed: int = 1) -> list[int]:
    """Text in which every match breaks off: few symbols, no order."""
    return np.random.default_rng(seed).integers(1, 6, n).tolist()


def healthy(position: int) -> int:
    return (2, 3, 1, 4, 0, 2, 3, 2)[position % 8]


def collapsed(position: int) -> int:
    return 0


def weak(position: int) -> int:
    return int(LUCK[position])


class Timed(LiveCosts):
    """Hears times of a ``true`` table."""

    true: CostTable

    def observe(self, tokens: int, rows: int, drafted: int, us: float) -> None:
        true_us = self.true.time(tokens) + self.true.drafting(drafted, rows)
        super().observe(tokens, rows, drafted, true_us)


PHASES = {
    "good": Phase(copied(16_000), healthy, MILD),
    "collapsed drafter": Phase(scattered(3000), collapsed, MILD),
    "poisoned cache": Phase(scattered(6000), healthy, MILD),
    "saturated batch": Phase(scattered(3000, 3), healthy, STEEP, batch=4),
    "steep": Phase(scattered(2000), healthy, POISON),
}


@cache
def best_fixed(name: str, first: int, *arms: str) -> float:
    """The rate of the best of ``arms``, after its first cycles."""
    rates = []
    for arm in arms:
        policy, has_model = fixed(arm)
        run = Run()
        decode(make_router(policy, has_model, floor=False), PHASES[name], run, PROMPT, "fixed")
        rates.append(run.rate(first))
    return max(rates)


@pytest.mark.parametrize("trouble", ["collapsed drafter", "poisoned cache", "saturated batch"])
def test_a_policy_that_is_wrong_is_relieved_and_comes_back(trouble: str) -> None:
    router = make_router(trusting_policy(), has_model=True, floor=True)
    for index, name in enumerate(("good", trouble, "good")):
        run, first = Run(), RELIEVED_WITHIN if name == trouble else WITHIN_CYCLES
        decode(router, PHASES[name], run, PROMPT, str(index))
        assert name == "good" or len(run.tokens) > 2 * WITHIN_CYCLES
        arms = ("model", "cache") if name == "good" else ("none", "model", "cache")
        assert run.rate(first) >= BAND * best_fixed(name, first, *arms), index
    assert router.controller.floor.serving == "policy"


POLICIES = {
    "trusting": trusting_policy(),
    "despairs of the drafter": trusting_policy(chance=0.01),
    "despairs of copies": trusting_policy(hazard=0.9),
    "counting": frequency_policy("s"),
    "first": first_policy("s"),
}


@pytest.mark.parametrize(
    ("start", "policy"),
    [*(("policy", name) for name in POLICIES), *((option, "trusting") for option in OPTIONS[1:])],
)
def test_a_mended_drafter_is_taken_up_whoever_is_in_force(start: Option, policy: str) -> None:
    router = make_router(POLICIES[policy], has_model=True, floor=True)
    decode(router, Phase(scattered(1500, 7), collapsed, MILD), Run(), PROMPT, "broken")
    router.controller.floor.serving, run = start, Run()
    decode(router, Phase(scattered(1500, 8), healthy, MILD), run, PROMPT, "mended")
    late = run.arms[WITHIN_CYCLES:]
    assert len(late) > 100 and late.count("model") > 0.9 * len(late)


DRAWS = np.random.default_rng(4).random((3, 4500, K))


@pytest.mark.parametrize("policy", ["trusting", "despairs of the drafter", "first"])
@pytest.mark.parametrize("draws", range(3))
def test_model_drafts_grow_back_when_their_later_tokens_are_mended(draws: int, policy: str) -> None:
    """While these were refused, drafts were cut before them, and told nothing of them."""

    def holds(*chances: float) -> Callable[[int], int]:
        held = DRAWS[draws] < np.array(chances)
        lengths = np.where(held.all(axis=1), K, held.argmin(axis=1))
        return lambda position: int(lengths[position])

    table = CostTable("dear drafts", (1, 101), (1.0, 1.6), draft_token_us=0.06)
    router = make_router(POLICIES[policy], has_model=True, floor=True)
    good, broken, run = holds(*[0.8] * K), holds(0.8, *[0.0] * (K - 1)), Run()
    for index, (accepts, tokens) in enumerate(((good, 1500), (broken, 1800), (good, 4500))):
        run = Run()
        text = scattered(tokens, 11 + index)
        decode(router, Phase(text, accepts, table), run, PROMPT, str(index))
    best = (1.0 + sum(0.8**n for n in range(1, K + 1))) / (table.time(1 + K) + K * 0.06)
    assert run.rate(4 * PROBE_EVERY) >= 0.93 * best


def test_a_plain_step_that_is_cheaper_than_its_profile_is_found_out() -> None:
    """Nothing else tells of it while every step drafts: without the look, a third is lost."""
    true = CostTable("true", (1, 2, 101), (0.6, 1.0, 1.6), draft_us=0.2)
    costs, run = Timed(MILD), Run()
    costs.true = true
    router = make_router(trusting_policy(hazard=0.9, chance=0.35), has_model=True, floor=True)
    decode(router, Phase(scattered(3000), weak, true), run, PROMPT, "x", costs)
    assert run.rate(WITHIN_CYCLES) >= BAND / true.dense[1]


@pytest.mark.parametrize("slower", [4.0, 30.0])
@pytest.mark.parametrize("arm", ["model", "cache"])
def test_drafts_that_were_thought_too_dear_are_found_out(arm: str, slower: float) -> None:
    """Thirty of them stalled, the first there were: who believes it makes none for ever."""
    phase = (
        Phase(copied(16_000), collapsed, MILD)
        if arm == "cache"
        else Phase(scattered(2000, 7), healthy, MILD)
    )
    costs, run = Timed(replace(MILD, verify_us=(1e4, 1.6e4), draft_us=2e3)), Run()
    costs.true = costs.table = replace(MILD, verify_us=(1e4, 1.6e4), draft_us=2e3)
    for step in range(40):
        tokens, drafted = (1 + K, K) if arm == "model" else (33, 0)
        LiveCosts.observe(costs, 1, 1, 0, 1e4)
        if step >= 10:
            us = slower * (costs.true.time(tokens) + costs.true.drafting(drafted, 1))
            LiveCosts.observe(costs, tokens, 1, drafted, us)
    router = make_router(trusting_policy(), has_model=True, floor=True)
    decode(router, phase, run, PROMPT, "x", costs)
    assert len(run.arms) > 1.5 * WITHIN_CYCLES and run.arms[-100:].count(arm) > 90


def test_a_cache_draft_needs_no_choice_to_be_known() -> None:
    """A policy that takes none sees what each would have brought, and so do the memories."""
    router = make_router(frequency_policy("s", float("inf")), has_model=False, floor=True)
    decode(router, Phase(scattered(400), collapsed, MILD), Run(), PROMPT, "broken")
    payoffs = router.memories.payoffs
    before, run = [payoffs.memories[name][1] for name in ("first", "log_payoff")], Run()
    decode(router, Phase(copied(1200), collapsed, MILD), run, PROMPT, "mended")
    after = [payoffs.memories[name][1] for name in ("first", "log_payoff")]
    assert all(a > b for a, b in zip(after, before, strict=True))
    assert router.controller.floor.serving == "cache"


def test_without_a_drafter_the_model_arm_is_no_candidate() -> None:
    router = make_router(trusting_policy(), has_model=False, floor=True)
    run = Run()
    decode(router, PHASES["steep"], run, PROMPT, "x")
    assert "model" not in run.arms
    assert run.rate(WITHIN_CYCLES) >= BAND * best_fixed("steep", WITHIN_CYCLES, "none", "cache")


@pytest.mark.parametrize(
    ("table", "least", "most"), [(MILD, 36, 36), (MIDDLING, 1, 18), (STEEP, 0, 0)]
)
def test_the_cache_arm_in_force_verifies_what_pays_by_match_and_price(
    table: CostTable, least: int, most: int
) -> None:
    """Whatever the policy expects: this one would verify next to nothing, or all there is."""
    lengths = set()
    for hazard in (0.6, 0.01):
        router = make_router(trusting_policy(hazard), has_model=False, floor=True)
        router.costs = LiveCosts(table, live=False)
        router.controller.floor.serving = "cache"
        text = copied(80)
        router.start("r", np.array([*PROMPT, *text], np.int32), RequestOptions(1 << 20, 1 << 21))
        router.observe([Committed("r", text[:9], 0)], 1)
        (decision,) = router.choose(["r"])
        lengths.add(len(decision.tokens))
        assert decision.arm == ("cache" if decision.tokens else "none")
    assert len(lengths) == 1 and least <= lengths.pop() <= most


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("table", [MILD, POISON, STEEP])
def test_the_cache_arm_costs_no_more_than_it_foresees_to_bring(
    table: CostTable, batch: int
) -> None:
    rng = np.random.default_rng(batch)
    features = np.zeros((batch, NUM_FEATURES), np.float32)
    features[:, FEATURES.index("prob_1")] = rng.uniform(0.2, 1.0, batch)
    features[:, FEATURES.index("match_len")] = matched = rng.integers(1, 33, batch)
    features[:, FEATURES.index("draft_len")] = 4 * matched
    lengths = cache_arm_lengths(features.view(FEATURE_ROW)[:, 0], batch, 0, 1.5, table.dense)
    whole = table.time(batch + 4 * int(matched.sum())) - table.time(batch)
    spent = table.time(batch + int(lengths.sum())) - table.time(batch)
    brings = sum(
        float(row[FEATURES.index("prob_1")]) * match / (match + place)
        for row, match, length in zip(features, matched, lengths, strict=True)
        for place in range(1, length + 1)
    )
    assert spent <= 1.02 * brings * table.time(batch) / (1.5 * batch)
    assert spent <= whole and (lengths <= 4 * matched).all()


Options = tuple[tuple[float, float], ...]
"""Tokens and time of each option."""


def cycles(floor: Floor, stretch: np.ndarray, committed: int, outcomes: Options) -> None:
    """Let the floor take in a cycle."""
    add_cycle(floor.state[0], stretch[0], committed, np.array(outcomes), 1)


def test_a_good_past_hides_no_change() -> None:
    """A thousand cycles ten times faster than any fixed arm buy the policy no later loss."""
    floor, stretch = Floor(), np.zeros(1, WINDOW)
    ahead: Options = ((10.0, 1.0), (1.0, 1.0), (1.0, 1.2), (1.0, 1.2))
    behind: Options = ((1.0, 1.5), (1.0, 1.0), (2.0, 1.2), (1.0, 1.5))
    for _ in range(1000):
        cycles(floor, stretch, 10, ahead)
    assert (floor.serving, floor.fallbacks) == ("policy", 0)
    lasted = 0
    while floor.serving == "policy":
        cycles(floor, stretch, 1, behind)
        lasted += 1
    assert floor.serving == "model"
    assert lasted <= 2 * WINDOW_CYCLES
    for _ in range(20 * WINDOW_CYCLES):  # and is held as long as it is far behind
        cycles(floor, stretch, 1, behind)
    assert (floor.serving, floor.fallbacks) == ("model", 1)


def test_luck_of_one_stretch_relieves_nobody() -> None:
    floor, stretch = Floor(), np.zeros(1, WINDOW)
    even: Options = ((1.0, 1.0),) * 4
    unlucky: Options = ((1.0, 1.9), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    for outcomes in (even, unlucky, even):
        for _ in range(WINDOW_CYCLES):
            cycles(floor, stretch, 1, outcomes)
    assert floor.serving == "policy"


def test_a_look_at_the_drafter_goes_to_whom_it_has_least_to_catch_up_with() -> None:
    router = make_router(trusting_policy(chance=0.01), has_model=True, floor=True)
    prompts = {"long": 500, "short": 20, "middle": 90}
    for name, length in prompts.items():
        ids = np.random.default_rng(length).integers(1, 30, length).astype(np.int32)
        router.start(name, ids, RequestOptions(1 << 20, 1 << 21))
    router.cache.index(None)  # or the first steps would want model drafts for the lack of others
    looked = []
    for _ in range(2 * PROBE_EVERY + 2):
        decisions = router.choose(list(prompts))
        looked += [n for n, d in zip(prompts, decisions, strict=True) if d.arm == "model"]
        router.observe([Committed(n, [7], 1 if n in looked[-1:] else 0) for n in prompts], 4)
    assert looked == ["short"] * len(looked) and looked


COSTS = CostTable("t", (1, 8, 32), (10.0, 30.0, 50.0), draft_us=2.0, draft_row_us=0.5)


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
    found, cycle, event = np.zeros((len(OPTIONS), 2)), np.zeros(1, CYCLE), np.zeros(1, ROW)
    cycle["arm"], cycle["policy_arm"], cycle["policy_len"] = arm, wanted, wanted_len
    cycle["cached_len"] = draft_len
    cycle["step"] = step.wanted, step.drafting, step.cached, 0, K, 0, 1, 0, 0, 0
    event["batch_size"], event["accepted"], event["verified_len"] = step.batch, accepted, verified
    event["drafted_len"], event["model_accepted"], event["predicted_model"] = drafted, seen, 1.5
    outcomes_of(cycle[0], event[0], COSTS.dense, COSTS.prices, found)
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
    told = Sink(None).step(Variant("", frequency_policy("s", threshold)), -1, 0.0, 1, 0.0)
    assert low <= told.view(STEP)[0]["parameter"] <= high
