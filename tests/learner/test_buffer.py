"""A ring that stays bounded, and what in it began after a row."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.buffer import Buffer
from learner.rows import COLUMNS, Rows, from_events
from tests.learner.traffic import Traffic

ROWS = from_events(Traffic(seed=6).events(30, each=10))


def same(one: Rows, other: Rows) -> bool:
    missing = ("model_accepted", "rate")
    return all(
        np.array_equal(getattr(one, c), getattr(other, c), equal_nan=c in missing) for c in COLUMNS
    )


def filled(capacity: int, rows: Rows = ROWS) -> Buffer:
    buffer = Buffer(capacity)
    for first in range(0, len(rows), 10):
        buffer.add(rows.take(np.arange(first, min(first + 10, len(rows)))))
    return buffer


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 300), st.integers(10, 60))
def test_keeps_the_newest(n: int, capacity: int) -> None:
    buffer = filled(capacity, ROWS.take(np.arange(n)))
    held = min(n, capacity)
    assert buffer.total == n and len(buffer) == held
    assert same(buffer.recent(capacity), ROWS.take(np.arange(n - held, n)))
    assert same(buffer.recent(7), ROWS.take(np.arange(n - min(held, 7), n)))


def test_a_session_of_which_something_is_older_did_not_begin_since() -> None:
    buffer = filled(1_000)
    fresh = buffer.begun_since(105, 1_000, 1_000)
    assert same(fresh, ROWS.take(np.arange(110, 300)))
    assert same(buffer.begun_since(105, 50, 1_000), ROWS.take(np.arange(250, 300)))
    assert len(buffer.begun_since(300, 50, 1_000)) == 0


def test_comes_back_from_a_snapshot_into_any_size() -> None:
    buffer = filled(120)
    for capacity in (120, 60, 500):
        again = Buffer.restored(buffer.snapshot(), capacity)
        held = min(120, capacity)
        assert (again.total, len(again)) == (300, held)
        assert same(again.recent(held), buffer.recent(held))
        again.add(ROWS.take(np.arange(5)))
        assert same(again.recent(5), ROWS.take(np.arange(5)))
