"""From events to records: by partition, numbered, encoded once; cut in two where they must be."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from decoder.complaints import Complaints
from decoder.contracts.errors import EventRefused
from decoder.contracts.events import DraftEvent, Origin, decode_batch, encode_batch
from decoder.telemetry.books import Books
from decoder.telemetry.outbox import Outbox
from decoder.telemetry.spill import Record

BATCH: Final = 256
"""Events a record: past this the record's size no longer amortises anything."""


class Recorder:
    """Puts records into ``outbox``; mutates the sequences and ids in ``books``."""

    def __init__(self, origin: Origin, books: Books, outbox: Outbox) -> None:
        self._origin, self._books, self._outbox = origin, books, outbox
        self._cuts: list[tuple[int, range]] = []  # partition, and ids of the records that moved up
        self._complaints = Complaints()

    def record(self, events: Sequence[DraftEvent], partitions: int) -> None:
        """Make records of events that are counted as waiting: a request's go to one partition."""
        groups: dict[int, list[DraftEvent]] = defaultdict(list)
        for event in events:
            groups[zlib.crc32(event.request.encode()) % partitions].append(event)
        for partition, group in groups.items():
            for begin in range(0, len(group), BATCH):
                self._add(group[begin : begin + BATCH], partition)

    def cut(self, record: Record) -> None:
        """Put two records in the place of one; the second and what came after it move up by one."""
        books, events = self._books, decode_batch(record.value).events
        half = len(events) // 2
        self._outbox.replace(record, [
            record._replace(id=record.id + at, rows=len(part),
                            value=encode_batch(part, self._origin, record.sequence))
            for at, part in ((0, events[:half]), (half, events[half:]))
        ])  # fmt: skip
        self._cuts.append((record.partition, range(record.id + half, books.last + BATCH)))
        books.sequences[record.partition] += 1

    def value(self, record: Record) -> bytes:
        """What is sent of a record: as it was made, unless it moved up."""
        moved = sum(p == record.partition and record.id in ids for p, ids in self._cuts)
        if not moved:
            return record.value
        events = decode_batch(record.value).events
        return encode_batch(events, self._origin, record.sequence + moved)

    def _add(self, events: Sequence[DraftEvent], partition: int) -> None:
        """One record of ``events``, or of as many as can be written."""
        books = self._books
        sequence = books.sequences.get(partition, 0)
        try:
            value = encode_batch(events, self._origin, sequence)
        except (EventRefused, TypeError, ValueError) as error:
            if len(events) > 1:
                half = len(events) // 2
                self._add(events[:half], partition)
                self._add(events[half:], partition)
                return
            self._complaints.warning("a draft event cannot be written: %s", error)
            books.waiting -= 1
            books.refuse("malformed", 1)
            return
        books.sequences[partition] = sequence + 1
        books.last = (books.last // BATCH + 1) * BATCH  # room for the ids of its parts
        self._outbox.add(Record(books.last, partition, sequence, len(events), value))
