"""Policy bundles and the learner's own status, to Kafka."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from kafka import KafkaProducer
from kafka.errors import KafkaError

from decoder.contracts.bundle import MAX_BUNDLE_BYTES, Policy
from decoder.contracts.errors import BrokerError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus
from decoder.contracts.topics import POLICY, STATUS
from decoder.policy.probes import to_bytes

log = logging.getLogger(__name__)

ACK_SECONDS: Final = 10.0
STATUS_BLOCK_MS: Final = 200
"""A status that waits longer than this for the broker is worth less than the loop's time."""
STATUS_RETRY_SECONDS: Final = 10.0


class PolicyPublisher:
    """Puts bundles on the policy topic, where compaction keeps the last of each scope."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._producer: Any = None

    def publish(self, policy: Policy) -> None:
        """Send ``policy``, keyed by its scope, and wait until all replicas have it.

        Raises:
            BrokerError: the broker is away or refused; sending again is harmless.
        """
        try:
            if self._producer is None:
                self._producer = KafkaProducer(
                    **self._kafka.client_options(),
                    acks="all",
                    max_request_size=MAX_BUNDLE_BYTES + 4096,
                    bootstrap_timeout_ms=2_000,
                    max_block_ms=3_000,
                )
            sent = self._producer.send(
                POLICY.name, value=to_bytes(policy), key=policy.scope.encode()
            )
            sent.get(timeout=ACK_SECONDS)
        except (KafkaError, OSError) as error:
            raise BrokerError(
                f"policy {policy.version} of scope {policy.scope} was not acknowledged by "
                f"{self._kafka.bootstrap_servers}: {error}"
            ) from error

    def close(self) -> None:
        """Leave the broker; everything sent was acknowledged already."""
        if self._producer is not None:
            self._producer.close(timeout=2)


class StatusProducer:
    """Sends status records as well as it can; never raises, and gives up quickly."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self.failed = 0
        self._kafka = kafka
        self._producer: Any = None
        self._retry_at = 0.0

    def send(self, status: LearnerStatus) -> None:
        """Hand ``status`` to the client, or count it as failed."""
        if time.monotonic() < self._retry_at:
            self.failed += 1
            return
        try:
            if self._producer is None:
                self._producer = KafkaProducer(
                    **self._kafka.client_options(),
                    acks=1,
                    enable_idempotence=False,
                    bootstrap_timeout_ms=1_000,
                    max_block_ms=STATUS_BLOCK_MS,
                    delivery_timeout_ms=5_000,
                    request_timeout_ms=3_000,
                )
            value = status.model_dump_json().encode()
            self._producer.send(STATUS.name, value=value, key=status.process.encode())
        except (KafkaError, OSError) as error:
            self.failed += 1
            self._retry_at = time.monotonic() + STATUS_RETRY_SECONDS
            log.debug("status not sent: %s", error)

    def close(self) -> None:
        """Leave the broker."""
        if self._producer is not None:
            self._producer.close(timeout=2)
