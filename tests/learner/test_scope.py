"""A scope is a function of the rows it was fed; what it learns, whom it offers, what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.policy.estimate import predict
from decoder.policy.probes import from_bytes, to_bytes
from learner import train
from learner.contest import FIRST, mark
from learner.learners import CAREFUL, QUICK
from learner.rows import Rows, from_events, joined
from learner.scope import BLOCK, Candidate, Scope
from learner.settings import LearnerSettings
from tests.learner.traffic import Traffic

SETTINGS = LearnerSettings(buffer_events=2_000, min_events=200, candidate_every=128)


def rows_of(requests: int, **traffic: Any) -> Rows:
    return from_events(Traffic(**traffic).events(requests))


@pytest.fixture(scope="module")
def first() -> Policy:
    """Learned from two hundred requests."""
    rows = rows_of(200, seed=1)
    return replace(train.export(train.fit(rows), "s", 6.0, rows.features), version=1)


def served(scope: Scope, rows: Rows, each: int = 100) -> list[Candidate]:
    """Feed ``rows`` and crown whoever wins; who did."""
    won = []
    for at in range(0, len(rows), each):
        scope.feed(rows.take(np.arange(at, min(at + each, len(rows)))))
        candidate = scope.candidate()
        if candidate is not None:
            won.append(candidate)
            scope.crown(replace(candidate.policy, version=scope.version + 1))
    return won


def state_of(scope: Scope) -> tuple[dict[str, Any], dict[str, bytes]]:
    arrays, state = scope.snapshot()
    return state, {name: array.tobytes() for name, array in arrays.items()}


def error(policy: Policy, rows: Rows) -> float:
    return float(np.abs(predict(policy, rows.features) - rows.accepted).mean())


ROWS = joined([rows_of(60, seed=2), rows_of(60, seed=3, sign=-1)])


@pytest.mark.parametrize("sizes", [(1,), (7, 64, 300), (997,)])
def test_neither_the_reading_nor_a_restart_changes_anything(sizes: Sequence[int]) -> None:
    rows = ROWS.take(np.arange(900))
    whole, pieces = (Scope("s", SETTINGS, frequency_policy("s")) for _ in range(2))
    expected = whole.feed(rows)
    at, alarms, n = 0, [], 0
    while at < len(rows):
        size = sizes[n % len(sizes)]
        alarms += pieces.feed(rows.take(np.arange(at, min(at + size, len(rows)))))
        at, n = at + size, n + 1
        if n % 5 == 0 and len(sizes) > 1:
            pieces = Scope.restored("s", SETTINGS, pieces.snapshot())
    assert state_of(pieces) == state_of(whole) and alarms == expected
    mine, theirs = pieces.candidate(), whole.candidate()
    assert (mine is None) == (theirs is None)


def test_what_fills_no_block_waits_in_the_snapshot() -> None:
    scope = Scope("s", SETTINGS, frequency_policy("s"))
    scope.feed(ROWS.take(np.arange(BLOCK - 1)))
    assert (scope.total, scope.buffer.total) == (BLOCK - 1, 0)
    again = Scope.restored("s", SETTINGS, scope.snapshot())
    again.feed(ROWS.take(np.arange(BLOCK - 1, BLOCK)))
    assert (again.total, again.buffer.total) == (BLOCK, BLOCK)


def test_a_new_scope_learns_to_beat_counting() -> None:
    scope = Scope("s", SETTINGS, frequency_policy("s"))
    won = served(scope, rows_of(150, seed=2))
    assert won and won[0].verdict.promote and won[0].verdict.gain > 0.05
    policy = from_bytes(to_bytes(won[0].policy), "s")
    assert policy.kind == "survival" and policy.provenance["costs"]["measured"]
    assert scope.promotions == scope.candidates == len(won) and scope.version == len(won)
    others = rows_of(40, seed=98)
    assert error(scope.champion, others) < 0.5 * error(frequency_policy("s"), others)
    assert scope.mae < 2.0
    last, promotions = scope.champion, scope.promotions
    scope.crown(replace(frequency_policy("s"), version=50))
    scope.crown(last)
    assert scope.promotions == promotions, "gone back to"


def test_traffic_as_usual_makes_nothing_worse(first: Policy) -> None:
    scope = Scope("s", SETTINGS, first)
    served(scope, rows_of(150, seed=6))
    others = rows_of(40, seed=98)
    assert not any(scope.alarms.values())
    assert error(scope.champion, others) <= 1.02 * error(first, others)


def test_traffic_that_turns_about_is_followed_and_nothing_is_forgotten(first: Policy) -> None:
    scope = Scope("s", SETTINGS, first)
    usual, turned = rows_of(60, seed=5), rows_of(100, seed=6, sign=-1)
    assert served(scope, usual) == []
    won = served(scope, turned)
    held = scope.total - scope.total % BLOCK
    assert won and len(scope.buffer) == min(held, SETTINGS.buffer_events)
    others = rows_of(40, seed=99, sign=-1)
    assert error(first, others) > 10.0
    assert error(scope.champion, others) < 0.7 * error(first, others)


def test_the_first_policy_comes_back_when_the_traffic_does(first: Policy) -> None:
    rows = rows_of(200, seed=9, sign=-1)
    turned = replace(train.export(train.fit(rows), "s", 6.0, rows.features), version=2)
    scope = Scope("s", SETTINGS.model_copy(update={"candidate_every": 10**9}), first)
    scope.crown(turned)
    assert served(scope, rows_of(60, seed=6, sign=-1)) == []
    won = served(scope, rows_of(60, seed=7), each=20)
    assert won[-1].origin == "first"
    assert mark(scope.champion) == mark(first) and scope.contest.seats[FIRST] is None


def test_what_a_person_serves_is_learned_on_from(first: Policy) -> None:
    scope = Scope("s", SETTINGS, frequency_policy("s"))
    scope.feed(rows_of(60, seed=2))
    scope.crown(replace(first, version=9))
    assert scope.version == 9 and scope.promotions == 0
    (weight, _), *_ = scope.learners.trainers[CAREFUL].layers()
    assert np.array_equal(weight, first.layers[0][0])
    seat = scope.contest.seats[FIRST]
    assert seat is not None and seat.policy.kind == "frequency"
    before = scope.learners.trainers[QUICK].weights.copy()
    scope.crown(replace(first, version=10))
    assert scope.version == 10 and np.array_equal(scope.learners.trainers[QUICK].weights, before)


def test_no_feature_within_its_bounds_breaks_a_scope(first: Policy) -> None:
    rows = rows_of(40, seed=2)
    rows.features[::7] = 1e9
    rows.features[1::7] = -1e9
    for policy in (first, frequency_policy("s")):
        scope = Scope("s", SETTINGS, policy)
        served(scope, rows)
        again = Scope.restored("s", SETTINGS, scope.snapshot())
        assert state_of(again) == state_of(scope)


def test_the_paper_s_kind_is_learned_and_tuned(first: Policy) -> None:
    settings = SETTINGS.model_copy(update={"kind": "payoff"})
    scope = Scope("s", settings, frequency_policy("s"))
    won = served(scope, rows_of(150, seed=2))
    assert won and won[0].policy.kind == "payoff" and 0.1 < won[0].policy.threshold < 10.0
