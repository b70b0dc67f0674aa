"""Costs out of noisy steps; seats, who is judged by what, who wins, what brings the first back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from decoder.contracts.bundle import MAX_DRAFT, frequency_policy
from decoder.contracts.features import FEATURES
from decoder.policy.estimate import predict
from decoder.policy.rule import CACHE, MODEL, NONE
from learner.evaluation.clusters import Cluster
from learner.evaluation.contest import (
    AGES,
    CLUSTERS,
    COLUMNS,
    DOUBTS,
    EARNED,
    FIRST,
    FORGIVEN,
    REGRET,
    STEPS,
    TRIED,
    VOTES,
    WON,
    Challenger,
    Contest,
    Regret,
)
from learner.evaluation.effect import FEWEST
from learner.evaluation.independent import Choice
from learner.evaluation.measured import NOMINAL, Costs, measure, robust_line
from learner.evaluation.skill import FIGURES
from learner.evaluation.tune import LEAST_RATE, best_threshold, tuned, worth
from learner.release.registrations import registration_of
from learner.scope import Scope
from learner.settings import LearnerSettings
from learner.training import train
from learner.training.rows import Rows, empty
from tests.events import from_events
from tests.learner.traffic import FIXED_US, MODEL_US, TOKEN_US, Traffic, learned

ROWS = from_events(Traffic(seed=4).events(30))
COSTS = measure(ROWS) or NOMINAL
COUNTING = frequency_policy("s")


def gained(
    contest: Contest, seat: int, sessions: int, gain: float = 4.0, unseen: int = 100, noise: int = 1
) -> None:
    """Clusters of ``sessions``, one of each, in which ``seat`` gains so much of forty steps."""
    begin = sum(one.judged for one in contest.seats if one is not None)
    clusters = []
    for session in range(begin, begin + sessions):
        sums = np.zeros(COLUMNS)
        sums[seat], sums[STEPS] = gain + (session % 2 - 0.5) * noise, 40.0
        clusters.append(Cluster(str(session), unseen, 16, sums))
    contest.update(np.zeros((0, COLUMNS)), clusters)


def test_a_challenger_is_judged_by_clusters_that_it_cannot_know() -> None:
    contest = Contest(COUNTING, COUNTING)
    contest.seats[0] = one = Challenger(learned(), 64, "quick")
    gained(contest, 0, 50, unseen=63)
    assert one.judged == 0 and contest.passed(0) is None
    gained(contest, 0, FEWEST - 1, unseen=64)
    assert contest.passed(0) is None, "too few to tell"
    gained(contest, 0, 10, unseen=64)
    assert one.judged == FEWEST + 9 and contest.passed(0) == 0
    drafts = one.drafts
    late = Cluster("0", 64, 16, np.ones(COLUMNS), before=VOTES)
    contest.update(np.zeros((0, COLUMNS)), [late])
    assert one.drafts == drafts, "its session has had its say"


def test_the_clusters_of_a_session_are_one_vote() -> None:
    contest = Contest(COUNTING, COUNTING)
    contest.seats[0] = one = Challenger(learned(), 0, "quick")
    sums = np.zeros(COLUMNS)
    sums[0], sums[STEPS] = 4.0, 40.0
    clusters = [Cluster("7", 0, 16, sums, before=n) for n in range(VOTES)]
    contest.update(np.zeros((0, COLUMNS)), clusters)
    assert one.votes == {"7": [4.0 * VOTES, 40.0 * VOTES, 0.0]}


def test_a_better_policy_is_ahead_on_nearly_every_block() -> None:
    contest = Contest(COUNTING, COUNTING)
    contest.seats[1] = Challenger(learned(), 0, "quick")
    ahead = contest.advantages(ROWS, COSTS)
    assert ahead[:, 1].mean() > 0.05 and (ahead[:, STEPS] > 0.0).all()
    assert not np.delete(ahead, [1, STEPS, DOUBTS.start + 1], axis=1).any()


def copied(good: np.ndarray) -> Rows:
    """Model drafts bring three tokens where the cache has nothing to offer; elsewhere cache drafts,
    which bring two, were verified."""
    draw = np.random.default_rng(0)
    rows = empty(len(good))
    rows.session[:] = np.arange(len(rows)) // 16
    rows.features[:, FEATURES.index("score")] = np.where(good, 4.0, 1.0)
    rows.features[:, FEATURES.index("draft_len")] = rows.draft_len[:] = 6
    rows.accepted[:] = np.where(good, 2, 0)
    rows.arm[:] = np.where(good, CACHE, MODEL)
    rows.verified_len[:] = np.where(good, draw.integers(3, 7, len(rows)), 4)
    rows.batch_size[:], rows.rate[:], rows.model_expected[:] = 1, 2.0, 3.0
    rows.model_accepted[:] = np.where(good, np.nan, 3)
    rows.step_tokens[:] = 1 + rows.verified_len
    rows.step_us[:] = 20_000 + 120 * rows.step_tokens + 1_000 * (rows.arm == MODEL)
    return rows


GOOD = np.random.default_rng(0).random(6_400) < 0.5


def test_what_a_model_draft_brings_where_none_was_verified_is_not_the_mean_of_the_chosen() -> None:
    rows, good = copied(GOOD), GOOD
    costs = measure(rows)
    assert costs is not None
    takes_the_cache, never = frequency_policy("s", 2.0), frequency_policy("s", 100.0)
    contest = Contest(takes_the_cache, takes_the_cache)
    contest.seats[0] = Challenger(never, 0, "quick")
    assert contest.advantages(rows, costs)[good, 0].max() < 0.0, "it really loses two tokens"
    contest = Contest(takes_the_cache, never)  # served, it is seen to lose
    contest.seats[FIRST] = Challenger(takes_the_cache, 0, "first")
    rows.arm[:], rows.model_accepted[:] = MODEL, np.where(good, 0, 3)
    assert contest.advantages(rows, costs)[good, FIRST].min() > 0.0


@pytest.mark.parametrize("brought", [0, 4])
def test_model_drafts_in_doubt_count_as_those_of_them_that_were_verified(brought: int) -> None:
    """One in thirty, by a variant or a guard: they bring less than the copy's two tokens, or more;
    drafts that the champion chooses too bring three, whatever becomes of these."""
    rows = copied(GOOD)
    tried = np.flatnonzero(GOOD)[::30]
    rows.arm[tried], rows.verified_len[tried] = MODEL, 4
    rows.model_accepted[tried] = brought
    takes_the_cache, never = frequency_policy("s", 2.0), frequency_policy("s", 100.0)
    costs = measure(rows)
    assert costs is not None
    contest = Contest(takes_the_cache, takes_the_cache)
    contest.seats[0] = one = Challenger(never, 0, "quick")
    numbers = contest.advantages(rows, costs)
    for session in range(20):
        part = numbers[session * 320 : session * 320 + 320]
        contest.update(part, [Cluster(str(session), 0, len(part), part.sum(axis=0))])
    assert one.tried == [len(tried), brought * len(tried)]
    assert (contest.passed(0) == 0) == (brought == 4)
    assert (one.gain().ratio > 1.0) == (brought == 4)


def test_evidence_against_one_champion_is_none_against_the_next() -> None:
    contest = Contest(COUNTING, COUNTING)
    contest.seats[0] = Challenger(learned(), 0, "quick")
    gained(contest, 0, 50)
    contest.promote(replace(learned(), version=3), 500)
    assert contest.passed(500) is None and contest.seats[:FIRST] == [None] * FIRST
    first = contest.seats[FIRST]
    assert first is not None and first.policy == COUNTING and contest.regret == Regret()


def test_who_passed_goes_on_being_judged_on_trial_and_another_may_win_meanwhile() -> None:
    contest = Contest(COUNTING, COUNTING)
    contest.seats[0] = one = Challenger(learned(), 0, "quick")
    gained(contest, 0, 20)
    assert contest.accept(0, 100) is one and contest.seats[0] is None
    contest.put_on_trial(replace(learned(), version=7), 100)
    assert contest.seats[TRIED] is one and one.policy.version == 7 and contest.seats[WON] is None
    assert one.gain().low > 1.0 and one.gain().pairs == 20
    other = frequency_policy("s", 9.0)
    contest.seats[1] = Challenger(other, 0, "quick")
    gained(contest, 1, 20)
    assert contest.accept(1, 100).policy is other and contest.seats[TRIED] is one
    assert one.judged == 40
    contest.put_on_trial(frequency_policy("s", 5.0), 200)  # a person's: judged from here on
    tried = contest.seats[TRIED]
    assert tried is not None and (tried.judged, tried.since) == (0, 200)
    contest.put_on_trial(replace(frequency_policy("s", 5.0), version=9), 250)
    assert contest.seats[TRIED] is tried and tried.policy.version == 9, "the same, made anew"
    contest.put_on_trial(replace(COUNTING, version=10), 260)
    tried = contest.seats[TRIED]
    assert tried is not None and tried.policy.version == 10, "level with the champion"
    contest.put_on_trial(None, 300)
    assert contest.seats[TRIED] is None


def test_a_return_that_waits_is_counted_once() -> None:
    contest = Contest(COUNTING, learned())
    contest.promote(learned(), 50)
    for row in (100, 200):
        contest.accept(FIRST, row)
    assert contest.returns == [100]
    contest.promote(COUNTING, 210)
    contest.promote(learned(), 220)
    contest.accept(FIRST, 300)
    assert contest.returns == [100, 300]


def test_who_is_behind_or_old_makes_room() -> None:
    assert Contest(COUNTING, COUNTING).vacant() == 0
    contest = _seated()
    assert contest.vacant() is None
    gained(contest, 2, FEWEST - 1, -3.0)
    assert contest.vacant() is None
    gained(contest, 2, 1, -3.0)
    assert contest.vacant() == 0, "behind"
    for seat in range(FIRST):
        contest = _seated()
        gained(contest, seat, 2 * AGES[0] - 1)
        one = contest.seats[seat]
        contest.seats = [None] * len(contest.seats)
        contest.seats[:FIRST] = [one] * FIRST
        assert contest.vacant() is None, "ahead"


def worse(kind: str, draw: np.random.Generator, sessions: int) -> np.ndarray:
    """Gains [sessions, clusters] of a challenger that is no better in the mean."""
    if kind == "large clusters lose":
        large = draw.random((sessions, 1)) < 0.2
        return np.where(large, draw.normal(-5.0, 3.0, large.shape), draw.normal(0.25, 0.35))
    if kind == "sessions of their own effect":
        special = draw.choice([-2.4, 2.4], (sessions, 1)) / VOTES
        return special + draw.normal(0.0, 0.05, (sessions, VOTES))
    return draw.normal(0.0, 1.0, (sessions, 1))


@pytest.mark.parametrize("kind", ["noise", "sessions of their own effect", "large clusters lose"])
def test_who_is_no_better_hardly_ever_passes(kind: str) -> None:
    passes, runs = 0, 200
    for seed in range(runs):
        draw, contest = np.random.default_rng(seed), Contest(COUNTING, COUNTING)
        contest.seats[2] = Challenger(learned(), 0, "quick")
        for session, gains in enumerate(worse(kind, draw, 64)):
            for before, gain in enumerate(gains.tolist()):
                sums = np.zeros(COLUMNS)
                sums[2], sums[STEPS] = gain, 40.0
                one = [Cluster(str(session), 0, 16, sums, before)]
                contest.update(np.zeros((0, COLUMNS)), one)
            if contest.passed(0) is not None:
                passes += 1
                break
    assert passes / runs <= binom.ppf(0.999, runs, 0.05) / runs


def served(contest: Contest, behind: float, clusters: int) -> bool:
    """Whether the first policy is due once it was ahead by so much on each of ``clusters``."""
    for session in range(clusters):
        numbers = np.zeros((1, COLUMNS))
        numbers[0, FIRST], numbers[0, STEPS] = behind, 40.0
        contest.update(numbers, [Cluster(str(session), 0, 16, numbers[0])])
        if contest.passed(0) == FIRST:
            return True
    return False


def test_a_champion_is_served_on_a_budget_of_regret() -> None:
    contest = Contest(COUNTING, COUNTING)
    contest.promote(learned(), 0)
    assert not served(contest, 0.1, 5) and contest.regret.behind == pytest.approx(0.5)
    assert not served(contest, -1.0, 50), "it is ahead"
    regret = contest.regret
    assert regret.behind == 0.0 and regret.steps == 2_200.0 and regret.peak == pytest.approx(49.5)
    assert regret.budget == max(2_200.0 * REGRET, CLUSTERS * regret.usual, 49.5 * EARNED)
    assert not served(contest, 1.0, int(regret.budget))
    assert served(contest, 1.0, 2)
    assert contest.accept(FIRST, 100).policy is COUNTING
    assert contest.passed(100) is None, "it is said once"


def test_each_return_doubles_what_is_asked_of_the_next_challenger_for_a_while() -> None:
    contest = Contest(COUNTING, COUNTING, returns=[10, 20])
    contest.seats[0] = Challenger(learned(), 0, "quick")
    gained(contest, 0, 4 * FEWEST - 1)
    assert contest.passed(100) is None and contest.passed(FORGIVEN + 50) == 0
    gained(contest, 0, 1)
    assert contest.passed(100) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_champion_that_foresees_no_number_falls_to_any_that_does(value: float) -> None:
    weight, bias = learned().layers[0]
    broken = replace(learned(), layers=((weight, np.full_like(bias, value)), *learned().layers[1:]))
    contest = Contest(COUNTING, COUNTING)
    contest.promote(broken, 0)
    contest.seats[0] = Challenger(learned(), 0, "quick")
    ahead = contest.advantages(ROWS, COSTS)
    assert (ahead.mean(axis=0)[[0, FIRST]] > 0).all() and np.isfinite(ahead).all()


def _seated() -> Contest:
    contest = Contest(COUNTING, COUNTING)
    contest.seats[:FIRST] = [Challenger(learned(), 0, "quick") for _ in range(FIRST)]
    return contest


def test_absurd_numbers_count_no_more_than_a_draft_can() -> None:
    contest = Contest(COUNTING, COUNTING)
    contest.seats[0] = Challenger(learned(), 0, "quick")
    rows = ROWS.take(np.arange(8))
    rows.features[:, 0], rows.rate[:] = 1e9, [1e-9, -1e12, 1e12, 0.0, 1e-30, 2.0, np.nan, 1.0]
    most = (MAX_DRAFT + 1) / LEAST_RATE
    assert np.abs(contest.advantages(rows, COSTS)).max() <= 2.0 * most


def test_policies_that_choose_alike_are_level_without_noise() -> None:
    contest = Contest(learned(), learned())
    contest.seats[0] = Challenger(replace(learned(), version=2), 0, "quick")
    contest.seats[FIRST] = Challenger(replace(learned(), version=3), 0, "first")
    assert not contest.advantages(ROWS, COSTS)[:, :STEPS].any()
    gained(contest, 0, 50, gain=0.0, noise=0)
    assert contest.passed(0) is None, "a tie is not worth a swap"


def test_a_winner_is_told_with_its_figures() -> None:
    one = Challenger(learned(), 0, "quick")
    assert one.metrics["gain"] == 0.0 and "of 0 sessions" in one.reason
    contest = Contest(COUNTING, COUNTING)
    contest.seats[0] = one
    gained(contest, 0, 20, noise=0)
    assert one.metrics["gain"] == pytest.approx(0.1) and one.metrics["gate_drafts"] == 320
    assert one.reason == "chooses better: +10.0% by the labels of 20 sessions, at least +10.0%"
    json.dumps(one.metrics, allow_nan=False)


def winner_of() -> tuple[Scope, Challenger]:
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
    assert {*FIGURES, *(f"champion_{name}" for name in FIGURES)} <= made.metrics.keys()
    assert made.metrics["f1"][-1] > made.metrics["champion_f1"][-1], "drafts born after it"


TIMED = from_events(Traffic(seed=2).events(100))


def test_a_first_policy_that_comes_back_waits_beside_candidates() -> None:
    scope, won = winner_of()
    candidate = registration_of(scope, won, {})
    back = registration_of(scope, replace(won, origin="first"), {})
    assert back.is_return and not candidate.is_return
    assert back.name != candidate.name and back.name[0] == candidate.name[0]


def test_costs_come_back_from_noisy_steps() -> None:
    costs = measure(TIMED)
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


def test_a_model_draft_brings_its_mean_or_what_is_given() -> None:
    costs = Costs(fixed_us=100.0, token_us=1.0, model_accepted=2.5, model_len=3.0)
    choice = Choice(np.full(2, MODEL, np.int8), np.zeros(2, np.int32))
    rows = ROWS.take(np.arange(2))
    assert costs.outcome(rows, choice)[0].tolist() == [3.5, 3.5]
    assert costs.outcome(rows, choice, np.array([0.0, 3.0]))[0].tolist() == [1.0, 4.0]


def test_a_request_pays_its_share_of_the_batch() -> None:
    costs = Costs(fixed_us=100.0, token_us=1.0, extra_us=(0.0, 20.0, 0.0), model_len=3.0)
    rows = replace(TIMED.take(np.arange(3)), batch_size=np.array([1, 2, 4], np.int32))
    choice = Choice(np.full(3, MODEL, np.int8), np.zeros(3, np.int32))
    _, time = costs.outcome(rows, choice)
    assert time.tolist() == [124.0, 64.0, 34.0]


def test_what_a_model_draft_brings_is_as_it_was_seen_or_as_the_champion_has_it() -> None:
    champion = replace(frequency_policy("s"), model_payoff=1.5)
    costs = measure(TIMED)
    assert costs is not None
    policy = tuned(champion, costs, champion, TIMED)
    assert policy.use_model and policy.model_payoff == pytest.approx(2.0, abs=0.15)
    assert tuned(champion, NOMINAL, champion, TIMED).model_payoff == 1.5


@pytest.mark.parametrize("model_accepted", [0.5, 2.0])
def test_the_threshold_is_the_best_of_all_by_what_workers_would_decide(
    model_accepted: float,
) -> None:
    rows = from_events(Traffic(seed=3, model_accepted=model_accepted).events(60))
    raw = train.export(train.fit(rows, "payoff", 3), "s", 6.0, rows.features)
    costs = measure(rows)
    assert costs is not None
    predicted = predict(raw, rows.features)
    never = replace(raw, threshold=1e9)

    def saved(threshold: float) -> float:
        """Plain steps, by what the gate judges choices by."""
        others = [replace(raw, threshold=threshold)]
        return float(worth(never, others, [False], rows, costs).saved.sum())

    found = tuned(raw, costs, raw, rows)
    best = max(saved(t) for t in [0.0, *(predicted + 1e-4).tolist()])
    assert saved(found.threshold) >= 0.999 * best > 0.0  # labels of model drafts, not their mean
    assert 0.0 < found.threshold < 24.0
    alike = replace(rows, features=np.tile(rows.features[:1], (len(rows), 1)))
    assert best_threshold(raw, alike, costs) != predicted[0], "one prediction has two sides"
