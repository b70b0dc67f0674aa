"""A process's part of a topic's partitions, by a consumer group; it reads no records.

A group divides work and fences nothing: whoever lost a partition may not know it yet. So what is
written twice has to be harmless, and what must not be written twice needs a lease.
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

SESSION_MS: Final = 10_000
"""A member that was lost is put out after this; it has missed three beats."""
STATIC_SESSION_MS: Final = 45_000
"""The same of a static member (KIP-345): one that starts again within it has its partitions at
once, and no other member's move."""
BEAT_MS: Final = 3_000
TURN_MS: Final = 60_000
"""A member whose process does nothing for so long is put out, too."""
POLL_MS: Final = 200
OFFSETS_MS: Final = 5_000
RETRY_SECONDS: Final = 1.0
_MEANWHILE: Final = (CommitFailedError, RebalanceInProgressError)


@dataclass(frozen=True)
class Part:
    """What the group gave: partitions, of how many, and for those that are new what the group
    remembers: where to read on, or None."""

    owned: frozenset[int] = frozenset()
    count: int = 0
    begins: Mapping[int, int | None] = field(default_factory=dict)

    def begin(self, offsets: dict[int, int]) -> None:
        """Let ``offsets`` say so. Mutates."""
        for partition, offset in self.begins.items():
            offsets.pop(partition, None)
            if offset is not None:
                offsets[partition] = offset


class Group(ConsumerRebalanceListener):  # type: ignore[misc]
    """One member of group ``name``, from the first :meth:`turn` on.

    A thread of its own keeps the membership: of kafka-python (3.0.12) an answer that comes while
    nobody polls is lost, and the group is joined again. ``owned`` changes in :meth:`turn` alone;
    ``settled`` says whether the group has ever given anything, or nothing.
    """

    def __init__(
        self, kafka: KafkaSettings, topic: Topic, name: str, keeps: bool, instance: str = ""
    ) -> None:
        """``keeps``: whether the group remembers offsets, and not its members. ``instance`` names a
        static member. Releases of other feature schemas, which pass over each other's records, have
        groups of their own."""
        name = f"{name}-{SCHEMA_ID.rpartition('-')[2]}"
        self._member: dict[str, Any] = {"session_timeout_ms": SESSION_MS}
        if instance:  # a person may have written it: Kafka takes few characters
            unique = hashlib.sha256(instance.encode()).hexdigest()[:16]
            self._member = {"session_timeout_ms": STATIC_SESSION_MS, "group_instance_id": unique}
        self.part = Part()
        self.settled = False
        self._kafka, self._topic, self._name, self._keeps = kafka, topic.name, name, keeps
        self._given = self.part
        self._read: Mapping[int, int] = {}
        self._consumer: Any = None
        self._thread: threading.Thread | None = None
        self._left = threading.Event()
        self._turned_at = 0.0
        self._limited_log = LimitedLog()

    @property
    def owned(self) -> frozenset[int]:
        """Partitions that are this process's to read."""
        return self.part.owned

    def turn(self) -> bool:
        """Stay a member; whether ``owned`` is another since the last call."""
        self._turned_at = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._stay, name=self._name, daemon=True)
            self._thread.start()
        before, self.part = self.part, self._given
        return before is not self.part

    def owns(self, key: str) -> bool:
        """Whether records of ``key`` are on a partition of ours, by Kafka's own partitioner."""
        part = self.part
        return bool(part.count) and (murmur2(key.encode()) & 0x7FFFFFFF) % part.count in part.owned

    def commit(self, offsets: Mapping[int, int]) -> None:
        """Remember ``offsets`` of what is owned then; soon, and if it can be. Never raises."""
        self._read = dict(offsets)

    def close(self) -> None:
        """Leave at once, so that nobody waits for this member."""
        self._left.set()
        if self._thread is not None:
            self._thread.join(2.0 * OFFSETS_MS / 1e3)

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Called by the client: somebody else reads the records."""
        self.settled = True
        self._consumer.pause(*assigned)

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Called by the client."""

    def _stay(self) -> None:
        while not self._left.is_set():
            if time.monotonic() > self._turned_at + TURN_MS / 1e3:
                self._left.wait(RETRY_SECONDS)  # the client leaves, and somebody else takes over
                continue
            try:
                self._poll()
                with suppress(*_MEANWHILE):  # to wait would lose the answer
                    self._remember()
            except AWAY as error:
                self._limited_log.warning("group %s: %r; going on trying", self._name, error)
                self._left.wait(RETRY_SECONDS)
            except Exception:  # noqa: BLE001 -- else nobody would know that the membership ended
                self._limited_log.exception(f"group {self._name}: its client failed; joining again")
                close(self._consumer)
                self._consumer = None
                self._left.wait(RETRY_SECONDS)
        with suppress(*AWAY):  # else what was read since the last time is read again
            self._remember()
        close(self._consumer)

    def _poll(self) -> None:
        if self._consumer is None:
            opened = open_consumer(
                self._kafka, self._name, group_id=self._name, **self._member,
                heartbeat_interval_ms=BEAT_MS, max_poll_interval_ms=TURN_MS,
            )  # fmt: skip
            opened.subscribe([self._topic], listener=self)
            self._consumer = opened
        self._consumer.poll(timeout_ms=POLL_MS)
        owned = frozenset(place.partition for place in self._consumer.assignment())
        count = len(self._consumer.partitions_for_topic(self._topic) or ())
        if (owned, count) == (self._given.owned, self._given.count):
            return
        fresh = owned - self.part.owned if self._keeps else ()
        places = {partition: TopicPartition(self._topic, partition) for partition in fresh}
        begins = {
            partition: self._consumer.committed(place, timeout_ms=OFFSETS_MS)
            for partition, place in places.items()
        }
        self._given = Part(owned, count, begins)

    def _remember(self) -> None:
        read, self._read = self._read, {}
        told = {
            TopicPartition(self._topic, partition): OffsetAndMetadata(offset, "", -1)
            for partition, offset in read.items()
            if partition in self.part.owned & self._given.owned
        }
        if told and self._consumer is not None:
            self._consumer.commit(told, timeout_ms=OFFSETS_MS)
