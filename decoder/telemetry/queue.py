"""The bounded queue between the decode path and the thread that passes events on."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

LOOKS: Final = 100
"""Attempts to see the counts at one moment, between two events."""


class Counts(NamedTuple):
    """Of the events that were put: ``made`` is the sum of the others."""

    made: int
    held: int
    taken: int
    dropped: int


class EventQueue:
    """What is to become events, waiting; a full queue drops the newest and counts it.

    ``put`` is one length check and one append, both atomic in CPython: it never waits for the
    consuming thread, and there is exactly one producer and one consumer. ``made`` counts every
    event that was put, those that were ``dropped`` included. Of ``size`` 0 is the queue that nobody
    reads: nothing is kept there, and nothing counted.
    """

    def __init__(self, size: int) -> None:
        """Begin empty."""
        self.size = size
        self._held: deque[Any] = deque()
        self.made = 0
        self.taken = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._held)

    def put(self, event: Any) -> None:
        """Take what is to be an event, or count it as dropped. Never blocks or raises."""
        if not self.size:
            return
        self.made += 1
        if len(self._held) >= self.size:
            self.dropped += 1
        else:
            self._held.append(event)

    def take(self, most: int) -> list[Any]:
        """Remove and return up to ``most``, oldest first. Never raises."""
        held = self._held
        taken = [held.popleft() for _ in range(min(most, len(held)))]
        self.taken += len(taken)
        return taken

    def counts(self) -> Counts:
        """All counts at one moment; for the consumer to ask, while the producer goes on."""
        for _ in range(LOOKS):
            found = Counts(self.made, len(self._held), self.taken, self.dropped)
            if found.made == found.held + found.taken + found.dropped == self.made:
                break
        return found
