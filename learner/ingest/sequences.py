"""Deduplication and loss detection by sequence numbers, for each producer incarnation."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

MAX_INCARNATIONS: Final = 10_000  # the most recently received; some 300 bytes each, and 100 a run
MAX_RUNS: Final = 16  # of an incarnation in a partition
MAX_FILLED_GAP: Final = 16
"""A gap of so many numbers is closed when there are too many runs: lost records never arrive, and
records read again must be recognised. A forged number suppresses as many."""
RECENT: Final = 10_000
"""Numbers of relayed records. An intake that fails sends those of some seconds twice."""
MAX_GAP: Final = 10_000_000  # a larger gap is a damaged or forged number, and counts as no loss
MAX_MISSING: Final = 2**53  # limit of a status field

Run = list[int]
"""First number, and the one after the last."""


@dataclass
class Sequences:
    """Sequence numbers received, for each incarnation (``life``) and partition.

    An incarnation is followed from its first record that is read: retention may have removed
    earlier ones. ``came`` holds the runs received, ``lately`` single numbers of relayed records.
    ``missing`` counts numbers skipped, ``duplicates`` records received again.
    """

    came: OrderedDict[str, dict[int, list[Run]]] = field(default_factory=OrderedDict)
    lately: dict[str, None] = field(default_factory=dict)
    missing: int = 0
    duplicates: int = 0

    def admit(self, life: str, partition: int, sequence: int) -> bool:
        """Whether the record with this number is new. Mutates.

        A producer's retry repeats the number, and so does a topic that is read again. Runs are
        stored, not a highest number, which one forged record could raise beyond all later ones.
        """
        runs = self.came.setdefault(life, {}).setdefault(partition, [])
        if any(first <= sequence < end for first, end in runs):
            self.duplicates += 1
            return False
        run = next((run for run in runs if run[1] == sequence), None)
        if run is None:
            run = [sequence, sequence]
            before = [end for _, end in runs if end < sequence]
            gap = sequence - max(before, default=sequence)
            self.missing = min(self.missing + (gap if gap <= MAX_GAP else 0), MAX_MISSING)
        else:
            runs.remove(run)
        run[1] += 1
        runs.append(run)
        if len(runs) > MAX_RUNS:
            _reduce(runs)
        self.came.move_to_end(life)
        if len(self.came) > MAX_INCARNATIONS:
            self.came.popitem(last=False)
        return True

    def admit_sparse(self, life: str, partition: int, sequence: int) -> bool:
        """As :meth:`admit` for numbers with gaps, since an intake relays some records only: the
        ``RECENT`` newest are recognised, and none counts as missing. Mutates."""
        number = f"{partition} {sequence} {life}"
        if number in self.lately:
            self.duplicates += 1
            return False
        self.lately[number] = None
        if len(self.lately) > RECENT:
            del self.lately[next(iter(self.lately))]
        return True


def _reduce(runs: list[Run]) -> None:
    """Join the two closest runs, or drop the least recently extended one. Mutates."""
    ordered = sorted(runs)
    gap, before, after = min((b[0] - a[1], a, b) for a, b in pairwise(ordered))
    if gap > MAX_FILLED_GAP:
        del runs[0]
        return
    after[0] = before[0]  # the later run is the one that goes on
    runs.remove(before)
