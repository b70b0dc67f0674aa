"""What is missing between the records of a life, and what came twice."""

from __future__ import annotations

import pytest

from learner import sequences
from learner.sequences import Sequences, runs_of


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
