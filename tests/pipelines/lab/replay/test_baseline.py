"""The rival is picked on prompts on which it is not compared."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.lab.replay.baseline import against_best
from pipelines.stats import Spent, interval


def spent(tokens: list[float], time: list[float]) -> Spent:
    return np.array(tokens), np.array(time)


def test_a_rule_that_is_best_on_one_half_stands_against_the_other() -> None:
    rules = {
        "even": spent([40, 10, 40, 10], [10, 10, 10, 10]),
        "odd": spent([20, 30, 20, 30], [10, 10, 10, 10]),
    }
    found = against_best(spent([30, 30, 30, 30], [10, 10, 10, 10]), rules)
    assert found is not None and found.rivals == ("odd", "even")
    assert found.ratio == pytest.approx(120 / (20 + 10 + 20 + 10))
    assert found.low <= found.ratio <= found.high


def test_of_many_rules_that_are_equal_none_is_ahead_by_chance() -> None:
    rng = np.random.default_rng(0)

    def one() -> Spent:
        return spent(list(rng.uniform(50, 150, 40)), [60.0] * 40)

    fair, lucky = [], []
    for _ in range(60):
        mine, rules = one(), {str(i): one() for i in range(12)}
        found = against_best(mine, rules)
        assert found is not None
        fair.append(found.ratio)
        lucky.append(mine[0].sum() / max(r[0].sum() for r in rules.values()))
    assert abs(np.mean(fair) - 1.0) < 0.02 < 1.0 - np.mean(lucky)


def test_an_interval_tells_what_is_so_from_what_may_be_chance() -> None:
    rng = np.random.default_rng(1)
    theirs = spent(list(rng.uniform(90, 110, 30)), [10.0] * 30)
    low, high = interval((theirs[0] * 1.1, theirs[1]), theirs) or (0.0, 0.0)
    assert low == pytest.approx(1.1) and high == pytest.approx(1.1)
    other = spent(list(rng.uniform(50, 150, 30)), [10.0] * 30)
    low, high = interval(other, theirs) or (1.0, 1.0)
    assert low < 1.0 < high


def test_one_prompt_no_rule_or_nothing_decoded_compares_nothing_and_an_end_at_once_little() -> None:
    mine, empty = spent([10.0], [1.0]), spent([0, 0], [0, 0])
    assert against_best(mine, {"greedy": mine}) is None and interval(mine, mine) is None
    assert against_best(spent([1, 1], [1, 1]), {}) is None
    assert against_best(empty, {"greedy": empty}) is None
    mine = spent([0, 10, 0, 10], [0, 5, 0, 5])
    found = against_best(mine, {"greedy": spent([0, 10, 0, 10], [0, 10, 0, 10])})
    assert found is not None and found.ratio == pytest.approx(2.0), "it takes no time"
