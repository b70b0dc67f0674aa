"""Draft events from Kafka, from the offsets the checkpoint holds; nothing is committed to a group.

Offsets that live elsewhere than the weights they led to would, after a crash, either lose events or
count them twice.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

from decoder.contracts.errors import EventRefused
from decoder.contracts.events import EventBatch, decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from learner.sequences import Sequences

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 2.0
PARTITIONS_SECONDS: Final = 30.0
"""How often added partitions are looked for."""
RECORDS_PER_POLL: Final = 40
"""A record holds about a hundred events: more at once would hold the loop for a second."""
REFUSALS_LISTED: Final = 1_000
"""Refused records written down per process; the rest are counted, and Kafka holds them all."""

ANSWER_MS: Final = 10
"""Milliseconds given to a fetch under way, so that a reader that is behind reads on."""
_OPTIONS: Final = {
    "group_id": None,
    "enable_auto_commit": False,
    "auto_offset_reset": "earliest",  # retention may have passed the stored offset
    "allow_auto_create_topics": False,
    "max_poll_records": RECORDS_PER_POLL,
    "bootstrap_timeout_ms": 2_000,
    "request_timeout_ms": 10_000,
    "reconnect_backoff_max_ms": 2_000,
}


@dataclass(frozen=True)
class Received:
    """A decoded record and where it lay."""

    partition: int
    offset: int
    batch: EventBatch


class EventSource:
    """Reads every partition of the draft topic.

    ``offsets`` maps a partition to the next offset to read: what belongs into the checkpoint.
    ``refused`` counts records that keep no contract; they are listed in ``refused_path``.
    ``sequences`` counts the records that are missing (refused ones among them) and those that came
    again.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        offsets: Mapping[int, int],
        refused_path: Path,
        sequences: Sequences | None = None,
    ) -> None:
        self.offsets = dict(offsets)
        self.refused = 0
        self.sequences = sequences or Sequences()
        self._kafka = kafka
        self._refused_path = refused_path
        self._consumer: Any = None
        self._partitions_at = 0.0
        self._complained = False

    def connect(self, stop: threading.Event) -> bool:
        """Wait for the broker and for the topic; False when ``stop`` was set first."""
        while not stop.is_set():
            try:
                if self._consumer is None:
                    self._consumer = KafkaConsumer(**self._kafka.client_options(), **_OPTIONS)
                if self._assign():
                    log.info("reading %s from %s", DRAFTS.name, self.offsets or "the earliest")
                    return True
                waiting = f"topic {DRAFTS.name} does not exist yet"
            except (KafkaError, OSError) as error:
                waiting = f"no broker at {self._kafka.bootstrap_servers} ({error})"
            log.warning("%s; trying again in %.0f s", waiting, RETRY_SECONDS)
            stop.wait(RETRY_SECONDS)
        return False

    def poll(self, timeout: float) -> list[Received]:
        """Records that have come; moves ``offsets`` past them. Where none has, waits ``timeout`` s.

        The wait is not the client's, which fetches without pause from a broker that answers empty
        fetches at once.
        Refused records are passed over, and those that came before. A broker that went away yields
        nothing and a log line; the client reconnects by itself.
        """
        try:
            if time.monotonic() >= self._partitions_at:
                self._assign()
            polled = self._consumer.poll(timeout_ms=ANSWER_MS)
        except (KafkaError, OSError) as error:
            if not self._complained:
                log.warning("reading %s failed: %s; going on trying", DRAFTS.name, error)
            self._complained = True
            time.sleep(timeout)
            return []
        if not polled:
            time.sleep(timeout)
        self._complained = self._complained and not polled
        received = []
        for tp, records in polled.items():
            for record in records:
                self.offsets[tp.partition] = record.offset + 1
                try:
                    batch = decode_batch(record.value or b"")
                except EventRefused as error:
                    self._set_aside(tp.partition, record, error)
                    continue
                if self.sequences.observe(batch.origin.life, tp.partition, batch.sequence):
                    received.append(Received(tp.partition, record.offset, batch))
        return received

    def lag(self) -> int:
        """Records between what was read and the end of the topic, as of the last fetch."""
        if self._consumer is None:
            return 0
        behind = 0
        for tp in self._consumer.assignment():
            end = self._consumer.highwater(tp)
            behind += max(0, end - self.offsets.get(tp.partition, 0)) if end is not None else 0
        return behind

    def close(self) -> None:
        """Leave the broker; commits nothing."""
        if self._consumer is not None:
            self._consumer.close()

    def _assign(self) -> bool:
        """Read all partitions there are, new ones from the earliest; False without any."""
        self._partitions_at = time.monotonic() + PARTITIONS_SECONDS
        partitions = {TopicPartition(DRAFTS.name, p) for p in self._partitions()}
        added = partitions - self._consumer.assignment()
        if added:
            self._consumer.assign(sorted(partitions))
            for tp in partitions:
                # assigning afresh forgets the positions of the old ones too
                if tp.partition in self.offsets:
                    self._consumer.seek(tp, self.offsets[tp.partition])
                else:
                    self._consumer.seek_to_beginning(tp)
        return bool(partitions)

    def _partitions(self) -> set[int]:
        return set(self._consumer.partitions_for_topic(DRAFTS.name) or ())

    def _set_aside(self, partition: int, record: Any, error: EventRefused) -> None:
        self.refused += 1
        if self.refused > REFUSALS_LISTED:
            return
        log.warning("record %d/%d refused: %s", partition, record.offset, error)
        line = {
            "time": time.time(),
            "topic": DRAFTS.name,
            "partition": partition,
            "offset": record.offset,
            "bytes": len(record.value or b""),
            "reason": str(error),
        }
        try:
            self._refused_path.parent.mkdir(parents=True, exist_ok=True)
            with self._refused_path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as failure:
            log.warning("refused record not listed in %s: %s", self._refused_path, failure)
