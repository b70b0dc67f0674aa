"""Reads records of a topic without a consumer group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from kafka import TopicPartition
from kafka.errors import UnknownTopicOrPartitionError

from decoder.contracts.errors import BrokerError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import Topic
from decoder.kafka.clients import AWAY, close, fetch, listens, offsets, open_consumer, partitions_of
from decoder.kafka.codec import Unreadable

ANSWER_MS: Final = 200
PATIENCE_S: Final = 30.0  # timeout for records that are known to exist


@contextmanager
def reading(kafka: KafkaSettings, purpose: str) -> Iterator[Any]:
    """A consumer without a group.

    Raises:
        BrokerError: the broker does not answer, or goes away.
    """
    where = f"Kafka at {kafka.bootstrap_servers}"
    if not listens(kafka):
        raise BrokerError(
            f"{where} does not answer: start it, or let HVD_KAFKA_BOOTSTRAP_SERVERS name yours."
        )
    consumer: Any = None
    try:
        consumer = open_consumer(kafka, purpose, bootstrap_timeout_ms=10_000)
        yield consumer
    except UnknownTopicOrPartitionError as error:
        raise BrokerError(
            f"{where} has no topic {error}: start a learner once, which creates them."
        ) from error
    except AWAY as error:
        raise BrokerError(f"{where} refuses or has gone: {error!r}") from error
    finally:
        close(consumer)


def spans(consumer: Any, topic: Topic) -> dict[int, range]:
    """The available offsets of each partition of ``topic``.

    Raises:
        KafkaError, OSError: broker or topic are missing.
    """
    places = partitions_of(consumer, topic.name)
    begins = offsets(consumer.beginning_offsets, places)
    ends = offsets(consumer.end_offsets, places)
    return {place.partition: range(begins[place], ends[place]) for place in places}


def records(
    consumer: Any,
    topic: Topic,
    wanted: Mapping[int, range],
    passed: Callable[[int], None] = lambda count: None,
) -> Iterator[list[Any]]:
    """Yield the records at the ``wanted`` offsets of each partition, in batches.

    Args:
        passed: called with the number of records that are skipped because they cannot be
            decompressed.

    Raises:
        BrokerError: records stopped arriving.
        KafkaError, OSError: broker or topic are missing.
    """
    open_ = {TopicPartition(topic.name, p): span for p, span in wanted.items() if span}
    consumer.assign(sorted(open_))
    consumer.resume(*open_)  # an earlier reading may have paused them
    for place, span in open_.items():
        consumer.seek(place, span.start)
    last_arrival = time.monotonic()

    def pass_over(batch: Unreadable) -> None:
        nonlocal last_arrival
        last_arrival = time.monotonic()
        passed(min(batch.upto, wanted[batch.place.partition].stop) - batch.offset)

    while open_:
        fetched = fetch(consumer, ANSWER_MS, pass_over)
        batch_ = [r for r in fetched if r.offset < wanted[r.partition].stop]
        for place in [p for p, span in open_.items() if consumer.position(p) >= span.stop]:
            consumer.pause(place)  # later records are not wanted
            del open_[place]
        if batch_:
            last_arrival = time.monotonic()
            yield batch_
        elif open_ and time.monotonic() - last_arrival > PATIENCE_S:
            raise BrokerError(f"records of {topic.name} stopped arriving: is the broker there?")
