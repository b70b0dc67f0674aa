"""What the registry is told of a winner's making, from a scope that really learned."""

from __future__ import annotations

import json

import numpy as np
import pytest

from decoder.contracts.bundle import frequency_policy
from learner.learned_from import POINTS
from learner.registrations import registration_of
from learner.rows import from_events
from learner.scope import Candidate, Scope
from learner.settings import LearnerSettings
from tests.learner.traffic import Traffic


def won(kind: str) -> tuple[Scope, Candidate]:
    """A scope that begins with counting, and who won over it."""
    settings = LearnerSettings(buffer_events=2_000, min_events=200, candidate_every=128, kind=kind)
    scope = Scope("s", settings, frequency_policy("s"))
    rows = from_events(Traffic(seed=2).events(400))
    for at in range(0, len(rows), 100):
        scope.feed(rows.take(np.arange(at, min(at + 100, len(rows)))))
        candidate = scope.candidate()
        if candidate is not None:
            return scope, candidate
    raise AssertionError("nobody won")


@pytest.mark.parametrize("kind", ["survival", "payoff"])
def test_a_registration_says_what_was_learned_from(kind: str) -> None:
    scope, candidate = won(kind)
    scope.served = {"target": "llama"}
    made = registration_of(scope, candidate, {1: 7, 0: 41})
    window = json.loads(json.dumps(made.window))  # it waits in the checkpoint
    assert (window["topic"], window["offsets"]) == ("hvd.drafts.v2", {"0": 41, "1": 7})
    times = scope.buffer.recent(2_000).time
    assert (window["time_from"], window["time_to"]) == (times.min(), times.max())
    when, champion, winner = zip(*window["errors"], strict=True)
    assert len(when) == POINTS and list(when) == sorted(when)
    assert np.mean(winner) < np.mean(champion)
    assert ("thresholds" in window) == (kind == "payoff")
    for threshold, rate in window.get("thresholds", []):
        assert threshold >= 0.0 and rate > 0.0
    assert made.tags["target"] == "llama" and made.metrics["decile_1_real"] >= 0.0
