"""The bounded queue between the decode path and the thread that talks to Kafka."""

from __future__ import annotations

from collections import deque

from decoder.contracts.events import DraftEvent


class EventQueue:
    """Events waiting to be sent; a full queue drops the newest and counts it.

    ``put`` is one length check and one append, both atomic in CPython: it never waits for the
    consuming thread, and there is exactly one producer and one consumer. ``made`` counts every
    event that was put, those that were ``dropped`` included.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._events: deque[DraftEvent] = deque()
        self.made = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: DraftEvent) -> None:
        """Take one event, or count it as dropped. Never blocks, never raises."""
        self.made += 1
        if len(self._events) >= self._size:
            self.dropped += 1
        else:
            self._events.append(event)

    def take(self, most: int) -> list[DraftEvent]:
        """Remove and return up to ``most`` events, oldest first."""
        taken: list[DraftEvent] = []
        while self._events and len(taken) < most:
            taken.append(self._events.popleft())
        return taken
