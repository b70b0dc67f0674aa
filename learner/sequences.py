"""How far each life of a worker has been read: what is missing, and what came twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

LIVES: Final = 10_000
"""Lives remembered, the ones heard of last; about 150 bytes each."""


class Sequences:
    """Counts over the sequence numbers that records carry, for each life and partition from 0.

    A life is followed from the first of its records that is read: what lay before may have been
    removed by age. ``missing`` counts numbers passed over, ``duplicates`` those that came before.
    """

    def __init__(self, known: Iterable[tuple[str, int, int]] = ()) -> None:
        """Go on from ``known``: life, partition, and the number expected next."""
        self._next = OrderedDict(((life, partition), due) for life, partition, due in known)
        self.missing = 0
        self.duplicates = 0

    def observe(self, life: str, partition: int, sequence: int) -> bool:
        """Take in the number of one record; whether it is new. Mutates the counts."""
        due = self._next.get((life, partition), sequence)
        if sequence < due:
            self.duplicates += 1
            return False
        self.missing += sequence - due
        self._next[life, partition] = sequence + 1
        self._next.move_to_end((life, partition))
        if len(self._next) > LIVES:
            self._next.popitem(last=False)
        return True

    def known(self) -> list[tuple[str, int, int]]:
        """What a later one goes on from."""
        return [(life, partition, due) for (life, partition), due in self._next.items()]
