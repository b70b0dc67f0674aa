from __future__ import annotations

from dataclasses import replace

import pytest

from pipelines.watch.ledger import Ledger, Phase
from tests.pipelines.watch.records import (
    ORIGIN,
    SCOPE,
    WORKER,
    event,
    learner_status,
    worker_status,
)


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger(WORKER)
    for second in range(11):  # 20 tokens a second, then 40
        tokens = 20 * second if second <= 5 else 100 + 40 * (second - 5)
        cycles = {"cache": 2 * second, "model": second, "none": second}
        made.add_status(
            worker_status(
                100.0 + second,
                tokens,
                cycles=cycles,
                accepted={"cache": 12 * second, "model": 3 * second},
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
    assert first.arm_shares == pytest.approx({"cache": 0.5, "model": 0.25, "none": 0.25})
    assert first.accepted_by_arm == pytest.approx({"cache": 6.0, "model": 3.0, "none": 0.0})


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
    ledger.add_events(ORIGIN, events)
    assert ledger.between(100.0, 105.0).mae == pytest.approx(1.5)
    assert ledger.between(105.0, 110.0).mae == 0.0
    assert ledger.labels() == {"hindsight censored": 1, "verified": 3}


def test_events_count_once_and_only_those_of_the_own_worker(ledger: Ledger) -> None:
    ledger.add_events(ORIGIN, [event(0, 101.0), event(0, 101.0)])
    ledger.add_events(replace(ORIGIN, worker="another"), [event(1, 101.0)])
    ledger.add_events(replace(ORIGIN, life="2e" * 8), [event(0, 102.0)])
    assert [e.time for e in ledger.events] == [101.0, 102.0]


def test_statuses_of_other_scopes_are_left_out(ledger: Ledger) -> None:
    ledger.add_status(learner_status(101.0, 5))
    ledger.add_status(learner_status(102.0, 99).model_copy(update={"scope": "other"}))
    assert ledger.consumed == 5
    assert ledger.learner[-1].scope == SCOPE


def test_a_policy_in_force_between_two_statuses_shows_in_the_events(ledger: Ledger) -> None:
    ledger.add_events(
        ORIGIN, [event(0, 107.2, policy_version=3), event(1, 107.3, policy_version=2)]
    )
    assert ledger.policy_switches() == [(100.0, 1), (105.5, 2), (107.2, 3)]
