"""What a scope's networks become, in force and held out, as traffic goes on or turns about."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import Policy
from decoder.policy.estimate import predict
from learner import train
from learner.rows import Rows, from_events
from learner.scope import Scope
from learner.settings import LearnerSettings
from tests.learner.traffic import Traffic


def error(policy: Policy, rows: Rows) -> float:
    """Mean absolute error in tokens."""
    return float(np.abs(predict(policy, rows.features) - rows.accepted).mean())


@pytest.fixture(scope="module")
def champion() -> Policy:
    """Learned from two hundred requests."""
    rows = from_events(Traffic(seed=1).events(200))
    return replace(train.export(train.fit(rows), "s", 6.0, rows.features), version=1)


def candidates(champion: Policy, traffic: Traffic, requests: int) -> list[Policy]:
    """What a scope proposes while ``traffic`` comes in, ten requests of the usual kind ahead."""
    scope = Scope("s", LearnerSettings(candidate_every=400))
    scope.crown(champion)
    events, found = Traffic(seed=5).events(10) + traffic.events(requests), []
    for first in range(0, len(events), 20):
        scope.watch(scope.admit(events[first : first + 20]), 0.0)
        scope.learn(100, seed=first)
        if scope.is_due():
            found.append(scope.propose().policy)
    return found


def test_a_good_network_learns_no_handful_of_requests_by_heart(champion: Policy) -> None:
    others = from_events(Traffic(seed=98).events(40))
    proposed = candidates(champion, Traffic(seed=6), requests=40)
    assert len(proposed) >= 2
    assert max(error(p, others) for p in proposed) <= 1.05 * error(champion, others)


def test_traffic_that_turns_about_is_followed_within_a_hundred_requests(champion: Policy) -> None:
    others = from_events(Traffic(seed=99, sign=-1).events(40))
    *_, last = candidates(champion, Traffic(seed=6, sign=-1), requests=100)
    assert error(champion, others) > 10.0
    assert error(last, others) < 1.5


@pytest.mark.parametrize("rates", [(train.QUICK,), (train.CAREFUL,)])
def test_neither_rate_would_do_alone(
    champion: Policy, rates: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.scope.RATES", rates)
    usual = from_events(Traffic(seed=98).events(40))
    turned = from_events(Traffic(seed=99, sign=-1).events(40))
    by_heart = max(error(p, usual) for p in candidates(champion, Traffic(seed=6), requests=40))
    late = error(candidates(champion, Traffic(seed=6, sign=-1), requests=100)[-1], turned)
    assert by_heart > 1.1 * error(champion, usual) or late > 5.0


def test_a_restored_scope_goes_on_with_both_networks(champion: Policy) -> None:
    scope = Scope("s", LearnerSettings())
    scope.crown(champion)
    scope.admit(Traffic(seed=5).events(30))
    scope.learn(20, seed=1)
    again = Scope.restored("s", scope.settings, scope.snapshot())
    for one in (scope, again):
        one.learn(20, seed=2)
    assert [t.rate for t in again.trainers] == [train.QUICK, train.CAREFUL]
    judged = scope.buffer.rows("gate", 100)
    for mine, theirs in zip(scope.trainers, again.trainers, strict=True):
        assert train.held_out_loss(mine, judged) == train.held_out_loss(theirs, judged)
