"""How far each life of a worker has been read: what is missing, and what came twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

LIVES: Final = 10_000
"""Lives remembered, the ones heard of last; some 300 bytes each, and 60 a partition."""
MOST: Final = 2**53
"""What ``missing`` stops at: a made-up sequence number must not count past what a status holds."""


class Sequences:
    """The sequence numbers that records carry, for each life and partition from 0.

    A life is followed from the first of its records that is read: what lay before may have been
    removed by age. ``missing`` counts numbers passed over, ``duplicates`` records that came before.
    """

    def __init__(
        self,
        known: Iterable[tuple[str, int, int]] = (),
        missing: int = 0,
        duplicates: int = 0,
    ) -> None:
        """Go on from ``known``: life, partition, and the number expected next."""
        self._next: OrderedDict[str, dict[int, int]] = OrderedDict()
        for life, partition, due in known:
            self._next.setdefault(life, {})[partition] = due
        self.missing = missing
        self.duplicates = duplicates

    def admit(self, life: str, partition: int, sequence: int) -> bool:
        """Whether the record of this number is new. Mutates the counts.

        A producer that sends again sends the same number, and so does a topic that is read again:
        a record is known whole, and none of its events needs to be remembered.
        """
        due = self._next.get(life, {}).get(partition, sequence)
        if sequence < due:
            self.duplicates += 1
            return False
        self.missing = min(self.missing + sequence - due, MOST)
        self._next.setdefault(life, {})[partition] = sequence + 1
        self._next.move_to_end(life)
        if len(self._next) > LIVES:
            self._next.popitem(last=False)
        return True

    def known(self) -> list[tuple[str, int, int]]:
        """What a later one goes on from."""
        return [
            (life, partition, due)
            for life, places in self._next.items()
            for partition, due in places.items()
        ]
