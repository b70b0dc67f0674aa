"""What is missing between the records of a life, and what came twice."""

from __future__ import annotations

import pytest

from learner import sequences
from learner.sequences import Sequences


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
    assert [life for life, _, _ in read.known()] == ["life-7", "life-8", "life-9"]


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
