"""Columns of a record are those of its events; what is kept of them, sampled, and missed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL
from decoder.contracts.events import Origin, decode_batch, encode_batch
from decoder.contracts.trials import HOLDOUT_SIDES, OWN_DRAFTS, SUFFIX
from decoder.trial.sides import STOCK
from learner import sequences
from learner.buffer import Buffer
from learner.rows import COLUMNS, Rows, empty, from_batch, from_events, joined
from learner.sample import WINDOW, Sample
from learner.sequences import Sequences, runs_of
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


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 300), st.integers(10, 60))
def test_keeps_the_newest(n: int, capacity: int) -> None:
    buffer = filled(capacity, ROWS.take(np.arange(n)))
    held = min(n, capacity)
    assert buffer.total == n and len(buffer) == held
    assert same(buffer.recent(capacity), ROWS.take(np.arange(n - held, n)))
    assert same(buffer.recent(7), ROWS.take(np.arange(n - min(held, 7), n)))


def test_a_session_of_which_something_is_older_did_not_begin_since() -> None:
    buffer = filled(1_000)
    fresh = buffer.begun_since(105, 1_000, 1_000)
    assert same(fresh, ROWS.take(np.arange(110, 300)))
    assert same(buffer.begun_since(105, 50, 1_000), ROWS.take(np.arange(250, 300)))
    assert len(buffer.begun_since(300, 50, 1_000)) == 0


def test_comes_back_from_a_snapshot_into_any_size() -> None:
    buffer = filled(120)
    for capacity in (120, 60, 500):
        again = Buffer.restored(buffer.snapshot(), capacity)
        held = min(120, capacity)
        assert (again.total, len(again)) == (300, held)
        assert same(again.recent(held), buffer.recent(held))
        again.add(ROWS.take(np.arange(5)))
        assert same(again.recent(5), ROWS.take(np.arange(5)))


def rows_at(per_second: float, n: int, start: float = 1e9, each: int = 4, seed: int = 0) -> Rows:
    request = np.repeat(
        np.random.default_rng(seed).integers(0, 2**64, -(-n // each), np.uint64), each
    )
    return replace(empty(n), request=request[:n], time=start + np.arange(n) / per_second)


def test_few_are_all_learned_from() -> None:
    rows = rows_at(50.0, 5 * WINDOW)
    sample = Sample(100.0)
    assert len(sample.take(rows)) == len(rows) and sample.share == 1.0


def test_of_many_there_remain_about_as_many_as_wanted_by_whole_requests() -> None:
    rows = rows_at(10_000.0, 100 * WINDOW)
    sample = Sample(100.0)
    sample.take(rows.take(np.arange(20 * WINDOW)))
    later = rows.take(np.arange(20 * WINDOW, len(rows)))
    kept = sample.take(later)
    seconds = float(later.time[-1] - later.time[0])
    assert 25.0 <= len(kept) / seconds <= 110.0
    whole = np.isin(later.request, kept.request)
    assert whole.sum() == len(kept)


def test_when_fewer_come_more_of_them_are_learned_from_again() -> None:
    sample = Sample(100.0)
    sample.take(rows_at(10_000.0, 20 * WINDOW))
    before = sample.share
    sample.take(rows_at(10.0, 20 * WINDOW, start=2e9))
    assert before < 0.05 and sample.share == 1.0


@pytest.mark.parametrize("wrong", [0.0, 6e10])
def test_a_clock_that_is_wrong_in_a_few_rows_moves_nothing(wrong: float) -> None:
    rows = rows_at(50.0, 10 * WINDOW)
    rows.time[::20] = wrong
    still = replace(rows_at(50.0, 5 * WINDOW), time=np.ones(5 * WINDOW))
    for each in (rows, still):
        assert len(Sample(100.0).take(each)) == len(each)


def test_neither_the_reading_nor_a_restart_changes_the_sample() -> None:
    rows = rows_at(1_000.0, 12 * WINDOW + 100)
    at_once = Sample(100.0).take(rows)
    sample, kept, at = Sample(100.0), [], 0
    for size in (1, 700, 3_000, 999, WINDOW, 8_000):
        sample = Sample.restored(100.0, sample.snapshot())
        kept.append(sample.take(rows.take(np.arange(at, min(at + size, len(rows))))))
        at += size
    assert np.array_equal(joined(kept).time, at_once.time) and len(at_once) < len(rows)


def test_the_window_that_doubles_the_share_is_still_of_the_smaller_one() -> None:
    """The rest of a window, taken alone: half of its requests are in the sample that it ends."""
    rows = rows_at(10.0, WINDOW, each=1)
    sample = Sample(100.0)
    sample.halvings = 1
    sample.take(rows.take(np.arange(WINDOW - 256)))
    last = rows.take(np.arange(WINDOW - 256, WINDOW))
    kept = sample.take(last)
    assert sample.share == 1.0
    assert np.array_equal(kept.request, last.request[last.request < np.uint64(1 << 63)])
    assert 80 < len(kept) < 176


def test_gaps_and_duplicates_are_counted_for_each_life_and_partition() -> None:
    read = Sequences()
    for life, partition, sequence in (
        ("a", 0, 5), ("a", 0, 6), ("b", 0, 0), ("a", 1, 0), ("a", 0, 6), ("a", 0, 9), ("b", 0, 1),
        ("a", 0, 5),
    ):  # fmt: skip
        read.admit(life, partition, sequence)
    assert (read.missing, read.duplicates) == (2, 2)
    again = Sequences(read.known())
    again.admit("a", 0, 10)
    again.admit("b", 0, 4)
    again.admit("a", 1, 0)
    assert (again.missing, again.duplicates) == (2, 1)


def test_lives_not_heard_of_for_long_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(sequences, "LIVES", 3)
    read = Sequences()
    for number in range(10):
        read.admit(f"life-{number}", 0, 0)
    assert [life for life, *_ in read.known()] == ["life-7", "life-8", "life-9"]


def test_a_life_counts_once_however_many_partitions_it_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequences, "LIVES", 3)
    read = Sequences()
    for sequence in (0, 1):
        for life in "abc":
            assert all(read.admit(life, partition, sequence) for partition in range(20))
    assert not read.admit("a", 0, 1) and (read.missing, read.duplicates) == (0, 1)
    assert len(read.known()) == 60 == len(Sequences(read.known()).known())


def test_a_number_from_far_ahead_silences_nobody_however_often_one_is_forged() -> None:
    read = Sequences()
    for sequence in range(100):
        assert read.admit("a", 0, sequence)
        for forged in (2**53 - sequence, 2**40 + 2 * sequence):
            read.admit("a", 0, forged)
        read = Sequences(read.known(), read.missing, read.duplicates)
    assert read.missing < 1_000 and len(read.known()) <= sequences.RUNS


def test_what_an_earlier_version_kept_is_gone_on_from() -> None:
    read = Sequences(runs_of([["a", 0, 7], ["b", 1, 3, 9]]))
    assert [read.admit("a", 0, n) for n in (0, 6, 7, 7)] == [False, False, True, False]
    assert [read.admit("b", 1, n) for n in (3, 8, 9)] == [False, False, True]
