"""What became of events: what the carrier settled, and the account of a worker's whole life."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

Counts = dict[str, int]


class Books(msgspec.Struct):
    """Events of one life, each settled in one way, and where a carrier goes on. Mutable.

    Rows from ``settled`` to before ``end`` are under way: records of at most ``limit`` rows for
    ``partitions`` partitions (0: nobody has said how many there are), numbered from ``sequences``.
    Whoever begins again makes the same records of them, so that readers know one they have had.
    """

    sent: int = 0
    in_doubt: int = 0
    failed: int = 0
    dropped: Counts = {}
    refused: Counts = {}
    rounds_sent: int = 0
    rounds_dropped: int = 0
    end: int = 0
    limit: int = 0
    partitions: int = 0
    sequences: dict[int, int] = {}

    @property
    def settled(self) -> int:
        """Events of which it is known for good what became of them."""
        lost = sum(self.dropped.values()) + sum(self.refused.values()) + self.failed
        return self.sent + self.in_doubt + lost


@dataclass
class Accounts:
    """Where the events of a worker's life are; the fields of its status, by the same names."""

    made: int = 0
    sent: int = 0
    in_doubt: int = 0
    waiting: int = 0
    failed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    deaths: int = 0
    rounds_sent: int = 0
    rounds_dropped: int = 0
