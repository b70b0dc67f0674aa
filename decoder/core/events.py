"""Where the events of cycles go: rows of a ring, written by the compiled step."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.contracts.events import COLUMNS, LIMITS, VEILED, DraftEvent, LabelKind, veiled
from decoder.core.requests import RequestOptions
from decoder.core.table import raw_of
from decoder.limited_log import LimitedLog
from decoder.policy.rule import ARMS
from decoder.telemetry.ring import HEAD, NAMES, ROW, SETTLED, STEP, Ring, packer

LABELS: Final[tuple[LabelKind, ...]] = ("", "verified", "hindsight")
_TELLABLE: Final = LIMITS["parameter"]
"""A threshold beyond it, which a policy may have, means as much: all or nothing."""
_STEP, _NAMES = packer(STEP), packer(NAMES)
KEPT: Final = 4096
"""Rows of a log between two settlements, at most."""


class Sink:
    """Writes a row for each cycle; what cannot be written is counted in the ring."""

    def __init__(self, ring: Ring | None) -> None:
        """Write into ``ring``; None keeps nothing."""
        self.ring = ring
        self.raw = raw_of(ring.rows if ring is not None else np.zeros(0, ROW))
        self.control = ring.control if ring is not None else np.zeros(8, np.int64)
        words = (*ARMS, *LABELS)
        self.words = np.array([self.word(word) for word in words], np.int64)
        self._limited_log = LimitedLog()

    def word(self, text: str) -> int:
        """The number that stands for ``text`` in a row.

        Raises:
            ValueError: there is no room for it.
        """
        return self.ring.word(text) if self.ring is not None else 0

    def names(self, name: str, options: RequestOptions) -> bytes | None:
        """A request's names as rows have them; None where they cannot be written."""
        try:
            return _NAMES.pack(*self._told(name, options), options.choice)
        except Exception:  # noqa: BLE001 -- told by the limited_log
            self._limited_log.exception("no event can be made of a request's cycles")
            return None

    def step(
        self,
        policy: Policy,
        side: str,
        parameter: float,
        wall: float,
        batch: int,
        draft_us: float,
    ) -> NDArray[np.uint8]:
        """The bytes of what the events of a step share; ``wall`` is in seconds since the epoch."""
        words = 0, -1, 0
        try:
            words = self.word(policy.role), self.word(side), self.word(policy.parameter_name)
        except ValueError:
            self._limited_log.exception("no events can be made of a step")
        parameter = min(max(parameter, _TELLABLE[0]), _TELLABLE[1])
        told = _STEP.pack(
            wall, parameter, draft_us, 0.0, policy.publication, policy.version, batch, 0, *words
        )
        return np.frombuffer(told, np.uint8)

    def written(self) -> None:
        """What was settled is in the ring."""

    def _told(self, name: str, options: RequestOptions) -> list[bytes]:
        """What a row says of who asks, in the order of :data:`VEILED`."""
        names = options.opaque or name, options.tenant, options.session, options.workload
        return [veiled(kind, each).encode() for kind, each in zip(VEILED, names, strict=True)]


class Log(Sink):
    """Keeps all rows, with the names that requests have, up to their first letters."""

    def __init__(self) -> None:
        ring = Ring(KEPT)
        super().__init__(ring)
        self._ring = ring
        self._rows: list[NDArray[Any]] = []
        self._events: list[DraftEvent] = []

    def written(self) -> None:
        """Take the rows out of the ring."""
        first, end = int(self.control[SETTLED]), int(self.control[HEAD])
        if end > first:
            rows = self._ring.slice(first, end)
            self.control[SETTLED] = end
            self._rows.append(rows)
            self.put(rows)

    def put(self, rows: NDArray[Any]) -> None:
        """Look at rows of dtype :data:`ROW`, as they come."""

    @property
    def every(self) -> list[DraftEvent]:
        """All events so far."""
        for rows in self._rows:
            self._events += self.events_of(rows)
        self._rows = []
        return self._events

    def events_of(self, rows: NDArray[Any]) -> list[DraftEvent]:
        """The events of ``rows``."""
        columns, _ = self._ring.columns_of(rows)
        features = [row["features"].copy() if row["draft_len"] else None for row in rows]
        lists = zip(*(columns[name] for name in COLUMNS), features, strict=True)
        return [DraftEvent(*values) for values in lists]

    def _told(self, name: str, options: RequestOptions) -> list[bytes]:
        names = options.opaque or name, options.tenant, options.session, options.workload
        return [
            each.encode()[: NAMES[kind].itemsize] for kind, each in zip(VEILED, names, strict=True)
        ]
