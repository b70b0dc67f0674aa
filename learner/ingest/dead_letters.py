"""Sends refused records to the dead-letter topic, with the reason and their position."""

from __future__ import annotations

from decoder.contracts.errors import EventRefused
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DEAD, DRAFTS, Topic
from learner.ingest.source import Fetched
from learner.status import BriefProducer


def headers_of(
    record: Fetched, error: EventRefused, topic: Topic = DRAFTS
) -> list[tuple[str, bytes]]:
    """Headers of a Kafka Streams dead-letter queue (KIP-1034), without a stack trace."""
    values = {
        "exception": type(error).__name__,
        "message": str(error),
        "topic": topic.name,
        "partition": record.partition,
        "offset": record.offset,
    }
    errors = [(f"__streams.errors.{name}", str(value).encode()) for name, value in values.items()]
    return [*DEAD.headers, *errors]


class DeadLetters(BriefProducer):
    """Sends refused records unchanged. ``topic``, from which they came, still holds those lost."""

    def __init__(self, kafka: KafkaSettings, topic: Topic = DRAFTS) -> None:
        super().__init__(kafka, "dead-letters")
        self._topic = topic

    def send(self, record: Fetched, error: EventRefused) -> None:
        """Send ``record``, or count it as failed."""
        self._limited_log.warning(
            "record %d/%d refused: %s", record.partition, record.offset, error
        )
        self.put(DEAD, record.value, record.key, headers_of(record, error, self._topic))
