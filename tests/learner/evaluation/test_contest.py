"""Costs out of noisy steps; seats, who is judged by what, who wins, what a winner is told of."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import MAX_DRAFT, frequency_policy
from decoder.policy.rule import CACHE, MODEL, NONE, Choice
from learner.evaluation.clusters import Cluster
from learner.evaluation.contest import AGES, FIRST, SEATS, VOTES, Contest, Contestant
from learner.evaluation.measured import NOMINAL, Costs, measure, robust_line
from learner.evaluation.tune import LEAST_RATE, tuned
from learner.release.registrations import registration_of
from learner.scope import Scope
from learner.settings import LearnerSettings
from tests.events import from_events
from tests.learner.traffic import FIXED_US, MODEL_US, TOKEN_US, Traffic, learned

ROWS = from_events(Traffic(seed=4).events(30))
COSTS = measure(ROWS) or NOMINAL
COUNTING = frequency_policy("s")


def won(contested: Contest, seat: int, clusters: int, number: float = 1.0, born: int = 100) -> None:
    sums = np.zeros(2 * SEATS)
    sums[seat], sums[SEATS + seat] = number, 4.0
    contested.take([Cluster(born, 16, sums)] * clusters)


def test_a_contestant_is_judged_by_sessions_that_began_after_it_was_made() -> None:
    contested = Contest(COUNTING, COUNTING)
    contested.seats[0] = one = Contestant(learned(), 64, "quick")
    won(contested, 0, 50, born=63)
    assert one.judged == 0 and contested.passed() == []
    won(contested, 0, 50, born=64)
    assert one.judged == 50 and contested.passed() == [0]
    contested.take([Cluster(64, 16, np.zeros(2 * SEATS), before=VOTES)])
    assert one.judged == 50, "it has had its say"


def test_a_better_policy_is_ahead_on_nearly_every_block() -> None:
    contested = Contest(COUNTING, COUNTING)
    contested.seats[1] = Contestant(learned(), 0, "quick")
    ahead = contested.advantages(ROWS, COSTS)
    assert ahead[:, 1].mean() > 0.05 and not ahead[:, [0, 2, FIRST]].any()
    assert (ahead[:, 1] >= -ahead[:, SEATS + 1] - 1e-9).all()


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_no_draft_loses_more_than_it_was_said_to_whatever_becomes_of_it(part: float) -> None:
    rows = replace(ROWS, rate=np.full(len(ROWS), 2.0, np.float32))
    other = replace(rows, accepted=np.floor(part * ROWS.draft_len).astype(np.float32))
    for champion, mine in ((COUNTING, learned()), (learned(), COUNTING)):
        contested = Contest(champion, champion)
        contested.seats[0] = Contestant(mine, 0, "quick")
        exposed = contested.advantages(rows, COSTS)[:, SEATS]
        assert (contested.advantages(other, COSTS)[:, 0] >= -exposed - 1e-9).all()


def test_evidence_against_one_champion_is_none_against_the_next() -> None:
    contested = Contest(COUNTING, COUNTING)
    contested.seats[0] = Contestant(learned(), 0, "quick")
    won(contested, 0, 50)
    contested.crown(replace(learned(), version=3), 500)
    assert contested.passed() == [] and contested.seats[:FIRST] == [None] * FIRST
    first = contested.seats[FIRST]
    assert first is not None and first.policy == COUNTING and first.since == 500


def test_who_has_no_hope_or_is_old_makes_room() -> None:
    assert Contest(COUNTING, COUNTING).vacant() == 0
    contested = _seated()
    assert contested.vacant() is None
    won(contested, 2, AGES[0] - 1, -3.0)
    assert contested.vacant() == 2, "no hope"
    contested = _seated()
    won(contested, 1, AGES[0])
    assert contested.vacant() == 0, "old"
    contested = _seated()
    won(contested, 0, AGES[0])
    assert contested.vacant() is None, "winning"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_champion_that_foresees_no_number_falls_to_any_that_does(value: float) -> None:
    weight, bias = learned().layers[0]
    broken = replace(learned(), layers=((weight, np.full_like(bias, value)), *learned().layers[1:]))
    contested = Contest(COUNTING, COUNTING)
    contested.crown(broken, 0)
    contested.seats[0] = Contestant(learned(), 0, "quick")
    ahead = contested.advantages(ROWS, COSTS)
    assert (ahead.mean(axis=0)[[0, FIRST]] > 0).all() and np.isfinite(ahead).all()


def _seated() -> Contest:
    contested = Contest(COUNTING, COUNTING)
    contested.seats[:FIRST] = [Contestant(learned(), 0, "quick") for _ in range(FIRST)]
    return contested


def test_absurd_numbers_count_no_more_than_a_draft_can() -> None:
    contested = Contest(COUNTING, COUNTING)
    contested.seats[0] = Contestant(learned(), 0, "quick")
    rows = ROWS.take(np.arange(8))
    rows.features[:, 0], rows.rate[:] = 1e9, [1e-9, -1e12, 1e12, 0.0, 1e-30, 2.0, np.nan, 1.0]
    most = (MAX_DRAFT + 1) / LEAST_RATE
    assert np.abs(contested.advantages(rows, COSTS)).max() <= 2.0 * most


def test_policies_that_choose_alike_are_level_without_noise() -> None:
    contested = Contest(learned(), learned())
    contested.seats[0] = Contestant(replace(learned(), version=2), 0, "quick")
    contested.seats[FIRST] = Contestant(replace(learned(), version=3), 0, "first")
    found = contested.advantages(ROWS, COSTS)
    assert not found[:, [FIRST, SEATS + FIRST]].any()
    assert (found[:, 0] < 0.0).all(), "a tie is not worth a swap"


def test_a_winner_is_told_with_its_figures() -> None:
    one = Contestant(learned(), 0, "quick")
    assert one.metrics["gain"] == 0.0 and "of 0 clusters" in one.reason
    contested = _seated()
    sums = np.zeros(2 * SEATS)
    sums[0], sums[SEATS] = 8.0, 1.0
    contested.take([Cluster(0, 16, sums)] * 20)
    (one, *_) = [seat for seat in contested.seats if seat]
    assert one.metrics["gain"] == 0.5 and one.metrics["gate_drafts"] == 320
    assert "of 20 clusters, 0.500 plain steps saved a draft" in one.reason


def winner_of() -> tuple[Scope, Contestant]:
    """A scope that begins with counting, and who won over it."""
    settings = LearnerSettings(buffer_events=2_000, min_events=200, candidate_every=128)
    scope = Scope("s", settings, frequency_policy("s"))
    rows = from_events(Traffic(seed=2).events(400))
    for at in range(0, len(rows), 100):
        scope.feed(rows.take(np.arange(at, min(at + 100, len(rows)))))
        candidate = scope.candidate()
        if candidate is not None:
            return scope, candidate
    raise AssertionError("nobody won")


def test_a_registration_says_what_was_learned_from() -> None:
    scope, candidate = winner_of()
    scope.served = {"target": "llama"}
    made = registration_of(scope, candidate, {1: 7, 0: 41})
    window = json.loads(json.dumps(made.window))  # it waits in the checkpoint
    assert (window["topic"], window["offsets"]) == ("hvd.drafts.v2", {"0": 41, "1": 7})
    times = scope.buffer.recent(2_000).time
    assert (window["time_from"], window["time_to"]) == (times.min(), times.max())
    assert made.tags["target"] == "llama" and made.metrics["gain"] > 0.0


STEPS = from_events(Traffic(seed=2).events(100))


def test_costs_come_back_from_noisy_steps() -> None:
    costs = measure(STEPS)
    assert costs is not None and costs.measured and costs.has_model
    assert costs.fixed_us == pytest.approx(FIXED_US, rel=0.03)
    assert costs.token_us == pytest.approx(TOKEN_US, rel=0.15)
    assert costs.extra_us[MODEL] == pytest.approx(MODEL_US, rel=0.1)
    assert abs(costs.extra_us[NONE]) < 500 and abs(costs.extra_us[CACHE]) < 500
    assert costs.model_accepted == pytest.approx(2.0, abs=0.15) and costs.model_len == 3


def test_one_stalled_step_in_ten_moves_nothing() -> None:
    x = np.arange(1.0, 201.0)
    y = 100 + 5 * x
    y[::10] += 1e6
    assert robust_line(x, y) == pytest.approx((100, 5), rel=0.06)
    assert robust_line(np.ones(50), np.ones(50)) is None


def test_a_request_pays_its_share_of_the_batch() -> None:
    costs = Costs(fixed_us=100.0, token_us=1.0, extra_us=(0.0, 20.0, 0.0), model_len=3.0)
    rows = replace(STEPS.take(np.arange(3)), batch_size=np.array([1, 2, 4], np.int32))
    choice = Choice(np.full(3, MODEL, np.int8), np.zeros(3, np.int32))
    _, time = costs.outcome(rows, choice)
    assert time.tolist() == [124.0, 64.0, 34.0]


def test_what_a_model_draft_brings_is_as_it_was_seen_or_as_the_champion_has_it() -> None:
    champion = replace(frequency_policy("s"), model_payoff=1.5)
    costs = measure(STEPS)
    assert costs is not None
    policy = tuned(champion, costs, champion)
    assert policy.use_model and policy.model_payoff == pytest.approx(2.0, abs=0.15)
    assert tuned(champion, NOMINAL, champion).model_payoff == 1.5
