"""Refused records, on a topic of their own: as they came, with why and from where.

The headers are those of Kafka Streams' dead-letter queues (KIP-1034), so that what reads those
reads these; a stack trace is left out, since a refusal has none worth reading.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from kafka.errors import MessageSizeTooLargeError

from decoder.contracts.errors import EventRefused
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DEAD, DRAFTS
from decoder.kafka.clients import AWAY, close, open_brief_producer
from learner.source import Fetched

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 10.0
LOGGED: Final = 100
"""Refusals that a process says in its log; the rest are counted, and lie on the topic."""


def headers_of(record: Fetched, error: EventRefused) -> list[tuple[str, bytes]]:
    """Why ``record`` was refused and where it lay, under Kafka Streams' names."""
    told = {
        "exception": type(error).__name__,
        "message": str(error),
        "topic": DRAFTS.name,
        "partition": record.partition,
        "offset": record.offset,
    }
    errors = [(f"__streams.errors.{name}", str(value).encode()) for name, value in told.items()]
    return [*DEAD.headers, *errors]


class DeadLetters:
    """Sends refused records as well as it can; never raises, and gives up quickly.

    ``failed`` counts those that no broker took: the draft topic still holds them.
    """

    def __init__(self, kafka: KafkaSettings) -> None:
        self.failed = 0
        self._kafka = kafka
        self._producer: Any = None
        self._retry_at = 0.0
        self._said = 0

    def send(self, record: Fetched, error: EventRefused) -> None:
        """Hand ``record`` to the client, or count it as failed."""
        if self._said < LOGGED:
            self._said += 1
            log.warning("record %d/%d refused: %s", record.partition, record.offset, error)
        if time.monotonic() < self._retry_at:
            self.failed += 1
            return
        try:
            if self._producer is None:
                self._producer = open_brief_producer(self._kafka, "dead-letters")
            sent = self._producer.send(
                DEAD.name, value=record.value, key=record.key, headers=headers_of(record, error)
            )
            sent.add_errback(self._lost)
        except MessageSizeTooLargeError:
            self.failed += 1  # it is too large with its headers, and no other is
        except AWAY as failure:
            self._lost(failure)

    def close(self) -> None:
        """Leave the broker."""
        close(self._producer)

    def _lost(self, failure: BaseException) -> None:
        self.failed += 1
        if time.monotonic() >= self._retry_at:  # many may be under way when the first one fails
            log.warning("%s does not take dead letters (%s); they are counted", DEAD.name, failure)
        self._retry_at = time.monotonic() + RETRY_SECONDS
