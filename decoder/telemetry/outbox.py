"""Records on their way to the broker, oldest first: in memory while it answers, else in a file."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection
from typing import Final

from decoder.complaints import Complaints
from decoder.telemetry.books import Books
from decoder.telemetry.spill import Cut, Record, Spill, SpillError, is_damage, still

log = logging.getLogger(__name__)

MEMORY: Final = 4 << 20
"""Bytes of records held in memory, a second of a busy worker: more belongs into the file, where a
process that dies does not lose it."""
MEMORY_ALONE: Final = 32 << 20
"""The same where there is no file."""
LOOKED_AT: Final = 64
"""Records among which one is looked for that may be sent beside others."""


class Outbox:
    """Every record until it is delivered or dropped; mutates ``books``, which count its events.

    Records are taken in the order of their ids. What is in memory is older than what is in the
    file: once something is there, all that comes follows it, until the file is empty.
    """

    def __init__(self, books: Books, spill: Spill | None, most: int) -> None:
        """``spill`` holds at most ``most`` bytes; None holds nothing."""
        self._books, self._most = books, most
        self._spill = spill
        self.flying: dict[int, int] = {}  # partitions of the records under way, by id
        self._memory: dict[int, Record] = {}
        self._size = 0  # bytes in memory
        self._doubtful: set[int] = set()  # ids of those that may lie on the topic all the same
        self._gone: set[int] = set()  # ids of those that the file would not let go of yet
        self._complaints = Complaints()
        self.cuts: list[Cut] = []
        if spill is not None:
            self.cuts = list(spill.cuts)
            for partition, number in spill.sequences.items():
                # one that was killed may have said less than it had made
                books.sequences[partition] = max(books.sequences.get(partition, 0), number)
            books.spilled += spill.rows
            books.taken += spill.rows
            books.found = spill.rows
            books.last = max(books.last, spill.last)

    def __bool__(self) -> bool:
        return bool(self._memory or self._books.spilled)

    def add(self, record: Record) -> None:
        """Take a record whose events are counted as waiting."""
        self._memory[record.id] = record
        self._size += len(record.value)
        if self._spill is not None:
            if self._spill.rows or self._size > MEMORY:
                self.put_down()
        else:
            while self._size > MEMORY_ALONE:
                self.drop(next(iter(self._memory)), "memory")

    def put_down(self) -> None:
        """Move what is in memory into the file, if there is one; past its bound the oldest go."""
        spill, books = self._spill, self._books
        if spill is None:
            return
        if spill.rows and not spill.path.exists():
            self._complaints.warning("%s was removed: draft events in it that are not sent before "
                                     "this worker ends are lost", spill.path)  # fmt: skip
        for record in list(self._memory.values()):
            try:
                spill.put(record)
            except SpillError as error:
                self._complaints.warning(
                    "draft events are lost: %s takes none (%s)", spill.path, error
                )
                self.drop(record.id, "disk")
                continue
            self._forget(record)
            books.waiting -= record.rows
            books.spilled += record.rows
        try:
            while (size := spill.size) > self._most and (oldest := spill.oldest()) is not None:
                self.drop(oldest, "spill")
                if spill.size == size:
                    return  # it lets go of none now
        except SpillError as error:
            self._file_failed(error)

    def ready(self) -> list[Record]:
        """The oldest record of each partition of which none is under way."""
        taken, found = set(self.flying.values()), []
        if self._memory:
            for record in itertools.islice(self._memory.values(), LOOKED_AT):
                if record.partition not in taken:
                    taken.add(record.partition)
                    found.append(record)
            return found
        for number, partition in self._heads():
            if self._spill is not None and partition not in taken:
                taken.add(partition)
                try:
                    found.append(self._spill.get(number))
                except SpillError as error:
                    if not is_damage(error):
                        self._file_failed(error)
                        break
                    self._complaints.warning("a record in a file is damaged and lost: %s", error)
                    spilled = self._books.spilled
                    self.drop(number, "damaged")
                    if self._books.spilled == spilled:  # it would be shown for ever
                        self._file_failed(error)
                        break
        return found

    def _heads(self) -> list[tuple[int, int]]:
        if self._spill is None:
            return []
        try:
            for number in sorted(self._gone):
                self._spill.remove(number)
                self._gone.discard(number)
        except SpillError as error:
            self._file_failed(error)
        if self._spill is None:
            return []
        try:
            heads = self._spill.heads(LOOKED_AT + len(self._gone))
        except SpillError as error:
            self._file_failed(error)
            return []
        return [head for head in heads if head[0] not in self._gone]

    def sent(self, record: Record) -> None:
        """It is under way."""
        self.flying[record.id] = record.partition
        if record.id in self._memory:
            self._books.flying += record.rows

    def landed(self, record: Record, doubtful: bool = False) -> None:
        """It is under way no more; ``doubtful`` where it may lie on the topic or not."""
        if self.flying.pop(record.id, None) is not None and record.id in self._memory:
            self._books.flying -= record.rows
        if doubtful:
            self._doubtful.add(record.id)

    def is_doubtful(self, record: Record) -> bool:
        """Whether it may lie on the topic though nobody said so."""
        return record.id in self._doubtful

    def delivered(self, record: Record) -> None:
        """It lies on the topic."""
        rows = self._out(record.id, record.rows)
        self._books.sent += rows

    def refused(self, record: Record, reason: str) -> None:
        """The broker will never take it; one that it may have taken before is in doubt."""
        self._lose(record.id, lambda rows: self._books.refuse(reason, rows), record.rows)

    def replace(self, record: Record, parts: Collection[Record]) -> None:
        """Put ``parts``, its events, in the place of a record."""
        rows = self._out(record.id, record.rows)
        self._books.waiting += rows
        held = {part.id: part for part in parts}
        self._size += sum(len(part.value) for part in parts)
        self._memory = dict(sorted({**self._memory, **held}.items()))

    def cut(self, cut: Cut) -> None:
        """Remember ``cut``, also for those who find the file, and no cut before the oldest record:
        where a broker takes few bytes, every record comes in two.
        """
        held = [*itertools.islice(self._memory, 1), *self._gone]
        try:
            if self._spill is not None:
                if (first := self._spill.oldest()) is not None:
                    held.append(first)
                self._spill.cut(cut, min(held, default=cut.first))
        except SpillError as error:
            self._file_failed(error)
        self.cuts = [*still(self.cuts, min(held, default=cut.first)), cut]

    def drop(self, record: int, reason: str) -> None:
        """Lose a record, by its id; one that may lie on the topic is in doubt."""
        self._lose(record, lambda rows: self._books.drop(reason, rows))

    def _lose(self, record: int, count: Callable[[int], None], held: int = 0) -> None:
        doubtful = record in self._doubtful or record in self.flying
        rows = self._out(record, held)
        if doubtful:
            self._books.in_doubt += rows
        elif rows:
            count(rows)

    def close(self) -> None:
        """Put down what is left; what no file takes is counted as failed, or in doubt."""
        self.put_down()
        for record in list(self._memory):
            self._lose(record, self._books.fail)
        if self._spill is not None:
            try:
                self._spill.close()
            except SpillError as error:
                log.warning("%s was not closed: %s", self._spill.path, error)

    def _out(self, number: int, held: int = 0) -> int:
        """Take a record out of its place; how many events it held.

        Where a file does not let go of it now, one of ``held`` events is taken out later, and not
        looked at until then; one of an unknown number of events stays, and 0 is returned.
        """
        record = self._memory.get(number)
        if record is not None:
            self._doubtful.discard(number)
            self._forget(record)
            self._books.waiting -= record.rows
            return record.rows
        if self._spill is None:
            return 0
        try:
            rows = self._spill.remove(number)
        except SpillError as error:
            self._file_failed(error)
            if self._spill is None or not held or number in self._gone:
                return 0
            self._gone.add(number)
            rows = held
        else:
            if number in self._gone:
                self._gone.discard(number)
                return 0
        self._doubtful.discard(number)
        self._books.spilled -= rows
        return rows

    def _forget(self, record: Record) -> None:
        del self._memory[record.id]
        self._size -= len(record.value)
        if record.id in self.flying:
            self._books.flying -= record.rows

    def _file_failed(self, error: Exception) -> None:
        """Go on without a file that is damaged; one that only cannot be used now is kept."""
        spill = self._spill
        if spill is None:
            return
        if not is_damage(error):
            self._complaints.warning("%s cannot be used now: %s", spill.path, error)
            return
        self._spill = None
        self._gone.clear()
        log.error("%d draft events are lost: %s cannot be read (%s)", spill.rows, spill.path, error)
        self._books.drop("damaged", self._books.spilled)
        self._books.spilled = 0
        try:
            spill.close()
            spill.path.unlink(missing_ok=True)
        except SpillError:
            log.warning("%s was not removed", spill.path)
