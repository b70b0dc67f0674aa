"""The events of a topic, each once, with what is missing and what could not be read counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.errors import EventRefused
from decoder.contracts.events import EventBatch, decode_batch
from learner.sequences import Sequences

Integers = NDArray[np.int64]


@dataclass
class Counts:
    """What became of the records that were read."""

    records: int = 0
    rows: int = 0  # distinct events
    duplicates: int = 0  # events that came again
    refused: int = 0  # records that keep no contract
    missing: int = 0  # records passed over in a sequence
    unreadable: int = 0  # records that cannot be unpacked


LIVES: Final = 100_000
"""Lives whose events are remembered, the ones heard of last: their names come from the topic."""


class Seen:
    """Numbers of each life's events, as runs: few, as long as few events are lost."""

    def __init__(self, runs: Mapping[str, Sequence[Sequence[int]]] = {}) -> None:
        """Begin with ``runs``: by life, first number and the one behind the last."""
        self._runs = {life: np.array(r, np.int64).reshape(-1, 2) for life, r in runs.items()}

    def admit(self, life: str, numbers: Integers) -> NDArray[np.bool_]:
        """Which of ``numbers`` [n], of which there are some, are new, each once. They are not,
        afterwards. Mutates."""
        runs = self._runs.pop(life, np.zeros((0, 2), np.int64))
        fresh = np.zeros(len(numbers), np.bool_)
        fresh[np.unique(numbers, return_index=True)[1]] = True
        if len(runs):
            at = np.searchsorted(runs[:, 0], numbers, side="right") - 1
            fresh &= (at < 0) | (numbers >= runs[at, 1])
        new = numbers[fresh, None] + np.array([0, 1])
        runs = np.concatenate([runs, new])
        runs = runs[np.argsort(runs[:, 0])]
        begins = np.append(True, runs[1:, 0] > runs[:-1, 1])
        ends = np.append(begins[1:], True)
        self._runs[life] = np.stack([runs[begins, 0], runs[ends, 1]], axis=1)
        if len(self._runs) > LIVES:
            del self._runs[next(iter(self._runs))]
        return fresh

    def runs(self) -> dict[str, list[list[int]]]:
        """What a later one goes on from."""
        return {life: runs.tolist() for life, runs in self._runs.items()}


@dataclass(frozen=True)
class Rows:
    """Events of one record: those of ``batch`` that are ``wanted`` [n]."""

    batch: EventBatch
    partition: int
    wanted: NDArray[np.bool_]

    def __len__(self) -> int:
        return int(self.wanted.sum())


class Intake:
    """Reads records of the drafts topic. ``counts`` is what became of them."""

    def __init__(
        self,
        counts: Counts | None = None,
        seen: Seen | None = None,
        known: Iterable[tuple[str, int, int, int]] = (),
    ) -> None:
        """Go on from what an earlier one kept, if there was one."""
        self.counts = counts or Counts()
        self.seen = seen or Seen()
        self.sequences = Sequences(known, self.counts.missing)

    def pass_over(self, count: int) -> None:
        """Count records that cannot be unpacked."""
        self.counts.unreadable += count

    def take(self, partition: int, value: bytes | None) -> Rows | None:
        """The events of a record that did not come before; None of one that keeps no contract."""
        self.counts.records += 1
        try:
            batch = decode_batch(value or b"")
        except EventRefused:
            self.counts.refused += 1
            return None
        self.sequences.admit(batch.origin.life, partition, batch.sequence)
        self.counts.missing = self.sequences.missing
        fresh = self.seen.admit(batch.origin.life, batch.numbers["number"])
        self.counts.rows += int(fresh.sum())
        self.counts.duplicates += int((~fresh).sum())
        return Rows(batch, partition, fresh)
