"""A consumer of drafts, rounds, policies and statuses that writes what it reads into a ledger.

It joins no consumer group: looking on must not take records from anyone.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any, Final

from kafka import TopicPartition

from decoder.complaints import Complaints
from decoder.contracts.bundle import unpack
from decoder.contracts.errors import ContractError
from decoder.contracts.events import decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import decode_status
from decoder.contracts.topics import DRAFTS, POLICY, STATUS, TRIALS
from decoder.contracts.trials import decode_round
from decoder.kafka.clients import AWAY, close, fetch, listens, open_consumer
from pipelines.watch.ledger import Ledger

POLL_S: Final = 0.25
PAUSE_S: Final = 5.0
_complaints: Final = Complaints()


def ingest(ledger: Ledger, topic: str, key: bytes | None, value: bytes | None, at: float) -> None:
    """Write one record, of ``at`` in seconds since the epoch, into ``ledger``; one that cannot be
    read is counted. Never raises."""
    try:
        if topic == POLICY.name:
            scope, _, role = (key or b"").decode(errors="replace").partition("/")
            ledger.add_policy(at, scope, role, unpack(value)[0] if value else None)
        elif value and topic == DRAFTS.name:
            ledger.add_drafts(decode_batch(value))
        elif value and topic == STATUS.name:
            ledger.add_status(decode_status(value))
        elif value and topic == TRIALS.name:
            ledger.add_round(decode_round(value))
    except ContractError:
        ledger.refused += 1
    except Exception:  # noqa: BLE001 -- whatever it is, a page must not go stale
        ledger.refused += 1
        _complaints.exception("a record was passed over: it cannot be shown")


class Observer:
    """Reads in a thread, between :meth:`start` and :meth:`close`.

    Policies are read from the beginning, statuses and rounds from ``since_s`` ago, drafts, which
    are many, from the end; all topics from the beginning where it is infinite, and again when a
    broker that was away comes back. Else it goes on where it was.
    """

    def __init__(self, kafka: KafkaSettings, ledger: Ledger, since_s: float = 0.0) -> None:
        self.kafka = kafka
        self.ledger = ledger
        self.since_s = since_s
        self._next: dict[Any, int] = {}  # offset by partition
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="observer", daemon=True)

    def start(self) -> None:
        """Begin to read; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        self._thread.join(5.0)

    def _read(self) -> None:
        while not self._closing.is_set():
            try:
                if listens(self.kafka):  # a client that finds no broker leaves sockets open
                    consumer = open_consumer(self.kafka, "observer", bootstrap_timeout_ms=20_000)
                    try:
                        self._follow(consumer)
                    finally:
                        close(consumer)
            except AWAY:
                pass
            except Exception:  # noqa: BLE001 -- as above
                _complaints.exception("the topics cannot be read: tried again")
            self._closing.wait(PAUSE_S)

    def _follow(self, consumer: Any) -> None:
        places = [
            TopicPartition(topic.name, partition)
            for topic in (DRAFTS, POLICY, STATUS, TRIALS)
            for partition in sorted(consumer.partitions_for_topic(topic.name) or {0})
        ]
        is_whole = math.isinf(self.since_s)
        consumer.assign(places)
        consumer.seek_to_end(*places)
        consumer.seek_to_beginning(*(p for p in places if is_whole or p.topic == POLICY.name))
        if self.since_s and not is_whole:
            past = [p for p in places if p.topic in (STATUS.name, TRIALS.name)]
            moment = int((time.time() - self.since_s) * 1000)
            for place, found in consumer.offsets_for_times(dict.fromkeys(past, moment)).items():
                if found is not None:
                    consumer.seek(place, found.offset)
        for place, offset in () if is_whole else self._next.items():
            consumer.seek(place, offset)
        self._next = {place: consumer.position(place) for place in places}
        while not self._closing.is_set():
            records = fetch(consumer, 0)
            for record in records:
                self._next[TopicPartition(record.topic, record.partition)] = record.offset + 1
                seconds = record.timestamp / 1000.0
                ingest(self.ledger, record.topic, record.key, record.value, seconds)
            if not records:
                self._closing.wait(POLL_S)
