"""What the shipper makes of events, with a broker and with one that refuses: all are counted."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import (
    InvalidRecordError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NotLeaderForPartitionError,
    SaslAuthenticationFailedError,
    TopicAuthorizationFailedError,
)

from decoder.contracts.events import DraftEvent, EventBatch, decode_batch, encode_batch
from decoder.contracts.features import NUM_FEATURES
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus, decode_status
from decoder.contracts.topics import DRAFTS, STATUS, TRIALS
from decoder.contracts.trials import decode_round
from decoder.policy.first import first_policy
from decoder.telemetry.queue import EventQueue
from decoder.telemetry.shipper import BATCH, Shipper
from decoder.trial.block import Account
from decoder.trial.sides import Side
from decoder.trial.turns import Played, Turns
from pipelines import machine
from pipelines.stack import broker, processes
from tests.contracts.test_events import EVENT, ORIGIN, PLAIN

# a kafka client that found no broker leaves its sockets to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

RECORD_OVERHEAD = 180
"""Bytes, at most, that the client counts beside a record's value, its headers among them."""


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Sockets left behind are collected here, not in somebody else's test."""
    yield
    gc.collect()


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[KafkaSettings]:
    port = machine.free_port()
    child = broker.start_broker(port, tmp_path / "data", tmp_path / "broker.log")
    reached = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
    broker.ensure_topics(reached)
    yield reached
    processes.stop([child])


def status_of(queue: EventQueue, shipper: Shipper | None = None) -> WorkerStatus:
    told: dict[str, Any] = {}
    if shipper is not None:
        told = {
            "events_sent": shipper.sent,
            "queue_depth": shipper.waiting,
            "events_refused": dict(shipper.refused),
            "events_failed": shipper.failed,
        }
    return WorkerStatus(
        process=ORIGIN.worker, scope=ORIGIN.scope, time=time.time(), events_made=queue.made,
        events_dropped=queue.dropped, **told,
    )  # fmt: skip


def shipper_of(kafka: KafkaSettings, queue: EventQueue) -> Shipper:
    return Shipper(kafka, queue, ORIGIN, lambda: status_of(queue))


def put(queue: EventQueue, *events: DraftEvent) -> None:
    for event in events:
        queue.put(event._replace(number=queue.made))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def consumed(kafka: KafkaSettings, topic: str) -> list[bytes]:
    consumer = KafkaConsumer(group_id=None, **kafka.client_options())
    place = TopicPartition(topic, 0)
    consumer.assign([place])
    consumer.seek_to_beginning(place)
    end, found = consumer.end_offsets([place])[place], []
    while consumer.position(place) < end:
        found += [r.value for records in consumer.poll(200).values() for r in records]
    consumer.close()
    return found


def batches(kafka: KafkaSettings) -> list[EventBatch]:
    return [decode_batch(value) for value in consumed(kafka, DRAFTS.name)]


def test_everything_arrives_once_and_in_order(kafka: KafkaSettings) -> None:
    queue = EventQueue(10_000)
    shipper = shipper_of(kafka, queue)
    put(queue, *[EVENT, PLAIN] * BATCH)
    shipper.start()
    until(lambda: shipper.sent == 2 * BATCH)
    put(queue, EVENT)
    shipper.close()
    found = batches(kafka)
    assert [batch.sequence for batch in found] == list(range(len(found)))
    assert {batch.origin for batch in found} == {ORIGIN}
    assert [e.number for b in found for e in b.events] == list(range(2 * BATCH + 1))
    assert status_of(queue, shipper).events_unaccounted == 0
    assert isinstance(decode_status(consumed(kafka, STATUS.name)[-1]), WorkerStatus)


def test_a_batch_above_the_limit_is_cut_and_one_event_above_it_is_set_aside(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client refuses here, as a broker would, whatever is larger than one small record."""
    queue = EventQueue(10_000)
    shipper = shipper_of(kafka, queue)
    large = EVENT._replace(features=np.full(NUM_FEATURES, 1e8 / 3, np.float32))
    most = len(encode_batch([EVENT] * 3, ORIGIN, 10**6)) + RECORD_OVERHEAD
    options = {**kafka.client_options(), "max_request_size": most}
    monkeypatch.setattr(shipper, "_connect", lambda: KafkaProducer(**options))
    put(queue, *[EVENT] * 50, *[PLAIN] * 3)
    shipper.start()
    until(lambda: shipper.sent == 53)
    small = len(encode_batch([PLAIN], ORIGIN, 10**6)) + RECORD_OVERHEAD
    assert len(encode_batch([large], ORIGIN, 0)) > small
    options["max_request_size"] = small
    shipper.close()
    again = Shipper(kafka, queue, ORIGIN, lambda: status_of(queue))
    monkeypatch.setattr(again, "_connect", lambda: KafkaProducer(**options))
    before = len(batches(kafka))
    put(queue, PLAIN, large, PLAIN, large, large, PLAIN)
    again.start()
    until(lambda: again.sent + again.refused.total() == 6)
    again.close()
    assert again.refused == {"MessageSizeTooLarge": 3} and again.sent == 3
    found = batches(kafka)[before:]
    assert [e.number for b in found for e in b.events] == [53, 55, 58]
    assert [b.sequence for b in found] == list(range(len(found)))


def test_a_worker_that_closes_without_a_broker_says_what_it_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decoder.telemetry.shipper.CLOSE_TIMEOUT_S", 0.2)
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{machine.free_port()}")
    queue = EventQueue(3)
    shipper = shipper_of(kafka, queue)
    shipper.start()
    put(queue, *[EVENT] * 5)
    shipper.close()
    shipper._thread.join(30)
    status = status_of(queue, shipper)
    assert (status.events_failed, status.events_dropped, status.queue_depth) == (3, 2, 0)
    assert status.events_unaccounted == 0


class Producer:
    """In the place of the client, of a broker that answers what it is told to answer.

    ``lost`` answers come to nobody: the record lies there all the same.
    """

    def __init__(self, answers: Iterator[str], partitions: set[int]) -> None:
        self.records: list[tuple[int, EventBatch]] = []
        self._answers, self._partitions = answers, partitions

    def partitions_for(self, topic: str) -> set[int]:
        return self._partitions

    def send(
        self, topic: str, key: bytes, value: bytes, partition: int, headers: list[tuple[str, bytes]]
    ) -> Producer:
        self.partition, self.value = partition, value
        return self

    def get(self, timeout: float) -> None:
        answer = next(self._answers, "")
        if answer not in ERRORS or answer == "lost":
            self.records.append((self.partition, decode_batch(self.value)))
        if answer in ERRORS:
            raise ERRORS[answer]


ERRORS: dict[str, Exception] = {
    "lost": KafkaTimeoutError("no answer"),
    "away": NotLeaderForPartitionError("elsewhere"),
    "reset": OSError("connection reset"),
    "credentials": SaslAuthenticationFailedError("who is it"),
    "large": MessageSizeTooLargeError("too large"),
    "invalid": InvalidRecordError("no"),
    "forbidden": TopicAuthorizationFailedError("no"),
}


AGAIN = (KafkaTimeoutError, NotLeaderForPartitionError, SaslAuthenticationFailedError, OSError)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["", "", *ERRORS]), max_size=40),
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
)
def test_whatever_the_broker_answers_every_event_is_counted_once(
    answers: list[str], sizes: list[int]
) -> None:
    queue = EventQueue(500)
    shipper = shipper_of(KafkaSettings(), queue)
    producer = Producer(iter(answers), {0, 1, 2})
    for size in sizes:
        put(queue, *[PLAIN] * size)
        for _ in range(60):
            with contextlib.suppress(*AGAIN):
                shipper._send_record(producer)
            status = status_of(queue, shipper)
            assert status.events_unaccounted == 0
    assert shipper.waiting == 0
    assert shipper.refused.keys() <= {"MessageSizeTooLarge", "InvalidRecord",
                                      "TopicAuthorizationFailed"}  # fmt: skip
    numbers = [e.number for _, batch in producer.records for e in batch.events]
    assert len(set(numbers)) >= shipper.sent
    assert list(dict.fromkeys(numbers)) == sorted(set(numbers)), "out of order"
    assert len({partition for partition, _ in producer.records}) <= 1
    known: dict[int, EventBatch] = {}
    for _, batch in producer.records:
        first = known.setdefault(batch.sequence, batch)
        same = [e.number for e in first.events] == [e.number for e in batch.events]
        assert same, "one number for two records"
    gaps = set(range(max(known, default=-1) + 1)) - set(known)
    in_doubt = len([answer for answer in answers if answer in ("lost", "away", "reset")])
    assert len(gaps) <= in_doubt, "a gap where every answer was plain"


def test_an_event_that_cannot_be_written_takes_no_other_with_it() -> None:
    queue = EventQueue(500)
    shipper = shipper_of(KafkaSettings(), queue)
    producer = Producer(iter(()), {0})
    put(queue, *[PLAIN] * 40, EVENT._replace(predicted=float("nan")), *[PLAIN] * 40)
    while shipper.waiting:
        shipper._send_record(producer)
    assert shipper.refused == Counter(malformed=1) and shipper.sent == 80


def test_a_cycle_that_cannot_be_told_is_counted_too() -> None:
    queue = EventQueue(500, lambda number: PLAIN._replace(number=12 // number))
    shipper = shipper_of(KafkaSettings(), queue)
    producer = Producer(iter(()), {0})
    for number in (1, 0, 2):
        queue.put(number)
    while shipper.waiting:
        shipper._send_record(producer)
    assert shipper.refused == Counter(unreadable=1) and shipper.sent == 2
    assert status_of(queue, shipper).events_unaccounted == 0


def test_a_status_that_cannot_be_made_holds_up_no_event(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = EventQueue(500)

    def status() -> WorkerStatus:
        raise RuntimeError("not now")

    shipper = Shipper(KafkaSettings(), queue, ORIGIN, status)
    producer = Producer(iter(()), {0})
    monkeypatch.setattr(producer, "close", lambda timeout: None, raising=False)
    monkeypatch.setattr(shipper, "_connect", lambda: producer)
    put(queue, PLAIN)
    shipper.start()
    until(lambda: shipper.sent == 1)
    shipper.close()
    assert "not now" in caplog.text


def test_a_round_that_cannot_be_written_holds_up_no_later_one(kafka: KafkaSettings) -> None:
    queue, policy = EventQueue(10), first_policy("s")
    turns = Turns((), 0.0, {}, policy, seed=1)
    whole, broken = (Account(Side("first", policy)),), (None,)
    turns.rounds.extend([Played(0, 1.0, broken), Played(1, 2.0, whole)])  # type: ignore[arg-type]
    shipper = Shipper(kafka, queue, ORIGIN, lambda: status_of(queue), turns)
    shipper.start()
    until(lambda: shipper.rounds_sent > 0)
    shipper.close()
    assert (shipper.rounds_sent, shipper.rounds_dropped) == (1, 1)
    assert [decode_round(value).number for value in consumed(kafka, TRIALS.name)] == [1]
