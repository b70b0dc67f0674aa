"""Policy bundles and the learner's own status, to Kafka."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError, KafkaTimeoutError

from decoder.contracts.bundle import MAX_BUNDLE_BYTES, Policy, unpack
from decoder.contracts.errors import BrokerError, PolicyRefused
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus
from decoder.contracts.topics import POLICY, STATUS, policy_key
from decoder.policy.probes import to_bytes

log = logging.getLogger(__name__)

ACK_SECONDS: Final = 10.0
ANSWER_MS: Final = 200
STATUS_BLOCK_MS: Final = 200
"""A status that waits longer than this for the broker is worth less than the loop's time."""
STATUS_RETRY_SECONDS: Final = 10.0


class PolicyPublisher:
    """Puts bundles on the policy topic, where compaction keeps the last of each scope and role.

    ``publications`` has the last number of each key. What the topic holds is read before the first
    publication of a process: no worker takes a number that is not above the one it has, so a
    learner that lost its state, or stands in for another, must go on from there.
    """

    def __init__(self, kafka: KafkaSettings, publications: Mapping[str, int] | None = None) -> None:
        self.publications = dict(publications or {})
        self._kafka = kafka
        self._producer: Any = None
        self._caught_up = False

    def publish(self, policy: Policy, role: str = "champion") -> Policy:
        """Send ``policy``, numbered, and wait until all replicas have it.

        Returns:
            the policy as it was published.

        Raises:
            BrokerError: the broker is away or refused; sending again is harmless.
        """
        key = policy_key(policy.scope, role)
        try:
            if not self._caught_up:
                self._catch_up()
            number = self.number_of(policy.scope, role) + 1
            numbered = replace(policy, publication=number, role=role)
            if self._producer is None:
                self._producer = KafkaProducer(
                    **self._kafka.client_options(),
                    acks="all",
                    max_request_size=MAX_BUNDLE_BYTES + 4096,
                    bootstrap_timeout_ms=2_000,
                    max_block_ms=3_000,
                )
            sent = self._producer.send(POLICY.name, value=to_bytes(numbered), key=key)
            # Taken even if no answer comes: the record may lie there all the same.
            self.publications[key.decode()] = number
            sent.get(timeout=ACK_SECONDS)
        except (KafkaError, OSError) as error:
            raise BrokerError(
                f"policy {policy.version} of scope {policy.scope} was not acknowledged by "
                f"{self._kafka.bootstrap_servers}: {error}"
            ) from error
        return numbered

    def _catch_up(self) -> None:
        """Take over the numbers on the topic. Raises KafkaError where it cannot be read."""
        consumer = KafkaConsumer(
            **self._kafka.client_options(),
            group_id=None,
            enable_auto_commit=False,
            bootstrap_timeout_ms=2_000,
        )
        try:
            places = [
                TopicPartition(POLICY.name, partition)
                for partition in sorted(consumer.partitions_for_topic(POLICY.name) or ())
            ]
            consumer.assign(places)
            consumer.seek_to_beginning(*places)
            ends = consumer.end_offsets(places)
            deadline = time.monotonic() + ACK_SECONDS
            while any(consumer.position(place) < ends[place] for place in places):
                if time.monotonic() > deadline:
                    raise KafkaTimeoutError(f"{POLICY.name} could not be read to its end")
                for records in consumer.poll(timeout_ms=ANSWER_MS).values():
                    for record in records:
                        self._saw(record)
        finally:
            consumer.close()
        self._caught_up = True

    def _saw(self, record: Any) -> None:
        try:
            policy, _ = unpack(record.value or b"")
        except PolicyRefused:
            return  # no worker takes it either
        key = policy_key(policy.scope, policy.role)
        if key == record.key:
            known = self.number_of(policy.scope, policy.role)
            self.publications[key.decode()] = max(known, policy.publication)

    def number_of(self, scope: str, role: str = "champion") -> int:
        """Number of the last publication known; 0 before the first."""
        return self.publications.get(policy_key(scope, role).decode(), 0)

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
