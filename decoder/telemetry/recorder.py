"""From events to records: by partition, numbered, encoded once; cut in two where they must be."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from decoder.complaints import Complaints
from decoder.contracts.errors import EventRefused
from decoder.contracts.events import DraftEvent, Origin, decode_batch, encode_batch
from decoder.telemetry.books import Books
from decoder.telemetry.outbox import Outbox
from decoder.telemetry.spill import Cut, Record, moved

BATCH: Final = 256
"""Events a record: past this the record's size no longer amortises anything."""


class Recorder:
    """Puts records into ``outbox``; mutates the sequences and ids in ``books``."""

    def __init__(self, origin: Origin, books: Books, outbox: Outbox) -> None:
        self._origin, self._books, self._outbox = origin, books, outbox
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
        self._outbox.cut(Cut(record.partition, record.id + half, _next_id(books.last)))
        books.sequences[record.partition] += 1

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
        books.last = _next_id(books.last)
        self._outbox.add(Record(books.last, partition, sequence, len(events), value))


def _next_id(last: int) -> int:
    return (last // BATCH + 1) * BATCH  # room for the ids of its parts


def value_of(record: Record, cuts: Iterable[Cut]) -> bytes:
    """What is sent of a record: as it was made, unless it moved up."""
    by = moved(cuts, record.partition, record.id)
    if not by:
        return record.value
    batch = decode_batch(record.value)
    return encode_batch(batch.events, batch.origin, record.sequence + by)
