"""Whatever brokers of another make answer, every event is counted once and comes in its order."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from decoder.contracts.events import DraftEvent, EventBatch, decode_batch
from decoder.contracts.topics import DRAFTS, STATUS
from decoder.telemetry.books import Accounts, Books
from decoder.telemetry.queue import EventQueue
from decoder.telemetry.recorder import BATCH
from decoder.telemetry.shipper import Shipper
from tests.contracts.test_events import EVENT, ORIGIN, PLAIN
from tests.decoder.telemetry.broker import batches, consumed
from tests.decoder.telemetry.telling import frame
from tests.decoder.telemetry.test_handover import handover_of, put, until
from tests.decoder.telemetry.test_shipper import numbered
from tests.mock_cluster.cluster import DISCONNECT, PRODUCE, MockCluster

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NOT_LEADER, TIMED_OUT, TOO_LARGE = 6, 7, 10
FEW_REPLICAS, FEW_REPLICAS_AFTER_APPEND = 19, 20
NOT_AUTHORISED, INVALID_RECORD, STORAGE = 29, 87, 56
PARTITIONS = 2


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is waited for a second, not ten."""
    monkeypatch.setattr("decoder.telemetry.shipper.ACK_TIMEOUT_S", 1.0)


def spread(count: int, first: int = 0) -> list[DraftEvent]:
    """Events of seven requests, which lie on both partitions."""
    events = [(EVENT, PLAIN)[n % 2]._replace(request=f"{n % 7:024x}") for n in range(count)]
    return numbered(events, first)


def ship(shipper: Shipper, done: Callable[[], bool]) -> None:
    """Turn until it comes true, without the pauses after a failure; the books add up each time."""
    deadline = time.monotonic() + 30.0
    while not done():
        assert time.monotonic() < deadline, f"it never came true: {shipper.books}"
        shipper._retry_at = 0.0
        shipper.step(hasten=True)
        books = shipper.books
        assert books.taken == books.settled + books.waiting + books.spilled
        time.sleep(0.01)


def in_order(found: list[EventBatch]) -> bool:
    """Whether each request's events, taken once, come as they were made."""
    came: dict[str, list[int]] = defaultdict(list)
    for batch in found:
        for event in batch.events:
            if event.number not in came[event.request]:
                came[event.request].append(event.number)
    return all(numbers == sorted(numbers) for numbers in came.values())


def numbers(found: list[EventBatch]) -> list[int]:
    return sorted(event.number for batch in found for event in batch.events)


def test_a_worker_is_read_by_a_client_of_another_make(cluster: MockCluster) -> None:
    queue = EventQueue(10_000)
    handover = handover_of(cluster.kafka, queue)
    put(queue, *spread(1_400))
    until(lambda: handover.accounts().sent == 1_400)
    handover.close()
    assert handover.accounts() == Accounts(made=1_400, sent=1_400)
    consumer = Consumer({"bootstrap.servers": cluster.servers, "group.id": "analyst"})
    consumer.assign([TopicPartition(DRAFTS.name, p, 0) for p in range(PARTITIONS)])
    found: list[EventBatch] = []
    while sum(len(batch.events) for batch in found) < 1_400:
        (record,) = consumer.consume(1, 30.0)
        assert record.error() is None and record.headers() == DRAFTS.headers
        found.append(decode_batch(record.value()))
    consumer.close()
    assert numbers(found) == list(range(1_400)) and in_order(found)
    assert consumed(cluster.kafka, STATUS.name)


@pytest.mark.parametrize(
    "errors",
    [
        [FEW_REPLICAS] * 6,
        [FEW_REPLICAS_AFTER_APPEND] * 6,
        [TIMED_OUT] * 6,
        [NOT_LEADER] * 3,
        [STORAGE, FEW_REPLICAS, TIMED_OUT, DISCONNECT],
        [DISCONNECT] * 4,
    ],
    ids=lambda errors: "-".join(map(str, dict.fromkeys(errors))),
)
@pytest.mark.parametrize("spills", [True, False], ids=["file", "memory"])
def test_what_passes_costs_no_event_and_no_order(
    cluster: MockCluster, tmp_path: Path, errors: list[int], spills: bool
) -> None:
    folder = tmp_path / "spill" if spills else None
    if folder is not None:
        folder.mkdir()
    shipper = Shipper(cluster.kafka, ORIGIN, Books(), folder=folder, most=1 << 30)
    shipper.take(frame(spread(10)))
    ship(shipper, lambda: shipper.books.sent == 10)
    cluster.answer(PRODUCE, *errors)
    shipper.take(frame(spread(2 * BATCH, 10)))
    shipper.step(hasten=True)
    shipper.take(frame(spread(BATCH, 10 + 2 * BATCH)))
    ship(shipper, lambda: shipper.books.sent == 10 + 3 * BATCH)
    shipper.close()
    assert shipper.books.settled == shipper.books.sent, "none is lost or in doubt"
    found = batches(cluster.kafka)
    assert numbers(found) == list(range(10 + 3 * BATCH)) and in_order(found)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(NOT_AUTHORISED, "TopicAuthorizationFailed"), (INVALID_RECORD, "InvalidRecord")],
)
def test_what_is_refused_for_good_is_counted_by_its_reason_and_the_rest_comes(
    cluster: MockCluster, error: int, reason: str
) -> None:
    shipper = Shipper(cluster.kafka, ORIGIN, Books())
    cluster.answer(PRODUCE, error)
    shipper.take(frame(numbered([PLAIN] * 5)))
    ship(shipper, lambda: shipper.books.settled == 5)
    shipper.take(frame(numbered([PLAIN] * 7, 5)))
    ship(shipper, lambda: shipper.books.sent == 7)
    shipper.close()
    assert shipper.books.refused == {reason: 5}
    assert numbers(batches(cluster.kafka)) == list(range(5, 12))


def test_a_record_that_brokers_find_too_large_comes_in_two(cluster: MockCluster) -> None:
    shipper = Shipper(cluster.kafka, ORIGIN, Books())
    cluster.answer(PRODUCE, TOO_LARGE)
    shipper.take(frame(numbered([PLAIN] * 50)))
    shipper.step(hasten=True)
    shipper.take(frame(numbered([PLAIN] * 3, 50)))
    ship(shipper, lambda: shipper.books.sent == 53)
    shipper.close()
    found = batches(cluster.kafka)
    assert [len(batch.events) for batch in found] == [25, 25, 3]
    assert [batch.sequence for batch in found] == [0, 1, 2]
    assert [event.number for batch in found for event in batch.events] == list(range(53))


def test_a_leader_that_moves_costs_no_event_and_no_order(cluster: MockCluster) -> None:
    shipper = Shipper(cluster.kafka, ORIGIN, Books())
    for turn in range(4):
        for partition in range(PARTITIONS):
            cluster.lead(DRAFTS.name, partition, 1 + (turn + partition) % 2)
        shipper.take(frame(spread(BATCH, turn * BATCH)))
        ship(shipper, lambda sent=(turn + 1) * BATCH: shipper.books.sent == sent)  # type: ignore[misc]
    shipper.close()
    found = batches(cluster.kafka)
    assert numbers(found) == list(range(4 * BATCH)) and in_order(found)


def test_brokers_that_go_and_come_find_everything(cluster: MockCluster, tmp_path: Path) -> None:
    shipper = Shipper(cluster.kafka, ORIGIN, Books(), folder=tmp_path, most=1 << 30)
    for made in (0, 1_000):
        shipper.take(frame(spread(300, made)))
        ship(shipper, lambda m=made: shipper.books.sent > m)  # type: ignore[misc]
        cluster.down()
        shipper.take(frame(spread(700, made + 300)))
        ship(shipper, lambda: shipper.books.spilled >= 700)
        cluster.up()
        ship(shipper, lambda m=made: shipper.books.sent == m + 1_000)  # type: ignore[misc]
    shipper.close()
    found = batches(cluster.kafka)
    assert set(numbers(found)) == set(range(2_000)) and in_order(found)
    assert {batch.sequence for batch in found} == set(range(max(b.sequence for b in found) + 1))
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_record_whose_acknowledgement_is_lost_lies_there_again_under_its_number(
    cluster: MockCluster,
) -> None:
    shipper = Shipper(cluster.kafka, ORIGIN, Books())
    shipper.take(frame(numbered([PLAIN] * 5)))
    ship(shipper, lambda: shipper.books.sent == 5)
    cluster.delay(60_000)
    shipper.take(frame(numbered([PLAIN] * 5, 5)))
    ship(shipper, lambda: shipper.books.flying == 5)
    until(lambda: cluster.asked(PRODUCE) == 2)
    cluster.down()
    ship(shipper, lambda: not shipper.books.flying)
    assert shipper.books.waiting == 5 and not shipper.books.in_doubt
    cluster.delay(0)
    cluster.up()
    ship(shipper, lambda: shipper.books.sent == 10)
    shipper.close()
    came = numbers(batches(cluster.kafka))
    assert set(came) == set(range(10)) and len(came) >= 15


def test_what_a_worker_that_ends_has_no_answer_for_is_in_doubt(cluster: MockCluster) -> None:
    queue = EventQueue(100)
    handover = handover_of(cluster.kafka, queue)
    put(queue, *spread(5))
    until(lambda: handover.accounts().sent == 5)
    cluster.delay(60_000)
    put(queue, *[PLAIN] * 10)
    handover.close()
    found = handover.accounts()
    assert found == Accounts(made=15, sent=5, in_doubt=10)
    cluster.delay(0)
    assert numbers(batches(cluster.kafka)) == list(range(15)), "here they lie"
