"""The queue never blocks, never grows past its bound, and counts what it could not take."""

from __future__ import annotations

import threading

from decoder.telemetry.queue import EventQueue


def test_order_bound_and_count() -> None:
    queue = EventQueue(3)
    for number in range(5):
        queue.put(number)
    assert queue.counts() == (5, 3, 0, 2)
    assert queue.take(2) == [0, 1]
    assert queue.counts() == (5, 1, 2, 2)
    assert queue.take(9) == [2] and queue.take(9) == []


def test_a_queue_that_nobody_reads_is_empty() -> None:
    queue = EventQueue(0)
    queue.put("event")
    assert queue.counts() == (0, 0, 0, 0) and not len(queue)


def test_the_counts_are_of_one_moment_while_another_thread_puts() -> None:
    queue, stop = EventQueue(50), threading.Event()

    def produce() -> None:
        while not stop.is_set():
            for _ in range(20):
                queue.put(None)
            stop.wait(0.0001)

    thread = threading.Thread(target=produce)
    thread.start()
    for _ in range(3_000):
        counts = queue.counts()
        assert counts.made == counts.held + counts.taken + counts.dropped
        queue.take(7)
    stop.set()
    thread.join()
    assert queue.made and queue.taken
