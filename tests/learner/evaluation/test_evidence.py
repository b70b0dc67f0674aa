"""Bets on noise win nothing; sessions become clusters that are final; a change raises one alarm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from decoder.contracts.bundle import frequency_policy
from decoder.policy.rule import MODEL
from learner.evaluation import clusters
from learner.evaluation.clusters import CAP, PATIENCE, SILENCE, Cluster, Clusters
from learner.evaluation.contest import AGES, SEATS, Contest, Contestant
from learner.evaluation.drift import Alarm, Detector, beyond
from learner.evaluation.evidence import Bets
from learner.training.losses import faced
from tests.events import from_events
from tests.learner.traffic import Traffic

RUNS = 100
LENGTH = AGES[1]
SKEWS = [(0.1, 9.0), (0.03, 32.4), (0.01, 99.0)]
"""Chance of a loss and how large, where all else gains 1: the mean is 0."""


def contested() -> Contest:
    found = Contest(frequency_policy("s"), frequency_policy("s"))
    found.seats[0] = Contestant(frequency_policy("s", 3.0), 0, "quick")
    return found


def passes(numbers: np.ndarray, exposed: float, each: int = 1) -> bool:
    """Whether a contestant ever passes by the numbers of clusters, ``each`` of a session."""
    found, clusters = contested(), Clusters(2 * SEATS)
    rows, sums = np.arange(CAP, dtype=np.uint64), np.zeros((CAP, 2 * SEATS))
    for place, number in enumerate(numbers.tolist()):
        rows[:] = place // each
        sums[0, 0], sums[0, SEATS] = number, exposed
        found.take(clusters.add(rows, sums))
        if found.passed():
            return True
    return False


@pytest.mark.parametrize(("chance", "loss"), SKEWS)
def test_many_small_gains_hide_no_rare_and_large_loss(chance: float, loss: float) -> None:
    draw = np.random.default_rng(1)
    lost = draw.random((RUNS, LENGTH)) < chance
    numbers = np.where(lost, -loss, draw.uniform(0.5, 1.5, lost.shape))
    assert np.mean([passes(row, loss) for row in numbers]) <= binom.ppf(0.999, RUNS, 0.01) / RUNS


def test_what_is_special_about_a_session_counts_once() -> None:
    draw = np.random.default_rng(2)
    effects = draw.normal(0.0, 0.4, (RUNS, 2 * LENGTH // 8)).repeat(8, axis=1)
    numbers = np.clip(effects + draw.normal(size=effects.shape), -12.0, 12.0)
    passed = [passes(row, 12.0, each=8) for row in numbers]
    assert np.mean(passed) <= binom.ppf(0.999, RUNS, 0.01) / RUNS


@pytest.mark.parametrize(("advantage", "within"), [(0.5, 120), (1.0, 60)])
def test_an_advantage_is_found_the_sooner_the_larger_it_is(advantage: float, within: int) -> None:
    draw = np.random.default_rng(3)
    found = [passes(row, 4.0) for row in draw.normal(advantage, 1.0, (50, within))]
    assert np.mean(found) >= 0.5


def taken(numbers: Iterable[float], restarts: bool = False) -> Bets:
    bets = Bets(restarts)
    for number in numbers:
        bets.take(number, 4.0)
    return bets


def test_a_long_bad_stretch_hides_nothing_from_bets_that_restart() -> None:
    numbers = [*np.random.default_rng(4).normal(-1.0, 1.0, 2_000), *[1.0] * 60]
    assert taken(numbers).evidence < math.log(100.0) < taken(numbers, restarts=True).evidence


@given(st.floats(1e-6, 1e6), st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_the_unit_of_the_numbers_changes_nothing(unit: float, numbers: list[float]) -> None:
    one, other = Bets(), Bets()
    for number in numbers:
        one.take(number, abs(number))
        other.take(number * unit, abs(number) * unit)
    assert math.isclose(one.evidence, other.evidence, abs_tol=1e-6)


BLOCK = 8


def fed(found: Clusters, sessions: list[int], first: int = 0) -> list[Cluster]:
    closed = []
    for at in range(0, len(sessions), BLOCK):
        block = np.array(sessions[at : at + BLOCK], np.uint64)
        numbers = np.stack([np.ones(len(block)), first + at + np.arange(len(block))], axis=1)
        closed += found.add(block, numbers)
    return closed


@given(st.lists(st.integers(0, 9), max_size=300))
def test_every_row_is_in_one_cluster_or_waits(sessions: list[int]) -> None:
    found = Clusters(2)
    closed = fed(found, sessions)
    whole = len(sessions)
    waiting = sum(rows for _, rows, _ in found.open.values())
    assert sum(c.rows for c in closed) + waiting == whole
    assert all(c.sums[0] == c.rows for c in closed)
    assert max((c.rows for c in closed), default=0) < CAP + BLOCK


def test_a_silent_session_is_over_and_the_next_draft_of_it_begins_another() -> None:
    found = Clusters(2)
    others = [1_000 + n // CAP for n in range(10 * CAP)]
    closed = fed(found, [7] * 5 + others)
    assert [c.rows for c in closed if c.rows == 5] == [5]
    again = fed(found, [7] * 3 + [2_000 + n // CAP for n in range(10 * CAP)])
    (later,) = [c for c in again if c.rows == 3]
    assert later.born == 0, "what was learned since then may have been learned from this session"


def test_a_session_waits_the_longer_the_more_are_under_way() -> None:
    found = Clusters(2)
    rounds, sessions = 4, 64
    closed = fed(found, [s for _ in range(rounds) for s in range(sessions)])
    assert SILENCE < sessions * (rounds - 1) < SILENCE + PATIENCE * sessions
    assert not closed


@pytest.mark.parametrize("drafts", [1, 2, 5])
@pytest.mark.parametrize("together", [1, 16, 64])
def test_short_answers_many_at_a_time_are_over_soon(together: int, drafts: int) -> None:
    found = Clusters(2)
    waves = range(0, 4_096 // drafts, together)
    sent = [w + s for w in waves for _ in range(drafts) for s in range(together)]
    closed = fed(found, sent)
    assert len(closed) > 0.8 * len(set(sent))
    assert sum(c.rows == drafts for c in closed) > 0.9 * len(closed)


def test_a_session_that_drafts_in_every_step_says_nothing_of_how_long_others_wait() -> None:
    draw = np.random.default_rng(3)
    sent = np.where(draw.random(8_000) < 0.6, 0, draw.integers(1, 41, 8_000)).tolist()
    closed = fed(Clusters(2), sent)
    assert sum(c.rows for c in closed) > 10 * len(closed)


def test_one_endless_session_is_born_anew() -> None:
    closed = fed(Clusters(2), [3] * (3 * clusters.LONG))
    assert len(Counter(c.born for c in closed)) == 3


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "MOST_OPEN", 20)
    monkeypatch.setattr(clusters, "SESSIONS", 50)
    found = Clusters(2)
    fed(found, list(range(1_000)))
    assert len(found.open) <= 20 and len(found.born) <= 50


def alarms_of(detector: Detector, numbers: np.ndarray) -> list[Alarm]:
    return [alarm for row, cluster in enumerate(numbers) for alarm in detector.take([cluster], row)]


def stream(draw: np.random.Generator, cache: float, model: float, n: int) -> np.ndarray:
    return draw.normal((cache, model), 1.0, (n, 2))


def test_a_careful_learner_that_is_the_better_raises_nothing() -> None:
    assert alarms_of(Detector(), stream(np.random.default_rng(1), -0.1, -0.1, 5_000)) == []


def test_a_change_is_found_in_its_own_stream() -> None:
    for changed, means in (("cache", (1.5, -0.2)), ("model", (-0.2, 1.5))):
        draw = np.random.default_rng(2)
        numbers = np.concatenate([stream(draw, -0.2, -0.2, 1_000), stream(draw, *means, 50)])
        found = alarms_of(Detector(), numbers)
        assert {a.stream for a in found} == {changed}
        assert 1_000 < found[0].row <= 1_045


def drafted(chances: list[float], seed: int) -> list[Alarm]:
    """Alarms where each cluster's sixteen model drafts of three tokens have such a chance."""
    draw, detector, rows = np.random.default_rng(seed), Detector(), Traffic(seed=1).events(1)
    block = from_events(rows).take(np.zeros(16, np.int64))
    block.arm[:], block.verified_len[:] = MODEL, 3
    alarms = []
    for row, chance in enumerate(chances):
        block.model_accepted[:] = np.minimum(draw.geometric(1.0 - chance, 16) - 1, 3)
        found = faced(block)
        sums = beyond(np.zeros(16), detector.drafter.weigh(found), found.tried).sum(axis=0)
        assert np.isfinite(sums).all()
        alarms += detector.take([np.array([0.0, sums[1]])], row)
    return alarms


@pytest.mark.parametrize("after", [0.35, 0.75])
def test_a_drafter_that_was_swapped_is_found_once_within_sixty_clusters(after: float) -> None:
    (found,) = drafted([0.55] * 500 + [after] * 1_000, 4)
    assert found.stream == "model" and 500 <= found.row < 560


def test_a_drafter_that_stays_the_same_is_left_alone() -> None:
    assert drafted([0.55] * 6_000, 5) == []


def test_a_drafter_that_never_or_always_fits_has_a_finite_word() -> None:
    assert 1 <= len(drafted([1e-9] * 3_000 + [1.0 - 1e-9] * 50, 6)) <= 2


def test_clusters_without_a_model_draft_say_nothing_of_it() -> None:
    detector = Detector()
    alarms_of(detector, np.stack([np.ones(100), np.zeros(100)], axis=1))
    assert detector.watches["model"].taken == 0
