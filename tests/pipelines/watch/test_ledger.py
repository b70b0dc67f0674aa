from __future__ import annotations

import time
from dataclasses import replace

import pytest

from decoder.contracts.bundle import CHAMPION, TRIAL, frequency_policy
from pipelines.watch import drafts
from pipelines.watch.ledger import Ledger, Phase
from tests.pipelines.watch.records import (
    ORIGIN,
    SCOPE,
    WORKER,
    batch,
    event,
    learner_status,
    rounds,
    worker_status,
)


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger(WORKER)
    for second in range(11):  # 20 tokens a second, then 40
        tokens = 20 * second if second <= 5 else 100 + 40 * (second - 5)
        made.add_status(
            worker_status(
                100.0 + second,
                tokens,
                drafts_labelled=second,
                policy_version=1 if second < 6 else 2,
                policy_applied_at=0.0 if second < 6 else 105.5,
                swap_ms_max=0.0 if second < 6 else 1.25,
            )
        )
    made.phases = [Phase("A", ("edits",), 100.0, 105.0), Phase("B", ("chat",), 105.0, 110.0)]
    return made


def test_rates_are_differences_of_counters(ledger: Ledger) -> None:
    first, second = ledger.between(100.0, 105.0), ledger.between(105.0, 110.0)
    assert (first.tok_per_s, second.tok_per_s) == pytest.approx((20.0, 40.0))


def test_rates_of_workers_add_up_and_a_new_life_begins_at_nothing(ledger: Ledger) -> None:
    both = Ledger()
    for status in ledger.statuses:
        both.add_status(status)
        both.add_status(status.model_copy(update={"process": "another", "life": "2e" * 8}))
    assert both.between(100.0, 105.0).tok_per_s == pytest.approx(40.0)
    both.add_status(worker_status(111.0, 0, life="3d" * 8))
    both.add_status(worker_status(112.0, 10, life="3d" * 8))
    assert both.between(111.0, 112.0).tok_per_s == pytest.approx(10.0)


def test_arms_are_those_of_the_policy_in_force_whatever_other_sides_did(ledger: Ledger) -> None:
    made = [
        event(0, 101.0, side="", arm="cache", accepted=5, verified_len=4),
        event(1, 101.0, side="champion", arm="model", model_accepted=2),
        event(2, 101.2, side="champion", arm="none"),
        event(3, 101.4, side="champion", arm="none"),
        event(4, 101.5, side="plain", arm="none"),
        event(5, 101.5, side="trial", arm="cache", accepted=8, role="trial", policy_version=9),
        event(6, 105.0, side="", arm="model", model_accepted=1),
    ]
    ledger.add_drafts(batch(made))
    window = ledger.between(100.0, 105.0)
    assert window.arm_shares == pytest.approx({"cache": 0.25, "model": 0.25, "none": 0.5})
    assert window.accepted_by_arm == pytest.approx({"cache": 4.0, "model": 2.0, "none": 0.0})
    assert (window.events, ledger.drafts.seen) == (4, 7)
    assert 9 not in dict(map(reversed, ledger.policy_switches()))


def test_bounds_between_two_readings_are_interpolated(ledger: Ledger) -> None:
    assert ledger.between(104.5, 105.5).tok_per_s == pytest.approx(30.0)


def test_a_stretch_beyond_the_readings_is_cut_to_them(ledger: Ledger) -> None:
    assert ledger.between(0.0, float("inf")).tok_per_s == pytest.approx(300.0 / 10.0)
    assert ledger.between(200.0, 300.0).tok_per_s == 0.0


def test_an_empty_ledger_has_rates_of_zero() -> None:
    window = Ledger(WORKER).between(0.0, 10.0)
    assert (window.tok_per_s, window.mae, window.events) == (0.0, None, 0)


def test_censored_labels_do_not_count_as_errors(ledger: Ledger) -> None:
    events = [
        event(0, 101.0, predicted=3.0, accepted=5),
        event(1, 102.0, predicted=4.0, accepted=3),
        event(2, 103.0, predicted=9.0, accepted=0, censored="length", label="hindsight"),
        event(3, 106.0, predicted=1.0, accepted=1),
        event(4, 106.5, predicted=0.0, accepted=0, draft_len=0, label="", features=None),
    ]
    ledger.add_drafts(batch(events))
    assert ledger.between(100.0, 105.0).mae == pytest.approx(1.5)
    assert ledger.between(105.0, 110.0).mae == 0.0
    assert dict(ledger.drafts.labels) == {"hindsight censored": 1, "verified": 3}
    features, accepted = ledger.drafts.recent
    assert (len(features), accepted.tolist()) == (3, [5.0, 3.0, 1.0])


def test_events_count_once_and_only_those_of_the_own_worker(ledger: Ledger) -> None:
    ledger.add_drafts(batch([event(0, 101.0), event(0, 101.0)]))
    ledger.add_drafts(batch([event(0, 101.0)]))
    ledger.add_drafts(batch([event(1, 101.0)], replace(ORIGIN, worker="another")))
    ledger.add_drafts(batch([event(0, 102.0)], replace(ORIGIN, life="2e" * 8)))
    assert ledger.drafts.seen == ledger.drafts.labels["verified"] == 2


def test_statuses_of_other_scopes_are_left_out(ledger: Ledger) -> None:
    ledger.add_status(learner_status(101.0, 5))
    ledger.add_status(learner_status(102.0, 99).model_copy(update={"scope": "other"}))
    assert ledger.consumed == 5
    assert ledger.learner[-1].scope == SCOPE


def test_a_policy_in_force_between_two_statuses_shows_in_the_events(ledger: Ledger) -> None:
    ledger.add_drafts(batch([event(0, 107.2, policy_version=3), event(1, 107.3, policy_version=2)]))
    assert ledger.policy_switches() == [(100.0, 1), (105.5, 2), (107.2, 3)]


def test_learned_versions_are_those_that_the_learner_made_and_that_were_in_force(ledger) -> None:
    counting = replace(frequency_policy(SCOPE), version=1)
    made = replace(counting, version=2, provenance={"origin": "learner"})
    ledger.add_policy(99.0, SCOPE, CHAMPION, counting)
    ledger.add_policy(104.0, SCOPE, TRIAL, replace(made, share=0.1))
    ledger.add_policy(104.5, SCOPE, TRIAL, replace(made, version=3))
    ledger.add_policy(105.0, SCOPE, CHAMPION, made)
    ledger.add_policy(105.1, SCOPE, TRIAL, None)
    ledger.add_policy(105.2, "another", CHAMPION, replace(made, scope="another", version=7))
    assert ledger.learned_versions() == [2]
    assert [(p.role, p.version, p.share) for p in ledger.published] == [
        *((CHAMPION, 1, 0.0), (TRIAL, 2, 0.1), (TRIAL, 3, 0.0), (CHAMPION, 2, 0.0)),
        (TRIAL, None, 0.0),
    ]
    assert ledger.bundle(2) == made
    assert ledger.bundle(7) is None


def test_what_is_older_than_is_kept_is_forgotten() -> None:
    ledger = Ledger(keep_s=60.0)
    for second in range(200):
        ledger.add_status(worker_status(float(second), second))
    for one in rounds(40, 0.0, 5.0, {"champion": 40.0}):
        ledger.add_round(one)
    assert ledger.statuses[0].time == 139.0
    assert ledger.rounds[0].time == 140.0


def test_a_record_of_a_time_to_come_deletes_no_history_and_one_long_gone_does_not_stretch_it() -> (
    None
):
    ledger, now = Ledger(keep_s=60.0), time.time()
    for at in (now - 5.0, now, now + 3600.0, 1.0, now):
        ledger.add_status(worker_status(at, 1))
    assert [s.time for s in ledger.statuses] == [now - 5.0, now, now]
    assert ledger.newest == now


def test_publications_are_kept_as_long_as_statuses_whatever_time_they_claim() -> None:
    ledger, now = Ledger(keep_s=60.0), time.time()
    ledger.add_status(worker_status(now, 1))
    for at in (now - 3600.0, now - 5.0, 1e15):
        ledger.add_policy(at, SCOPE, TRIAL, None)
    assert len(ledger.published) == 2
    assert ledger.published[-1].time <= time.time()


def test_made_up_lives_and_versions_do_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, now = Ledger(keep_s=60.0), time.time()
    monkeypatch.setattr(drafts, "KEPT_LIVES", 3)
    for life in range(10):
        made = event(0, now - 600.0 + 60.0 * life, policy_version=life + 1)
        ledger.add_drafts(batch([made, made], replace(ORIGIN, life=f"{life:x}")))
    assert ledger.drafts.seen == 10
    assert len(ledger.drafts._numbers) == 3
    assert set(ledger.drafts.versions) <= {9, 10}


def test_drafts_are_kept_no_longer_than_a_calibration_needs() -> None:
    ledger = Ledger()
    numbers = iter(range(10_000))
    for _ in range(20):
        ledger.add_drafts(batch([event(next(numbers), 100.0) for _ in range(300)]))
    features, accepted = ledger.drafts.recent
    assert len(features) == len(accepted) == 4096
