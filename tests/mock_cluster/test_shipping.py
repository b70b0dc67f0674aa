"""Whatever brokers of another make answer, every event is counted once and comes in its order."""

from __future__ import annotations

from collections import defaultdict

import pytest
from confluent_kafka import Consumer, TopicPartition

from decoder.contracts.events import EventBatch, decode_batch
from decoder.contracts.status import WorkerStatus
from decoder.contracts.topics import DRAFTS, STATUS
from decoder.telemetry.exporter import BATCH, Exporter
from decoder.telemetry.ring import HEAD, DeliveryReport, Ring
from tests.contracts.test_events import EVENT, ORIGIN, PLAIN
from tests.decoder.telemetry.broker import batches, consumed
from tests.decoder.telemetry.telling import put, ring_of
from tests.decoder.telemetry.test_exporter import ship
from tests.decoder.telemetry.test_supervisor import supervisor_of, until
from tests.events import DraftEvent, events_of
from tests.mock_cluster.cluster import DISCONNECT, PRODUCE, MockCluster

NOT_LEADER, TIMED_OUT, TOO_LARGE = 6, 7, 10
FEW_REPLICAS, FEW_REPLICAS_AFTER_APPEND = 19, 20
NOT_AUTHORISED, INVALID_RECORD, STORAGE = 29, 87, 56
PARTITIONS = 2


def spread(count: int) -> list[DraftEvent]:
    """Events of seven requests, which lie on both partitions."""
    return [(EVENT, PLAIN)[n % 2]._replace(request=f"{n % 7:024x}") for n in range(count)]


def in_order(found: list[EventBatch]) -> bool:
    """Whether each request's events, taken once, come as they were made."""
    came: dict[str, list[int]] = defaultdict(list)
    for batch in found:
        for event in events_of(batch):
            if event.number not in came[event.request]:
                came[event.request].append(event.number)
    return all(numbers == sorted(numbers) for numbers in came.values())


def numbers(found: list[EventBatch]) -> list[int]:
    return sorted(event.number for batch in found for event in events_of(batch))


def test_a_worker_is_read_by_a_client_of_another_make(cluster: MockCluster) -> None:
    ring = Ring(10_000)
    supervisor = supervisor_of(cluster.kafka, ring)
    put(ring, *spread(1_400))
    until(lambda: supervisor.report().sent == 1_400)
    supervisor.close()
    assert supervisor.report() == DeliveryReport(made=1_400, sent=1_400)
    consumer = Consumer({"bootstrap.servers": cluster.servers, "group.id": "analyst"})
    consumer.assign([TopicPartition(DRAFTS.name, p, 0) for p in range(PARTITIONS)])
    found: list[EventBatch] = []
    while sum(len(batch) for batch in found) < 1_400:
        (record,) = consumer.consume(1, 300.0)
        assert record.error() is None and record.headers() == DRAFTS.headers
        assert record.key() == ORIGIN.worker.encode()
        found.append(decode_batch(record.value()))
    consumer.close()
    assert numbers(found) == list(range(1_400)) and in_order(found)
    assert consumed(cluster.kafka, STATUS.name)


@pytest.mark.parametrize(
    "errors",
    [
        [FEW_REPLICAS] * 4,
        [FEW_REPLICAS_AFTER_APPEND] * 4,
        [TIMED_OUT] * 4,
        [NOT_LEADER] * 3,
        [STORAGE, FEW_REPLICAS, TIMED_OUT, DISCONNECT],
        [DISCONNECT] * 4,
    ],
    ids=lambda errors: "-".join(map(str, dict.fromkeys(errors))),
)
def test_what_passes_costs_no_event_and_no_order(cluster: MockCluster, errors: list[int]) -> None:
    ring = ring_of(*spread(10))
    exporter = Exporter(cluster.kafka, ORIGIN, ring)
    ship(exporter, lambda: exporter.progress.sent == 10)
    cluster.answer(PRODUCE, *errors)
    put(ring, *spread(3 * BATCH))
    ship(exporter, lambda: exporter.progress.sent == 10 + 3 * BATCH)
    exporter.close()
    assert ring.progress().settled == ring.progress().sent, "none is lost or in doubt"
    found = batches(cluster.kafka)
    assert numbers(found) == list(range(10 + 3 * BATCH)) and in_order(found)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(NOT_AUTHORISED, "TopicAuthorizationFailed"), (INVALID_RECORD, "InvalidRecord")],
)
def test_what_is_refused_for_good_is_counted_by_its_reason_and_the_rest_comes(
    cluster: MockCluster, error: int, reason: str
) -> None:
    """A right that was missing counts as missing until the client asks for the topic again."""
    ring = ring_of(*[PLAIN] * 5)
    exporter = Exporter(cluster.kafka, ORIGIN, ring)
    cluster.answer(PRODUCE, error)
    ship(exporter, lambda: exporter.progress.settled == 5)
    assert ring.progress().refused == {reason: 5}
    while not exporter.progress.sent:
        put(ring, PLAIN)
        ship(exporter, lambda: exporter.idle)
    exporter.close()
    progress = ring.progress()
    made = int(ring.control[HEAD])
    assert progress.refused.keys() == {reason} and progress.sent + progress.refused[reason] == made
    assert numbers(batches(cluster.kafka)) == list(range(made))[-progress.sent :]


def test_a_record_that_brokers_find_too_large_comes_in_two(cluster: MockCluster) -> None:
    ring = ring_of(*[PLAIN] * 50)
    exporter = Exporter(cluster.kafka, ORIGIN, ring)
    cluster.answer(PRODUCE, TOO_LARGE)
    ship(exporter, lambda: exporter.progress.sent == 50)
    put(ring, *[PLAIN] * 3)
    ship(exporter, lambda: exporter.progress.sent == 53)
    exporter.close()
    found = batches(cluster.kafka)
    assert [len(batch) for batch in found] == [25, 25, 3]
    assert [batch.sequence for batch in found] == [0, 1, 2]
    assert [event.number for batch in found for event in events_of(batch)] == list(range(53))


def test_a_leader_that_moves_costs_no_event_and_no_order(cluster: MockCluster) -> None:
    ring = Ring(4 * BATCH)
    exporter = Exporter(cluster.kafka, ORIGIN, ring)
    for turn in range(4):
        for partition in range(PARTITIONS):
            cluster.lead(DRAFTS.name, partition, 1 + (turn + partition) % 2)
        put(ring, *spread(BATCH))
        ship(exporter, lambda sent=(turn + 1) * BATCH: exporter.progress.sent == sent)  # type: ignore[misc]
    exporter.close()
    found = batches(cluster.kafka)
    assert numbers(found) == list(range(4 * BATCH)) and in_order(found)


def test_brokers_that_go_and_come_find_everything(cluster: MockCluster) -> None:
    ring = Ring(2_000)
    exporter = Exporter(cluster.kafka, ORIGIN, ring)
    for made in (0, 1_000):
        put(ring, *spread(300))
        ship(exporter, lambda m=made: exporter.progress.sent > m)  # type: ignore[misc]
        cluster.down()
        put(ring, *spread(700))
        for _ in range(20):
            exporter.turn()
        cluster.up()
        ship(exporter, lambda m=made: exporter.progress.sent == m + 1_000)  # type: ignore[misc]
    exporter.close()
    found = batches(cluster.kafka)
    assert set(numbers(found)) == set(range(2_000)) and in_order(found)
    places = {(b.sequence, b.names["request"][0]) for b in found}
    assert len({sequence for sequence, _ in places}) > 2


def test_a_record_whose_acknowledgement_is_lost_lies_there_again_under_its_number(
    cluster: MockCluster,
) -> None:
    ring = ring_of(*[PLAIN] * 5)
    exporter = Exporter(cluster.kafka, ORIGIN, ring)
    ship(exporter, lambda: exporter.progress.sent == 5)
    asked = cluster.asked(PRODUCE)
    cluster.delay(60_000)
    put(ring, *[PLAIN] * 5)
    ship(exporter, lambda: cluster.asked(PRODUCE) > asked)
    cluster.down()
    for _ in range(5):
        exporter.turn()
    assert len(ring) == 5 and not ring.progress().in_doubt
    cluster.delay(0)
    cluster.up()
    ship(exporter, lambda: exporter.progress.sent == 10)
    exporter.close()
    came = numbers(batches(cluster.kafka))
    assert set(came) == set(range(10)) and len(came) >= 15


def test_what_a_worker_that_ends_has_no_answer_for_is_in_doubt(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoder.telemetry.supervisor.CLOSE_TIMEOUT_S", 1.0)

    def status() -> WorkerStatus:
        raise RuntimeError("events are all that is sent")

    ring = Ring(100)
    supervisor = supervisor_of(cluster.kafka, ring, status=status)
    put(ring, *spread(5))
    until(lambda: supervisor.report().sent == 5)
    asked = cluster.asked(PRODUCE)
    cluster.delay(60_000)
    put(ring, *[PLAIN] * 10)
    until(lambda: cluster.asked(PRODUCE) > asked)
    supervisor.close()
    assert supervisor.report() == DeliveryReport(made=15, sent=5, in_doubt=10)
    cluster.delay(0)
    assert numbers(batches(cluster.kafka)) == list(range(15)), "here they lie"
