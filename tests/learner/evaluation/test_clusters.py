"""Sessions become clusters that are final; a change raises one alarm."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from river.drift import PageHinkley

from decoder.policy.rule import MODEL
from learner import checkpoint
from learner.evaluation import clusters
from learner.evaluation.clusters import CAP, PATIENCE, SILENCE, Cluster, Clusters
from learner.evaluation.drift import (
    FEWEST,
    RISE,
    SETTLING,
    SLACK,
    Alarm,
    Detector,
    StreamTest,
    excess,
)
from learner.training.losses import labels_of
from learner.training.rows import HELD_OUT, is_held_out
from tests.events import from_events
from tests.learner.traffic import Traffic

BLOCK = 8


def fed(found: Clusters, sessions: list[int], first: int = 0) -> list[Cluster]:
    closed = []
    for at in range(0, len(sessions), BLOCK):
        block = np.array(sessions[at : at + BLOCK], np.uint64)
        numbers = np.stack([np.ones(len(block)), first + at + np.arange(len(block))], axis=1)
        closed += found.add(block, numbers)
    return closed


@given(st.lists(st.integers(0, 9), max_size=300))
def test_every_row_is_in_one_cluster_or_pending(sessions: list[int]) -> None:
    found = Clusters(2)
    closed = fed(found, sessions)
    whole = len(sessions)
    waiting = sum(rows for _, _, rows, _ in found.open.values())
    assert sum(c.rows for c in closed) + waiting == whole
    assert all(c.sums[0] == c.rows for c in closed)
    assert max((c.rows for c in closed), default=0) < CAP + BLOCK


def test_a_silent_session_s_cluster_closes_and_its_next_draft_opens_another() -> None:
    found = Clusters(2)
    others = [1_000 + n // CAP for n in range(10 * CAP)]
    closed = fed(found, [7] * 5 + others)
    assert [c.rows for c in closed if c.rows == 5] == [5]
    again = fed(found, [7] * 3 + [2_000 + n // CAP for n in range(10 * CAP)])
    (later,) = [c for c in again if c.rows == 3]
    assert later.unseen == 0, "what was learned since then may have been learned from this session"


def test_a_held_out_session_evaluates_what_was_learned_during_it() -> None:
    for session in (HELD_OUT * 2, HELD_OUT * 2 + 1):
        found = Clusters(2)
        closed = fed(found, [session] * (3 * CAP))
        began = [0, CAP, 2 * CAP] if is_held_out(session) else [0, 0, 0]
        assert [c.unseen for c in closed] == began and len({c.session for c in closed}) == 1


def test_clusters_stay_open_longer_with_more_concurrent_sessions() -> None:
    found = Clusters(2)
    rounds, sessions = 4, 64
    closed = fed(found, [s for _ in range(rounds) for s in range(sessions)])
    assert SILENCE < sessions * (rounds - 1) < SILENCE + PATIENCE * sessions
    assert not closed


@pytest.mark.parametrize("drafts", [1, 2, 5])
@pytest.mark.parametrize("together", [1, 16, 64])
def test_clusters_of_many_short_answers_close_soon(together: int, drafts: int) -> None:
    found = Clusters(2)
    waves = range(0, 4_096 // drafts, together)
    sent = [w + s for w in waves for _ in range(drafts) for s in range(together)]
    closed = fed(found, sent)
    assert len(closed) > 0.8 * len(set(sent))
    assert sum(c.rows == drafts for c in closed) > 0.9 * len(closed)


def test_a_busy_session_does_not_shorten_the_patience_with_others() -> None:
    draw = np.random.default_rng(3)
    sent = np.where(draw.random(8_000) < 0.6, 0, draw.integers(1, 41, 8_000)).tolist()
    closed = fed(Clusters(2), sent)
    assert sum(c.rows for c in closed) > 10 * len(closed)


def test_an_endless_session_gets_a_new_birth() -> None:
    closed = fed(Clusters(2), [3] * (3 * clusters.LONG))
    assert len(Counter(c.unseen for c in closed)) == 3


def test_clusters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "MAX_OPEN", 20)
    monkeypatch.setattr(clusters, "MAX_SESSIONS", 50)
    found = Clusters(2)
    fed(found, list(range(1_000)))
    assert len(found.open) <= 20 and len(found.born) <= 50


def alarms_of(detector: Detector, numbers: np.ndarray) -> list[Alarm]:
    return [
        alarm for row, cluster in enumerate(numbers) for alarm in detector.update([cluster], row)
    ]


def stream(draw: np.random.Generator, cache: float, model: float, n: int) -> np.ndarray:
    return draw.normal((cache, model), 1.0, (n, 2))


def test_a_better_slow_network_rarely_raises_an_alarm() -> None:
    """An alarm slots a challenger and costs no more than that: it may be as light as this."""
    found = alarms_of(Detector(), stream(np.random.default_rng(1), -0.1, -0.1, 5_000))
    assert len(found) <= 5


def test_the_test_equals_river_s_across_checkpoints() -> None:
    """Its state goes through a checkpoint after every number."""
    draw = np.random.default_rng(7)
    raised = 0
    for shift in (0.0, 0.6, -0.5, 1.0, 1.5, 2.0, 3.0):
        numbers = np.concatenate([draw.normal(0.0, 1.0, 200), draw.normal(shift, 1.0, 200)])
        watch, test = StreamTest(), PageHinkley(FEWEST, SLACK, RISE, alpha=1.0, mode="up")
        test._min_increase = 0.0  # a rise that begins with the first number counts whole
        for number in numbers.tolist():
            scale, settled = watch.scale, watch.count >= SETTLING
            watch = checkpoint.restore(StreamTest, checkpoint.unpack(checkpoint.pack(vars(watch))))
            alarm = watch.update(number)
            if settled:
                test.update(min(max(number / scale, -1.0), 1.0))
                assert alarm == test.drift_detected
            if alarm:
                raised += 1
                break
    assert raised >= 3


def test_a_change_raises_an_alarm_in_its_own_stream() -> None:
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
        found = labels_of(block)
        advantages = detector.drafter.update(found)
        sums = excess(np.zeros(16), advantages, found.model_tried).sum(axis=0)
        assert np.isfinite(sums).all()
        alarms += detector.update([np.array([0.0, sums[1]])], row)
    return alarms


@pytest.mark.parametrize("after", [0.35, 0.75])
def test_a_swapped_drafter_raises_one_alarm_within_sixty_clusters(after: float) -> None:
    (found,) = drafted([0.55] * 500 + [after] * 1_000, 4)
    assert found.stream == "model" and 500 <= found.row < 560


def test_an_unchanged_drafter_raises_no_alarm() -> None:
    assert drafted([0.55] * 6_000, 5) == []


def test_a_drafter_that_never_or_always_holds_has_finite_advantages() -> None:
    assert 1 <= len(drafted([1e-9] * 3_000 + [1.0 - 1e-9] * 50, 6)) <= 2


def test_clusters_without_model_drafts_are_not_tested() -> None:
    detector = Detector()
    alarms_of(detector, np.stack([np.ones(100), np.zeros(100)], axis=1))
    assert detector.watches["model"].count == 0
