"""Reads a topic from the offsets of the checkpoint.

Nothing is committed to a group: offsets stored apart from the weights that they led to would, after
a crash, lose events or count them twice.
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
from learner.ingest.group import GroupMember

log = logging.getLogger(__name__)

GLANCE_MS: Final = 2
"""Poll timeout after an empty poll: enough to send a fetch or to receive an answer. With 0,
kafka-python (3.0.12) needs several calls for either."""
RETRY_SECONDS: Final = 2.0
PARTITIONS_SECONDS: Final = 30.0  # interval of looking for added partitions
BEGINNINGS_MS: Final = 2_000
BEGINNING_MS: Final = 200  # timeout for one partition, after all together did not answer
RECORDS_PER_POLL: Final = 40
"""A record holds some two hundred events: more would hold the loop for a second."""

_OPTIONS: Final = {
    "auto_offset_reset": "earliest",  # retention may have passed the stored offset
    "max_poll_records": RECORDS_PER_POLL,
    "request_timeout_ms": 10_000,
    "reconnect_backoff_max_ms": 2_000,
}


@dataclass(frozen=True)
class Fetched:
    """A record as read from the topic; ``timestamp`` in milliseconds since the epoch."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes


Fingerprint = tuple[int, int, int]
"""Offset, timestamp and checksum of a record. It reveals a partition that was recreated and has
grown beyond the stored offset."""


def fingerprint_of(record: Any) -> Fingerprint:
    """Fingerprint of a record of the client, or a :class:`Fetched`."""
    return record.offset, record.timestamp, zlib.crc32(record.value or b"")


class EventSource:
    """Reads all partitions of ``topic``, or those assigned to ``group``; one that does not answer
    does not block the others.

    ``offsets`` maps partitions to the next offset to read, ``fingerprints`` to a record read before
    that is compared from time to time; both belong in the checkpoint. ``skipped`` counts records
    that were removed before they were read, or cannot be decompressed. ``caught_up``: the end of
    the topic was near once. ``read_at`` is when the newest record read was written, in seconds
    since the epoch; 0 at first.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        offsets: Mapping[int, int],
        skipped: int = 0,
        topic: Topic = DRAFTS,
        fingerprints: Mapping[int, Fingerprint] = {},
        group: GroupMember | None = None,
    ) -> None:
        self.offsets = dict(offsets)
        self.fingerprints = dict(fingerprints)
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
        self._asked_at = time.monotonic()
        self._last: dict[int, Fingerprint] = {}  # of the last record read, by partition
        self._comparing: set[TopicPartition] = set()  # the fingerprint's record is read again
        self._limited_log = LimitedLog()
        self._is_logged = False
        self._flows = False
        self._lag = 0
        self._pending: deque[Fetched] = deque()
        self._background = Background(f"reader-of-{topic.name}")  # owns the consumer while busy

    def records(self, timeout: float, seconds: float) -> Iterator[Fetched]:
        """Records of :meth:`poll` for up to ``seconds``; the rest follow in the next call.

        Asking for the next record acknowledges the one before; an unacknowledged one comes again.
        """
        self._apply_assignment()
        if not self._pending:
            self._pending.extend(self.poll(timeout))
        self.acknowledge([])  # an empty topic is caught up, too
        return self._iterate(time.monotonic() + seconds)

    def _iterate(self, deadline: float) -> Iterator[Fetched]:
        while self._pending:
            yield (record := self._pending[0])
            self._pending.popleft()
            self.acknowledge([record])
            if time.monotonic() >= deadline:
                return

    def _apply_assignment(self) -> None:
        if self._group is not None and self._background.idle() and self._group.update():
            self._group.assignment.apply(self.offsets)
            self._pending.clear()
            self._disconnect()

    def poll(self, timeout: float) -> list[Fetched]:
        """New records, in order within a partition; waits ``timeout`` seconds if there are none.

        While the broker is away, returns nothing, logs once, and reconnects. Requests other than
        fetches run in the background.
        """
        try:
            self._apply_assignment()
            if self._background.idle() and time.monotonic() >= self._partitions_at:
                self._background.submit(self._assign_or_disconnect)
            if not self._background.idle(timeout):
                return []
            if self._owns_nothing:
                time.sleep(timeout)
                return []
            answer_ms = ANSWER_MS if self._flows else GLANCE_MS
            records = (
                fetch(self._consumer, answer_ms, self._skip) if self._consumer is not None else []
            )
            for place in {TopicPartition(self._topic, record.partition) for record in records}:
                self._answered_at[place] = time.monotonic()
                if place in self._comparing:
                    records = self._compare(place, records)
        except AWAY as error:
            self._retry_after(error)
            time.sleep(timeout)
            return []
        self._flows = bool(records)
        if not records:
            time.sleep(timeout)
        self._is_logged = self._is_logged and not records
        return [
            Fetched(each.partition, each.offset, each.timestamp, each.key, each.value or b"")
            for each in records
        ]

    def _skip(self, batch: Unreadable) -> None:
        partition = batch.place.partition
        due = self.offsets.get(partition, 0)
        self._comparing.discard(batch.place)
        if batch.upto <= due:  # skipped before; the fingerprint's record lies in it
            self._consumer.seek(batch.place, due)
            return
        self.offsets[partition] = batch.upto
        self.skipped += batch.upto - max(batch.offset, due)

    def _seek_fingerprint(self, place: TopicPartition) -> None:
        """Read the fingerprint's record of ``place`` again, if it still exists."""
        self._comparing.discard(place)  # the previous request may be unanswered
        fingerprint = self.fingerprints.get(place.partition)
        if fingerprint is None:
            return
        if self._begins[place] <= fingerprint[0] < self.offsets.get(place.partition, 0):
            self._comparing.add(place)
            self._consumer.seek(place, fingerprint[0])
        else:  # it was removed, or will be read again anyway
            del self.fingerprints[place.partition]

    def _compare(self, place: TopicPartition, records: list[Any]) -> list[Any]:
        """``records`` without those of ``place`` that were read before."""
        self._comparing.discard(place)
        partition = place.partition
        first = next(record for record in records if record.partition == partition)
        fingerprint, due = self.fingerprints.pop(partition), self.offsets.get(partition, 0)
        if fingerprint_of(first) != fingerprint and first.offset <= fingerprint[0]:
            self.offsets[partition] = self._begins[place]
            log.warning(_RECREATED, partition, self._topic, self.offsets[partition], due)
            self._consumer.seek(place, self.offsets[partition])
            return [record for record in records if record.partition != partition]
        if partition in self._last or first.offset == fingerprint[0]:
            self.fingerprints[partition] = self._last.get(partition, fingerprint)
        if self._consumer.position(place) < due:
            self._consumer.seek(place, due)
        return [each for each in records if each.partition != partition or each.offset >= due]

    def acknowledge(self, records: Sequence[Fetched]) -> None:
        """Move ``offsets`` past ``records``, which were processed or refused."""
        for record in records:
            partition = record.partition
            due = self.offsets.get(partition, record.offset)
            if record.offset > due:
                self.skipped += record.offset - due
                self._limited_log.warning(
                    "%d records of partition %d were removed before they were read; continuing at "
                    f"%d. Raise retention.ms of {self._topic} above the time that a learner may be "
                    "away.", record.offset - due, partition, record.offset,
                )  # fmt: skip
            elif record.offset < due:
                log.warning(_RECREATED, partition, self._topic, record.offset, due)
            self.offsets[partition] = record.offset + 1
        for record in {each.partition: each for each in records}.values():
            self._last[record.partition] = fingerprint_of(record)
            self.fingerprints.setdefault(record.partition, self._last[record.partition])
        if records:  # the writer's clock may be ahead
            newest = max(record.timestamp for record in records)
            self.read_at = min(newest / 1e3, time.time())
        self.caught_up = self.caught_up or self.is_near_the_end()

    def lag(self) -> int:
        """Records up to the end of the topic, as of the last fetch."""
        if self._consumer is None or not self._background.idle():
            return self._lag
        self._lag = 0
        for place in self._consumer.assignment():
            end = self._consumer.highwater(place)
            # records removed unread are no lag: no later record would reveal the gap
            read = max(self.offsets.get(place.partition, 0), self._begins.get(place, 0))
            self._lag += max(0, end - read) if end is not None else 0
        return self._lag

    def unreachable_seconds(self) -> float:
        """Time since the broker, or that of one partition, last answered; 0 while all do."""
        seconds = time.monotonic() - min(self._answered_at.values(), default=self._asked_at)
        return seconds if seconds > 2.0 * PARTITIONS_SECONDS else 0.0

    def is_near_the_end(self) -> bool:
        """Whether at most one poll's records are unread."""
        if self._owns_nothing:
            return self._group is not None and self._group.joined
        if self._consumer is None or not self._background.idle():
            return False
        ends = [self._consumer.highwater(place) for place in self._consumer.assignment()]
        return bool(ends) and None not in ends and self.lag() <= RECORDS_PER_POLL

    @property
    def _owns_nothing(self) -> bool:
        return self._group is not None and not self._group.assignment.owned

    def close(self) -> None:
        """Disconnect; commits nothing."""
        self._background.close()  # a client is not thread-safe
        self._pending.clear()
        self._disconnect()

    def _disconnect(self) -> None:
        close(self._consumer)
        self._consumer, self._partitions_at, self._lag = None, 0.0, 0
        self._comparing.clear()

    def _assign_or_disconnect(self) -> None:
        try:
            self._assign()
        except AWAY as error:
            self._retry_after(error)

    def _retry_after(self, error: Exception) -> None:
        if not self._is_logged:
            log.warning("reading %s failed: %r; retrying", self._topic, error)
        self._is_logged = True
        # A consumer of kafka-python (3.0.12) with a fetch for a broker that the metadata does not
        # name (yet) never asks that broker again.
        self._disconnect()
        self._partitions_at = time.monotonic() + RETRY_SECONDS

    def _assign(self) -> None:
        """Assign all partitions, new ones from their beginning."""
        if self._consumer is None:
            self._consumer = open_consumer(self._kafka, f"reader-of-{self._topic}", **_OPTIONS)
        existing = set(self._consumer.partitions_for_topic(self._topic) or ())
        delay = PARTITIONS_SECONDS if existing else RETRY_SECONDS
        self._partitions_at = time.monotonic() + delay
        if not existing:
            self._limited_log.warning(f"topic {self._topic} does not exist (yet)")
        ours = existing if self._group is None else existing & self._group.assignment.owned
        partitions = {TopicPartition(self._topic, p) for p in ours}
        answering = self._find_beginnings(partitions)
        if self._silent.isdisjoint(answering):
            assigned = self._consumer.assignment()
            # an unanswering partition would keep the client from the others
            wanted = answering | (assigned & partitions)
            if wanted and wanted != assigned:
                log.info("reading %s from %s", self._topic, self.offsets or "the earliest")
                self._consumer.assign(sorted(wanted))
                self._comparing.clear()
                for place in wanted:  # assign() forgets all positions
                    begin = self.offsets.get(place.partition, self._begins[place])
                    self._consumer.seek(place, begin)
            for place in answering:
                self._seek_fingerprint(place)
        else:  # the client may never ask their brokers again: see _retry_after
            self._disconnect()
        self._silent = partitions - answering

    def _find_beginnings(self, partitions: set[TopicPartition]) -> set[TopicPartition]:
        """Find the first offsets; the partitions that answer. A client whose broker is away returns
        no records and no error.

        Raises:
            KafkaError, OSError: none answers.
        """
        begins: dict[TopicPartition, int] = {}
        failure: Exception | None = None
        deadline = time.monotonic() + 2.0 * BEGINNINGS_MS / 1e3
        queue = [sorted(partitions - self._silent), *([tp] for tp in self._silent & partitions)]
        for attempt, group in enumerate(queue):
            if group and time.monotonic() < deadline:
                timeout_ms = BEGINNING_MS if attempt else BEGINNINGS_MS
                try:
                    begins |= offsets(
                        self._consumer.beginning_offsets, group, timeout_ms=timeout_ms
                    )
                except AWAY as error:
                    failure = error
                    queue += [[place] for place in group] if len(group) > 1 else []
        if failure is not None and not begins:
            raise failure
        self._begins |= begins
        self._asked_at = now = time.monotonic()
        answered_at = dict.fromkeys(partitions, now) | self._answered_at
        self._answered_at = {tp: now if tp in begins else answered_at[tp] for tp in partitions}
        if len(begins) < len(partitions):
            self._limited_log.warning(
                f"partitions %s of {self._topic} do not answer (do they have a leader?); reading "
                "the others", [place.partition for place in sorted(partitions - begins.keys())],
            )  # fmt: skip
        return set(begins)


_RECREATED: Final = (
    "partition %d of %s was recreated: reading from %d, not %d; records read before are recognised "
    "by their sequence numbers"
)
