"""A topic that goes, comes back, or was never there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import KafkaError, UnknownTopicOrPartitionError

from decoder.contracts.topics import LEASE
from decoder.kafka import compacted
from decoder.kafka.compacted import Compacted
from tests.learner.conftest import Broker
from tests.learner.stream import produce, produce_unreadable


class Followed:
    """A follower of the lease topic, and what it was told."""

    def __init__(self, broker: Broker) -> None:
        self.values: list[bytes] = []
        self.lies: list[range] = []
        self.log = Compacted(broker.kafka, LEASE, self._take, lambda _, at: self.lies.append(at))

    def _take(self, record: Any) -> None:
        self.values.append(record.value)

    def has(self, value: bytes) -> bool:
        """Whether it comes to be there, and all that lay there has been read."""
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            try:
                if self.log.read(1.0) and value in self.values:
                    return True
            except KafkaError:
                time.sleep(0.1)
        return False


@pytest.fixture
def followed(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    monkeypatch.setattr(compacted, "REVIEW_SECONDS", 0.0)
    made = Followed(broker)
    yield made
    made.log.close()


def anew(broker: Broker, *values: bytes) -> None:
    admin = KafkaAdminClient(**broker.kafka.client_options())
    admin.delete_topics([LEASE.name])
    admin.create_topics([NewTopic(LEASE.name, 1, -1)])
    admin.close()
    produce(broker.kafka, list(values), LEASE)


def test_a_topic_made_anew_is_read_to_its_end_again(broker: Broker, followed: Followed) -> None:
    produce(broker.kafka, [b"one", b"two", b"three"], LEASE)
    assert followed.has(b"three") and followed.lies[-1] == range(3)
    anew(broker, b"four")
    assert followed.has(b"four")


def test_what_is_gone_when_the_broker_answers_again_is_told(
    broker: Broker, followed: Followed
) -> None:
    produce(broker.kafka, [b"one", b"two", b"three"], LEASE)
    assert followed.has(b"three")
    followed.log.close()
    anew(broker, b"four")
    assert followed.has(b"four") and followed.lies[-1] == range(1)


def test_a_topic_that_is_missing_is_asked_for_again(bare_broker: Broker) -> None:
    followed = Followed(bare_broker)
    with pytest.raises(UnknownTopicOrPartitionError):
        followed.log.read()
    bare_broker.make_topics()
    produce(bare_broker.kafka, [b"one"], LEASE)
    assert followed.has(b"one")
    followed.log.close()


def test_what_cannot_be_unpacked_hides_nothing_that_lies_behind_it(
    broker: Broker, followed: Followed
) -> None:
    produce(broker.kafka, [b"before"], LEASE)
    produce_unreadable(broker.kafka, LEASE)
    produce(broker.kafka, [b"behind"], LEASE)
    assert followed.has(b"behind") and followed.values == [b"before", b"behind"]
