"""A scope's bounded memory of labelled drafts, the newest of those that are learned from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.checkpoint import Tree
from learner.rows import COLUMNS, Rows, empty, joined


class Buffer:
    """A ring of at most ``capacity`` rows; ``total`` counts those ever added.

    A row's number is ``total`` when it came.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.total = 0
        self._held = 0
        self._ring = empty(capacity)

    def __len__(self) -> int:
        return self._held

    def add(self, rows: Rows) -> None:
        """Store ``rows``, at most ``capacity`` of them, over the oldest. Mutates."""
        slots = (self.total + np.arange(len(rows))) % self.capacity
        for name in COLUMNS:
            getattr(self._ring, name)[slots] = getattr(rows, name)
        self.total += len(rows)
        self._held = min(self._held + len(rows), self.capacity)

    def times(self) -> dict[str, float]:
        """``time_from`` and ``time_to`` of what is held, in seconds since the epoch."""
        held = self._ring.time[np.arange(self.total - len(self), self.total) % self.capacity]
        return {"time_from": float(held.min()), "time_to": float(held.max())} if len(held) else {}

    def recent(self, last: int) -> Rows:
        """The newest rows, at most ``last``, oldest first, copied."""
        held = min(len(self), last)
        begins, ends = (self.total - held) % self.capacity, self.total % self.capacity
        if held and ends <= begins:
            return joined([self._ring.part(begins, self.capacity), self._ring.part(0, ends)])
        return joined([self._ring.part(begins, ends)])

    def at(self, numbers: NDArray[np.int64]) -> Rows:
        """The rows of these ``numbers``, each among the newest ``capacity``, copied."""
        return self._ring.take(numbers % self.capacity)

    def snapshot(self, since: int = 0) -> Tree:
        """Everything :meth:`restored` needs beside the rows before number ``since``."""
        rows = self.recent(self.total - since)
        return {"total": self.total, "rows": dict(vars(rows))}

    @classmethod
    def restored(cls, snapshot: Tree, capacity: int) -> Buffer:
        """A buffer as it was, or its newest part when ``capacity`` has become smaller.

        Raises:
            KeyError, ValueError: the snapshot is not one of this version.
        """
        rows = Rows(**snapshot["rows"])
        held = min(len(rows), capacity)
        buffer = cls(capacity)
        buffer.total = int(snapshot["total"]) - held
        buffer.add(rows.take(np.arange(len(rows) - held, len(rows))))
        return buffer
