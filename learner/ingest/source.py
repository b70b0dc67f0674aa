"""Records of a topic, from the checkpoint's offsets; nothing is committed to a group.

Offsets that live elsewhere than the weights they led to would, after a crash, either lose events or
count them twice.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kafka import TopicPartition

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, Topic
from decoder.kafka.clients import ANSWER_MS, AWAY, close, fetch, offsets, open_consumer
from decoder.kafka.codec import Unreadable
from decoder.limited_log import LimitedLog
from learner.background import Background
from learner.ingest.group import Group

log = logging.getLogger(__name__)

GLANCE_MS: Final = 2
"""Poll timeout after an empty poll: enough to send a fetch or to receive an answer. With 0,
kafka-python (3.0.12) needs several calls for either."""
RETRY_SECONDS: Final = 2.0
PARTITIONS_SECONDS: Final = 30.0
"""How often added partitions are looked for."""
ENDS_MS: Final = 2_000
ALONE_MS: Final = 200
"""For the beginning of one partition, where all together did not answer."""
RECORDS_PER_POLL: Final = 40
"""A record holds some two hundred events: more at once would hold the loop for a second."""

_OPTIONS: Final = {
    "auto_offset_reset": "earliest",  # retention may have passed the stored offset
    "max_poll_records": RECORDS_PER_POLL,
    "request_timeout_ms": 10_000,
    "reconnect_backoff_max_ms": 2_000,
}


@dataclass(frozen=True)
class Fetched:
    """A record as it lay on the topic; ``timestamp`` in milliseconds since the epoch."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes


Mark = tuple[int, int, int]
"""Offset, timestamp and sum of a record, by which a partition that was made anew is told from the
one before: it may have grown past what was read."""


def mark_of(record: Any) -> Mark:
    """Of a record as it was fetched."""
    return record.offset, record.timestamp, zlib.crc32(record.value or b"")


class EventSource:
    """Reads every partition of ``topic``, or those that ``group`` gives this process; one that does
    not answer keeps no other waiting.

    ``offsets`` maps a partition to the next offset to read, ``marks`` to a record that was read
    there and is looked at again now and then: both belong into the checkpoint.
    ``skipped`` counts records that were gone from the topic before they were read, or that cannot
    be unpacked. ``caught_up`` says whether the end of the topic was ever near, ``read_at`` when the
    newest of the records that were read last was written, in seconds since the epoch; 0 before any.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        offsets: Mapping[int, int],
        skipped: int = 0,
        topic: Topic = DRAFTS,
        marks: Mapping[int, Mark] = {},
        group: Group | None = None,
    ) -> None:
        self.offsets = dict(offsets)
        self.marks = dict(marks)
        self.skipped = skipped
        self.caught_up = False
        self.read_at = 0.0
        self._topic = topic.name
        self._kafka = kafka
        self._group = group
        self._consumer: Any = None
        self._partitions_at = 0.0
        self._begins: dict[TopicPartition, int] = {}
        self._silent: set[TopicPartition] = set()
        self._answered_at: dict[TopicPartition, float] = {}
        self._heard_at = time.monotonic()
        self._read: dict[int, Mark] = {}  # the last record of each partition
        self._looked_at: set[TopicPartition] = set()  # where the mark is read again
        self._limited_log = LimitedLog()
        self._complained = False
        self._flows = False
        self._lag = 0
        self._kept: deque[Fetched] = deque()
        self._background = Background(f"reader-of-{topic.name}")  # has the consumer meanwhile

    def taken(self, timeout: float, seconds: float) -> Iterator[Fetched]:
        """Records as :meth:`poll` has them, for so many ``seconds``: the rest come with the next
        call. Each is :meth:`done` once the next is asked for, and comes again if none is."""
        self._regroup()
        if not self._kept:
            self._kept.extend(self.poll(timeout))
        self.done([])  # where nothing comes, the end is near all the same
        return self._each(time.monotonic() + seconds)

    def _each(self, deadline: float) -> Iterator[Fetched]:
        while self._kept:
            yield (record := self._kept[0])
            self._kept.popleft()
            self.done([record])
            if time.monotonic() >= deadline:
                return

    def _regroup(self) -> None:
        if self._group is not None and self._background.idle() and self._group.turn():
            self._group.part.begin(self.offsets)
            self._kept.clear()
            self._drop()

    def poll(self, timeout: float) -> list[Fetched]:
        """Records that have come, each partition's in order. Where none has, waits ``timeout`` s.

        A broker that went away yields nothing and a log line, and is looked for again. What it is
        asked for beside records is waited for by a thread of its own.
        """
        try:
            self._regroup()
            if self._background.idle() and time.monotonic() >= self._partitions_at:
                self._background.offer(self._assign_aside)
            if not self._background.idle(timeout):
                return []
            if self._idle:
                time.sleep(timeout)
                return []
            patience = ANSWER_MS if self._flows else GLANCE_MS
            records = (
                fetch(self._consumer, patience, self._passed) if self._consumer is not None else []
            )
            for place in {TopicPartition(self._topic, record.partition) for record in records}:
                self._answered_at[place] = time.monotonic()
                if place in self._looked_at:
                    records = self._looked(place, records)
        except AWAY as error:
            self._lost(error)
            time.sleep(timeout)
            return []
        self._flows = bool(records)
        if not records:
            time.sleep(timeout)
        self._complained = self._complained and not records
        return [
            Fetched(each.partition, each.offset, each.timestamp, each.key, each.value or b"")
            for each in records
        ]

    def _passed(self, batch: Unreadable) -> None:
        partition = batch.place.partition
        due = self.offsets.get(partition, 0)
        self._looked_at.discard(batch.place)
        if batch.upto <= due:  # it was passed before, and lies where the mark was
            self._consumer.seek(batch.place, due)
            return
        self.offsets[partition] = batch.upto
        self.skipped += batch.upto - max(batch.offset, due)

    def _look(self, place: TopicPartition) -> None:
        """Read the mark of ``place`` again, if it is still there."""
        self._looked_at.discard(place)  # the last look may not have been answered yet
        mark = self.marks.get(place.partition)
        due = self.offsets.get(place.partition, 0)
        if mark is not None and not self._begins[place] <= mark[0] < due:
            del self.marks[place.partition]  # age left no trace of it, or it is to be read again
        elif mark is not None:
            self._looked_at.add(place)
            self._consumer.seek(place, mark[0])

    def _looked(self, place: TopicPartition, records: list[Any]) -> list[Any]:
        """``records`` without those of ``place`` that were read before."""
        self._looked_at.discard(place)
        partition = place.partition
        first = next(record for record in records if record.partition == partition)
        mark, due = self.marks.pop(partition), self.offsets.get(partition, 0)
        if mark_of(first) != mark and first.offset <= mark[0]:
            log.warning(
                "partition %d of %s was made anew: reading it from its beginning, not %d; what was "
                "read before is known by its sequence", partition, self._topic, due,
            )  # fmt: skip
            self.offsets[partition] = due = self._begins[place]
            self._consumer.seek(place, due)
            return [record for record in records if record.partition != partition]
        if partition in self._read or first.offset == mark[0]:
            self.marks[partition] = self._read.get(partition, mark)
        if self._consumer.position(place) < due:
            self._consumer.seek(place, due)
        return [each for each in records if each.partition != partition or each.offset >= due]

    def done(self, records: Sequence[Fetched]) -> None:
        """``records`` are admitted, or refused for good: move ``offsets`` past them."""
        for record in records:
            due = self.offsets.get(record.partition, record.offset)
            if record.offset > due:
                self.skipped += record.offset - due
                self._limited_log.warning(
                    "%d records of partition %d were removed before they were read: reading on at "
                    f"%d. Keep them longer (retention.ms of {self._topic}) than a learner may be "
                    "away.", record.offset - due, record.partition, record.offset,
                )  # fmt: skip
            elif record.offset < due:
                log.warning(
                    "partition %d was made anew: reading it from %d, not %d; what was read before "
                    "is known by its sequence", record.partition, record.offset, due,
                )  # fmt: skip
            self.offsets[record.partition] = record.offset + 1
        for record in {each.partition: each for each in records}.values():
            self._read[record.partition] = mark_of(record)
            self.marks.setdefault(record.partition, self._read[record.partition])
        if records:  # a clock that is ahead hides how old what is read is until the next are
            newest = max(record.timestamp for record in records)
            self.read_at = min(newest / 1e3, time.time())
        self.caught_up = self.caught_up or self.is_near_the_end()

    def lag(self) -> int:
        """Records between what was read and the end of the topic, as of the last fetch."""
        if self._consumer is None or not self._background.idle():
            return self._lag
        behind = 0
        for tp in self._consumer.assignment():
            end = self._consumer.highwater(tp)
            # what age has removed unread is not waited for: no record comes that would tell of it
            read = max(self.offsets.get(tp.partition, 0), self._begins.get(tp, 0))
            behind += max(0, end - read) if end is not None else 0
        self._lag = behind
        return behind

    def silent_seconds(self) -> float:
        """For how long the broker, or that of one partition, has not answered; 0 where all did when
        they were last due to."""
        silent = time.monotonic() - min(self._answered_at.values(), default=self._heard_at)
        return silent if silent > 2.0 * PARTITIONS_SECONDS else 0.0

    def is_near_the_end(self) -> bool:
        """Whether next to nothing lies there unread."""
        if self._idle:
            return self._group is not None and self._group.settled
        if self._consumer is None or not self._background.idle():
            return False
        places = self._consumer.assignment()
        ends = [self._consumer.highwater(place) for place in places]
        return bool(ends) and None not in ends and self.lag() <= RECORDS_PER_POLL

    @property
    def _idle(self) -> bool:
        """Whether all partitions are others' to read."""
        return self._group is not None and not self._group.owned

    def close(self) -> None:
        """Leave the broker; commits nothing."""
        self._background.close()  # a client is for one thread at a time
        self._kept.clear()
        self._drop()

    def _drop(self) -> None:
        close(self._consumer)
        self._consumer, self._partitions_at, self._lag = None, 0.0, 0
        self._looked_at.clear()

    def _assign_aside(self) -> None:
        try:
            self._assign()
        except AWAY as error:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        if not self._complained:
            log.warning("reading %s failed: %r; going on trying", self._topic, error)
        self._complained = True
        # Of kafka-python (3.0.12) a consumer that had a fetch for a broker which the metadata does
        # not name (yet) never asks that broker again.
        self._drop()
        self._partitions_at = time.monotonic() + RETRY_SECONDS

    def _assign(self) -> None:
        """Read all partitions there are, new ones from the earliest."""
        if self._consumer is None:
            self._consumer = open_consumer(self._kafka, f"reader-of-{self._topic}", **_OPTIONS)
        there = set(self._consumer.partitions_for_topic(self._topic) or ())
        self._partitions_at = time.monotonic() + (PARTITIONS_SECONDS if there else RETRY_SECONDS)
        if not there:
            self._limited_log.warning(f"topic {self._topic} does not exist (yet)")
        ours = there if self._group is None else there & self._group.owned
        partitions = {TopicPartition(self._topic, p) for p in ours}
        found = self._ask(partitions)
        if self._silent.isdisjoint(found):
            assigned = self._consumer.assignment()
            # one without an answer would keep the client from the others
            wanted = found | (assigned & partitions)
            if wanted and wanted != assigned:
                log.info("reading %s from %s", self._topic, self.offsets or "the earliest")
                self._consumer.assign(sorted(wanted))
                self._looked_at.clear()
                for tp in wanted:  # assigning afresh forgets the positions of the old ones too
                    self._consumer.seek(tp, self.offsets.get(tp.partition, self._begins[tp]))
            for tp in found:
                self._look(tp)
        else:  # the client may never ask their brokers again: see poll
            self._drop()
        self._silent = partitions - found

    def _ask(self, partitions: set[TopicPartition]) -> set[TopicPartition]:
        """Those of ``partitions`` that answer where they begin: a client whose broker is away finds
        nothing to read and says no more.

        Raises:
            KafkaError, OSError: none answers.
        """
        found: dict[TopicPartition, int] = {}
        failure: Exception | None = None
        deadline = time.monotonic() + 2.0 * ENDS_MS / 1e3
        asked = [sorted(partitions - self._silent), *([tp] for tp in self._silent & partitions)]
        for turn, group in enumerate(asked):
            if group and time.monotonic() < deadline:
                patience = ALONE_MS if turn else ENDS_MS
                try:
                    found |= offsets(self._consumer.beginning_offsets, group, timeout_ms=patience)
                except AWAY as error:
                    failure = error
                    asked += [[tp] for tp in group] if len(group) > 1 else []
        if failure is not None and not found:
            raise failure
        self._begins |= found
        self._heard_at = now = time.monotonic()
        heard = dict.fromkeys(partitions, now) | self._answered_at
        self._answered_at = {tp: now if tp in found else heard[tp] for tp in partitions}
        if len(found) < len(partitions):
            self._limited_log.warning(
                f"of {self._topic}, partitions %s do not answer (have they a leader?): the others "
                "are read", [tp.partition for tp in sorted(partitions - found.keys())],
            )  # fmt: skip
        return set(found)
