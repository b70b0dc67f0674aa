"""The queue never blocks, never grows past its bound, and counts what it could not take."""

from __future__ import annotations

from decoder.telemetry.queue import EventQueue
from tests.contracts.test_events import EVENT


def test_order_bound_and_count() -> None:
    queue = EventQueue(3)
    for _ in range(5):
        queue.put(EVENT)
    assert (len(queue), queue.dropped) == (3, 2)
    assert len(queue.take(2)) == 2 and len(queue.take(9)) == 1 and queue.take(9) == []
