"""The policy feed: bundles come in by Kafka, keyed by scope and role, and ask for admission.

The thread lives as long as the worker: nothing that lies on the topic, and nothing that the broker
does, ends it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from decoder.admission import Admission
from decoder.contracts.bundle import TRIAL
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import POLICY, policy_role

log = logging.getLogger(__name__)

POLL_S: Final = 0.25
"""Pause of a reader that found nothing. It does not wait inside the client: where a broker answers
an empty fetch at once instead of holding it, the client asks again at once, and in a worker such a
thread takes the interpreter from decoding (measured: two thirds of a core)."""
RETRY_S = 1.0
CONNECT_TIMEOUT_S: Final = 2.0
CLOSE_TIMEOUT_S = 3.0
COMPLAIN_EVERY_S: Final = 60.0


class PolicyFeed:
    """The thread that reads the policy topic from its beginning; offers what is for this scope."""

    def __init__(self, kafka: KafkaSettings, scope: str, admission: Admission) -> None:
        self._kafka, self._scope, self._admission = kafka, scope, admission
        self._ends: dict[Any, int] = {}  # what lay there when it was connected, by partition
        self._found: list[Any] = []
        self._complained = -COMPLAIN_EVERY_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-policy-feed", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._stopping.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _connect(self) -> Any:
        from kafka import KafkaConsumer, TopicPartition

        consumer = KafkaConsumer(
            enable_auto_commit=False,
            bootstrap_timeout_ms=int(CONNECT_TIMEOUT_S * 1000),
            **self._kafka.client_options(),
        )
        partitions = consumer.partitions_for_topic(POLICY.name)
        if not partitions:
            consumer.close()
            return None
        places = [TopicPartition(POLICY.name, p) for p in sorted(partitions)]
        consumer.assign(places)
        consumer.seek_to_beginning()
        self._ends, self._found = consumer.end_offsets(places), []
        return consumer

    def _run(self) -> None:
        consumer = None
        while not self._stopping.is_set():
            try:
                consumer = consumer or self._connect()
                if consumer is None:
                    self._stopping.wait(RETRY_S)
                    continue
                polled = consumer.poll(timeout_ms=0)
                self._found += [
                    record
                    for records in polled.values()
                    for record in records
                    if policy_role(record.key, self._scope) is not None
                ]
                if self._is_caught_up(consumer):
                    self.take(self._found)
                    self._found = []
                if not polled:
                    self._stopping.wait(POLL_S)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the next one must be heard of
                self._complain(error)
                self._left(consumer)
                consumer = None
                self._stopping.wait(RETRY_S)
        self._left(consumer)

    def _is_caught_up(self, consumer: Any) -> bool:
        """Whether all was read that lay there: until then the newest bundle is not known, and each
        older one would be put in force in its turn."""
        behind = any(consumer.position(place) < end for place, end in self._ends.items())
        if not behind:
            self._ends = {}
        return not behind

    def _left(self, consumer: Any) -> None:
        with contextlib.suppress(Exception):
            if consumer is not None:
                consumer.close()

    def _complain(self, error: Exception) -> None:
        """The shipper says aloud that Kafka is away; anything else is said here."""
        from kafka.errors import KafkaError

        away = isinstance(error, (KafkaError, OSError))
        if not away and time.monotonic() - self._complained >= COMPLAIN_EVERY_S:
            self._complained = time.monotonic()
            log.warning("the policy feed failed and goes on", exc_info=error)
        else:
            log.debug("policy feed: %r", error)

    def take(self, records: Iterable[Any]) -> None:
        """Offer the newest bundle of each key for this scope: no other is worth a swap.

        A trial ends with a record that has no value; what is served is not withdrawn so.
        """
        latest: dict[tuple[bytes, str], bytes | None] = {}
        for record in records:
            role = policy_role(record.key, self._scope)
            if role is not None and (record.value is not None or role == TRIAL):
                latest[record.key, role] = record.value
        for (_, role), value in latest.items():
            if value is None:
                self._admission.end_trial()
            else:
                self._admission.offer(value, role)
