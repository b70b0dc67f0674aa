"""Delivery counters: what the exporter settled, and the report of a worker's whole life."""

from __future__ import annotations

import msgspec

Counts = dict[str, int]


class DeliveryCounters(msgspec.Struct):
    """Events of one life, each settled in one way, and rounds of trials. Mutable."""

    sent: int = 0
    in_doubt: int = 0
    failed: int = 0
    dropped: Counts = {}
    refused: Counts = {}
    rounds_sent: int = 0
    rounds_dropped: int = 0

    @property
    def settled(self) -> int:
        """Events of which it is known for good what became of them."""
        lost = sum(self.dropped.values()) + sum(self.refused.values()) + self.failed
        return self.sent + self.in_doubt + lost


class DeliveryProgress(DeliveryCounters):
    """The same, and where an exporter goes on.

    Rows from ``settled`` to before ``end`` are under way: one record, the one with number
    ``sequence``. Later ones are of at most ``limit`` events. All go to one ``partition``, -1 where
    it is not known yet. Whoever begins again makes the same record, so that readers know one they
    have had.
    """

    end: int = 0
    limit: int = 0
    partition: int = -1
    sequence: int = 0


class DeliveryReport(DeliveryCounters):
    """Where the events of a worker's life are; the fields of its status, by the same names."""

    made: int = 0
    waiting: int = 0
    deaths: int = 0
