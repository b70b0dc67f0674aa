"""Columns read from a record are those of its events, row by row."""

from __future__ import annotations

import numpy as np

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL
from decoder.contracts.events import Origin, decode_batch, encode_batch
from decoder.contracts.trials import HOLDOUT_SIDES, OWN_DRAFTS, SUFFIX
from decoder.trial.sides import STOCK
from learner.rows import COLUMNS, from_batch, from_events
from tests.conftest import KeepingSink
from tests.decoder.trial.test_router_turns import decode, playing
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


def test_drafts_of_a_side_with_limits_of_its_own_are_no_rows() -> None:
    sides = ["", CHAMPION, TRIAL, FIRST, SUFFIX, "of a later version"]
    events = [e._replace(side=side) for e, side in zip(EVENTS, sides, strict=False)]
    batch = decode_batch(encode_batch([PLAIN, *events], Origin("s", "w", "1f"), 0))
    rows = from_batch(batch)
    assert np.allclose(rows.features, from_events(events[:4]).features, atol=1e-4)
    assert len(from_events(batch.events)) == len(rows) == 4


def test_whoever_is_shown_the_workers_own_drafts_is_learned_from() -> None:
    shown = {name: side.shown for name, side in STOCK.items()}
    for name in (CHAMPION, TRIAL, *HOLDOUT_SIDES):
        assert (name in OWN_DRAFTS) == (shown.get(name, "worker") == "worker"), name


def test_what_a_worker_tells_of_compared_sides_is_learned_from_by_its_own_limits(
    sink: KeepingSink, token_classes: np.ndarray
) -> None:
    router = playing(sink, token_classes, names=(SUFFIX,))
    decode(router, 30)
    told = decode_batch(encode_batch(sink.every, Origin("s", "w", "1f"), 0))
    rows = from_batch(told)
    stock = [e for e in sink.events if e.side == SUFFIX]
    assert max(e.draft_len for e in stock) <= 24 < rows.draft_len.max()
    assert len(stock) > 50 and len(rows) == len(sink.events) - len(stock) > 50


def test_a_record_without_a_draft_has_no_rows() -> None:
    assert len(from_batch(decode_batch(encode_batch([PLAIN], Origin("s", "w", "1f"), 0)))) == 0
