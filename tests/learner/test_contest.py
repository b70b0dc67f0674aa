"""Seats, who is judged by what, and who comes back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import MAX_DRAFT, Policy, frequency_policy
from learner import train
from learner.clusters import Cluster
from learner.contest import AGES, FIRST, SEATS, Contest, Contestant, mark
from learner.measured import NOMINAL, measure
from learner.rows import Rows, from_events
from learner.tune import LEAST_RATE
from tests.learner.traffic import Traffic

ROWS = from_events(Traffic(seed=4).events(30))
COSTS = measure(ROWS) or NOMINAL
LEARNED = from_events(Traffic(seed=5).events(60))
GOOD = train.export(train.fit(LEARNED, "survival", 20), "s", 4.0, LEARNED.features)
COUNTING = frequency_policy("s")


def won(contested: Contest, seat: int, clusters: int, number: float = 1.0, born: int = 100) -> None:
    sums = np.zeros(SEATS)
    sums[seat] = number
    contested.take([Cluster(born, 16, sums)] * clusters)


def test_a_contestant_is_judged_by_sessions_that_began_after_it_was_made() -> None:
    contested = Contest(COUNTING)
    contested.seats[0] = one = Contestant(GOOD, 64, "quick")
    won(contested, 0, 50, born=63)
    assert one.judged == 0 and contested.passed() == []
    won(contested, 0, 50, born=64)
    assert one.judged == 50 and contested.passed() == [0]


def test_a_better_policy_is_ahead_on_nearly_every_block() -> None:
    contested = Contest(COUNTING)
    contested.seats[1] = Contestant(GOOD, 0, "quick")
    ahead = contested.advantages(ROWS, COSTS)
    assert ahead[:, 1].mean() > 0.05 and not ahead[:, [0, 2, FIRST]].any()


def test_evidence_against_one_champion_is_none_against_the_next() -> None:
    contested = Contest(COUNTING)
    contested.seats[0] = Contestant(GOOD, 0, "quick")
    won(contested, 0, 50)
    contested.crown(replace(GOOD, version=3), 500)
    assert contested.passed() == [] and contested.seats[:FIRST] == [None] * FIRST
    first = contested.seats[FIRST]
    assert first is not None and first.policy == COUNTING and first.since == 500


def test_the_first_policy_comes_back_after_a_long_bad_stretch() -> None:
    contested = Contest(COUNTING)
    contested.crown(GOOD, 0)
    won(contested, FIRST, 1_000, -1.0)
    won(contested, FIRST, 40, 1.0)
    assert contested.passed() == [FIRST]
    contested.crown(COUNTING, 900)
    assert contested.seats[FIRST] is None


def test_who_has_no_hope_or_is_old_makes_room() -> None:
    assert Contest(COUNTING).vacant() == 0
    contested = _seated()
    assert contested.vacant() is None
    won(contested, 2, AGES[0] - 1, -1.0)
    assert contested.vacant() == 2, "no hope"
    contested = _seated()
    won(contested, 1, AGES[0])
    assert contested.vacant() == 0, "old"
    contested = _seated()
    won(contested, 0, AGES[0])
    assert contested.vacant() is None, "winning"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_champion_that_foresees_no_number_falls_to_any_that_does(value: float) -> None:
    weight, bias = GOOD.layers[0]
    broken = replace(GOOD, layers=((weight, np.full_like(bias, value)), *GOOD.layers[1:]))
    contested = Contest(COUNTING)
    contested.crown(broken, 0)
    contested.seats[0] = Contestant(GOOD, 0, "quick")
    ahead = contested.advantages(ROWS, COSTS)
    assert (ahead.mean(axis=0)[[0, FIRST]] > 0).all() and np.isfinite(ahead).all()


def test_a_name_or_a_version_makes_no_other_policy() -> None:
    assert mark(GOOD) == mark(replace(GOOD, version=7, scope="t", publication=3))
    other = replace(COUNTING, threshold=3.0)
    assert len({mark(p) for p in (GOOD, COUNTING, other)}) == 3


def test_a_contest_goes_on_from_a_snapshot() -> None:
    one = Contest(COUNTING)
    one.crown(replace(GOOD, version=2), 10)
    one.seats[1] = Contestant(_nudged(GOOD), 20, "careful")
    _feed(one, ROWS.take(np.arange(300)))
    arrays, numbers = one.snapshot()
    other = Contest.restored((arrays, json.loads(json.dumps(numbers))))
    for each in (one, other):
        _feed(each, ROWS.take(np.arange(300, 600)))
    assert one.snapshot()[1] == other.snapshot()[1]
    assert {k: v.tobytes() for k, v in arrays.items()} == {
        k: v.tobytes() for k, v in other.snapshot()[0].items()
    }


def _seated() -> Contest:
    contested = Contest(COUNTING)
    contested.seats[:FIRST] = [Contestant(GOOD, 0, "quick") for _ in range(FIRST)]
    return contested


def _nudged(policy: Policy) -> Policy:
    *others, (weight, bias) = policy.layers
    return replace(policy, layers=(*others, (weight, bias + np.float32(0.1))))


def _feed(contested: Contest, rows: Rows) -> None:
    for first in range(0, len(rows), 60):
        block = rows.take(np.arange(first, first + 60))
        sums = contested.advantages(block, COSTS).sum(axis=0)
        contested.take([Cluster(100, len(block), sums)])


def test_a_contestant_that_was_found_slower_makes_room_at_its_age() -> None:
    contested = Contest(COUNTING)
    for seat, age in enumerate(AGES):
        contested.seats[seat] = one = Contestant(GOOD, 0, "quick", recheck=8)
        won(contested, seat, age)
        assert one.bets.evidence > 1.0
    assert contested.vacant() == 0


def test_absurd_numbers_count_no_more_than_a_draft_can() -> None:
    contested = Contest(COUNTING)
    contested.seats[0] = Contestant(GOOD, 0, "quick")
    rows = ROWS.take(np.arange(8))
    rows.features[:, 0], rows.rate[:] = 1e9, [1e-9, -1e12, 1e12, 0.0, 1e-30, 2.0, np.nan, 1.0]
    most = (MAX_DRAFT + 1) / LEAST_RATE
    assert np.abs(contested.advantages(rows, COSTS)).max() <= most


def test_policies_that_choose_alike_are_level_without_noise() -> None:
    contested = Contest(GOOD)
    contested.seats[0] = Contestant(replace(GOOD, version=2), 0, "quick")
    assert not contested.advantages(ROWS, COSTS).any()
