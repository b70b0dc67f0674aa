"""What is told of cycles arrives as their events."""

from __future__ import annotations

import numpy as np

from decoder.contracts.events import DraftEvent
from decoder.telemetry import told
from tests.contracts.test_events import EVENT, PLAIN
from tests.decoder.telemetry.telling import tell


def same(one: DraftEvent, other: DraftEvent) -> bool:
    if (one.features is None) != (other.features is None):
        return False
    equal = one.features is None or np.array_equal(one.features, other.features)
    return equal and one._replace(features=None) == other._replace(features=None)


def test_events_come_through_as_they_were() -> None:
    events = [EVENT, PLAIN, EVENT._replace(number=7, censored="length")]
    through = told.events_of(told.decode(told.encode(tell(events))))
    assert all(same(one, other) for one, other in zip(events, through, strict=True))


def test_numbers_of_numpy_are_numbers() -> None:
    cycles = tell([EVENT._replace(accepted=np.int64(4), predicted=np.float32(1.5))])  # type: ignore[arg-type]
    (event,) = told.events_of(told.decode(told.encode(cycles)))
    assert (event.accepted, event.predicted) == (4, 1.5)
    assert type(event.accepted) is int
