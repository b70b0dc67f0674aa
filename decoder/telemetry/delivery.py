"""Delivery counters: of the exporter, and the report of a worker's whole life."""

from __future__ import annotations

import msgspec

Counts = dict[str, int]


class DeliveryCounters(msgspec.Struct):
    """Events of one life (incarnation) by outcome, and rounds of trials. Mutable."""

    sent: int = 0
    in_doubt: int = 0
    failed: int = 0
    dropped: Counts = {}
    refused: Counts = {}
    rounds_sent: int = 0
    rounds_dropped: int = 0

    @property
    def settled(self) -> int:
        """Events whose outcome is final."""
        lost = sum(self.dropped.values()) + sum(self.refused.values()) + self.failed
        return self.sent + self.in_doubt + lost


class DeliveryProgress(DeliveryCounters):
    """The counters, and the position from which another exporter can resume.

    Rows ``settled`` to ``end`` (exclusive) are in flight, as the record with number ``sequence``.
    Later records have at most ``limit`` events. All go to one ``partition``; -1 where it is not
    known yet. A restarted exporter encodes the same record again, so readers detect a duplicate.
    """

    end: int = 0
    limit: int = 0
    partition: int = -1
    sequence: int = 0


class DeliveryReport(DeliveryCounters):
    """The outcomes of all events of a worker's life; its status has them by the same names."""

    made: int = 0
    waiting: int = 0
    deaths: int = 0
