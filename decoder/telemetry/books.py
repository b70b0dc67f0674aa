"""What became of events: the books of one carrier, and the account of a worker's whole life."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

Counts = dict[str, int]


class Books(msgspec.Struct):
    """Events of one life that a carrier answers for, each in one place. Mutable.

    ``taken`` is the sum of the other counts but ``former``, ``former_lost`` (by reason) and
    ``unread`` (files, of which nobody knows what they held), which are of other lives, and
    ``flying``: of those waiting, the ones that are sent and not yet acknowledged. ``sequences`` are
    the records that each partition has been given, ``last`` the greatest id of a record; a carrier
    that comes after this one goes on from there.
    """

    taken: int = 0
    sent: int = 0
    in_doubt: int = 0
    waiting: int = 0
    spilled: int = 0
    failed: int = 0
    dropped: Counts = {}
    refused: Counts = {}
    former: int = 0
    former_lost: Counts = {}
    unread: int = 0
    flying: int = 0
    rounds_sent: int = 0
    rounds_dropped: int = 0
    sequences: dict[int, int] = {}
    last: int = -1
    ready: bool = False  # whether it has looked into the file of this life
    found: int = 0  # events that were in it

    def copy(self) -> Books:
        """What a carrier that comes after begins with."""
        return Books(sequences=dict(self.sequences), last=self.last)

    def drop(self, reason: str, events: int) -> None:
        """Count events of no place as dropped."""
        self.dropped[reason] = self.dropped.get(reason, 0) + events

    def refuse(self, reason: str, events: int) -> None:
        """Count events of no place as refused by the broker."""
        self.refused[reason] = self.refused.get(reason, 0) + events

    def fail(self, events: int) -> None:
        """Count events of no place as left at the end."""
        self.failed += events

    def lose_former(self, reason: str, events: int) -> None:
        """Count events of former lives as lost with their file, or refused by the broker."""
        self.former_lost[reason] = self.former_lost.get(reason, 0) + events

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
    spilled: int = 0
    failed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    former: int = 0
    former_lost: Counter[str] = field(default_factory=Counter)
    unread: int = 0
    deaths: int = 0
    rounds_sent: int = 0
    rounds_dropped: int = 0

    def add(self, books: Books | Accounts) -> None:
        """Add what ``books`` settled."""
        self.sent += books.sent
        self.in_doubt += books.in_doubt
        self.failed += books.failed
        self.dropped.update(books.dropped)
        self.refused.update(books.refused)
        self.former += books.former
        self.former_lost.update(books.former_lost)
        self.unread += books.unread
        self.rounds_sent += books.rounds_sent
        self.rounds_dropped += books.rounds_dropped
