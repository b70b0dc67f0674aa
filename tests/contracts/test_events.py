"""Draft events come back from the wire as they left, or the record is refused whole."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.contracts.errors import EventRefused
from decoder.contracts.events import Origin, decode_batch
from decoder.contracts.features import NUM_FEATURES
from decoder.contracts.fields import LIMITS, NUMBERS
from decoder.contracts.identity import Pseudonyms, is_pseudonym, is_readable
from tests.events import DraftEvent, encode_events, events_of

NAMES = Pseudonyms(b"of these tests")
NULLABLE = {field.name for field in NUMBERS if field.nullable}  # -1 in memory
ORIGIN = Origin("scope", "w", "1f" * 8)
EVENT = DraftEvent(
    number=1, time=1.5, request=NAMES.of("request", "r"), tenant=NAMES.of("tenant", "t"),
    session="", choice=0, workload="edits", cycle=3, position=7, policy_version=2, publication=5,
    role="champion", side="", round=None, parameter=6.0, parameter_name="threshold",
    predicted=4.25, predicted_model=1.0, arm="cache", draft_len=9, drafted_len=9,
    verified_len=9, accepted=4, label="verified", censored="", model_accepted=None,
    batch_size=2, step_tokens=11, draft_us=40.0, step_us=9000.0, share=1.0,
    features=np.arange(NUM_FEATURES, dtype=np.float32) / 8,
)  # fmt: skip
PLAIN = EVENT._replace(
    number=2, arm="model", draft_len=0, drafted_len=3, verified_len=3, accepted=0, label="",
    model_accepted=2, features=None,
)  # fmt: skip


def wire(*events: DraftEvent) -> dict[str, Any]:
    return json.loads(encode_events(events, ORIGIN, 7))  # type: ignore[no-any-return]


def test_round_trip() -> None:
    other = EVENT._replace(number=3, arm="model", model_accepted=2, label="hindsight")
    other = other._replace(verified_len=np.int32(3), predicted=np.float32(0.5))  # type: ignore[arg-type]
    sent = [EVENT, PLAIN, other]
    batch = decode_batch(encode_events(sent, ORIGIN, 7))
    assert (batch.origin, batch.sequence) == (ORIGIN, 7)
    assert [e[:-1] for e in events_of(batch)] == [e[:-1] for e in sent]
    for mine, read in zip(sent, events_of(batch), strict=True):
        assert (mine.features is None) == (read.features is None)
        if mine.features is not None:
            assert np.allclose(mine.features, read.features, atol=1e-5)
            assert read.features.dtype == np.float32


def test_a_record_says_what_is_served_as_far_as_its_worker_does() -> None:
    named = Origin("scope", "w", "1f" * 8, "Llama-3.1-8B", "llama-3.1-eagle3")
    record = json.loads(encode_events([EVENT], named, 0))
    assert decode_batch(json.dumps(record).encode()).origin == named
    del record["target"], record["drafter"]  # as workers of before wrote it
    assert decode_batch(json.dumps(record).encode()).origin == ORIGIN
    with pytest.raises(EventRefused, match="target"):
        decode_batch(json.dumps(record | {"target": "a/b\nc"}).encode())


def test_a_record_holds_no_token_and_no_text() -> None:
    secret = "Patient 4711, born 1970-01-01"
    event = EVENT._replace(request=secret, tenant=secret, session=secret, workload=secret)
    value = encode_events([event, EVENT], ORIGIN, 0)
    assert b"4711" not in value and b"Patient" not in value
    read = events_of(decode_batch(value))[0]
    assert all(map(is_pseudonym, (read.request, read.tenant, read.session, read.workload)))
    assert not {"tokens", "text", "prompt", "output"} & set(wire(EVENT)["columns"])


@pytest.mark.parametrize(
    ("name", "readable"),
    [
        ("edits", True), ("swe-bench_2026.v1", False), ("swe-bench-2026", True), ("", False),
        ("Edits", False), ("a" * 32, True), ("a" * 33, False), ("two words", False),
        ("49-30-1234567", False), ("me@example.org", False), ("edits\n", False), ("édits", False),
        ("sk-a81b3c9d77", False),
    ],
)  # fmt: skip
def test_only_short_plain_words_stay_readable(name: str, readable: bool) -> None:
    assert is_readable(name) == readable
    assert NAMES.workload(name) == (name if readable else NAMES.of("workload", name))


def test_unknown_columns_and_arms_are_kept() -> None:
    record = wire(EVENT)
    record["columns"]["new_in_v2_1"] = ["x"]
    record["columns"]["arm"] = ["tree"]
    (event,) = events_of(decode_batch(json.dumps(record).encode()))
    assert event.arm == "tree"


@pytest.mark.parametrize("column", sorted(LIMITS))
def test_each_number_has_its_range_at_both_ends(column: str) -> None:
    low, high = LIMITS[column]
    just_above = [high + 1] if isinstance(high, int) else []
    for value in (type(low)(2 * high + 1), low - 1 - (column in NULLABLE), *just_above):
        with pytest.raises(EventRefused, match=f"a {column} outside"):
            encode_events([PLAIN, EVENT._replace(**{column: value})], ORIGIN, 0)
        record = wire(PLAIN, EVENT)
        record["columns"][column][1] = value
        with pytest.raises(EventRefused):
            decode_batch(json.dumps(record).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"predicted": float("nan")}, {"step_us": float("inf")}, {"accepted": 10},
        {"features": np.full(NUM_FEATURES, np.nan, np.float32)}, {"features": None},
        {"features": np.full(NUM_FEATURES, 1e20, np.float32)},
        {"arm": "a" * 65}, {"arm": "\ud800"}, {"label": "guessed"}, {"model_accepted": 10**6},
    ],
)  # fmt: skip
def test_what_no_reader_would_take_is_not_written(changes: dict[str, Any]) -> None:
    with pytest.raises(EventRefused):
        encode_events([PLAIN, EVENT._replace(**changes)], ORIGIN, 0)


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from([2**40, -1, 10**400, 1e300, "x" * 10_000, "NaN"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)  # fmt: skip
PATHS = [(key,) for key in wire(EVENT)] + [
    (part, name) for part in ("columns", "features") for name in wire(EVENT)[part]
]


@given(path=st.sampled_from(PATHS), index=st.integers(0, 1), value=ANYTHING, whole=st.booleans())
def test_a_mutated_record_is_read_or_refused(
    path: tuple[str, ...], index: int, value: Any, whole: bool
) -> None:
    record = wire(EVENT, PLAIN)
    target = record[path[0]] if len(path) > 1 else record
    if whole or len(path) == 1:
        target[path[-1]] = value
    else:
        target[path[-1]][index] = value
    read_or_refused(json.dumps(record).encode())


@given(position=st.integers(0, 2**20), flip=st.integers(1, 255), cut=st.integers(0, 2**20))
def test_a_damaged_record_is_read_or_refused(position: int, flip: int, cut: int) -> None:
    data = bytearray(encode_events([EVENT, PLAIN], ORIGIN, 0))
    data[position % len(data)] ^= flip
    read_or_refused(bytes(data))
    read_or_refused(bytes(data[: cut % len(data)]))


def read_or_refused(data: bytes) -> None:
    """What is read can be written again."""
    try:
        batch = decode_batch(data)
    except EventRefused:
        return
    encode_events(events_of(batch), batch.origin, batch.sequence)
