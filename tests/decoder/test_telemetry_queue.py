"""The queue never blocks, never grows past its bound, and counts what it could not take."""

from __future__ import annotations

from decoder.contracts.events import DraftEvent
from decoder.telemetry.queue import EventQueue
from tests.contracts.test_events import EVENT


def test_order_bound_and_count() -> None:
    queue = EventQueue(3)
    for _ in range(5):
        queue.put(EVENT)
    assert (len(queue), queue.dropped) == (3, 2)
    assert len(queue.take(2)) == 2 and len(queue.take(9)) == 1 and queue.take(9) == []


def test_what_cannot_be_read_is_counted_and_takes_no_other_with_it() -> None:
    def read(number: int) -> DraftEvent:
        return EVENT._replace(number=12 // number)

    queue = EventQueue(9, read)
    for number in (1, 0, 3, 0, 4):
        queue.put(number)
    assert [e.number for e in queue.take(2)] == [12, 4] and queue.unreadable == 1
    assert [e.number for e in queue.take(9)] == [3] and queue.unreadable == 2
