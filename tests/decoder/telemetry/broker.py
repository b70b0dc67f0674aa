"""A broker for a test, and what lies on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kafka import KafkaConsumer, TopicPartition

from decoder.contracts.events import EventBatch, decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from learner.topics import make_right
from pipelines import machine
from pipelines.stack import broker, processes
from tests.conftest import patience


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
                make_right(reached)
            yield reached
    finally:
        processes.stop([child])


def consumed(kafka: KafkaSettings, topic: str) -> list[bytes]:
    """Values of all records, a partition after another."""
    consumer = KafkaConsumer(group_id=None, **kafka.client_options())
    places = [TopicPartition(topic, p) for p in sorted(consumer.partitions_for_topic(topic) or {0})]
    consumer.assign(places)
    consumer.seek_to_beginning(*places)
    ends, found = consumer.end_offsets(places), []
    while any(consumer.position(place) < end for place, end in ends.items()):
        found += [r for records in consumer.poll(200).values() for r in records]
    consumer.close()
    return [r.value for r in sorted(found, key=lambda r: (r.partition, r.offset))]


def batches(kafka: KafkaSettings) -> list[EventBatch]:
    """The draft events that lie there."""
    return [decode_batch(value) for value in consumed(kafka, DRAFTS.name)]


def numbers(found: list[EventBatch]) -> list[int]:
    """Of the events in them."""
    return [event.number for batch in found for event in batch.events]
