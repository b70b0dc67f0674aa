"""``python -m learner.intake``: what draft events teach, from topic to topic, until it is told.

As many as there are partitions share ``hvd.drafts.v2`` out by a consumer group. Each record goes
through :class:`learner.ingest.lessons.Intake`, which a learner calls where both are one process,
and what it teaches goes to ``hvd.lessons.v2`` under its scope. Offsets are committed behind what
was delivered: a record may be sent twice, and those who learn know it again.
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
from learner.ingest.group import Group
from learner.ingest.lessons import Intake, Lessons, encode_lessons
from learner.ingest.source import RETRY_SECONDS, EventSource, Fetched
from learner.ingest.workers import Workers
from learner.page import Vitals, serving
from learner.settings import LearnerSettings
from learner.status import StatusProducer

log = logging.getLogger(__name__)

GROUP: Final = "hvd-intake"
POLL_SECONDS: Final = 0.05
TURN_SECONDS: Final = 1.0
"""For the records of one turn."""
SETTLE_SECONDS: Final = 1.0
"""Between two commits, and statuses: what an intake that dies has sent twice."""
DELIVERY_MS: Final = 10_000
"""What was not delivered by then never is: of one that was stopped nothing comes for longer."""
MOST_BYTES: Final = 4 * 2**20


class Relay:
    """The process's state; :meth:`step` is its life. Start from :func:`run`."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self.process = f"intake-{socket.gethostname()}-{os.getpid()}"
        self.life = secrets.token_hex(8)
        self.faults = 0  # lessons that Kafka takes from nobody
        self.vitals = Vitals()
        self.workers = Workers(kafka, self.process)
        self.intake = Intake(DeadLetters(kafka))
        self.status = StatusProducer(kafka)
        self._kafka = kafka
        self._group = Group(kafka, DRAFTS, GROUP, keeps=True)
        self.source = EventSource(kafka, {}, group=self._group)
        self._part = self._group.part
        self._safe: dict[int, int] = {}  # offsets before which all is delivered
        self._producer: Any = None
        self._under_way: list[Any] = []
        self._settled_at = time.monotonic()

    def step(self) -> None:
        """One turn; takes about ``POLL_SECONDS`` when idle."""
        records = self.source.taken(POLL_SECONDS, TURN_SECONDS)
        if self._group.part is not self._part:
            self._part = self._group.part
            self._part.begin(self._safe)
            self._forget()
        self.workers.read()
        self.intake.shares = self.workers.shares
        try:
            for record in records:
                lessons = self.intake.admit(record)
                if lessons is not None and len(lessons.rows):
                    self._send(record, lessons)
            if time.monotonic() >= self._settled_at + SETTLE_SECONDS:
                self._settle()
        except AWAY as error:
            log.warning("lessons are not taken (%r): they are sent again", error)
            self._again()
        self.vitals.turned(self.source.caught_up)

    def close(self) -> None:
        """Commit what is delivered by then, and leave."""
        with suppress(*AWAY):
            self._settle()
        for part in (self.source, self._group, self.workers, self.intake.dead, self.status):
            part.close()
        close(self._producer)

    def _send(self, record: Fetched, lessons: Lessons) -> None:
        if self._producer is None:
            self._producer = open_producer(
                self._kafka, "intake", max_request_size=MOST_BYTES,
                linger_ms=20, compression_type="zstd", max_block_ms=5_000,
                delivery_timeout_ms=DELIVERY_MS, request_timeout_ms=DELIVERY_MS // 2,
            )  # fmt: skip
        share = self.intake.shares.get(lessons.scope, 1.0)
        source = Source(record.partition, record.offset, share)
        value = encode_lessons(lessons, source)
        key = lessons.scope.encode()
        try:
            sent = self._producer.send(LESSONS.name, value=value, key=key, headers=LESSONS.headers)
            self._under_way.append(sent)
        except MessageSizeTooLargeError as error:
            self._lost(error)

    def _settle(self) -> None:
        """Wait for what is under way, then have the group remember how far was read.

        Raises:
            KafkaError, OSError: something was not delivered.
        """
        sent, self._under_way = self._under_way, []
        for each in sent:
            try:
                each.get(timeout=2.0 * DELIVERY_MS / 1e3)
            except MessageSizeTooLargeError as error:
                self._lost(error)
        self._safe = dict(self.source.offsets)
        self._group.commit(self._safe)
        self._settled_at = time.monotonic()
        told = self.intake.said(self.source)
        said = LearnerStatus(process=self.process, life=self.life, faults=self.faults, **told)
        self.status.send(said)
        self.vitals.said = [said]

    def _lost(self, error: MessageSizeTooLargeError) -> None:
        self.faults += 1
        log.error("lessons that Kafka takes from nobody are lost: %s", error)

    def _again(self) -> None:
        """Read on from where all is delivered."""
        close(self._producer)
        self.source.close()
        self.source.offsets = dict(self._safe)
        self._producer, self._under_way = None, []
        self._forget()
        time.sleep(RETRY_SECONDS)

    def _forget(self) -> None:
        """What was read may be read again, and is then to be sent again."""
        self.intake.sequences.came.clear()


def run(settings: LearnerSettings, kafka: KafkaSettings, stop: threading.Event) -> None:
    """Take in until ``stop`` is set.

    Raises:
        SettingsError: the page's port is taken.
        BrokerError: see :func:`learner.topics.wait_until_right`.
    """
    vitals = Vitals()
    with serving(settings, vitals):
        topics.wait_until_right(kafka, stop)
        relay = Relay(kafka)
        relay.vitals = vitals
        try:
            while not stop.is_set():
                relay.step()
        finally:
            relay.close()


if __name__ == "__main__":
    sys.exit(main(run))
