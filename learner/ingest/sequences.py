"""How far each life of a worker has been read: what is missing, and what came twice."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

LIVES: Final = 10_000
"""Lives remembered, the ones heard of last; some 300 bytes each, and 100 a run."""
RUNS: Final = 16
"""Runs of numbers remembered of a life in a partition."""
FILLED: Final = 16
"""A gap of so many numbers is taken to have come where there are more runs: what was refused or
lost comes no more, and a topic that is read again is to be known. A forged number silences as many.
"""
LATELY: Final = 10_000
"""Lessons that would be known again. One that died, or could not write, has an intake send those of
some seconds twice."""
LEAP: Final = 10_000_000
"""Of a number further ahead nothing is taken to be missing: it is damaged, or somebody's who is not
that life, which goes on where it was."""
MOST: Final = 2**53
"""What ``missing`` stops at: a made-up sequence number must not count past what a status holds."""

Run = list[int]
"""The first number, and the one behind the last."""


@dataclass
class Sequences:
    """The sequence numbers that records carry, for each life and partition from 0.

    A life is followed from the first of its records that is read: what lay before may have been
    removed by age. ``came`` holds the runs of each life and partition, ``lately`` single numbers,
    of lessons. ``missing`` counts numbers passed over, ``duplicates`` records that came before.
    """

    came: OrderedDict[str, dict[int, list[Run]]] = field(default_factory=OrderedDict)
    lately: dict[str, None] = field(default_factory=dict)
    missing: int = 0
    duplicates: int = 0

    def admit(self, life: str, partition: int, sequence: int) -> bool:
        """Whether the record of this number is new. Mutates the counts.

        A producer that sends again sends the same number, and so does a topic that is read again:
        a record is known whole, and none of its events needs to be remembered. What came is
        remembered, and not how far: one forged number would silence a life that it leaps ahead of.
        """
        runs = self.came.setdefault(life, {}).setdefault(partition, [])
        if any(first <= sequence < behind for first, behind in runs):
            self.duplicates += 1
            return False
        own = next((run for run in runs if run[1] == sequence), None)
        if own is None:
            own = [sequence, sequence]
            before = [behind for _, behind in runs if behind < sequence]
            gap = sequence - max(before, default=sequence)
            self.missing = min(self.missing + (gap if gap <= LEAP else 0), MOST)
        else:
            runs.remove(own)
        own[1] += 1
        runs.append(own)
        if len(runs) > RUNS:
            _shorten(runs)
        self.came.move_to_end(life)
        if len(self.came) > LIVES:
            self.came.popitem(last=False)
        return True

    def admit_lesson(self, life: str, partition: int, sequence: int) -> bool:
        """The same where a life's numbers have gaps, since not every record of it is sent on: the
        newest ``LATELY`` that came are known, and nothing is taken to be missing. Mutates."""
        one = f"{partition} {sequence} {life}"
        if one in self.lately:
            self.duplicates += 1
            return False
        self.lately[one] = None
        if len(self.lately) > LATELY:
            del self.lately[next(iter(self.lately))]
        return True


def _shorten(runs: list[Run]) -> None:
    """Join the two runs with the least between them, or forget the one that went on longest ago.
    Mutates."""
    ordered = sorted(runs)
    gap, before, after = min((b[0] - a[1], a, b) for a, b in pairwise(ordered))
    if gap > FILLED:
        del runs[0]
        return
    after[0] = before[0]  # the later numbers are what goes on
    runs.remove(before)
