"""A consumer of drafts, rounds, policies and statuses that writes what it reads into a ledger.

It joins no consumer group: looking on must not take records from anyone.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from kafka import TopicPartition

from decoder.complaints import Complaints
from decoder.contracts.bundle import unpack
from decoder.contracts.errors import BrokerError, ContractError
from decoder.contracts.events import decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import decode_status
from decoder.contracts.topics import DRAFTS, POLICY, STATUS, TRIALS
from decoder.contracts.trials import decode_round
from decoder.kafka.clients import AWAY, close, fetch, listens, open_consumer
from pipelines.watch.ledger import Ledger

POLL_S: Final = 0.25
PAUSE_S: Final = 5.0


def take(ledger: Ledger, topic: str, key: bytes | None, value: bytes | None, at: float) -> None:
    """Write one record, of ``at`` in seconds since the epoch, into ``ledger``; one that keeps no
    contract is counted."""
    try:
        if topic == POLICY.name:
            scope, _, role = (key or b"").decode(errors="replace").partition("/")
            ledger.add_policy(at, scope, role, unpack(value)[0] if value else None)
        elif value is None:
            return
        elif topic == DRAFTS.name:
            ledger.add_drafts(decode_batch(value))
        elif topic == STATUS.name:
            ledger.add_status(decode_status(value))
        elif topic == TRIALS.name:
            ledger.add_round(decode_round(value))
    except ContractError:
        ledger.refused += 1


class Observer:
    """Reads in a thread, between :meth:`start` and :meth:`close`.

    Policies are read from the beginning, statuses and rounds from ``since_s`` ago, drafts from the
    end: they are many, and what is shown of them is of now. One that is ``patient`` goes on where
    it was when a broker that refused it comes back, and behind records that it cannot take; one
    that reads the ``whole`` topics begins with their beginning, then and at first.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        ledger: Ledger,
        since_s: float = 0.0,
        patient: bool = False,
        whole: bool = False,
    ) -> None:
        self.kafka = kafka
        self.ledger = ledger
        self.since_s = since_s
        self.patient = patient
        self.whole = whole
        self._next: dict[Any, int] = {}  # offset by partition
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._failure: Exception | None = None
        self._complaints = Complaints()
        self._thread = threading.Thread(target=self._read, name="observer", daemon=True)

    def start(self) -> None:
        """Return once its place in the topics is fixed: what is sent afterwards is seen. A patient
        one returns at once.

        Raises:
            BrokerError: the broker does not answer.
        """
        self._thread.start()
        if not self.patient and not self._ready.wait(20.0):
            raise BrokerError(f"Kafka at {self.kafka.bootstrap_servers} does not answer.")

    def check(self) -> None:
        """Do nothing while it reads.

        Raises:
            BrokerError: it reads no more; what was not read cannot be reported on.
        """
        if self._failure is not None:
            raise BrokerError(f"the topics can no longer be read: {self._failure}")

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def _read(self) -> None:
        while not self._closing.is_set():
            # a client that finds no broker leaves sockets open
            if self.patient and not listens(self.kafka):
                self._closing.wait(PAUSE_S)
                continue
            try:
                consumer = open_consumer(self.kafka, "observer", bootstrap_timeout_ms=20_000)
                try:
                    self._follow(consumer)
                finally:
                    close(consumer)
            except Exception as error:  # noqa: BLE001 -- whatever it is, a page must not go stale
                if not self.patient:
                    self._failure = error
                    return
                if not isinstance(error, AWAY):
                    self._complaints.exception("records were passed over: they cannot be shown")
                self._closing.wait(PAUSE_S)

    def _follow(self, consumer: Any) -> None:
        places = [
            TopicPartition(topic.name, partition)
            for topic in (DRAFTS, POLICY, STATUS, TRIALS)
            for partition in sorted(consumer.partitions_for_topic(topic.name) or {0})
        ]
        consumer.assign(places)
        consumer.seek_to_end(*places)
        consumer.seek_to_beginning(*(p for p in places if self.whole or p.topic == POLICY.name))
        if self.since_s:
            past = [p for p in places if p.topic in (STATUS.name, TRIALS.name)]
            moment = int((time.time() - self.since_s) * 1000)
            for place, found in consumer.offsets_for_times(dict.fromkeys(past, moment)).items():
                if found is not None:
                    consumer.seek(place, found.offset)
        for place, offset in () if self.whole else self._next.items():
            consumer.seek(place, offset)
        for place in places:
            consumer.position(place)
        self._ready.set()
        while not self._closing.is_set():
            records = fetch(consumer, 0)
            for record in records:
                self._next[TopicPartition(record.topic, record.partition)] = record.offset + 1
                seconds = record.timestamp / 1000.0
                take(self.ledger, record.topic, record.key, record.value, seconds)
            if not records:
                self._closing.wait(POLL_S)
