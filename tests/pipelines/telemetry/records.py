"""Draft events on a broker, as many workers would send them, with all that may happen to them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kafka.admin import NewTopic

from decoder.contracts.events import DraftEvent, Origin, encode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from decoder.kafka.clients import close, open_admin, open_producer
from learner.topics import make_right
from tests.pipelines.watch.records import event

ONE, OTHER = Origin("scope", "one", "1a" * 8), Origin("scope", "other", "2b" * 8)
NOW = float(round(time.time()))
HOSTILE = (b"", b"no record", b"[" * 5_000, b'{"contract": "hvd.drafts.v9"}')


def spread(kafka: KafkaSettings, partitions: int = 3) -> None:
    """Our topics, that of drafts on so many partitions, and nothing on it."""
    admin = open_admin(kafka, "test", 10_000)
    if DRAFTS.name in admin.list_topics():
        admin.delete_topics([DRAFTS.name])
    admin.create_topics([NewTopic(DRAFTS.name, partitions, 1)])
    close(admin)
    make_right(kafka)


def events(first: int, count: int, ago: float = 60.0) -> list[DraftEvent]:
    """Of the numbers from ``first`` on, a tenth of a second apart."""
    return [
        event(
            number, NOW - ago + number / 10, accepted=number % 8, batch_size=1 + number % 4,
            workload=("edits", "chat")[number % 2], arm=("cache", "none")[number % 3 == 2],
        )
        for number in range(first, first + count)
    ]  # fmt: skip


def record(origin: Origin, sequence: int, first: int, count: int = 10) -> bytes:
    return encode_batch(events(first, count), origin, sequence)


def produce(kafka: KafkaSettings, sent: Sequence[tuple[int, bytes]]) -> None:
    """Records by partition, as they are sent."""
    producer = open_producer(kafka, "test", compression_type="zstd")
    for partition, value in sent:
        producer.send(DRAFTS.name, partition=partition, value=value, headers=DRAFTS.headers)
    producer.flush()
    close(producer)


def mixed() -> list[tuple[int, bytes]]:
    """Fifteen records of two lives: a record and some events come twice, two records are lost, and
    four are none. 100 distinct events: 70 of the one worker and 30 of the other."""
    return [
        (0, record(ONE, 0, 0)),
        (0, record(ONE, 1, 10)),
        (1, record(ONE, 0, 20)),
        (2, record(OTHER, 0, 0)),
        *((1, value) for value in HOSTILE),
        (0, record(ONE, 1, 10)),  # again
        (0, record(ONE, 4, 30)),  # two lost
        (1, record(ONE, 1, 35, 15)),  # of which five came above, on another partition
        (2, record(OTHER, 1, 20)),
        (2, record(OTHER, 2, 10)),
        (1, record(ONE, 2, 50)),
        (0, record(ONE, 5, 60)),
    ]
