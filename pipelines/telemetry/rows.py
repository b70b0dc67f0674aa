"""The events of a topic, each once, with what is missing and what could not be read counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.errors import EventRefused
from decoder.contracts.events import COLUMNS, EventBatch, decode_batch
from decoder.contracts.features import FEATURES
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

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)


LIVES: Final = 100_000
"""Lives whose events are remembered, the ones heard of last: their names come from the topic."""


class Seen:
    """Numbers of each life's events, as runs: few, as long as few events are lost."""

    def __init__(self, runs: Mapping[str, Sequence[Sequence[int]]] = {}) -> None:
        """Begin with ``runs``: by life, first number and the one behind the last."""
        self._runs: dict[str, tuple[Integers, Integers]] = {}
        for life, pairs in runs.items():
            starts, ends = np.array(pairs, np.int64).reshape(-1, 2).T
            self._runs[life] = (starts, ends)

    def admit(self, life: str, numbers: Integers) -> NDArray[np.bool_]:
        """Which of ``numbers`` [n] are new, each once. They are not, afterwards. Mutates."""
        nothing = np.zeros(0, np.int64)
        starts, ends = self._runs.get(life, (nothing, nothing))
        fresh = np.zeros(len(numbers), np.bool_)
        fresh[np.unique(numbers, return_index=True)[1]] = True
        at = np.searchsorted(starts, numbers, side="right") - 1
        if len(starts):
            fresh &= (at < 0) | (numbers >= ends[at])
        new = numbers[fresh]
        if len(new):
            starts, ends = np.concatenate([starts, new]), np.concatenate([ends, new + 1])
            order = np.argsort(starts)
            starts, ends = starts[order], ends[order]
            begins = np.append(True, starts[1:] > ends[:-1])
            self._runs.pop(life, None)
            self._runs[life] = (starts[begins], ends[np.append(begins[1:], True)])
            if len(self._runs) > LIVES:
                del self._runs[next(iter(self._runs))]
        return fresh

    def runs(self) -> dict[str, list[list[int]]]:
        """What a later one goes on from."""
        return {life: np.stack(pair, axis=1).tolist() for life, pair in self._runs.items()}


@dataclass(frozen=True)
class Rows:
    """Events of one record: those of ``batch`` that are ``wanted`` [n]."""

    batch: EventBatch
    partition: int
    wanted: NDArray[np.bool_]

    def __len__(self) -> int:
        return int(self.wanted.sum())

    def dictionaries(self) -> Iterator[dict[str, Any]]:
        """A dictionary each: where it comes from, its columns, its features, None where none."""
        origin = self.batch.origin
        whence = {"scope": origin.scope, "worker": origin.worker, "life": origin.life}
        names = [f"feature_{name}" for name in FEATURES]
        for event, wanted in zip(self.batch.events, self.wanted.tolist(), strict=True):
            if wanted:
                vector = event.features
                values = [None] * len(names) if vector is None else vector.tolist()
                yield (
                    whence
                    | dict(zip(COLUMNS, event[:-1], strict=True))
                    | dict(zip(names, values, strict=True))
                )


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
