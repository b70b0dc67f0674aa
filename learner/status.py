"""Best-effort producers: their records may be lost, and sending never blocks."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final

from kafka.errors import MessageSizeTooLargeError

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus
from decoder.contracts.topics import STATUS, Topic
from decoder.kafka.clients import AWAY, close, open_producer
from decoder.limited_log import LimitedLog
from learner.background import Background

RETRY_SECONDS: Final = 10.0
BRIEF: Final = {
    "acks": 1,
    "bootstrap_timeout_ms": 1_000,
    "max_block_ms": 200,  # blocking the sender for longer costs more than the record is worth
    "delivery_timeout_ms": 5_000,
    "request_timeout_ms": 3_000,
}
"""Options of a producer that gives up soon."""
MAX_QUEUED: Final = 500
MAX_BYTES: Final = 2**20  # Kafka's default limit of a record
Header = tuple[str, bytes]


class BriefProducer:
    """Sends records on a thread; never raises, and gives up soon. ``failed`` counts lost ones."""

    def __init__(self, kafka: KafkaSettings, purpose: str) -> None:
        self.failed = 0
        self._kafka, self._purpose = kafka, purpose
        self._producer: Any = None
        self._background = Background(purpose)
        self._retry_at = 0.0
        self._limited_log = LimitedLog()

    def put(self, topic: Topic, value: bytes, key: bytes | None, headers: list[Header]) -> None:
        """Send a record, or count it as failed."""
        full = len(value) > MAX_BYTES or self._background.queued >= MAX_QUEUED
        if full or time.monotonic() < self._retry_at:
            self.failed += 1
        else:
            self._background.submit(partial(self._send, topic, value, key, headers))

    def close(self) -> None:
        """Disconnect."""
        if self._background.close():
            close(self._producer)

    def _send(self, topic: Topic, value: bytes, key: bytes | None, headers: list[Header]) -> None:
        if time.monotonic() < self._retry_at:  # an earlier record failed
            self.failed += 1
            return
        try:
            if self._producer is None:
                self._producer = open_producer(self._kafka, self._purpose, **BRIEF)
            sent = self._producer.send(topic.name, value=value, key=key, headers=headers)
            sent.add_errback(self._count_failure)
        except MessageSizeTooLargeError:
            self.failed += 1  # too large with its headers; others are not
        except AWAY as failure:
            self._count_failure(failure)

    def _count_failure(self, failure: BaseException) -> None:
        self.failed += 1
        self._limited_log.warning("the broker does not accept %s: %s", self._purpose, failure)
        self._retry_at = time.monotonic() + RETRY_SECONDS


class StatusProducer(BriefProducer):
    """Sends status records."""

    def __init__(self, kafka: KafkaSettings) -> None:
        super().__init__(kafka, "status-records")

    def send(self, status: LearnerStatus) -> None:
        """Send ``status``, or count it as failed."""
        self.put(STATUS, status.model_dump_json().encode(), status.process.encode(), STATUS.headers)
