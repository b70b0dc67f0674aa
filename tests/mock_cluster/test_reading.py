"""Feed, source, leases, dead letters and the check of topics at brokers of another make."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from decoder.admission import Admission
from decoder.contracts.bundle import Policy
from decoder.contracts.errors import BrokerError
from decoder.contracts.status import LearnerStatus
from decoder.contracts.topics import DEAD, DRAFTS, LEASE, POLICY, STATUS
from decoder.feed import PolicyFeed
from decoder.kafka.clients import close, fetch, open_consumer, partitions_of
from decoder.kafka.compacted import Compacted
from decoder.policy.first import first_policy
from learner import topics
from learner.ingest.dead_letters import DeadLetters
from learner.ingest.records import RecordReader
from learner.ingest.source import EventSource, Fetched
from learner.lease import Lease
from learner.release.publisher import PolicyPublisher
from pipelines.watch.ledger import Ledger, Observer
from tests.conftest import until
from tests.contracts.test_events import ORIGIN, PLAIN
from tests.decoder.telemetry.broker import consumed, send
from tests.events import encode_events
from tests.mock_cluster.cluster import DISCONNECT, FETCH, METADATA, PRODUCE, MockCluster

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NOBODY = -1
UNKNOWN_TOPIC = 3
NOT_LEADER, NOT_AVAILABLE, FEW_REPLICAS, NOT_AUTHORISED, STORAGE = 6, 5, 19, 29, 56


@pytest.fixture
def publisher(cluster: MockCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[PolicyPublisher]:
    monkeypatch.setattr("decoder.feed.RETRY_S", 0.1)
    for name, value in {"compacted.REQUEST_MS": 5_000, "clients.CLOSE_S": 2.0}.items():
        monkeypatch.setattr(f"decoder.kafka.{name}", value)  # of brokers that go away
    made = PolicyPublisher(cluster.kafka)
    yield made
    made.close()


def policy(version: int) -> Policy:
    return replace(first_policy("scope"), version=version)


def produce(cluster: MockCluster, partition: int, *values: bytes) -> None:
    send(cluster.kafka, DRAFTS.name, *values, partition=partition)


def test_a_feed_receives_the_next_policy_after_every_fault(
    cluster: MockCluster, publisher: PolicyPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[Policy] = []
    feed = PolicyFeed(cluster.kafka, "scope", Admission("scope", applied.append))
    first = publisher.publish(policy(1), term=1)
    feed.start()
    until(lambda: len(applied) == 1)
    cluster.answer(FETCH, NOT_LEADER, STORAGE, DISCONNECT, NOT_AUTHORISED)
    second = publisher.publish(policy(2), term=1)
    until(lambda: len(applied) == 2)
    cluster.down()
    monkeypatch.setattr("learner.release.publisher.ACK_SECONDS", 2.0)
    with pytest.raises(BrokerError, match="was not acknowledged"):
        publisher.publish(policy(3), term=1)
    cluster.up()
    until(lambda: publishes(publisher, 4))
    until(lambda: applied[-1].version == 4)
    feed.close()
    numbers = [each.publication for each in applied]
    assert numbers[:2] == [first.publication, second.publication]
    assert numbers == sorted(set(numbers)), "each number once, and none of before"


def publishes(publisher: PolicyPublisher, version: int) -> bool:
    try:
        publisher.publish(policy(version), term=1)
    except BrokerError:
        return False
    return True


def test_a_policy_with_too_few_replicas_is_not_published(
    cluster: MockCluster, publisher: PolicyPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.release.publisher.ACK_SECONDS", 2.0)
    cluster.answer(PRODUCE, *[FEW_REPLICAS] * 200)
    with pytest.raises(BrokerError, match="was not acknowledged"):
        publisher.publish(policy(1), term=1)
    assert not consumed(cluster.kafka, POLICY.name)


def received(source: EventSource, count: int) -> list[Fetched]:
    found: list[Fetched] = []
    until(lambda: found.extend(source.poll(0.1)) or len(found) >= count)  # type: ignore[func-returns-value]
    return found


def test_a_learner_reads_each_record_once_through_every_fault(cluster: MockCluster) -> None:
    def record(number: int) -> bytes:
        return encode_events([PLAIN._replace(number=number)], ORIGIN, number // 2)

    source = EventSource(cluster.kafka, {})
    intake, events = RecordReader(DeadLetters(cluster.kafka)), 0
    for turn in range(4):
        produce(cluster, 0, *map(record, range(20 * turn, 20 * turn + 20, 2)))
        produce(cluster, 1, *map(record, range(20 * turn + 1, 20 * turn + 20, 2)))
        if turn == 1:
            cluster.answer(FETCH, NOT_LEADER, STORAGE, DISCONNECT)
        elif turn == 2:
            cluster.lead(DRAFTS.name, 0, 1)
            cluster.lead(DRAFTS.name, 1, 1)
        elif turn == 3:
            cluster.down()
            source.poll(0.1)
            cluster.up()

        def read() -> None:
            nonlocal events
            fetched = source.poll(0.1)
            events += sum(a.events for r in fetched if (a := intake.read(r)) is not None)
            source.acknowledge(fetched)

        until(lambda due=20 * turn + 20: events >= due, f"turn {turn}", turn=read)  # type: ignore[misc]
    source.close()
    assert source.offsets == {0: 40, 1: 40} and source.lag() == 0 and source.skipped == 0
    assert intake.sequences.missing == intake.sequences.duplicates == 0


def test_an_older_offset_reads_all_records_again(cluster: MockCluster) -> None:
    source = EventSource(cluster.kafka, {})
    produce(cluster, 0, *[b""] * 6)
    for due in (0, 2, 0):
        source.close()
        source.offsets = {0: due} if due else {}
        again = received(source, 6 - due)
        assert [record.offset for record in again] == list(range(due, 6))
        source.acknowledge(again)
    source.close()
    assert source.skipped == 0


def test_a_partition_without_a_named_leader_is_read_again(
    cluster: MockCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """kafka-python (3.0.12) waits for ever for what it could not ask a broker that it does not
    know."""
    source = EventSource(cluster.kafka, {})
    for partition in (0, 1):
        cluster.lead(DRAFTS.name, partition, 1)
        produce(cluster, partition, b"")
    source.acknowledge(received(source, 2))
    cluster.down(1)
    until(lambda: not source.poll(0.1) and "UnknownBrokerId" in caplog.text)
    cluster.up()
    produce(cluster, 0, b"")
    assert [(record.partition, record.offset) for record in received(source, 1)] == [(0, 1)]
    source.close()


def test_a_partition_without_a_leader_blocks_no_other(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {
        "PARTITIONS_SECONDS": 0.5,
        "BEGINNINGS_MS": 300,
        "BEGINNING_MS": 100,
    }.items():
        monkeypatch.setattr(f"learner.ingest.source.{name}", value)
    produce(cluster, 1, b"kept for later")
    cluster.lead(DRAFTS.name, 0, 2)
    cluster.lead(DRAFTS.name, 1, NOBODY)
    source = EventSource(cluster.kafka, {})
    for _ in range(3):
        produce(cluster, 0, b"")
        source.acknowledge(received(source, 1))
    assert source.offsets == {0: 3}
    until(
        lambda: source.unreachable_seconds() > 1.0,
        turn=lambda: source.acknowledge(source.poll(0.1)),
    )
    assert "partitions [1] of" in caplog.text
    cluster.lead(DRAFTS.name, 1, 1)
    (late,) = received(source, 1)
    source.acknowledge([late])
    assert late.value == b"kept for later"
    until(lambda: source.unreachable_seconds() == 0.0, turn=lambda: source.poll(0.1))
    cluster.down(1)  # and under a reader
    until(
        lambda: source.unreachable_seconds() > 1.0,
        turn=lambda: source.acknowledge(source.poll(0.1)),
    )
    produce(cluster, 0, b"the other")
    (other,) = received(source, 1)
    source.acknowledge([other])
    assert other.value == b"the other"
    cluster.up()
    produce(cluster, 1, b"back")
    assert [record.value for record in received(source, 1)] == [b"back"]
    source.close()


def test_refused_records_are_dead_letters_and_lost_ones_are_counted(
    cluster: MockCluster,
) -> None:
    produce(cluster, 0, b"no record", b"none either")
    source, dead = EventSource(cluster.kafka, {}), DeadLetters(cluster.kafka)
    intake, fetched, asked = RecordReader(dead), received(source, 2), cluster.asked(PRODUCE)
    assert intake.read(fetched[0]) is None
    until(lambda: cluster.asked(PRODUCE) > asked)
    cluster.answer(PRODUCE, NOT_AUTHORISED)
    assert intake.read(fetched[1]) is None
    until(lambda: dead.failed == 1)
    source.close()
    dead.close()
    consumer = open_consumer(cluster.kafka, "test")
    consumer.assign(partitions_of(consumer, DEAD.name))
    found: list[Any] = []
    until(lambda: found.extend(fetch(consumer, 500)) or found)
    close(consumer)
    (letter,) = found
    told = dict(letter.headers)
    assert letter.value == b"no record" and told["__streams.errors.offset"] == b"0"
    assert intake.refused.total() == 2


def test_a_compacted_topic_with_a_leaderless_partition_fails_no_reader(
    cluster: MockCluster, publisher: PolicyPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.lease.RETRY_SECONDS", 0.1)
    cluster.lead(LEASE.name, 1, NOBODY)
    cluster.lead(POLICY.name, 1, NOBODY)
    lease, applied = Lease(cluster.kafka, "first"), []  # type: ignore[var-annotated]
    feed = PolicyFeed(cluster.kafka, "scope", Admission("scope", applied.append))
    feed.start()
    lease.renew({"scope": 0})
    assert not lease.ready, "what lies there may hold the scope for somebody"
    for topic in (LEASE, POLICY):
        cluster.lead(topic.name, 1, 1)
    until(lambda: publishes(publisher, 1))
    cluster.answer(METADATA, NOT_AVAILABLE)
    cluster.answer(PRODUCE, NOT_LEADER)
    until(lambda: lease.renew({"scope": 0}) or lease.holds("scope"))  # type: ignore[func-returns-value]
    until(lambda: applied)
    feed.close()
    lease.close()


def test_a_topic_with_another_id_is_read_from_its_beginning(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was made anew may have grown past what was read before it is looked at again."""
    monkeypatch.setattr("decoder.kafka.clients.METADATA_MS", 100)
    monkeypatch.setattr("decoder.kafka.compacted.REVIEW_SECONDS", 1e6)
    received, forgotten, ledger = list[bytes](), list[int](), Ledger()

    def lies(partition: int, offsets: range) -> None:
        if not offsets:
            forgotten.append(partition)

    send(cluster.kafka, DEAD.name, b"a", b"b", partition=1)
    send(cluster.kafka, DEAD.name, b"c", partition=0)
    status = LearnerStatus(process="p", scope="", time=1.0).model_dump_json().encode()
    reader = Compacted(cluster.kafka, DEAD, lambda record: received.append(record.value), lies)
    until(lambda: reader.read() and len(received) == 3)
    with Observer(cluster.kafka, ledger, since_s=math.inf):
        send(cluster.kafka, STATUS.name, status)
        until(lambda: len(ledger.learner) == 1)
        forgotten.clear()
        for topic in (DEAD, STATUS):
            cluster.make_anew(topic.name)
        until(lambda: reader.read() and len(received) == 6)
        until(lambda: len(ledger.learner) == 2)
    reader.close()
    assert sorted(forgotten) == [0, 1] and sorted(received) == sorted(2 * [b"a", b"b", b"c"])


def test_topics_that_reappear_are_read(
    cluster: MockCluster, publisher: PolicyPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoder.kafka.clients.METADATA_MS", 100)
    monkeypatch.setattr("learner.ingest.source.PARTITIONS_SECONDS", 0.1)
    applied: list[Policy] = []
    feed = PolicyFeed(cluster.kafka, "scope", Admission("scope", applied.append))
    feed.start()
    source = EventSource(cluster.kafka, {})
    for version in (1, 2):
        until(lambda: publishes(publisher, version))  # noqa: B023 -- called within the turn
        until(lambda: applied and applied[-1].version == version)  # noqa: B023
        produce(cluster, version % 2, b"%d" % version)
        source.acknowledge(received(source, 1))
        asked = cluster.asked(METADATA)
        cluster.answer(METADATA, *[UNKNOWN_TOPIC] * 12)
        until(lambda: cluster.asked(METADATA) > asked + 12, turn=lambda: source.poll(0.01))  # noqa: B023
    until(lambda: publishes(publisher, 3))
    until(lambda: applied[-1].version == 3)
    feed.close()
    source.close()


def test_topics_without_reported_settings_are_left_alone(
    cluster: MockCluster, caplog: pytest.LogCaptureFixture
) -> None:
    topics.ensure_topics(cluster.kafka)
    assert "does not report settings of its topics" in caplog.text


def test_a_topic_that_cannot_be_created_names_the_command() -> None:
    cluster = MockCluster(1)
    cluster.make_topic(POLICY.name)
    with pytest.raises(BrokerError, match=rf"kafka-topics.sh --create --topic {DRAFTS.name}"):
        topics.ensure_topics(cluster.kafka)
    cluster.close()
