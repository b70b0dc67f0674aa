"""``python -m learner.intake``: relays training rows from ``hvd.drafts.v2`` to ``hvd.lessons.v2``.

A consumer group assigns the partitions of ``hvd.drafts.v2`` to intakes. Each record passes through
:class:`learner.ingest.records.RecordReader`, as in a learner that reads draft events itself, and
its training rows go to ``hvd.lessons.v2`` under their scope. Offsets are committed after delivery:
a record may be sent twice, and learners deduplicate.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final

from kafka.errors import MessageSizeTooLargeError

from decoder.contracts.events import Source
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus
from decoder.contracts.topics import DRAFTS, LESSONS
from decoder.kafka.clients import AWAY, close, open_producer
from learner import topics
from learner.__main__ import main
from learner.ingest.dead_letters import DeadLetters
from learner.ingest.group import GroupMember
from learner.ingest.records import DraftRecord, RecordReader, encode_rows
from learner.ingest.source import RETRY_SECONDS, EventSource, Fetched
from learner.ingest.statuses import StatusReader
from learner.page import Health, serve_page
from learner.settings import LearnerSettings
from learner.status import StatusProducer

log = logging.getLogger(__name__)

GROUP: Final = "hvd-intake"
POLL_SECONDS: Final = 0.05
TURN_SECONDS: Final = 1.0
COMMIT_SECONDS: Final = 1.0  # interval of commits and statuses: a failed intake sends so much twice
DELIVERY_MS: Final = 10_000
"""Delivery timeout: after an intake stopped, nothing of it arrives for longer."""
MAX_BYTES: Final = 4 * 2**20


class Intake:
    """State of the process; :func:`run` calls :meth:`step` in a loop."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self.process = f"intake-{socket.gethostname()}-{os.getpid()}"
        self.life = secrets.token_hex(8)
        self.faults = 0  # records larger than Kafka accepts
        self.health = Health()
        self.statuses = StatusReader(kafka, self.process)
        self.reader = RecordReader(DeadLetters(kafka))
        self.status = StatusProducer(kafka)
        self._kafka = kafka
        self._group = GroupMember(kafka, DRAFTS, GROUP, commits=True)
        self.source = EventSource(kafka, {}, group=self._group)
        self._assignment = self._group.assignment
        self._delivered: dict[int, int] = {}  # offsets up to which all records are delivered
        self._producer: Any = None
        self._in_flight: list[Any] = []
        self._committed_at = time.monotonic()

    def step(self) -> None:
        """One turn; takes about ``POLL_SECONDS`` when idle."""
        records = self.source.records(POLL_SECONDS, TURN_SECONDS)
        if self._group.assignment is not self._assignment:
            self._assignment = self._group.assignment
            self._assignment.apply(self._delivered)
            self.reader.sequences.came.clear()
        self.statuses.read()
        self.reader.sample_rates = self.statuses.sample_rates
        try:
            for record in records:
                decoded = self.reader.read(record)
                if decoded is not None and len(decoded.rows):
                    self._send(record, decoded)
            if time.monotonic() >= self._committed_at + COMMIT_SECONDS:
                self._commit()
        except AWAY as error:
            log.warning("training rows are not accepted (%r): sending them again", error)
            self._rewind()
        self.health.record_turn(self.source.caught_up)

    def close(self) -> None:
        """Commit what has been delivered, and disconnect."""
        with suppress(*AWAY):
            self._commit()
        for part in (self.source, self._group, self.statuses, self.reader.dead, self.status):
            part.close()
        close(self._producer)

    def _send(self, record: Fetched, decoded: DraftRecord) -> None:
        if self._producer is None:
            self._producer = open_producer(
                self._kafka, "intake", max_request_size=MAX_BYTES,
                linger_ms=20, compression_type="zstd", max_block_ms=5_000,
                delivery_timeout_ms=DELIVERY_MS, request_timeout_ms=DELIVERY_MS // 2,
            )  # fmt: skip
        rate = self.reader.sample_rates.get(decoded.scope, 1.0)
        value = encode_rows(decoded, Source(record.partition, record.offset, rate))
        key = decoded.scope.encode()
        try:
            sent = self._producer.send(LESSONS.name, value=value, key=key, headers=LESSONS.headers)
            self._in_flight.append(sent)
        except MessageSizeTooLargeError as error:
            self._count_lost(error)

    def _commit(self) -> None:
        """Wait for records in flight, commit offsets, and report.

        Raises:
            KafkaError, OSError: something was not delivered.
        """
        in_flight, self._in_flight = self._in_flight, []
        for each in in_flight:
            try:
                each.get(timeout=2.0 * DELIVERY_MS / 1e3)
            except MessageSizeTooLargeError as error:
                self._count_lost(error)
        self._delivered = dict(self.source.offsets)
        self._group.commit(self._delivered)
        self._committed_at = time.monotonic()
        fields = self.reader.status(self.source)
        status = LearnerStatus(process=self.process, life=self.life, faults=self.faults, **fields)
        self.status.send(status)
        self.health.statuses = [status]

    def _count_lost(self, error: MessageSizeTooLargeError) -> None:
        self.faults += 1
        log.error("training rows larger than Kafka accepts are lost: %s", error)

    def _rewind(self) -> None:
        """Continue at the offsets up to which all records are delivered."""
        close(self._producer)
        self.source.close()
        self.source.offsets = dict(self._delivered)
        self._producer, self._in_flight = None, []
        self.reader.sequences.came.clear()  # records read again are sent again
        time.sleep(RETRY_SECONDS)


def run(settings: LearnerSettings, kafka: KafkaSettings, stop: threading.Event) -> None:
    """Relay until ``stop`` is set.

    Raises:
        SettingsError: the page's port is taken.
        BrokerError: see :func:`learner.topics.wait_for_topics`.
    """
    health = Health()
    with serve_page(settings, health):
        topics.wait_for_topics(kafka, stop)
        intake = Intake(kafka)
        intake.health = health
        try:
            while not stop.is_set():
                intake.step()
        finally:
            intake.close()


if __name__ == "__main__":
    sys.exit(main(run))
