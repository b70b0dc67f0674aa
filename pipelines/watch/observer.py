"""A consumer of drafts, policies and status that writes what it reads into a ledger.

It joins no consumer group: looking on must not take records from anyone.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from decoder.contracts.errors import BrokerError, ContractError
from decoder.contracts.events import decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import decode_status
from decoder.contracts.topics import DRAFTS, POLICY, STATUS
from pipelines.watch.ledger import Ledger

POLL_S: Final = 0.25


def take(ledger: Ledger, topic: str, value: bytes | None) -> None:
    """Write one record into ``ledger``; one that keeps no contract is counted."""
    if value is None:
        return
    try:
        if topic == DRAFTS.name:
            batch = decode_batch(value)
            ledger.add_events(batch.origin, batch.events)
        elif topic == STATUS.name:
            ledger.add_status(decode_status(value))
        elif topic == POLICY.name:
            ledger.policies += 1
    except ContractError:
        ledger.refused += 1


class Observer:
    """Reads from the end of the topics, in a thread, between :meth:`start` and :meth:`close`."""

    def __init__(self, kafka: KafkaSettings, ledger: Ledger) -> None:
        self.kafka = kafka
        self.ledger = ledger
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._read, name="observer", daemon=True)

    def start(self) -> None:
        """Return once its place in the topics is fixed: what is sent afterwards is seen.

        Raises:
            BrokerError: the broker does not answer.
        """
        self._thread.start()
        if not self._ready.wait(20.0):
            raise BrokerError(f"Kafka at {self.kafka.bootstrap_servers} does not answer.")

    def check(self) -> None:
        """Do nothing while it reads.

        Raises:
            BrokerError: the broker refused it; what was not read cannot be reported on.
        """
        if self._failure is not None:
            raise BrokerError(f"the topics can no longer be read: {self._failure}")

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def _read(self) -> None:
        from kafka import KafkaConsumer
        from kafka.errors import KafkaError

        try:
            consumer: Any = KafkaConsumer(group_id=None, **self.kafka.client_options())
            try:
                self._follow(consumer)
            finally:
                consumer.close()
        except (KafkaError, OSError) as error:
            self._failure = error

    def _follow(self, consumer: Any) -> None:
        from kafka import TopicPartition

        places = [
            TopicPartition(topic.name, partition)
            for topic in (DRAFTS, POLICY, STATUS)
            for partition in sorted(consumer.partitions_for_topic(topic.name) or {0})
        ]
        consumer.assign(places)
        consumer.seek_to_end(*places)
        for place in places:
            consumer.position(place)
        self._ready.set()
        while not self._closing.is_set():
            polled = consumer.poll(timeout_ms=0)
            for records in polled.values():
                for record in records:
                    take(self.ledger, record.topic, record.value)
            if not polled:
                self._closing.wait(POLL_S)
