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
from learner.release.published import Published

ACK_SECONDS: Final = 4.0
PAUSE_SECONDS: Final = 2.0
"""Before anything is published again after the broker did not take it."""
QUIET_SENDS: Final = 2
"""The same is published so often at once: a topic that was made anew lacks it, and no more."""
LONGEST_PAUSE_SECONDS: Final = 60.0
"""Before what the topic never holds is published again; the first pause is of two."""


@dataclass(frozen=True)
class Sent:
    """``what`` was sent for a key last, as version and share, how often in a row, and when it may
    be again by the monotonic clock."""

    what: tuple[int, float]
    times: int
    again_at: float


class PolicyPublisher:
    """Puts bundles on the policy topic, where compaction keeps the last of each scope and role.

    :meth:`follow` and :meth:`begin` wait for no broker: a thread of its own reads and writes the
    topic. ``current`` says whether it was read to its end, ``pending`` has the keys of what is on
    its way.
    """

    def __init__(self, kafka: KafkaSettings, numbers: Mapping[bytes, int] = {}) -> None:
        """``numbers``: the highest known of each key, as :class:`.published.Published`."""
        self.published = Published(kafka, numbers)
        self.current = False
        self._kafka = kafka
        self._producer: Any = None
        self._sent: dict[bytes, Sent] = {}
        self.pending: set[bytes] = set()
        self._background = Background("publisher")
        self._done: deque[Policy] = deque()
        self._retry_at = 0.0
        self._limited_log = LimitedLog()

    def waits(self, scope: str, role: str, version: int = 0, share: float = 0.0) -> bool:
        """Whether ``version``, or a tombstone for 0, is on its way, or is not due again yet: it was
        sent in vain, or the broker takes nothing."""
        now, key = time.monotonic(), policy_key(scope, role)
        last = self._sent.get(key)
        in_vain = last is not None and last.what == (version, share) and now < last.again_at
        return in_vain or now < self._retry_at or key in self.pending

    def follow(self) -> None:
        """Have what has come to the topic read."""
        if self._background.idle() and time.monotonic() >= self._retry_at:
            self._background.offer(self._read)

    def begin(
        self, scope: str, role: str, term: Callable[[], int], policy: Policy | None = None
    ) -> None:
        """Have ``policy`` published, or else what lies there withdrawn, if ``term`` then gives a
        lease's; see :meth:`acknowledged`."""
        key = policy_key(scope, role)

        def send() -> None:
            try:
                held = term() if time.monotonic() >= self._retry_at else 0
                if held and policy is not None:
                    self._done.append(self.publish(policy, held, role))
                elif held:
                    self.withdraw(scope, role)
                self._read(ACK_SECONDS * bool(held))  # else it would be missed there
            except BrokerError as error:
                if error.__cause__ is not None:  # else it is of this scope alone
                    self._retry_at = time.monotonic() + PAUSE_SECONDS
                self._limited_log.warning(
                    "%s; what was published stays, and it is tried again", error
                )
            finally:
                self.pending.discard(key)

        self.pending.add(key)
        self._background.offer(send)

    def acknowledged(self) -> list[Policy]:
        """What was begun and lies on the topic since the last call, as it was published."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def _read(self, seconds: float = 0.0) -> None:
        try:
            self.current = self.published.read(seconds)
        except AWAY:  # the log has it
            self.current, self._retry_at = False, time.monotonic() + PAUSE_SECONDS

    def publish(self, policy: Policy, term: int, role: str = "champion") -> Policy:
        """Send ``policy``, numbered, and wait until all replicas have it.

        Numbers of a lease's ``term`` begin with it: what an earlier holder sends late has another
        number than anything of a later one, and a lower one.

        Returns:
            the policy as it was published.

        Raises:
            BrokerError: the broker is away or refused, or a later holder has published; to send
                again is harmless.
        """
        key = policy_key(policy.scope, role)
        try:
            if not self.published.read(ACK_SECONDS):
                raise KafkaTimeoutError(f"{POLICY.name} could not be read to its end")
            number = max(self.published.numbers.get(key, 0), term * NUMBERS_A_TERM) + 1
            if number > (term + 1) * NUMBERS_A_TERM:
                raise BrokerError(f"scope {policy.scope} was published under a later term already")
            numbered = replace(policy, publication=number, role=role)
            # Taken even if no answer comes: the record may lie there all the same.
            self.published.numbers[key] = number
            self._send(key, to_bytes(numbered))
            self._count(key, policy.version, policy.share)
        except AWAY as error:
            raise BrokerError(
                f"policy {policy.version} of scope {policy.scope} was not acknowledged by "
                f"{self._kafka.bootstrap_servers}: {error}"
            ) from error
        return numbered

    def withdraw(self, scope: str, role: str) -> None:
        """Put a tombstone in place of what lies there for ``scope`` and ``role``, into every
        partition: releases before this one published by the hash of the key.

        Raises:
            BrokerError: the broker is away or refused; to send again is harmless.
        """
        key = policy_key(scope, role)
        try:
            for partition in sorted(self._open_producer().partitions_for(POLICY.name)):
                self._send(key, None, partition)
            self._count(key)
        except AWAY as error:
            raise BrokerError(
                f"the {role} policy of scope {scope} could not be withdrawn from "
                f"{self._kafka.bootstrap_servers}: {error}"
            ) from error

    def _open_producer(self) -> Any:
        if self._producer is None:
            self._producer = open_producer(
                self._kafka,
                "publisher",
                max_request_size=MAX_BUNDLE_BYTES + 4096,
                max_block_ms=int(ACK_SECONDS * 250),
                # shorter than what must be left of a lease
                delivery_timeout_ms=int(ACK_SECONDS * 1e3),
                request_timeout_ms=int(ACK_SECONDS * 500),
            )
        return self._producer

    def _send(self, key: bytes, value: bytes | None, partition: int = 0) -> None:
        """Send a record; all of a key to one partition, however many there are: added ones would
        have its next records lie in no order with those before."""
        headers = POLICY.headers + signed(self._kafka.policy_key, key, value)
        sent = self._open_producer().send(
            POLICY.name, value=value, key=key, headers=headers, partition=partition
        )
        sent.get(timeout=ACK_SECONDS)

    def _count(self, key: bytes, version: int = 0, share: float = 0.0) -> None:
        """Note that this was sent. Of what is sent again and again the topic keeps nothing."""
        now, last, times = time.monotonic(), self._sent.get(key), 1
        if last and last.what == (version, share) and now < last.again_at + LONGEST_PAUSE_SECONDS:
            times = last.times + 1
        vain = times - QUIET_SENDS
        pause = min(2.0**vain, LONGEST_PAUSE_SECONDS) if vain > 0 else 0.0
        self._sent[key] = Sent((version, share), times, now + pause)
        if pause:
            self._limited_log.warning(
                f"topic {POLICY.name} does not keep what is published: version %d for %s was sent "
                "%d times (0: its end), and again in %.0f s. See who else writes or deletes there, "
                "and let hvd doctor look at the topic.", version, key.decode(), times, pause,
            )  # fmt: skip

    def close(self) -> None:
        """Leave the broker, once what is on its way was acknowledged or given up."""
        if self._background.close():
            self.published.close()
            close(self._producer)
