"""Records of drafts and lessons pass between the last release and this code, both ways; what the
release refused is refused for the same reason.

``released/`` holds what release 182b4e1c wrote, and what it said of malformed records.
``current/`` holds what this code writes: the release has read these very bytes as :data:`EVENTS`.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.errors import EventRefused
from decoder.contracts.events import Source, decode_batch
from learner.ingest.records import decode_record, encode_rows
from learner.ingest.source import Fetched
from tests.contracts import malformed
from tests.contracts.malformed import REASONS, RECORD, RELEASED
from tests.contracts.test_events import EVENT, ORIGIN, PLAIN
from tests.events import encode_events, events_of

assert EVENT.features is not None
SERVED = replace(ORIGIN, target="Llama-3.1-8B", drafter="llama-3.1-eagle3")
EVENTS = [
    EVENT,
    PLAIN,
    EVENT._replace(
        number=2**53, arm="tree", censored="length", predicted=13.3, share=0.125,
        label="hindsight", features=EVENT.features * 37 - 5.123456,
    ),
    PLAIN._replace(
        number=4, session=EVENT.tenant, model_accepted=0, role="", side="plain", choice=3
    ),
]  # fmt: skip
SOURCE = Source(3, 12_345, 0.25)
CURRENT = RELEASED.parent / "current"
ADDED = ("round",)
"""Columns since then, which the release passes over."""


def lessons() -> bytes:
    taught = decode_record(Fetched(3, 12_345, 2_000, b"w", RECORD), {}, 2.0)
    return encode_rows(taught, SOURCE)


@pytest.mark.parametrize("name", ["drafts.json", "lessons.json"])
def test_what_the_release_wrote_is_read(name: str) -> None:
    batch = decode_batch((RELEASED / name).read_bytes())
    sent = EVENTS if name == "drafts.json" else [e for e in EVENTS if e.draft_len]
    assert (batch.origin, batch.sequence) == (SERVED, 7)
    assert batch.source == (None if name == "drafts.json" else SOURCE)
    read = events_of(batch)
    assert [e[:-1] for e in read] == [e[:-1] for e in sent]
    for mine, its in zip(sent, read, strict=True):
        assert (mine.features is None) == (its.features is None)
        assert its.features is None or np.allclose(mine.features, its.features, atol=1e-5)


def test_what_is_written_now_is_what_the_release_has_read() -> None:
    assert encode_events(EVENTS, SERVED, 7) == (CURRENT / "drafts.json").read_bytes()
    assert lessons() == (CURRENT / "lessons.json").read_bytes()


@pytest.mark.parametrize("name", ["drafts.json", "lessons.json"])
def test_the_same_columns_are_written_in_the_same_order(name: str) -> None:
    before, now = (json.loads((folder / name).read_bytes()) for folder in (RELEASED, CURRENT))
    assert list(before) == list(now)
    for part in ("columns", "features"):
        assert list(before[part]) == [each for each in now[part] if each not in ADDED]
    assert before["columns"].items() <= now["columns"].items()
    for name in before["features"]:
        for old, new in zip(before["features"][name], now["features"][name], strict=True):
            assert (old is None and new is None) or np.float32(old) == np.float32(new)


CASES = malformed.cases()


@pytest.mark.parametrize("name", CASES)
def test_a_malformed_record_is_refused_for_the_reason_the_release_gave(name: str) -> None:
    """Of an integer beyond 64 bits, which is read as a float, "malformed" may stand for "range"."""
    assert CASES.keys() == REASONS.keys()
    reason = ""
    try:
        decode_batch(CASES[name])
    except EventRefused as error:
        reason = error.reason
    same = {REASONS[name], "malformed"} if name in malformed.BEYOND_64_BITS else {REASONS[name]}
    assert reason in same


def test_rows_that_a_record_only_announces_take_no_memory() -> None:
    """Also where a column is left out that may be."""
    record = json.loads(RECORD) | {"rows": 2**62}
    del record["columns"]["share"]
    with pytest.raises(EventRefused, match="4611686018427387904 announced"):
        decode_batch(json.dumps(record).encode())
