"""Events as rows of a ring, for tests that begin with events."""

from __future__ import annotations

import numpy as np

from decoder.contracts.events import Origin, decode_batch, encode_batch
from decoder.contracts.fields import NUMBERS, ROW, STRINGS
from decoder.telemetry.ring import FULL, HEAD, SETTLED, UNREADABLE, Ring
from tests.events import DraftEvent, events_of


def write(ring: Ring, *events: DraftEvent) -> None:
    """Write a row for each event, as it is; readers see all of them at once, as of a step."""
    head, settled = int(ring.control[HEAD]), int(ring.control[SETTLED])
    for event in events:
        told = event._asdict()
        for field in STRINGS:
            text = told[field.name]
            told[field.name] = ring.intern(text) if field.interned else text.encode()
        for field in NUMBERS:
            if field.nullable and told[field.name] is None:
                told[field.name] = -1
        row = np.zeros(1, ROW)
        for name in ROW.names:
            row[name] = 0.0 if told[name] is None else told[name]
        if head - settled < ring.size:
            ring.rows[ring.indices(head, head + 1)] = row
            head += 1
        else:
            ring.control[FULL] += 1
    ring.control[HEAD] = head


def put(ring: Ring, *events: DraftEvent) -> None:
    """The same, each with its number in the life of the ring."""
    made = int(ring.control[HEAD] + ring.control[FULL] + ring.control[UNREADABLE])
    write(ring, *(event._replace(number=made + n) for n, event in enumerate(events)))


def ring_of(*events: DraftEvent, size: int = 4096) -> Ring:
    """A ring that holds ``events``."""
    ring = Ring(size)
    put(ring, *events)
    return ring


def events_in(ring: Ring) -> list[DraftEvent]:
    """The events in the ring, as whoever reads their record sees them."""
    rows = ring.slice(int(ring.control[SETTLED]), int(ring.control[HEAD]))
    if not len(rows):
        return []
    return events_of(decode_batch(encode_batch(ring.batch(rows, Origin("scope", "w", "1f"), 0))))
