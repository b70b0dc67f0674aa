"""Columns read from a record are those of its events, row by row."""

from __future__ import annotations

import numpy as np

from decoder.contracts.events import Origin, decode_batch, encode_batch
from learner.rows import COLUMNS, from_batch, from_events
from tests.learner.traffic import NAMES, Traffic

EVENTS = Traffic(seed=4).events(6)
PLAIN = EVENTS[0]._replace(draft_len=0, accepted=0, label="", features=None)
RATED = EVENTS[1]._replace(
    parameter_name="rate", arm="tree", session=NAMES.of("session", "s"), model_accepted=None
)


def test_columns_are_those_of_the_events() -> None:
    batch = decode_batch(encode_batch([PLAIN, *EVENTS, RATED], Origin("s", "w", "1f"), 0))
    rows, twin = from_batch(batch), from_events(batch.events)
    assert len(rows) == len(EVENTS) + 1 and np.isfinite(rows.rate).sum() == 1
    for name in COLUMNS:
        mine, other = getattr(rows, name), getattr(twin, name)
        assert mine.dtype == other.dtype and np.array_equal(mine, other, equal_nan=True), name


def test_a_record_without_a_draft_has_no_rows() -> None:
    assert len(from_batch(decode_batch(encode_batch([PLAIN], Origin("s", "w", "1f"), 0)))) == 0
