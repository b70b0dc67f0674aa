"""A scope's bounded memory of labelled drafts: each event once, split by request, trusted from a
point in time.

Splits are by request, never by event: drafts of one request resemble each other, and a network
that trained on some of them would look better on the rest than it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.events import DraftEvent
from learner.rows import COLUMNS, Rows, empty, from_events, hash_id

Split = Literal["train", "tune", "gate"]
SPLITS: Final[tuple[Split, ...]] = ("gate", "tune", "train", "train", "train")
"""Of five requests three train the network, one tunes the decision, one judges both: a gate that
looked at the drafts the threshold was fitted to would flatter every candidate."""

REMEMBERED_IDS: Final = 4
"""Ids remembered per row of the buffer. A replay after a crash reaches back one checkpoint (seconds
of events), a producer's retry less; four buffers are far beyond both and cost 32 bytes a row."""

Snapshot = tuple[dict[str, NDArray[Any]], dict[str, Any]]
"""Arrays and JSON-able numbers: what a part of the learner puts into the checkpoint."""


def split_of(request: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Index into :data:`SPLITS` of each hashed request id, the same for ever."""
    return (request % np.uint64(len(SPLITS))).astype(np.int64)


class Buffer:
    """A ring of at most ``capacity`` rows.

    ``total`` counts distinct events with a cache draft ever admitted, ``plain`` those without one,
    which teach nothing, ``duplicates`` the ones turned away; a row's place is ``total`` when it
    came. Rows before ``trusted_from`` stay in the ring for their costs but teach nothing.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.total = 0
        self.plain = 0
        self.duplicates = 0
        self.trusted_from = 0
        self._ring = empty(capacity)
        self._ids: set[int] = set()
        self._id_order: deque[int] = deque()

    def __len__(self) -> int:
        return min(self.total, self.capacity)

    def admit(self, events: Sequence[DraftEvent], life: str = "") -> Rows:
        """Store the drafts of the events that are new and return their rows. Mutates the buffer.

        Args:
            life: of the worker that made them; an event is known by it and by its number.
        """
        fresh = [event for event in events if self._remember(hash_id(f"{life}/{event.number}"))]
        self.duplicates += len(events) - len(fresh)
        rows = from_events(fresh)
        self.plain += len(fresh) - len(rows)
        self.store(rows)
        return rows

    def store(self, rows: Rows) -> None:
        """Store new rows. Mutates the buffer."""
        kept = rows.take(np.arange(len(rows))[-self.capacity :])
        slots = (self.total + np.arange(len(rows))[-self.capacity :]) % self.capacity
        for name in COLUMNS:
            getattr(self._ring, name)[slots] = getattr(kept, name)
        self.total += len(rows)

    def trust_last(self, events: int) -> None:
        """Forget, for teaching and judging, everything older than the last ``events``.

        Trust only ever moves forward. Mutates ``trusted_from``.
        """
        self.trusted_from = max(self.trusted_from, self.total - max(events, 0))

    def slots(self, split: Split) -> NDArray[np.int64]:
        """Ring slots of the trusted rows of ``split``, oldest first."""
        first = max(self.trusted_from, self.total - self.capacity)
        slots = np.arange(first, self.total) % self.capacity
        chosen = np.array([name == split for name in SPLITS])
        mask: NDArray[np.bool_] = chosen[split_of(self._ring.request[slots])]
        return slots[mask]

    def rows(self, split: Split, last: int) -> Rows:
        """The newest trusted rows of ``split``, at most ``last``, oldest first, copied."""
        return self._ring.take(self.slots(split)[-last:])

    def recent(self, last: int) -> Rows:
        """The newest rows of every split, trusted or not: costs do not follow the text."""
        first = max(0, self.total - min(self.capacity, last))
        return self._ring.take(np.arange(first, self.total) % self.capacity)

    def at(self, slots: NDArray[np.int64]) -> Rows:
        """The rows in ``slots``, copied."""
        return self._ring.take(slots)

    def _remember(self, event_id: int) -> bool:
        if event_id in self._ids:
            return False
        self._ids.add(event_id)
        self._id_order.append(event_id)
        if len(self._id_order) > REMEMBERED_IDS * self.capacity:
            self._ids.discard(self._id_order.popleft())
        return True

    def snapshot(self) -> Snapshot:
        """Everything :meth:`restored` needs."""
        rows = self.recent(self.capacity)
        arrays: dict[str, NDArray[Any]] = {name: getattr(rows, name) for name in COLUMNS}
        arrays["ids"] = np.array(self._id_order, np.uint64)
        numbers = {
            "total": self.total,
            "plain": self.plain,
            "duplicates": self.duplicates,
            "trusted_from": self.trusted_from,
        }
        return arrays, numbers

    @classmethod
    def restored(cls, snapshot: Snapshot, capacity: int) -> Buffer:
        """A buffer as it was, or its newest part when ``capacity`` has become smaller."""
        arrays, numbers = snapshot
        buffer = cls(capacity)
        buffer.total = int(numbers["total"])
        buffer.plain = int(numbers["plain"])
        buffer.duplicates = int(numbers["duplicates"])
        held = min(len(arrays["request"]), capacity)
        # A larger ring than the one saved has nothing older than what was saved.
        buffer.trusted_from = max(int(numbers["trusted_from"]), buffer.total - held)
        slots = np.arange(buffer.total - held, buffer.total) % capacity
        for name in COLUMNS:
            getattr(buffer._ring, name)[slots] = arrays[name][len(arrays[name]) - held :]
        for event_id in arrays["ids"].tolist():
            buffer._remember(event_id)
        return buffer
