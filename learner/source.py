"""Records of a topic, from the checkpoint's offsets; nothing is committed to a group.

Offsets that live elsewhere than the weights they led to would, after a crash, either lose events or
count them twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kafka import TopicPartition

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, Topic
from decoder.kafka.clients import ANSWER_MS, AWAY, GLANCE_MS, close, fetch, open_consumer
from decoder.kafka.unpacking import Unreadable

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 2.0
PARTITIONS_SECONDS: Final = 30.0
"""How often added partitions are looked for."""
ENDS_MS: Final = 2_000
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


class EventSource:
    """Reads every partition of ``topic``.

    ``offsets`` maps a partition to the next offset to read: what belongs into the checkpoint.
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
    ) -> None:
        self.offsets = dict(offsets)
        self.skipped = skipped
        self.caught_up = False
        self.read_at = 0.0
        self._topic = topic.name
        self._kafka = kafka
        self._consumer: Any = None
        self._partitions_at = 0.0
        self._begins: dict[TopicPartition, int] = {}
        self._answered_at = time.monotonic()
        self._complained = False
        self._flows = False

    def connect(self, stop: threading.Event) -> bool:
        """Wait for the broker and for the topic; False when ``stop`` was set first."""
        while not stop.is_set():
            try:
                if self._assign():
                    log.info("reading %s from %s", self._topic, self.offsets or "the earliest")
                    return True
                waiting = f"topic {self._topic} does not exist yet"
            except AWAY as error:
                waiting = f"no broker at {self._kafka.bootstrap_servers} ({error})"
            log.warning("%s; trying again in %.0f s", waiting, RETRY_SECONDS)
            stop.wait(RETRY_SECONDS)
        return False

    def poll(self, timeout: float) -> list[Fetched]:
        """Records that have come, each partition's in order. Where none has, waits ``timeout`` s.

        A broker that went away yields nothing and a log line, and is looked for again.
        """
        try:
            if time.monotonic() >= self._partitions_at:
                self._assign()
            patience = ANSWER_MS if self._flows else GLANCE_MS
            records = (
                fetch(self._consumer, patience, self._passed) if self._consumer is not None else []
            )
        except AWAY as error:
            if not self._complained:
                log.warning("reading %s failed: %r; going on trying", self._topic, error)
            self._complained = True
            # Of kafka-python (3.0.12) a consumer that had a fetch for a broker which the metadata
            # does not name (yet) never asks that broker again.
            self.close()
            self._partitions_at = time.monotonic() + RETRY_SECONDS
            time.sleep(timeout)
            return []
        self._flows = bool(records)
        if not records:
            time.sleep(timeout)
        else:
            self._answered_at = time.monotonic()
        self._complained = self._complained and not records
        return [
            Fetched(each.partition, each.offset, each.timestamp, each.key, each.value or b"")
            for each in records
        ]

    def _passed(self, batch: Unreadable) -> None:
        self.offsets[batch.place.partition] = batch.upto
        self.skipped += batch.upto - batch.offset

    def done(self, records: Sequence[Fetched]) -> None:
        """``records`` are admitted, or refused for good: move ``offsets`` past them."""
        for record in records:
            due = self.offsets.get(record.partition, record.offset)
            if record.offset > due:
                self.skipped += record.offset - due
                log.error(
                    "%d records of partition %d were removed before they were read: reading on at "
                    "%d. Keep them longer (retention.ms of %s) than a learner may be away.",
                    record.offset - due, record.partition, record.offset, self._topic,
                )  # fmt: skip
            elif record.offset < due:
                log.warning(
                    "partition %d was made anew: reading it from %d, not %d; what was read before "
                    "is known by its sequence", record.partition, record.offset, due,
                )  # fmt: skip
            self.offsets[record.partition] = record.offset + 1
        if records:  # a clock that is ahead hides how old what is read is until the next are
            newest = max(record.timestamp for record in records)
            self.read_at = min(newest / 1e3, time.time())
        self.caught_up = self.caught_up or self._is_near_the_end()

    def lag(self) -> int:
        """Records between what was read and the end of the topic, as of the last fetch."""
        if self._consumer is None:
            return 0
        behind = 0
        for tp in self._consumer.assignment():
            end = self._consumer.highwater(tp)
            # what age has removed unread is not waited for: no record comes that would tell of it
            read = max(self.offsets.get(tp.partition, 0), self._begins.get(tp, 0))
            behind += max(0, end - read) if end is not None else 0
        return behind

    def silent_seconds(self) -> float:
        """For how long the broker has not answered; 0 where it did when it was last due to."""
        silent = time.monotonic() - self._answered_at
        return silent if silent > 2.0 * PARTITIONS_SECONDS else 0.0

    def _is_near_the_end(self) -> bool:
        places = self._consumer.assignment() if self._consumer is not None else ()
        ends = [self._consumer.highwater(place) for place in places]
        return bool(ends) and None not in ends and self.lag() <= RECORDS_PER_POLL

    def close(self) -> None:
        """Leave the broker; commits nothing."""
        close(self._consumer)
        self._consumer = None

    def _assign(self) -> bool:
        """Read all partitions there are, new ones from the earliest; False without any."""
        if self._consumer is None:
            self._consumer = open_consumer(self._kafka, f"reader-of-{self._topic}", **_OPTIONS)
        self._partitions_at = time.monotonic() + PARTITIONS_SECONDS
        partitions = {TopicPartition(self._topic, p) for p in self._partitions()}
        added = partitions - self._consumer.assignment()
        if added:
            self._consumer.assign(sorted(partitions))
            for tp in partitions:
                # assigning afresh forgets the positions of the old ones too
                if tp.partition in self.offsets:
                    self._consumer.seek(tp, self.offsets[tp.partition])
                else:
                    self._consumer.seek_to_beginning(tp)
        # A client whose broker is away finds nothing to read and says no more: this asks.
        self._begins = self._consumer.beginning_offsets(sorted(partitions), timeout_ms=ENDS_MS)
        self._answered_at = time.monotonic()
        return bool(partitions)

    def _partitions(self) -> set[int]:
        return set(self._consumer.partitions_for_topic(self._topic) or ())
