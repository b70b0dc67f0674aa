"""A sample over time: whole requests, as many as there is time for, whoever reads them how."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.rows import Rows, empty, joined
from learner.sample import WINDOW, Sample


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
    sample = Sample(100.0)
    assert len(sample.take(rows)) == len(rows)


def test_a_clock_that_stands_still_says_nothing() -> None:
    rows = replace(rows_at(50.0, 5 * WINDOW), time=np.ones(5 * WINDOW))
    assert len(Sample(100.0).take(rows)) == len(rows)


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
