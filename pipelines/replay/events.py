"""The events of a router in the laboratory: all of them kept, in the place of a worker's ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.events import EventBatch, Origin
from decoder.contracts.fields import REQUEST, ROW
from decoder.contracts.identity import Named
from decoder.core.events import Sink
from decoder.telemetry.ring import HEAD, SETTLED, Ring

ROOM: Final = 4096
"""Rows between two settlements, at most."""
ORIGIN: Final = Origin("lab", "lab", "0")


class EventLog(Sink):
    """Keeps all rows, with the names that requests have, up to their first letters.

    ``update`` is called with rows of :data:`decoder.contracts.fields.ROW` as they come.
    """

    def __init__(self, update: Callable[[NDArray[Any]], None] | None = None) -> None:
        self._kept = Ring(ROOM)
        super().__init__(self._kept)
        self._update = update
        self._rows: list[NDArray[Any]] = []

    def written(self) -> None:
        """Take the rows out of the ring."""
        first, end = int(self.control[SETTLED]), int(self.control[HEAD])
        if end > first:
            rows = self._kept.slice(first, end)
            self.control[SETTLED] = end
            self._rows.append(rows)
            if self._update is not None:
                self._update(rows)

    def batch(self) -> EventBatch:
        """All events so far, or since :meth:`clear`."""
        self._rows = [np.concatenate([np.zeros(0, ROW), *self._rows])]
        return self._kept.batch(self._rows[0], ORIGIN, 0)

    def clear(self) -> None:
        """Forget them."""
        self._rows = []

    def _packed(self, kind: Named, name: str) -> bytes:
        return name.encode()[: REQUEST[kind].itemsize]
