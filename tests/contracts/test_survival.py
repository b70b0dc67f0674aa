"""Survival is the product of the chances not to break off, and the rate rule is the best choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.costs import MAX_TOKENS, NOMINAL, CostTable
from decoder.contracts.rule import (
    CACHE,
    MODEL,
    NONE,
    Situation,
    choose_batch,
    choose_each,
    choose_one,
    draft_length,
)
from decoder.contracts.survival import BUCKETS, chain_yields, naive_survival, survival, yields_of

logits = st.lists(st.floats(-8, 8, width=32), min_size=BUCKETS, max_size=BUCKETS)


@given(logits, st.integers(1, 512))
def test_survival_is_the_running_product_of_its_definition(values: list[float], n: int) -> None:
    (curve,) = survival(np.array([values], np.float32), np.array([n]))
    assert np.allclose(curve, naive_survival(np.array(values), n), atol=1e-5)
    assert (np.diff(curve) <= 0).all()


def test_nothing_survives_behind_its_end() -> None:
    curves = survival(np.full((3, BUCKETS), -2.0, np.float32), np.array([0, 2, 5]))
    assert [int((row > 0).sum()) for row in curves] == [0, 2, 5]


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=3), st.integers(0, 8))
def test_a_chain_yields_a_geometric_sum(odds: list[float], k: int) -> None:
    yields = chain_yields(np.array(odds, np.float32), k)
    assert yields.shape == (len(odds), k)
    for row, odd in zip(yields, odds, strict=True):
        chance = 1 / (1 + np.exp(-odd))
        sums = [sum(chance**j for j in range(1, i + 1)) for i in range(1, k + 1)]
        assert row.tolist() == pytest.approx(sums, abs=1e-4)


curve = st.lists(st.floats(0.015625, 1.0, width=32), max_size=4).map(
    lambda c: sorted(c, reverse=True)
)
situations = st.builds(
    lambda slope, jump, draft, k: (
        Situation(
            CostTable("t", (1, 4, 5, MAX_TOKENS), (1.0, 1 + 3 * slope, 1 + 4 * slope + jump, 1e4)),
            k,
        )
        if draft < 0
        else Situation(
            CostTable("t", (1, MAX_TOKENS), (1.0, 1.0 + slope * (MAX_TOKENS - 1)), draft_us=draft),
            k,
        )
    ),
    st.floats(0.0, 0.5),
    st.floats(0.0, 1.0),
    st.floats(-0.2, 1.0),
    st.integers(0, 3),
)


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
    plain = s.costs.dense[n]
    tokens = sum(
        float(model[i]) if arm == MODEL else float(curves[i, :length].sum())
        for i, (arm, length) in enumerate(choice)
    )
    spent = sum(length for _, length in choice)
    drafting = s.costs.drafting(s.model_len, n) if any(a == MODEL for a, _ in choice) else 0.0
    return tokens * plain / (rate * n) - (s.costs.dense[n + spent] - plain) - drafting


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
        choose_each(curves, models, np.array([1]), rate, s),
        choose_one(curves[0], float(models[0]), rate, s),
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
    choice = choose_batch(curves, models, rate, s, len(rows))
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

    found = draft_length(yields, rate, s, 1)
    assert gain(found) == pytest.approx(max(gain(j) for j in range(1, k + 1)), abs=1e-6)


def test_a_drafter_for_many_makes_what_those_gain_who_gain() -> None:
    table = CostTable("t", (1, 64), (1.0, 1.63), draft_token_us=0.05)
    likely, unlikely = yields_of(0.95, 6), yields_of(0.2, 6)

    def length(*rows: list[float]) -> int:
        return draft_length(np.array(rows, np.float32), 2.0, Situation(table, 6), 4)

    assert length(likely, likely, likely, likely) == 6
    assert length(unlikely, unlikely, unlikely, unlikely) == 1
    assert length(likely, unlikely, unlikely, unlikely) == 6


def test_the_drafter_runs_only_if_it_pays_for_the_whole_batch() -> None:
    table = CostTable("t", (1, 64), (1.0, 1.6), draft_us=1.0)
    curves = padded([[0.9] * 4] * 8)
    model = np.array([2.5] + [0.0] * 7, np.float32)
    alone = choose_batch(curves, model, 2.0, Situation(table, 4), 8)
    assert MODEL not in alone.arms
    together = choose_batch(curves[:, :0], np.full(8, 2.5, np.float32), 2.0, Situation(table, 4), 8)
    assert (together.arms == MODEL).all()


def test_costly_verification_cuts_drafts_to_their_likely_part() -> None:
    curves = padded([[0.9, 0.8, 0.3, 0.1]])
    no_model = np.zeros(1, np.float32)
    lengths = [
        int(choose_each(curves, no_model, np.array([1]), 1.0, Situation(table)).lengths[0])
        for slope in (0.01, 0.2, 0.5, 0.95)
        for table in (CostTable("t", (1, 11), (1.0, 1.0 + 10 * slope)),)
    ]
    assert lengths == [4, 3, 2, 0]


def test_nominal_costs_are_a_fifth_more_for_32_tokens() -> None:
    assert NOMINAL.dense[33] == pytest.approx(1.192)


@pytest.mark.parametrize(
    ("tokens", "times"),
    [((2, 4), (1.0, 2.0)), ((1, 1), (1.0, 2.0)), ((1, 2), (1.0, np.nan)), ((1, 2), (0.0, 1.0))],
)
def test_a_table_that_makes_no_sense_is_refused(tokens: tuple, times: tuple) -> None:
    with pytest.raises(ValueError, match="cost table"):
        CostTable("t", tokens, times)


def test_more_tokens_never_cost_less_whatever_was_measured() -> None:
    table = CostTable("t", (1, 2, 4, 8), (10.0, 9.0, 12.0, 11.0))
    assert (np.diff(table.dense) >= 0).all()
