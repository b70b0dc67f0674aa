"""The ratio of two sides' rates: what it is, and that its interval holds whenever one looks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import norm, t

from decoder.contracts.bundle import CHAMPION, TRIAL
from decoder.contracts.trials import PLAIN, Block, Round
from learner.evaluation.effect import (
    FEWEST,
    FEWEST_AT_END,
    TIGHTEST,
    UNKNOWN,
    effect,
    effect_of,
    gain_effect,
    pairs_to_tell,
)

Drawn = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def pairs(rng: np.random.Generator, n: int, ratio: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of as many tokens; times share the traffic of their round, with noise of their own."""
    traffic = np.exp(rng.normal(0.0, 0.5, n))
    own = np.exp(rng.normal(0.0, 0.3, (2, n)))
    tokens = np.full(n, 16.0)
    mine, other = traffic * own[0] / ratio, traffic * own[1]
    return np.stack([tokens, mine], axis=1), np.stack([tokens, other], axis=1)


def test_it_is_tokens_over_time_of_all_pairs_and_not_a_mean_of_ratios() -> None:
    mine, other = [[10, 1.0], [30, 9.0]], [[10, 2.0], [10, 2.0]]
    assert effect(mine, other).ratio == pytest.approx((40 / 10) / (20 / 4))


def test_too_few_pairs_say_nothing_and_empty_blocks_are_no_pairs() -> None:
    mine, other = pairs(np.random.default_rng(0), FEWEST - 1)
    found = effect(mine, other)
    assert (found.low, found.high, found.pairs) == (0.0, math.inf, FEWEST - 1)
    empty = np.zeros((5, 2))
    assert effect(np.concatenate([mine, empty]), np.concatenate([other, empty])) == found
    assert effect([], []).pairs == 0


@pytest.mark.parametrize("count", [1, FEWEST, 60])
def test_no_number_of_a_round_is_too_much_for_it(count: int) -> None:
    extremes = [5e-324, 1e-300, 1e-12, 1e-5, 1.0, 1e9, 1e15, 1e300]
    for numbers in itertools.product(extremes, repeat=4):
        usual = np.tile([100.0, 1e6], (count - 1, 1))
        mine, other = (np.vstack([usual, each]) for each in (numbers[:2], numbers[2:]))
        found = effect(mine, other)
        assert 0.0 < found.ratio < math.inf and 0.0 <= found.low <= found.ratio <= found.high
        alike = effect(np.tile(numbers[:2], (count, 1)), np.tile(numbers[2:], (count, 1)))
        assert 0.0 < alike.ratio < math.inf and alike.low <= alike.ratio <= alike.high


def lucky(rng: np.random.Generator, n: int, ratio: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Blocks that take as long as their text is strange, of which it is known how much is not."""
    known = rng.beta(1.0, 1.5, (2, n))
    times = (1.3 - known) * np.exp(rng.normal(0.0, 0.15, (2, n))) / [[ratio], [1.0]]
    tokens = np.full(n, 16.0)
    mine, other = (
        np.stack([tokens, t, 16.0 * k], axis=1) for t, k in zip(times, known, strict=True)
    )
    return mine, other


def test_what_luck_explains_is_taken_off_and_nothing_else() -> None:
    mine, other = lucky(np.random.default_rng(6), 200, ratio=1.1)
    bare, found = effect(mine[:, :2], other[:, :2]), effect(mine, other)
    assert math.log(found.high / found.low) < 0.6 * math.log(bare.high / bare.low)
    assert found.low < 1.1 < found.high
    untold = np.zeros((200, 1))
    told = [np.hstack([side[:, :2], untold]) for side in (mine, other)]
    assert effect(*told) == bare


@pytest.mark.parametrize(("drawn", "n"), [(pairs, 300), (lucky, 150)])
def test_looking_after_every_round_errs_no_more_often_than_stated(drawn: Drawn, n: int) -> None:
    rng, excluded = np.random.default_rng(1), 0
    for _ in range(200):
        mine, other = drawn(rng, n)
        found = [effect(mine[:m], other[:m]) for m in range(FEWEST, n, 3)]
        excluded += any(f.low > 1.0 or f.high < 1.0 for f in found)
    assert excluded <= 10  # of 200, at 5%


@pytest.mark.parametrize("n", [FEWEST_AT_END, 24])
@pytest.mark.parametrize("drawn", [pairs, lucky])
def test_an_interval_of_one_look_errs_no_more_often_than_stated(drawn: Drawn, n: int) -> None:
    rng, wrong = np.random.default_rng(5), 0
    for _ in range(400):
        found = effect(*drawn(rng, n), at_end=True)
        wrong += found.low > 1.0 or found.high < 1.0
    assert wrong <= 30  # of 400, at 5%: more come once in 160 times


def test_an_effect_is_seen_and_found_where_it_is() -> None:
    mine, other = pairs(np.random.default_rng(2), 400, ratio=1.2)
    found = effect(mine, other)
    assert 1.0 < found.low < 1.2 < found.high < 1.4
    turned = effect(other, mine)
    assert turned.ratio == pytest.approx(1 / found.ratio)
    assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_only_rounds_that_both_were_in_count() -> None:
    def block(side: str, us: float) -> Block:
        return Block(side=side, steps=4, requests=1, tokens=16, us=us, cost_us=2.0)

    both = (block(CHAMPION, 4.0), block(TRIAL, 2.0), block(PLAIN, 8.0))
    rounds = [
        Round(scope="s", worker="w", life="ab", number=i, unit=i, time=1.0, blocks=blocks)
        for i, blocks in enumerate([both, both[::2], both])
    ]
    assert effect_of(rounds, TRIAL, CHAMPION).ratio == pytest.approx(2.0)
    assert [effect_of(rounds, s, CHAMPION).pairs for s in (TRIAL, PLAIN)] == [2, 3]


def test_an_interval_of_few_pairs_is_as_wide_as_students_is() -> None:
    rng = np.random.default_rng(3)
    for n in (FEWEST, 24, 100, 1_000):
        mine, other = pairs(rng, n)
        found = effect(mine, other)
        x, y = mine.mean(axis=0), other.mean(axis=0)
        pulls = (mine / x) @ [1.0, -1.0] - (other / y) @ [1.0, -1.0]
        z = math.log(found.high / found.ratio) * math.sqrt(n) / pulls.std(ddof=1)
        normal = norm.isf(t.sf(z, n - 1))  # what it would be, were the spread known
        weight = (-2.0 * math.log(0.05) + math.log(1.0 - 2.0 * math.log(0.05))) / TIGHTEST
        spread = n * weight + 1.0
        bound = math.sqrt(2.0 * spread / (n * weight) * math.log(math.sqrt(spread) / 0.05))
        assert normal == pytest.approx(bound, rel=0.04)


def test_pairs_that_would_tell_a_loss_do() -> None:
    mine, other = pairs(np.random.default_rng(4), 60)
    n = round(pairs_to_tell(effect(mine, other), 0.03))
    mine, other = pairs(np.random.default_rng(5), n)
    found = effect(mine, other)
    assert 0.015 < math.log(found.high / found.ratio) < 0.06
    assert pairs_to_tell(effect(mine[:5], other[:5]), 0.03) == math.inf


def test_a_gain_by_labels_is_a_ratio_of_sums_whatever_size_clusters_have() -> None:
    rng = np.random.default_rng(4)
    steps = rng.uniform(10.0, 400.0, 60)
    found = gain_effect(0.05 * steps + rng.normal(0.0, 2.0, 60), steps)
    assert found.low < 1.05 < found.high and found.low > 1.03
    assert gain_effect(0.05 * steps, steps).low == pytest.approx(1.05)
    few = gain_effect(steps[: FEWEST - 1], steps[: FEWEST - 1])
    assert (few.ratio, few.low, few.high) == (2.0, 0.0, math.inf)
    assert gain_effect([], []) == gain_effect([1.0], [0.0]) == UNKNOWN
