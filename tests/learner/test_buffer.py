"""Each event once, splits by request, a ring that stays bounded."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.buffer import REMEMBERED_IDS, Buffer
from learner.costs import measure
from learner.rows import COLUMNS, UNKNOWN, Rows, from_events, hash_id
from tests.learner.traffic import Traffic

EVENTS = Traffic(seed=6).events(30, each=10)


def same(one: Rows, other: Rows) -> bool:
    return all(
        np.array_equal(getattr(one, c), getattr(other, c), equal_nan=c in ("model_accepted", "rate"))
        for c in COLUMNS
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 299), max_size=400), st.integers(1, 60))
def test_keeps_the_newest_distinct_events(order: list[int], capacity: int) -> None:
    buffer = Buffer(capacity)
    distinct = list(dict.fromkeys(order))
    for start in range(0, len(order), 7):
        buffer.admit([EVENTS[i] for i in order[start : start + 7]])
    assert len(buffer) == min(buffer.total, capacity)
    assert buffer.total + buffer.duplicates == len(order)
    if len(distinct) <= REMEMBERED_IDS * capacity:
        assert buffer.total == len(distinct)
        kept = [EVENTS[i].accepted for i in distinct[-capacity:]]
        assert buffer.recent(capacity).accepted.tolist() == kept


def test_splits_share_no_request_and_miss_no_event() -> None:
    buffer = Buffer(1000)
    buffer.admit(EVENTS)
    parts = [buffer.rows(split, 1000) for split in ("train", "tune", "gate")]
    requests = [set(part.request.tolist()) for part in parts]
    assert sum(map(len, parts)) == len(EVENTS)
    assert len(set.union(*requests)) == sum(map(len, requests)) == 30
    assert all(requests)


def test_ids_are_forgotten_in_order() -> None:
    buffer = Buffer(10)
    buffer.admit([EVENTS[0]._replace(number=i) for i in range(REMEMBERED_IDS * 10 + 1)])
    assert len(buffer.admit([EVENTS[0]._replace(number=0)])) == 1
    assert len(buffer.admit([EVENTS[0]._replace(number=40)])) == 0


def test_trust_moves_forward_only() -> None:
    buffer = Buffer(1000)
    buffer.admit(EVENTS)
    buffer.trust_last(50)
    assert sum(len(buffer.slots(s)) for s in ("train", "tune", "gate")) == 50
    buffer.trust_last(200)
    assert buffer.trusted_from == 250 and len(buffer.recent(1000)) == 300


def test_comes_back_from_a_snapshot_into_any_size() -> None:
    buffer = Buffer(120)
    buffer.admit(EVENTS)
    for capacity in (120, 60, 500):
        again = Buffer.restored(buffer.snapshot(), capacity)
        held = min(120, capacity)
        assert same(again.recent(held), buffer.recent(held)) and len(again.rows("gate", 999))
        assert len(again.admit(EVENTS[-5:])) == 0
        total = sum(len(again.slots(s)) for s in ("train", "tune", "gate"))
        assert total == held


def test_hashes_are_the_same_for_ever() -> None:
    assert hash_id("request") == 10201474900411090615


def test_a_number_is_an_event_of_its_life_only() -> None:
    buffer = Buffer(1000)
    for life in ("a", "b", "a"):
        buffer.admit(EVENTS[:10], life)
    assert (buffer.total, buffer.duplicates) == (20, 10)


def test_events_without_a_draft_are_counted_and_teach_nothing() -> None:
    buffer = Buffer(1000)
    plain = [
        e._replace(draft_len=0, accepted=0, label="", features=None, arm="model", model_accepted=1)
        for e in EVENTS[:50:2]
    ]
    rows = buffer.admit([*plain, *EVENTS[50:60]])
    assert (len(rows), buffer.total, buffer.plain) == (10, 10, 25)
    assert len(buffer.admit(plain)) == 0 and buffer.duplicates == 25
    again = Buffer.restored(buffer.snapshot(), 1000)
    assert (again.total, again.plain, again.duplicates) == (10, 25, 25)


def test_an_arm_that_nobody_knows_yet_keeps_its_label_and_teaches_no_cost() -> None:
    rows = from_events([e._replace(arm="tree") for e in EVENTS] + EVENTS)
    assert len(rows) == 2 * len(EVENTS) and (rows.arm[: len(EVENTS)] == UNKNOWN).all()
    assert measure(rows) == measure(from_events(EVENTS))
