"""Columns of a record are those of its events; what is kept of them, sampled, and missed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL
from decoder.contracts.events import Origin, decode_batch
from decoder.contracts.trials import HOLDOUT_VARIANTS, OWN_DRAFTS, SUFFIX
from decoder.experiment.variants import STOCK
from decoder.policy.rule import ARMS
from learner.checkpoint import pack, restore, unpack
from learner.ingest import sequences
from learner.ingest.records import decode_record
from learner.ingest.sampling import HeadSampler
from learner.ingest.sequences import Sequences
from learner.ingest.source import Fetched
from learner.training.rows import COLUMNS, Buffer, Rows, from_batch, hash_id
from tests.decoder.experiment.test_router_variants import decode, playing
from tests.events import DraftEvent, encode_events, events_of, from_events
from tests.learner.traffic import NAMES, Traffic

EVENTS = Traffic(seed=4).events(6)
PLAIN = EVENTS[0]._replace(draft_len=0, accepted=0, label="", features=None)
RATED = EVENTS[1]._replace(
    parameter_name="rate", arm="tree", session=NAMES.of("session", "s"), model_accepted=None
)


def test_columns_are_those_of_the_events() -> None:
    batch = decode_batch(encode_events([PLAIN, *EVENTS, RATED], Origin("s", "w", "1f"), 0))
    rows, events = from_batch(batch), [e for e in events_of(batch) if e.draft_len]
    assert len(rows) == len(EVENTS) + 1 and np.isfinite(rows.rate).sum() == 1
    twin: dict[str, list[Any]] = {
        name: [getattr(event, name) for event in events]
        for name in COLUMNS
        if name in DraftEvent._fields
    }
    twin |= {
        "request": [hash_id(e.request) for e in events],
        "session": [hash_id(e.session or e.request) for e in events],
        "rate": [e.parameter if e.parameter_name == "rate" else np.nan for e in events],
        "censored": [e.censored != "" for e in events],
        "arm": [ARMS.index(e.arm) if e.arm in ARMS else len(ARMS) for e in events],
        "model_expected": [e.predicted_model for e in events],
        "model_accepted": [
            np.nan if e.model_accepted is None else e.model_accepted for e in events
        ],
    }
    assert twin.keys() == set(COLUMNS)
    for name in COLUMNS:
        mine = getattr(rows, name)
        assert np.array_equal(mine, np.asarray(twin[name], mine.dtype), equal_nan=True), name


def test_drafts_of_variants_with_other_limits_are_no_training_rows() -> None:
    sides = ["", CHAMPION, TRIAL, FIRST, SUFFIX, "of a later version"]
    events = [e._replace(side=side) for e, side in zip(EVENTS, sides, strict=False)]
    batch = decode_batch(encode_events([PLAIN, *events], Origin("s", "w", "1f"), 0))
    rows = from_batch(batch)
    assert np.allclose(rows.features, from_events(events[:4]).features, atol=1e-4)
    assert len(from_events(events_of(batch))) == len(rows) == 4


def test_variants_with_the_worker_s_own_drafts_are_trained_on() -> None:
    shown = {name: side.draft_source for name, side in STOCK.items()}
    for name in (CHAMPION, TRIAL, *HOLDOUT_VARIANTS):
        assert (name in OWN_DRAFTS) == (shown.get(name, "worker") == "worker"), name


def test_compared_variants_are_trained_on_within_the_worker_s_limits() -> None:
    router = playing((SUFFIX,))
    decode(router, 30)
    sink = router.kept
    told = decode_batch(encode_events(sink.every, Origin("s", "w", "1f"), 0))
    rows = from_batch(told)
    stock = [e for e in sink.events if e.side == SUFFIX]
    assert max(e.draft_len for e in stock) <= 24 < rows.draft_len.max()
    assert len(stock) > 50 and len(rows) == len(sink.events) - len(stock) > 50


ROWS = from_events(Traffic(seed=6).events(30, each=10))


def same(one: Rows, other: Rows) -> bool:
    missing = ("model_accepted", "rate")
    return all(
        np.array_equal(getattr(one, c), getattr(other, c), equal_nan=c in missing) for c in COLUMNS
    )


def filled(capacity: int, rows: Rows = ROWS) -> Buffer:
    buffer = Buffer(capacity)
    for first in range(0, len(rows), 10):
        buffer.add(rows.take(np.arange(first, min(first + 10, len(rows)))))
    return buffer


@settings(max_examples=25)
@given(st.integers(0, 300), st.integers(10, 60))
def test_the_buffer_keeps_the_newest_rows(n: int, capacity: int) -> None:
    buffer = filled(capacity, ROWS.take(np.arange(n)))
    held = min(n, capacity)
    assert buffer.total == n and len(buffer) == held
    assert same(buffer.recent(capacity), ROWS.take(np.arange(n - held, n)))
    assert same(buffer.recent(7), ROWS.take(np.arange(n - min(held, 7), n)))


def test_the_buffer_resumes_in_any_capacity() -> None:
    buffer = filled(120)
    for capacity in (120, 60, 500):
        again = Buffer(capacity, buffer.recent(120), buffer.total)
        held = min(120, capacity)
        assert (again.total, len(again)) == (300, held)
        assert same(again.recent(held), buffer.recent(held))
        again.add(ROWS.take(np.arange(5)))
        assert same(again.recent(5), ROWS.take(np.arange(5)))


def test_sampling_is_independent_of_workers_clocks() -> None:
    """Two workers with five hundred drafts a second each, whose clocks are two seconds apart."""
    shares, kept = HeadSampler(100.0), []
    events = Traffic(seed=3).events(100, each=5)
    for second in range(30):
        shares.adjust(float(second), live=True, holds=lambda _: True)
        kept.append(0)
        for life, behind in enumerate((0.0, 2.0)):
            told = [
                e._replace(
                    time=1e9 + second - behind, request=f"{2 * second + life:014x}{i // 5:010x}"
                )
                for i, e in enumerate(events)
            ]
            value = encode_events(told, Origin("s", "w", f"{life:02x}"), second)
            lessons = decode_record(Fetched(0, 0, 0, None, value), shares, 1e9 + second)
            whole = np.isin(from_events(told).request, lessons.rows.request)
            assert whole.sum() == len(lessons.rows) and lessons.drafts == 500
            shares.count("s", lessons.drafts)
            kept[-1] += len(lessons.rows)
    assert kept[0] == 1_000 and 25.0 <= sum(kept[15:]) / 15 <= 110.0


def test_the_sampling_rate_follows_live_arrivals_and_the_lease_holder() -> None:
    shares = HeadSampler(100.0, {"mine": 0.25, "theirs": 0.25})

    def second(now: float, drafts: int, live: bool = True) -> None:
        shares.count("mine", drafts)
        shares.count("theirs", drafts)
        shares.adjust(now, live, "mine".__eq__)

    for now in range(30):  # a backlog, as fast as it is read
        second(now, 100_000, live=False)
    assert dict(shares) == {"mine": 0.25, "theirs": 0.25}
    for now in range(30, 60):
        second(now, 10)
    assert dict(shares) == {"theirs": 0.25}
    shares.adopt({"theirs": 1.0, "mine": 0.5, "made-up": 0.0})
    assert shares["mine"] == 0.5 and "theirs" not in shares and shares["made-up"] > 0.0


def test_sampling_rates_of_forged_scopes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.ingest.sampling.MAX_SCOPES", 10)
    shares = HeadSampler(100.0)
    for second in range(20):
        shares.adopt({f"made up {second} {n}": 0.5 for n in range(8)} | {"theirs": 0.25})
    assert len(shares) == 10 and shares["theirs"] == 0.25


def test_a_growing_lag_lowers_the_sampling_rate() -> None:
    shares = HeadSampler(100.0)
    for now in range(60):
        shares.count("s", 8_000)
        shares.adjust(float(now), False, lambda _: True, lag=100 + 50 * now)
    assert shares["s"] <= 100.0 / 8_000
    for now in range(60, 120):  # it catches up: what is read says nothing of what comes
        shares.count("s", 10)
        shares.adjust(float(now), False, lambda _: True, lag=5_000 - 50 * (now - 60))
    assert shares["s"] <= 100.0 / 8_000


def test_gaps_and_duplicates_are_counted_by_incarnation_and_partition() -> None:
    read = Sequences()
    for life, partition, sequence in (
        ("a", 0, 5), ("a", 0, 6), ("b", 0, 0), ("a", 1, 0), ("a", 0, 6), ("a", 0, 9), ("b", 0, 1),
        ("a", 0, 5),
    ):  # fmt: skip
        read.admit(life, partition, sequence)
    assert (read.missing, read.duplicates) == (2, 2)
    again = restore(Sequences, unpack(pack({"read": read}))["read"])
    again.admit("a", 0, 10)
    again.admit("b", 0, 4)
    again.admit("a", 1, 0)
    assert (again.missing, again.duplicates) == (4, 3)


def test_the_oldest_incarnations_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(sequences, "MAX_INCARNATIONS", 3)
    read = Sequences()
    for number in range(10):
        read.admit(f"life-{number}", 0, 0)
    assert [*read.came] == ["life-7", "life-8", "life-9"]


def test_an_incarnation_counts_once_for_all_its_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequences, "MAX_INCARNATIONS", 3)
    read = Sequences()
    for sequence in (0, 1):
        for life in "abc":
            assert all(read.admit(life, partition, sequence) for partition in range(20))
    assert not read.admit("a", 0, 1) and (read.missing, read.duplicates) == (0, 1)
    assert [len(places) for places in read.came.values()] == [20, 20, 20]


def test_forged_numbers_far_ahead_suppress_nothing() -> None:
    read = Sequences()
    for sequence in range(100):
        assert read.admit("a", 0, sequence)
        for forged in (2**53 - sequence, 2**40 + 2 * sequence):
            read.admit("a", 0, forged)
        read = restore(Sequences, unpack(pack({"read": read}))["read"])
    assert read.missing < 1_000 and len(read.came["a"][0]) <= sequences.MAX_RUNS


@pytest.mark.parametrize("every", [3, 50])
def test_a_topic_read_again_is_recognised_despite_lost_records(
    every: int,
) -> None:
    read = Sequences()
    came = [number for number in range(2_000) if number % every]
    assert all(read.admit("a", 0, number) for number in came)
    assert not any(read.admit("a", 0, number) for number in came), "none teaches twice"
    assert read.missing == len([n for n in range(1, 2_000) if n % every == 0])
    assert len(read.came["a"][0]) <= sequences.MAX_RUNS


def test_forged_numbers_nearby_suppress_few_records() -> None:
    read, silenced, forged = Sequences(), 0, 0
    for number in range(2_000):
        silenced += not read.admit("a", 0, number)
        if number % 100 == 0:
            forged += 1
            read.admit("a", 0, number + 5_000)
    assert silenced <= forged * sequences.MAX_FILLED_GAP
