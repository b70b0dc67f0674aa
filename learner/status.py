"""Best-effort producers: what can be lost is sent as well as it can, and nobody waits for it."""

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
MOST: Final = 500
MOST_BYTES: Final = 2**20
"""Records that wait for the broker, and bytes of one: none takes more unless told to."""
Header = tuple[str, bytes]


class BriefProducer:
    """Sends what can be done without as well as it can, by a thread of its own; never raises, and
    gives up quickly.

    ``failed`` counts what no broker took.
    """

    def __init__(self, kafka: KafkaSettings, purpose: str) -> None:
        self.failed = 0
        self._kafka, self._purpose = kafka, purpose
        self._producer: Any = None
        self._background = Background(purpose)
        self._retry_at = 0.0
        self._limited_log = LimitedLog()

    def put(self, topic: Topic, value: bytes, key: bytes | None, headers: list[Header]) -> None:
        """Have a record handed to the client, or count it as failed."""
        full = len(value) > MOST_BYTES or self._background.waiting >= MOST
        if full or time.monotonic() < self._retry_at:
            self.failed += 1
        else:
            self._background.offer(partial(self._send, topic, value, key, headers))

    def close(self) -> None:
        """Leave the broker."""
        if self._background.close():
            close(self._producer)

    def _send(self, topic: Topic, value: bytes, key: bytes | None, headers: list[Header]) -> None:
        if time.monotonic() < self._retry_at:  # as of one before it
            self.failed += 1
            return
        try:
            if self._producer is None:
                self._producer = open_producer(self._kafka, self._purpose, **BRIEF)
            sent = self._producer.send(topic.name, value=value, key=key, headers=headers)
            sent.add_errback(self._lost)
        except MessageSizeTooLargeError:
            self.failed += 1  # it is too large with its headers, and no other is
        except AWAY as failure:
            self._lost(failure)

    def _lost(self, failure: BaseException) -> None:
        self.failed += 1
        self._limited_log.warning("the broker takes no %s: %s", self._purpose, failure)
        self._retry_at = time.monotonic() + RETRY_SECONDS


class StatusProducer(BriefProducer):
    """Sends status records."""

    def __init__(self, kafka: KafkaSettings) -> None:
        super().__init__(kafka, "status-records")

    def send(self, status: LearnerStatus) -> None:
        """Hand ``status`` to the client, or count it as failed."""
        self.put(STATUS, status.model_dump_json().encode(), status.process.encode(), STATUS.headers)
