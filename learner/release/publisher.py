"""Publishes policy bundles on the policy topic."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kafka.errors import KafkaTimeoutError

from decoder.contracts.bundle import MAX_BUNDLE_BYTES, NUMBERS_A_TERM, Policy
from decoder.contracts.errors import BrokerError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.signature import signed
from decoder.contracts.topics import POLICY, policy_key
from decoder.kafka.clients import AWAY, close, open_producer
from decoder.limited_log import LimitedLog
from decoder.policy.probes import to_bytes
from learner.background import Background
from learner.release.policy_topic import PolicyTopic

ACK_SECONDS: Final = 4.0
RETRY_SECONDS: Final = 2.0
IMMEDIATE_SENDS: Final = 2  # repeats without a pause: a recreated topic lacks the policy
MAX_PAUSE_SECONDS: Final = 60.0
"""Between repeats of a policy that the topic never retains; the pause doubles from two seconds."""


@dataclass(frozen=True)
class Sent:
    """Version and share sent last for a key, how often in a row, and the monotonic time from which
    it may be sent again."""

    content: tuple[int, float]
    times: int
    again_at: float


class PolicyPublisher:
    """Publishes bundles; compaction keeps the last of each scope and role.

    A thread reads and writes the topic. ``current``: the topic was read to its end. ``in_flight``
    has the keys being published.
    """

    def __init__(self, kafka: KafkaSettings, numbers: Mapping[bytes, int] = {}) -> None:
        """``numbers``: the highest known publication of each key, as :class:`.PolicyTopic`."""
        self.topic = PolicyTopic(kafka, numbers)
        self.current = False
        self.in_flight: set[bytes] = set()
        self._kafka = kafka
        self._producer: Any = None
        self._sent: dict[bytes, Sent] = {}
        self._background = Background("publisher")
        self._acknowledged: deque[Policy] = deque()
        self._retry_at = 0.0
        self._limited_log = LimitedLog()

    def must_wait(self, scope: str, role: str, version: int = 0, share: float = 0.0) -> bool:
        """Whether ``version``, or a tombstone for 0, is in flight, was just sent in vain, or the
        broker is failing."""
        now, key = time.monotonic(), policy_key(scope, role)
        last = self._sent.get(key)
        in_vain = last is not None and last.content == (version, share) and now < last.again_at
        return in_vain or now < self._retry_at or key in self.in_flight

    def missing(
        self, scope: str, due: Mapping[str, tuple[int, float] | None]
    ) -> dict[str, tuple[int, float]]:
        """Versions and shares ``due`` by role that are not on the topic."""
        last = {role: self.topic.last(scope, role) for role in due}
        current = {role: each and (each.version, each.share) for role, each in last.items()}
        return {role: each for role, each in due.items() if each and each != current[role]}

    def sendable(
        self, scope: str, due: Mapping[str, tuple[int, float]]
    ) -> dict[str, tuple[int, float]]:
        """Those ``due`` by role that need not wait."""
        due = due if self.current else {}
        return {role: each for role, each in due.items() if not self.must_wait(scope, role, *each)}

    def read_in_background(self) -> None:
        """Start to read new records."""
        if self._background.idle() and time.monotonic() >= self._retry_at:
            self._background.submit(self._read)

    def submit(
        self, scope: str, role: str, term: Callable[[], int], policy: Policy | None = None
    ) -> None:
        """Publish ``policy``, or withdraw the published one, in the background, if ``term`` then
        returns a lease's term; see :meth:`acknowledged`."""
        key = policy_key(scope, role)

        def send() -> None:
            try:
                held = term() if time.monotonic() >= self._retry_at else 0
                if held and policy is not None:
                    self._acknowledged.append(self.publish(policy, held, role))
                elif held:
                    self.withdraw(scope, role)
                self._read(ACK_SECONDS * bool(held))  # otherwise it would look missing
            except BrokerError as error:
                if error.__cause__ is not None:  # otherwise it concerns this scope only
                    self._retry_at = time.monotonic() + RETRY_SECONDS
                self._limited_log.warning("%s; retrying, the published policy stays", error)
            finally:
                self.in_flight.discard(key)

        self.in_flight.add(key)
        self._background.submit(send)

    def acknowledged(self) -> list[Policy]:
        """Submitted policies published since the last call, as published."""
        return [self._acknowledged.popleft() for _ in range(len(self._acknowledged))]

    def _read(self, seconds: float = 0.0) -> None:
        try:
            self.current = self.topic.read(seconds)
        except AWAY:  # already logged
            self.current, self._retry_at = False, time.monotonic() + RETRY_SECONDS

    def publish(self, policy: Policy, term: int, role: str = "champion") -> Policy:
        """Send ``policy`` with the next number, and wait until all replicas have it.

        Numbers begin with the lease's ``term``: a late record of an earlier holder has a lower
        number than any of a later one.

        Returns:
            the policy as published.

        Raises:
            BrokerError: the broker is away or refused, or a later holder has published. A retry is
                harmless.
        """
        key = policy_key(policy.scope, role)
        try:
            if not self.topic.read(ACK_SECONDS):
                raise KafkaTimeoutError(f"{POLICY.name} could not be read to its end")
            number = max(self.topic.numbers.get(key, 0), term * NUMBERS_A_TERM) + 1
            if number > (term + 1) * NUMBERS_A_TERM:
                raise BrokerError(f"scope {policy.scope} was published under a later term already")
            numbered = replace(policy, publication=number, role=role)
            # used up even without an acknowledgement: the record may exist
            self.topic.numbers[key] = number
            self._send(key, to_bytes(numbered))
            self._record_sent(key, policy.version, policy.share)
        except AWAY as error:
            raise BrokerError(
                f"policy {policy.version} of scope {policy.scope} was not acknowledged by "
                f"{self._kafka.bootstrap_servers}: {error}"
            ) from error
        return numbered

    def withdraw(self, scope: str, role: str) -> None:
        """Write tombstones for ``scope`` and ``role`` into every partition: earlier releases chose
        the partition by the hash of the key.

        Raises:
            BrokerError: the broker is away or refused. A retry is harmless.
        """
        key = policy_key(scope, role)
        try:
            for partition in sorted(self._open_producer().partitions_for(POLICY.name)):
                self._send(key, None, partition)
            self._record_sent(key)
        except AWAY as error:
            raise BrokerError(
                f"the {role} policy of scope {scope} could not be withdrawn from "
                f"{self._kafka.bootstrap_servers}: {error}"
            ) from error

    def _open_producer(self) -> Any:
        if self._producer is None:
            ack_ms = int(ACK_SECONDS * 1e3)  # shorter than what must be left of a lease
            self._producer = open_producer(
                self._kafka, "publisher",
                max_request_size=MAX_BUNDLE_BYTES + 4096, max_block_ms=ack_ms // 4,
                delivery_timeout_ms=ack_ms, request_timeout_ms=ack_ms // 2,
            )  # fmt: skip
        return self._producer

    def _send(self, key: bytes, value: bytes | None, partition: int = 0) -> None:
        """Send a record to a fixed partition: added partitions would break the order of a key."""
        headers = POLICY.headers + signed(self._kafka.policy_key, key, value)
        sent = self._open_producer().send(
            POLICY.name, value=value, key=key, headers=headers, partition=partition
        )
        sent.get(timeout=ACK_SECONDS)

    def _record_sent(self, key: bytes, version: int = 0, share: float = 0.0) -> None:
        """Record a send, and warn of repeats: the topic does not retain them."""
        now, last, times = time.monotonic(), self._sent.get(key), 1
        if last and last.content == (version, share) and now < last.again_at + MAX_PAUSE_SECONDS:
            times = last.times + 1
        repeats = times - IMMEDIATE_SENDS
        pause = min(2.0**repeats, MAX_PAUSE_SECONDS) if repeats > 0 else 0.0
        self._sent[key] = Sent((version, share), times, now + pause)
        if pause:
            self._limited_log.warning(
                f"topic {POLICY.name} does not retain policies: version %d for %s was sent %d "
                "times (0: its end), and again in %.0f s. Check who else writes or deletes there, "
                "and run hvd doctor.", version, key.decode(), times, pause,
            )  # fmt: skip

    def close(self) -> None:
        """Finish what is in flight, and disconnect."""
        if self._background.close():
            self.topic.close()
            close(self._producer)
