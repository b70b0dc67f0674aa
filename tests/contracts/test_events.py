"""Draft events come back from the wire as they left, or the record is refused whole."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decoder.contracts.errors import EventRefused
from decoder.contracts.events import DraftEvent, decode_batch, encode_batch
from decoder.contracts.features import NUM_FEATURES

EVENT = DraftEvent(
    event_id="w/1/1", time=1.5, request="r", workload="edits", cycle=3, position=7,
    policy_version=2, threshold=6.0, predicted=4.25, predicted_model=1.0, arm="cache",
    draft_len=9, verified_len=9, accepted=4, label="verified", censored="", model_accepted=None,
    batch_size=2, step_tokens=11, draft_us=40.0, step_us=9000.0,
    features=np.arange(NUM_FEATURES, dtype=np.float32) / 8,
)  # fmt: skip


def test_round_trip() -> None:
    other = replace(EVENT, event_id="w/1/2", arm="model", model_accepted=2, label="hindsight")
    batch = decode_batch(encode_batch([EVENT, other], "scope", "w"))
    assert (batch.scope, batch.worker) == ("scope", "w")
    for sent, got in zip([EVENT, other], batch.events, strict=True):
        assert np.allclose(sent.features, got.features, atol=1e-5)
        same = np.zeros(0, np.float32)
        assert replace(sent, features=same).__repr__() == replace(got, features=same).__repr__()


def test_a_record_holds_no_token_and_no_text() -> None:
    record = json.loads(encode_batch([EVENT], "scope", "w"))
    assert not {"tokens", "text", "prompt", "output"} & set(record["columns"])


def test_unknown_columns_are_additive() -> None:
    record = json.loads(encode_batch([EVENT], "scope", "w"))
    record["columns"]["new_in_v1_1"] = ["x"]
    assert len(decode_batch(json.dumps(record).encode()).events) == 1


def spoil(path: tuple[str, ...], value: Any) -> bytes:
    record = json.loads(encode_batch([EVENT], "scope", "w"))
    target = record
    for key in path[:-1]:
        target = target[key]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        b"[1,2",
        spoil(("contract",), "hvd.drafts.v2"),
        spoil(("schema_id",), "older"),
        spoil(("rows",), 2),
        spoil(("columns", "accepted"), ...),
        spoil(("columns", "accepted"), [10]),
        spoil(("columns", "accepted"), [-1]),
        spoil(("columns", "accepted"), ["4"]),
        spoil(("columns", "arm"), ["tree"]),
        spoil(("columns", "features"), [[0.0]]),
        spoil(("columns", "step_us"), [float("nan")]),
    ],
)
def test_bad_records_are_refused(data: bytes) -> None:
    with pytest.raises(EventRefused):
        decode_batch(data)
