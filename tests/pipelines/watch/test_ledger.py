"""What of the records of a service is counted, kept and forgotten, and how much faster it is."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from decoder.contracts.bundle import CHAMPION, TRIAL
from pipelines.watch import ledger
from pipelines.watch.ledger import Drafts, Ledger, Phase, Window
from pipelines.watch.page import ALL, as_dict, as_text, over_time, rate_in, uplifts
from tests.pipelines.watch import records
from tests.pipelines.watch.records import (
    ORIGIN,
    SCOPE,
    WORKER,
    batch,
    event,
    learner_status,
    rounds,
)


def test_arms_are_those_of_the_policy_in_force_whatever_other_sides_did() -> None:
    made = [
        event(0, 101.0, side="", arm="cache", accepted=5, verified_len=4),
        event(1, 101.0, side="champion", arm="model", model_accepted=2, censored="length"),
        event(2, 101.2, side="champion", arm="none", predicted=4.0, accepted=3),
        event(3, 101.4, arm="none", draft_len=0, accepted=0, label="", features=None),
        event(4, 101.5, side="plain", arm="none"),
        event(5, 101.5, side="trial", arm="cache", accepted=8, role="trial"),
        event(6, 105.0, side="", arm="model", model_accepted=1, accepted=3),
    ]
    found = Ledger(WORKER)
    found.add_drafts(batch(made))
    first, second, nothing = found.drafts.windows([(100.0, 105.0), (105.0, 110.0), (0.0, 9.0)])
    shares = {"cache": 0.25, "model": 0.25, "none": 0.5}
    assert first == Window(4, shares, {"cache": 4.0, "model": 2.0})
    assert (second.events, second.accepted_by_arm["model"]) == (1, 1.0)
    assert nothing == Drafts().windows([(0.0, 9.0)])[0]
    assert (nothing.events, found.drafts.seen) == (0, 7)


def test_events_count_once_and_only_those_of_the_own_worker_and_scope() -> None:
    found = Ledger(WORKER)
    found.add_drafts(batch([event(0, 101.0), event(0, 101.0)]))
    found.add_drafts(batch([event(0, 101.0)]))
    found.add_drafts(batch([event(1, 101.0)], replace(ORIGIN, worker="another")))
    found.add_drafts(batch([event(0, 102.0)], replace(ORIGIN, life="2e" * 8)))
    assert found.drafts.seen == found.drafts.windows([(0.0, 200.0)])[0].events == 2
    found.add_status(records.worker_status(101.0, 0))
    found.add_status(learner_status(101.0, 5))
    found.add_status(learner_status(102.0, 99).model_copy(update={"scope": "other"}))
    assert (found.consumed, found.learner[-1].scope) == (5, SCOPE)


def test_learned_versions_are_those_that_the_learner_made_and_that_were_in_force() -> None:
    found = records.recorded()
    made = found.published[-1].policy
    found.add_policy(1060.5, SCOPE, TRIAL, replace(made, version=3))
    found.add_policy(1061.0, SCOPE, TRIAL, None)
    found.add_policy(1062.0, "another", CHAMPION, replace(made, scope="another", version=7))
    assert found.policy_switches() == [(1000.0, 1), (1060.0, 2)]
    assert found.learned_versions() == [2]
    published = [(p.role, p.policy and p.policy.version) for p in found.published]
    assert published == [(CHAMPION, 1), (CHAMPION, 2), (TRIAL, 3), (TRIAL, None)]


def test_what_is_older_than_is_kept_is_forgotten_and_a_time_to_come_deletes_no_history() -> None:
    found = Ledger(keep_s=60.0)
    for second in range(200):
        found.add_status(records.worker_status(float(second), second))
    for one in records.rounds(40, 0.0, 5.0, {"champion": 40.0}):
        found.add_round(one)
    assert (found.statuses[0].time, found.rounds[0].time) == (139.0, 140.0)
    now = time.time()
    for at in (now - 5.0, now, now + 3600.0, 1.0, now):
        found.add_status(records.worker_status(at, 1))
    assert [s.time for s in found.statuses] == [now - 5.0, now, now]


def test_made_up_lives_times_and_publications_do_not_grow_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, now = Ledger(keep_s=3.0), time.time()
    monkeypatch.setattr(ledger, "KEPT_NUMBERS", 3)
    monkeypatch.setattr(ledger, "KEPT_PUBLICATIONS", 3)
    for life in range(10):
        made = event(life, now + 60.0 * life)
        found.add_drafts(batch([made, made], replace(ORIGIN, life=f"{life:x}")))
        found.add_policy(1e15, SCOPE, TRIAL, None)
    assert found.drafts.seen == 10
    assert len(found.drafts._numbers) == len(found._published) == 3
    assert len(found.drafts._seconds) <= 7
    assert found._published[-1].time <= time.time()


RATES = {"champion": 60.0, "plain": 40.0, "suffix": 50.0}
PHASES = [Phase("A", ("edits",), 100.0, 200.0), Phase("B", ("chat",), 200.0)]


def played() -> list:
    return [*rounds(40, 100.0, 2.0, RATES), *rounds(20, 200.0, 2.0, {**RATES, "champion": 30.0})]


def test_each_phase_has_its_own_ratio_and_the_whole_is_that_of_all() -> None:
    found = uplifts(played(), PHASES)
    first, second, whole = (found[name]["plain"] for name in ("A", "B", ALL))
    assert (first.ratio, second.ratio) == pytest.approx((1.5, 0.75), rel=0.05)
    assert (first.pairs, second.pairs, whole.pairs) == (40, 20, 60)
    assert whole.low < whole.ratio < whole.high
    assert found["A"]["suffix"].ratio == pytest.approx(1.2, rel=0.05)
    rates = [rate_in(phase, played()) for phase in PHASES]
    assert rates == pytest.approx([60.0, 30.0], rel=0.05) and rate_in(PHASES[0], []) == 0.0


def test_no_interval_is_claimed_before_there_is_one_and_no_side_that_never_played() -> None:
    assert list(uplifts(rounds(5, 0.0, 2.0, RATES), ())[ALL]) == ["plain", "suffix"]
    none, few, many = (uplifts(rounds(n, 0.0, 1.0, RATES), ())[ALL]["plain"] for n in (0, 5, 50))
    assert as_text(none) == "-" and as_text(few).startswith("about 1.") and " to " in as_text(many)
    assert as_dict(none) == {"ratio": None, "low": None, "high": None, "pairs": 0}
    assert as_dict(few) == {**as_dict(none), "ratio": round(few.ratio, 4), "pairs": 5}


def test_a_course_ends_with_what_is_known_now_narrows_and_the_recent_one_follows() -> None:
    points = over_time(played()[:40], "plain", 10)
    assert len(points) == 10
    assert points[-1] == (180.0, uplifts(played()[:40], ())[ALL]["plain"])
    assert points[-1][1].high - points[-1][1].low < points[4][1].high - points[4][1].low
    lately, whole = (over_time(played(), "plain", 10, n)[-1][1] for n in (24, None))
    assert lately.pairs == 24 and lately.ratio < whole.ratio
