"""The bounded queue between the decode path and the thread that talks to Kafka."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from decoder.contracts.events import DraftEvent


def _itself(event: DraftEvent) -> DraftEvent:
    return event


class EventQueue:
    """Events waiting to be sent; a full queue drops the newest and counts it.

    ``put`` is one length check and one append, both atomic in CPython: it never waits for the
    consuming thread, and there is exactly one producer and one consumer. ``made`` counts every
    event that was put, those that were ``dropped`` included.
    """

    def __init__(self, size: int, read: Callable[[Any], DraftEvent] = _itself) -> None:
        """Begin empty.

        Args:
            read: makes an event of what was put; it runs where events are taken out.
        """
        self._size, self._read = size, read
        self._held: deque[Any] = deque()
        self.made = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._held)

    def put(self, event: Any) -> None:
        """Take an event, or what is to be one, or count it as dropped. Never blocks or raises."""
        self.made += 1
        if len(self._held) >= self._size:
            self.dropped += 1
        else:
            self._held.append(event)

    def take(self, most: int) -> list[DraftEvent]:
        """Remove and return up to ``most`` events, oldest first."""
        taken: list[DraftEvent] = []
        while self._held and len(taken) < most:
            taken.append(self._read(self._held.popleft()))
        return taken
