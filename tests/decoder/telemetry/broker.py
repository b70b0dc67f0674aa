"""A broker for a test, and what lies on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from decoder.contracts.events import EventBatch, decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from decoder.kafka.clients import fetch, open_consumer, open_producer, partitions_of
from learner.topics import ensure_topics
from pipelines import machine
from pipelines.stack import broker, processes
from tests.conftest import patience, until
from tests.events import events_of


def start_broker(port: int, data: Path, log: Path) -> processes.Child:
    """A broker without topics, once it answers."""
    part = broker.broker_part(port, data, log)
    child = processes.start(part)
    try:
        processes.wait_until(child, lambda: broker.answers(broker.local(port)), part.patience_s)
    except BaseException:
        processes.stop([child])
        raise
    return child


@contextmanager
def running(folder: Path, port: int = 0, topics: bool = True) -> Iterator[KafkaSettings]:
    """A broker with the project's topics, or with those that were there."""
    port = port or machine.free_port()
    child = start_broker(port, folder / "data", folder / "broker.log")
    reached = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
    try:
        with patience():
            if topics:
                ensure_topics(reached)
            yield reached
    finally:
        processes.stop([child])


def lying(kafka: KafkaSettings, topic: str) -> list[Any]:
    """All records that can be unpacked, a partition after another."""
    with closing(open_consumer(kafka, "test", bootstrap_timeout_ms=60_000)) as consumer:
        places, found = partitions_of(consumer, topic), list[Any]()
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        ends = consumer.end_offsets(places)

        def read() -> bool:
            found.extend(fetch(consumer, 200))
            return all(consumer.position(place) >= end for place, end in ends.items())

        until(read, topic)
    return sorted(found, key=lambda r: (r.partition, r.offset))


def consumed(kafka: KafkaSettings, topic: str) -> list[bytes]:
    """Values of :func:`lying`."""
    return [record.value for record in lying(kafka, topic)]


def send(kafka: KafkaSettings, topic: str, *values: bytes | None, **where: Any) -> None:
    """Put ``values`` onto a topic, and wait until they lie there."""
    with closing(open_producer(kafka, "test", bootstrap_timeout_ms=60_000)) as producer:
        for sent in [producer.send(topic, value=value, **where) for value in values]:
            sent.get(300)


def batches(kafka: KafkaSettings) -> list[EventBatch]:
    """The draft events that lie there."""
    return [decode_batch(value) for value in consumed(kafka, DRAFTS.name)]


def numbers(found: list[EventBatch]) -> list[int]:
    """Of the events in them."""
    return [event.number for batch in found for event in events_of(batch)]
