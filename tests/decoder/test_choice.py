"""Survival is its definition; the compiled step chooses what its own choose; nothing beats it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.bundle import BUCKET_ENDS, BUCKETS, OUTPUTS, Kind, Policy
from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.policy.estimate import Estimate, estimate, network, survival
from decoder.policy.loops import Terms, draft_length, share_out, yields_of_places
from decoder.policy.pricing import (
    MAX_TOKENS,
    NOMINAL,
    CostTable,
    step_time,
    token_value,
)
from decoder.policy.rule import CACHE, MODEL, NONE
from learner.evaluation.independent import Choice, Situation, cost_shares, decide_each
from tests.conftest import random_policy
from tests.decoder.simulated import Wanted, trusting_policy, wanted_of, yields_of

SURVIVAL = Policy("s", 0, 0.0, "survival")


def even(chance: float) -> np.ndarray:
    """Log-odds of model drafts whose every token has the same chance."""
    return np.full(4, np.log(chance / (1.0 - chance)))


def shared(
    curves: np.ndarray, models: np.ndarray, rate: float, s: Situation, room: int = 1 << 40
) -> Choice:
    """The step of all these requests."""
    n = len(models)
    terms = Terms(s.costs.dense[n] / (rate * n), n, room, s.costs.prices)
    return Choice(*share_out(curves, models, s.model_len, terms, s.costs.dense)[:2])


logits = st.lists(st.floats(-8, 8, width=32), min_size=BUCKETS, max_size=BUCKETS)


def naive_survival(logits: np.ndarray, length: int) -> list[float]:
    """The definition, one position at a time."""
    alive, curve = 1.0, []
    for position in range(1, length + 1):
        bucket = sum(position > end for end in BUCKET_ENDS)
        alive *= 1.0 - 1.0 / (1.0 + float(np.exp(-np.float64(logits[bucket]))))
        curve.append(alive)
    return curve


@given(logits, st.integers(1, 512))
def test_survival_is_the_running_product_of_its_definition(values: list[float], n: int) -> None:
    (curve,) = survival(np.array([values], np.float32), np.array([n]))
    assert np.allclose(curve, naive_survival(np.array(values), n), atol=1e-5)
    assert (np.diff(curve) <= 0).all()


@given(st.floats(0.001, 0.999), st.integers(1, 8))
def test_a_chain_yields_a_geometric_sum(chance: float, k: int) -> None:
    yields = yields_of_places(np.full(k, np.log(chance / (1 - chance))), k)
    assert yields[-1] == pytest.approx(sum(chance**j for j in range(1, k + 1)), rel=1e-5)


@pytest.mark.parametrize(
    ("tokens", "times"),
    [((2, 4), (1.0, 2.0)), ((1, 1), (1.0, 2.0)), ((1, 2), (1.0, np.nan)), ((1, 2), (0.0, 1.0))],
)
def test_a_table_that_makes_no_sense_is_refused(
    tokens: tuple[int, ...], times: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match="cost table"):
        CostTable("t", tokens, times)


curve = st.lists(st.floats(0.015625, 1.0, width=32), max_size=4).map(
    lambda c: sorted(c, reverse=True)
)
slopes = st.floats(0.0, 0.5)
stepped = st.builds(
    lambda slope, jump: CostTable(
        "t", (1, 4, 5, MAX_TOKENS), (1.0, 1 + 3 * slope, 1 + 4 * slope + jump, 1e4)
    ),
    slopes, st.floats(0.0, 1.0),
)  # fmt: skip
straight = st.builds(
    lambda slope, draft: CostTable(
        "t", (1, MAX_TOKENS), (1.0, 1.0 + slope * (MAX_TOKENS - 1)), draft_us=draft
    ),
    slopes, st.floats(0.0, 1.0),
)  # fmt: skip
situations = st.builds(Situation, stepped | straight, st.integers(0, 3))


def padded(curves: list[list[float]]) -> np.ndarray:
    out = np.zeros((len(curves), max(map(len, curves), default=0)), np.float32)
    for row, values in zip(out, curves, strict=True):
        row[: len(values)] = values
    return out


def worth(
    curves: np.ndarray, model: np.ndarray, choice: list[tuple[int, int]], rate: float, s: Situation
) -> float:
    """What a step of these (arm, length) is worth, from the rule's definition."""
    n = len(choice)
    tokens = sum(
        float(model[i]) if arm == MODEL else float(curves[i, :length].sum())
        for i, (arm, length) in enumerate(choice)
    )
    spent = sum(length for _, length in choice)
    drafted = s.model_len if any(arm == MODEL for arm, _ in choice) else 0
    time = step_time(s.costs, n, spent, drafted) - step_time(s.costs, n, 0)
    return tokens * float(token_value(n, rate, s.costs.dense)) - time


def options(row: np.ndarray, k: int) -> list[tuple[int, int]]:
    found = [(NONE, 0)] + [(CACHE, j) for j in range(1, int((row > 0).sum()) + 1)]
    return found + ([(MODEL, k)] if k else [])


@settings(max_examples=200, deadline=None)
@given(curve, st.floats(0, 3, width=32), st.floats(0.5, 8), situations)
def test_a_lone_request_gets_the_best_choice_there_is(
    values: list[float], model: float, rate: float, s: Situation
) -> None:
    curves, models = padded([values]), np.array([model], np.float32)
    best = max(worth(curves, models, [o], rate, s) for o in options(curves[0], s.model_len))
    for choice in (
        decide_each(SURVIVAL, Estimate(models, models, curves), models, s, np.array([1]), rate),
        shared(curves, models, rate, s),
    ):
        mine = [(int(choice.arms[0]), int(choice.lengths[0]))]
        assert worth(curves, models, mine, rate, s) == pytest.approx(best, abs=1e-5)


@settings(max_examples=150, deadline=None)
@given(st.lists(curve, min_size=2, max_size=3), st.floats(0.5, 8), situations, st.data())
def test_a_batch_is_never_worse_than_the_best_cut_of_cache_drafts_or_model_drafts_for_all(
    rows: list[list[float]], rate: float, s: Situation, data: st.DataObject
) -> None:
    curves = padded(rows)
    models = np.array([data.draw(st.floats(0, 3, width=32)) for _ in rows], np.float32)
    choice = shared(curves, models, rate, s)
    mine = list(zip(choice.arms.tolist(), choice.lengths.tolist(), strict=True))
    found = worth(curves, models, mine, rate, s)
    every = itertools.product(*(options(row, 0) for row in curves))
    fixed = [worth(curves, models, list(c), rate, s) for c in every]
    if s.model_len:
        fixed.append(worth(curves, models, [(MODEL, s.model_len)] * len(rows), rate, s))
    assert found >= max(fixed) - 1e-5


@settings(max_examples=200, deadline=None)
@given(st.floats(0.02, 0.98), st.floats(0.5, 8), situations, st.integers(1, 5))
def test_a_lone_drafter_makes_as_many_tokens_as_pay_best(
    chance: float, rate: float, s: Situation, k: int
) -> None:
    yields = np.array([yields_of(chance, k)], np.float32)
    none = padded([[]])

    def gain(length: int) -> float:
        asked = Situation(s.costs, length)
        return worth(none, yields[:, length - 1], [(MODEL, length)], rate, asked)

    terms = Terms(s.costs.dense[1] / rate, 1, 1 << 40, s.costs.prices)
    found = draft_length(yields, terms, s.costs.dense)
    assert gain(found) == pytest.approx(max(gain(j) for j in range(1, k + 1)), abs=1e-6)


def test_a_drafter_for_many_makes_what_those_gain_who_gain() -> None:
    table = CostTable("t", (1, 64), (1.0, 1.63), draft_token_us=0.05)
    likely, unlikely = yields_of(0.95, 6), yields_of(0.2, 6)

    def length(*rows: list[float]) -> int:
        terms = Terms(table.dense[4] / (2.0 * 4), 4, 1 << 40, table.prices)
        return draft_length(np.array(rows, np.float32), terms, table.dense)

    assert length(likely, likely, likely, likely) == 6
    assert length(unlikely, unlikely, unlikely, unlikely) == 1
    assert length(likely, unlikely, unlikely, unlikely) == 6


@given(st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_outputs_are_those_of_the_network(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    widths = [NUM_FEATURES, *rng.integers(1, 70, int(rng.integers(0, 3))).tolist(), BUCKETS + 1]
    layers = tuple(
        (rng.normal(0, 0.3, (a, b)).astype(np.float32), rng.normal(0, 1, b).astype(np.float32))
        for a, b in itertools.pairwise(widths)
    )
    std = rng.uniform(0.5, 2.0, NUM_FEATURES).astype(np.float32)
    policy = Policy("s", 1, 2.0, "survival", std=std, layers=layers)
    features = some_features(n, seed)
    hidden = features
    for place, (weight, bias) in enumerate(policy.folded):
        hidden = np.maximum(hidden, 0.0) if place else hidden
        hidden = hidden @ weight + bias
    assert np.allclose(network(policy, features), hidden, atol=1e-3)


def a_policy(kind: Kind, seed: int = 0, *, use_model: bool = True) -> Policy:
    rng = np.random.default_rng(seed)
    shape = NUM_FEATURES, OUTPUTS[kind]
    layers = ((rng.normal(0, 0.3, shape).astype(np.float32), np.zeros(shape[1], np.float32)),)
    return Policy(
        "s", 1, 2.0, kind, layers=layers if shape[1] else (), use_model=use_model, model_payoff=1.5
    )


def some_features(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, NUM_FEATURES)).astype(np.float32)
    features[:, FEATURES.index("draft_len")] = rng.integers(1, 30, n)
    features[:, FEATURES.index("score")] = rng.random(n) * 5
    return features


@pytest.mark.parametrize("kind", ["frequency", "payoff", "survival"])
@pytest.mark.parametrize("use_model", [True, False])
@given(seed=st.integers(0, 2**32 - 1), k=st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_a_lone_request_is_decided_as_the_learner_replays_it(
    kind: Kind, use_model: bool, seed: int, k: int
) -> None:
    policy, features = a_policy(kind, seed, use_model=use_model), some_features(1, seed)
    mine = wanted_of(policy, features, np.array([0]), 1, NOMINAL, 2.0, k)
    found = estimate(policy, features)
    step = Situation(NOMINAL, mine.model_len)
    theirs = decide_each(policy, found, mine.model, step, np.array([1]), 2.0)
    assert mine.expected == pytest.approx(found.expected, rel=1e-4)
    assert (mine.arms, mine.lengths) == (theirs.arms, theirs.lengths)


tables = st.builds(
    lambda slope, jump, draft, row, own, graphs: CostTable(
        "t", (1, 40, 41, 900), (1.0, 1.0 + slope, 1.0 + slope + jump, 1.0 + 9 * slope + jump),
        draft_us=draft, draft_token_us=draft, draft_row_us=row, own_us=own,
        graphs=tuple(range(8, 8 * graphs + 1, 8)),
    ),
    st.floats(0.0, 5.0), st.floats(0.0, 2.0), st.floats(0.0, 1.0), st.floats(0.0, 0.1),
    st.floats(0.0, 0.1), st.integers(0, 600),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(tables, st.integers(1, 6000), st.integers(0, 9000))
def test_a_table_ends_in_a_line(costs: CostTable, rows: int, drafts: int) -> None:
    grown = rows + drafts
    beyond = max(grown - MAX_TOKENS, 0) * costs.slope
    time = float(costs.dense[min(grown, MAX_TOKENS)]) + beyond
    assert costs.time(grown) == pytest.approx(time) == float(costs.verifying(grown))


@settings(max_examples=100, deadline=None)
@given(tables, st.lists(st.integers(0, 64), min_size=1, max_size=40), st.integers(0, 8),
       st.integers(0, 3000))  # fmt: skip
def test_what_the_requests_of_a_step_pay_adds_up_to_it(
    costs: CostTable, lengths: list[int], drafted: int, prefill: int
) -> None:
    rows, drafts = len(lengths), sum(lengths)
    asked = max(rows // 2, 1)
    spent = np.where(np.arange(rows) < asked, costs.drafting(drafted, rows), 0.0)
    paid = cost_shares(costs, rows, lengths, drafts, spent, asked, prefill).sum()
    assert paid == pytest.approx(step_time(costs, rows, drafts, drafted, prefill))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 40), st.integers(0, 4),
       st.sampled_from(["frequency", "payoff", "survival"]))  # fmt: skip
def test_a_step_verifies_no_more_than_it_has_room_for(
    n: int, seed: int, most: int, k: int, kind: Kind
) -> None:
    features, policy = some_features(n, seed), replace(a_policy(kind, seed), threshold=0.0)
    owners = np.arange(0, n, 1 + seed % 2)
    step = (policy, features[: len(owners)], owners, n, NOMINAL, 8.0, k)
    bound, free = (wanted_of(*step, odds=even(0.9), budget=m) for m in (most, None))
    assert bound.lengths.sum() <= most
    assert ((bound.arms == NONE) == (bound.lengths == 0)).all()
    if most >= free.lengths.sum() and kind != "survival":
        assert (bound.lengths == free.lengths).all()


def test_room_goes_where_it_buys_most() -> None:
    curves, none = padded([[0.9, 0.8], [0.5, 0.4], [0.95]]), np.zeros(3, np.float32)
    step = shared(curves, none, 1.0, Situation(NOMINAL), room=2)
    assert step.lengths.tolist() == [1, 0, 1]
    drafter = Situation(CostTable("t", (1, 64), (1.0, 1.06)), 2)
    model = np.array([0.5, 1.5, 1.9], np.float32)
    step = shared(curves[:, :0], model, 1.0, drafter, room=5)
    assert step.arms.tolist() == [NONE, MODEL, MODEL] and step.lengths.sum() == 4


def test_a_request_that_the_drafter_did_not_read_has_no_model_draft() -> None:
    costs = CostTable("t", (1, MAX_TOKENS), (1.0, 1.0 + 0.01 * (MAX_TOKENS - 1)), draft_us=0.05)
    features, nobody = np.zeros((0, NUM_FEATURES), np.float32), np.zeros(0, np.int64)

    def chosen(policy: Policy, *unable: int) -> Wanted:
        asked = policy, features, nobody, 3, costs, 1.0, 4
        return wanted_of(*asked, odds=even(0.6), unable=unable)

    trusting = trusting_policy()
    assert chosen(trusting).arms.tolist() == [MODEL] * 3 and chosen(trusting).model_gain > 0.0
    some = chosen(trusting, 0, 2)
    assert some.arms.tolist() == [NONE, MODEL, NONE] and some.lengths[[0, 2]].tolist() == [0, 0]
    assert some.model[1] > 0.0 and some.model[[0, 2]].tolist() == [0.0, 0.0]
    assert some.model_gain == chosen(trusting).model_gain == chosen(trusting, 0, 1, 2).model_gain
    assert chosen(trusting, 0, 1, 2).arms.tolist() == [NONE] * 3
    threshold = random_policy()
    assert chosen(threshold, 1).arms.tolist() == [MODEL, NONE, MODEL]
    assert chosen(threshold, 1).lengths.tolist() == [4, 0, 4]
    assert chosen(threshold).model_gain == np.inf
