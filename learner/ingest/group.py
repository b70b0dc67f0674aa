"""Membership of a consumer group, which assigns partitions to processes; it reads no records.

A group assigns work but fences nothing: a member that lost a partition may not know it yet. Writes
by two members must therefore be idempotent, or need a lease.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from kafka import ConsumerRebalanceListener, TopicPartition
from kafka.errors import CommitFailedError, RebalanceInProgressError
from kafka.partitioner.default import murmur2
from kafka.structs import OffsetAndMetadata

from decoder.contracts.features import SCHEMA_ID
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import Topic
from decoder.kafka.clients import AWAY, close, open_consumer
from decoder.limited_log import LimitedLog

SESSION_MS: Final = 10_000  # three heartbeats
STATIC_SESSION_MS: Final = 45_000
"""Of a static member (KIP-345): it may restart within this time without a rebalance."""
HEARTBEAT_MS: Final = 3_000
MAX_POLL_MS: Final = 60_000
POLL_MS: Final = 200
OFFSETS_MS: Final = 5_000
RETRY_SECONDS: Final = 1.0
_REBALANCING: Final = (CommitFailedError, RebalanceInProgressError)


@dataclass(frozen=True)
class Assignment:
    """Partitions of this member, their number in the topic, and for new ones the committed offset,
    or None."""

    owned: frozenset[int] = frozenset()
    count: int = 0
    committed: Mapping[int, int | None] = field(default_factory=dict)

    def apply(self, offsets: dict[int, int]) -> None:
        """Replace ``offsets`` of new partitions by the committed ones. Mutates."""
        for partition, offset in self.committed.items():
            offsets.pop(partition, None)
            if offset is not None:
                offsets[partition] = offset


class GroupMember(ConsumerRebalanceListener):  # type: ignore[misc]
    """A member of consumer group ``name``, which joins at the first :meth:`update`.

    The membership has a thread of its own, since kafka-python (3.0.12) loses an answer that arrives
    while nobody polls, and then joins again. ``assignment`` changes in :meth:`update` only.
    ``joined`` says whether the group has ever assigned anything, or nothing.
    """

    def __init__(
        self, kafka: KafkaSettings, topic: Topic, name: str, commits: bool, instance: str = ""
    ) -> None:
        """``commits``: whether the group stores offsets. ``instance`` names a static member.
        Releases with other feature schemas, which skip each other's records, have other groups."""
        name = f"{name}-{SCHEMA_ID.rpartition('-')[2]}"
        self._member: dict[str, Any] = {"session_timeout_ms": SESSION_MS}
        if instance:  # hashed, since Kafka accepts few characters
            unique = hashlib.sha256(instance.encode()).hexdigest()[:16]
            self._member = {"session_timeout_ms": STATIC_SESSION_MS, "group_instance_id": unique}
        self.assignment = Assignment()
        self.joined = False
        self._kafka, self._topic, self._name, self._commits = kafka, topic.name, name, commits
        self._latest = self.assignment
        self._to_commit: Mapping[int, int] = {}
        self._consumer: Any = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._updated_at = 0.0
        self._limited_log = LimitedLog()

    def update(self) -> bool:
        """Stay a member; whether the assignment has changed since the last call."""
        self._updated_at = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        before, self.assignment = self.assignment, self._latest
        return before is not self.assignment

    def owns(self, key: str) -> bool:
        """Whether Kafka's partitioner puts records of ``key`` on a partition of this member."""
        count, owned = self.assignment.count, self.assignment.owned
        return bool(count) and (murmur2(key.encode()) & 0x7FFFFFFF) % count in owned

    def commit(self, offsets: Mapping[int, int]) -> None:
        """Commit ``offsets`` of owned partitions later, if possible. Never raises."""
        self._to_commit = dict(offsets)

    def close(self) -> None:
        """Leave the group at once."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(2.0 * OFFSETS_MS / 1e3)

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Called by the client. Records are read by another consumer."""
        self.joined = True
        self._consumer.pause(*assigned)

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Called by the client."""

    def _run(self) -> None:
        while not self._closing.is_set():
            if time.monotonic() > self._updated_at + MAX_POLL_MS / 1e3:
                self._closing.wait(RETRY_SECONDS)  # the process hangs: the client leaves the group
                continue
            try:
                self._poll()
                with suppress(*_REBALANCING):  # waiting here would lose the answer
                    self._commit()
            except AWAY as error:
                self._limited_log.warning("group %s: %r; retrying", self._name, error)
                self._closing.wait(RETRY_SECONDS)
            except Exception:  # noqa: BLE001 -- otherwise the membership would end unnoticed
                self._limited_log.exception(f"group {self._name}: its client failed; joining again")
                close(self._consumer)
                self._consumer = None
                self._closing.wait(RETRY_SECONDS)
        with suppress(*AWAY):  # otherwise some records are read again
            self._commit()
        close(self._consumer)

    def _poll(self) -> None:
        if self._consumer is None:
            opened = open_consumer(
                self._kafka, self._name, group_id=self._name, **self._member,
                heartbeat_interval_ms=HEARTBEAT_MS, max_poll_interval_ms=MAX_POLL_MS,
            )  # fmt: skip
            opened.subscribe([self._topic], listener=self)
            self._consumer = opened
        self._consumer.poll(timeout_ms=POLL_MS)
        owned = frozenset(place.partition for place in self._consumer.assignment())
        count = len(self._consumer.partitions_for_topic(self._topic) or ())
        if (owned, count) == (self._latest.owned, self._latest.count):
            return
        new = owned - self.assignment.owned if self._commits else ()
        committed = {
            partition: self._consumer.committed(
                TopicPartition(self._topic, partition), timeout_ms=OFFSETS_MS
            )
            for partition in new
        }
        self._latest = Assignment(owned, count, committed)

    def _commit(self) -> None:
        offsets, self._to_commit = self._to_commit, {}
        owned = {
            TopicPartition(self._topic, partition): OffsetAndMetadata(offset, "", -1)
            for partition, offset in offsets.items()
            if partition in self.assignment.owned & self._latest.owned
        }
        if owned and self._consumer is not None:
            self._consumer.commit(owned, timeout_ms=OFFSETS_MS)
