"""The policy feed: bundles come in by Kafka, are checked, and replace one reference.

A bundle that fails any check is refused, counted by reason and logged; what is in force stays in
force. A swap is one assignment between cycles: no request waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import PolicyRefused
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import POLICY
from decoder.policy.probes import from_bytes

log = logging.getLogger(__name__)

POLL_S: Final = 0.25
"""Pause of a reader that found nothing. It does not wait inside the client: where a broker answers
an empty fetch at once instead of holding it, the client asks again at once, and in a worker such a
thread takes the interpreter from decoding (measured: two thirds of a core)."""
RETRY_S = 1.0
CLOSE_TIMEOUT_S = 3.0


class PolicyGate:
    """Applies bundles of one scope through ``apply``; keeps the previous policy and the tally."""

    def __init__(self, scope: str, apply: Callable[[Policy], None]) -> None:
        self._scope, self._apply = scope, apply
        self.current: Policy | None = None
        self.previous: Policy | None = None
        self.applied_at = 0.0  # seconds since the epoch
        self.swaps = 0
        self.swap_ms_max = 0.0
        self.refusals: Counter[str] = Counter()

    def offer(self, data: bytes) -> bool:
        """Check ``data`` and put it in force. Returns whether it is now in force."""
        began = time.perf_counter()
        try:
            policy = from_bytes(data, self._scope)
        except PolicyRefused as refused:
            self.refusals[refused.reason] += 1
            log.warning("policy bundle refused, the one in force stays: %s", refused)
            return False
        self._apply(policy)
        self.previous, self.current = self.current, policy
        self.applied_at, self.swaps = time.time(), self.swaps + 1
        self.swap_ms_max = max(self.swap_ms_max, (time.perf_counter() - began) * 1e3)
        log.info("policy version %d (%s) is in force", policy.version, policy.kind)
        return True


class PolicyFeed:
    """The thread that reads the policy topic from its beginning and offers this scope's bundles."""

    def __init__(self, kafka: KafkaSettings, scope: str, gate: PolicyGate) -> None:
        self._kafka, self._scope, self._gate = kafka, scope, gate
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

        consumer = KafkaConsumer(enable_auto_commit=False, **self._kafka.client_options())
        partitions = consumer.partitions_for_topic(POLICY.name)
        if not partitions:
            consumer.close()
            return None
        consumer.assign([TopicPartition(POLICY.name, p) for p in sorted(partitions)])
        consumer.seek_to_beginning()
        return consumer

    def _run(self) -> None:
        from kafka.errors import KafkaError

        consumer = None
        while not self._stopping.is_set():
            try:
                consumer = consumer or self._connect()
                if consumer is None:
                    self._stopping.wait(RETRY_S)
                    continue
                polled = consumer.poll(timeout_ms=0)
                self._take(polled)
                if not polled:
                    self._stopping.wait(POLL_S)
            except (KafkaError, OSError, ValueError) as error:
                log.debug("policy feed: %s", error)  # the shipper says aloud that Kafka is away
                consumer = None
                self._stopping.wait(RETRY_S)
        if consumer is not None:
            consumer.close()

    def _take(self, polled: dict[Any, list[Any]]) -> None:
        latest: dict[bytes, bytes] = {}
        for record in (r for records in polled.values() for r in records):
            if record.key == self._scope.encode() and record.value is not None:
                latest[record.key] = record.value  # of several, only the newest is worth a swap
        for value in latest.values():
            self._gate.offer(value)
