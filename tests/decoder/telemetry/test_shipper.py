"""What the shipper makes of events, with a broker and with one that refuses: all are counted."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka import KafkaProducer
from kafka.errors import (
    InvalidRecordError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NotLeaderForPartitionError,
    SaslAuthenticationFailedError,
    TopicAuthorizationFailedError,
)
from kafka.future import Future

from decoder.contracts.events import DraftEvent, EventBatch, decode_batch, encode_batch
from decoder.contracts.features import NUM_FEATURES
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, TRIALS
from decoder.telemetry import frames
from decoder.telemetry.books import Books
from decoder.telemetry.frames import Frame
from decoder.telemetry.recorder import BATCH
from decoder.telemetry.shipper import Shipper
from decoder.telemetry.spill import claim
from tests.contracts.test_events import EVENT, ORIGIN, PLAIN
from tests.decoder.telemetry.broker import batches
from tests.decoder.telemetry.telling import frame

# a kafka client that found no broker leaves its sockets to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MOST = 1 << 30
RECORD_OVERHEAD = 200
"""Bytes, at most, that the client adds to a record's value before it compares with its limit."""


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Sockets left behind are collected here, not in somebody else's test."""
    yield
    gc.collect()


def numbered(events: list[DraftEvent], first: int = 0) -> list[DraftEvent]:
    return [event._replace(number=first + at) for at, event in enumerate(events)]


def ship(shipper: Shipper, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not done():
        assert time.monotonic() < deadline, f"it never came true: {shipper.books}"
        shipper.step(hasten=True)
        time.sleep(0.01)


def balanced(books: Books) -> bool:
    return books.taken == books.settled + books.waiting + books.spilled


def test_everything_arrives_once_and_in_order(kafka: KafkaSettings) -> None:
    shipper = Shipper(kafka, ORIGIN, Books())
    shipper.take(frame(numbered([EVENT, PLAIN] * BATCH)))
    ship(shipper, lambda: shipper.books.sent == 2 * BATCH)
    shipper.take(frame(numbered([EVENT], 2 * BATCH)))
    ship(shipper, lambda: not shipper.outbox and not shipper.books.waiting)
    shipper.close()
    found = batches(kafka)
    assert [batch.sequence for batch in found] == list(range(len(found)))
    assert {batch.origin for batch in found} == {ORIGIN}
    assert [e.number for b in found for e in b.events] == list(range(2 * BATCH + 1))
    assert balanced(shipper.books)


def test_a_batch_above_the_limit_is_cut_and_one_event_above_it_is_set_aside(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client refuses here, as a broker would, whatever is larger than one small record."""
    large = EVENT._replace(features=np.full(NUM_FEATURES, 1e8 / 3, np.float32))
    shipper = Shipper(kafka, ORIGIN, Books())
    most = len(encode_batch([EVENT] * 3, ORIGIN, 10**6)) + RECORD_OVERHEAD
    options = {**kafka.client_options(), "max_request_size": most}
    monkeypatch.setattr(shipper, "_make_producer", lambda: KafkaProducer(**options))
    shipper.take(frame(numbered([*[EVENT] * 50, *[PLAIN] * 3])))
    shipper.step(hasten=True)
    shipper.take(frame(numbered([PLAIN], 53)))  # made before the record ahead of it is cut
    ship(shipper, lambda: shipper.books.sent == 54)
    most = len(shipper.outbox.cuts)
    for first in (54, 84, 114, 144):
        shipper.take(frame(numbered([EVENT] * 30, first)))
        ship(shipper, lambda sent=first + 30: shipper.books.sent == sent)  # type: ignore[misc]
        assert len(shipper.outbox.cuts) <= most, "of what was delivered none is remembered"
    small = len(encode_batch([PLAIN], ORIGIN, 10**6)) + RECORD_OVERHEAD
    assert len(encode_batch([large], ORIGIN, 0)) > small
    options["max_request_size"] = small
    shipper._leave()
    shipper.take(frame(numbered([PLAIN, large, PLAIN, large, large, PLAIN], 174)))
    ship(shipper, lambda: shipper.books.settled == 180)
    shipper.close()
    assert shipper.books.refused == {"MessageSizeTooLarge": 3}
    found = batches(kafka)
    assert [e.number for b in found for e in b.events] == [*range(175), 176, 179]
    sequences = [b.sequence for b in found]
    assert sequences == sorted(set(sequences)), "each number once"
    assert shipper.books.sequences[0] - len(found) == 3, "a gap for each that was refused"


@pytest.mark.parametrize("life", ["the same, begun again", "the next"])
def test_who_comes_after_a_cut_gives_no_number_twice(tmp_path: Path, life: str) -> None:
    """What moved up behind a record that came in two waits in the file when the carrier ends."""
    away = Producer(iter(["large", "", "reset", "reset"]), {0})
    shipper = impatient(Shipper(KafkaSettings(), ORIGIN, Books(), folder=tmp_path, most=MOST), away)
    shipper.take(frame(numbered([PLAIN] * 50)))
    shipper.step()
    shipper.take(frame(numbered([PLAIN] * 3, 50)))
    while not shipper.books.spilled:
        shipper.step()
    spilled, books = shipper.books.spilled, shipper.books.copy()
    shipper.close()
    assert spilled == 28 and [len(batch.events) for _, batch in away.records] == [25]
    back = Producer(iter(()), {0})
    if life == "the next":
        os.close(claim(tmp_path, ORIGIN.life))  # its process has gone, and with it the lock
        books, origin = Books(), replace(ORIGIN, life="ab")
    else:
        origin = ORIGIN
    after = impatient(Shipper(KafkaSettings(), origin, books, folder=tmp_path, most=MOST), back)
    for _ in range(20):
        after.step()
    if life != "the next":
        after.take(frame(numbered([PLAIN], 53)))
        after.step()
    after.close()
    came = [batch for _, batch in (*away.records, *back.records)]
    assert {batch.origin.life for batch in came} == {ORIGIN.life}
    assert [batch.sequence for batch in came] == list(range(len(came)))
    assert [e.number for batch in came for e in batch.events] == list(range(53 + len(came) - 3))


class Producer:
    """In the place of the client, of a broker that answers what it is told to answer.

    ``lost`` answers come to nobody: the record lies there all the same.
    """

    def __init__(self, answers: Iterator[str], partitions: set[int]) -> None:
        self.records: list[tuple[int, EventBatch]] = []
        self._answers, self._partitions = answers, partitions

    def partitions_for(self, topic: str) -> set[int]:
        return self._partitions

    def send(self, topic: str, *, partition: int, value: bytes, **rest: Any) -> Future:
        answer, future = next(self._answers, ""), Future()
        if topic == DRAFTS.name and (answer not in ERRORS or answer == "lost"):
            self.records.append((partition, decode_batch(value)))
        return future.failure(ERRORS[answer]) if answer in ERRORS else future.success(None)

    def close(self, timeout: float) -> None:
        pass


ERRORS: dict[str, Exception] = {
    "lost": KafkaTimeoutError("no answer"),
    "away": NotLeaderForPartitionError("elsewhere"),
    "reset": OSError("connection reset"),
    "credentials": SaslAuthenticationFailedError("who is it"),
    "large": MessageSizeTooLargeError("too large"),
    "invalid": InvalidRecordError("no"),
    "forbidden": TopicAuthorizationFailedError("no"),
}
FINAL = {"MessageSizeTooLarge", "InvalidRecord", "TopicAuthorizationFailed"}


def impatient(shipper: Shipper, producer: Producer) -> Shipper:
    """``shipper`` with that producer, and no pause after a failure."""
    shipper._make_producer = lambda: producer  # type: ignore[method-assign]
    turn = shipper.step

    def step(hasten: bool = True) -> None:
        shipper._retry_at = 0.0
        turn(hasten)

    shipper.step = step  # type: ignore[method-assign]
    return shipper


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["", "", *ERRORS]), max_size=40),
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
)
def test_whatever_the_broker_answers_every_event_is_counted_once(
    answers: list[str], sizes: list[int], partitions: int, spills: bool
) -> None:
    with tempfile.TemporaryDirectory() as root:
        told: list[Books] = []
        folder = Path(root) if spills else None
        shipper = Shipper(KafkaSettings(), ORIGIN, Books(), told.append, folder, 1 << 30)
        producer = Producer(iter(answers), set(range(partitions)))
        impatient(shipper, producer)
        made = 0
        for size in sizes:
            events = [PLAIN._replace(request=f"{n % 7:024x}") for n in range(size)]
            shipper.take(frame(numbered(events, made)))
            made += size
            for _ in range(3):
                shipper.step()
                assert balanced(shipper.books)
        for _ in range(300):
            shipper.step()
            assert balanced(shipper.books)
        books = shipper.books
        assert not books.waiting and not books.spilled and books.taken == made
        shipper.close()
        assert folder is None or not list(folder.iterdir()), "an empty file is not left behind"
    assert books.refused.keys() <= FINAL and not books.dropped
    by_request: dict[str, list[int]] = defaultdict(list)
    places: dict[str, set[int]] = defaultdict(set)
    records: dict[tuple[int, int], list[int]] = {}
    delivered: set[int] = set()
    for partition, batch in producer.records:
        numbers = [e.number for e in batch.events]
        known = records.setdefault((partition, batch.sequence), numbers)
        assert known == numbers, "one number for two records"
        for event in batch.events:
            places[event.request].add(partition)
            if event.number not in delivered:
                by_request[event.request].append(event.number)
        delivered.update(numbers)
    assert books.sent <= len(delivered) <= books.sent + books.in_doubt
    assert all(len(place) == 1 for place in places.values())
    assert all(numbers == sorted(numbers) for numbers in by_request.values()), "out of order"


def test_an_event_that_cannot_be_written_takes_no_other_with_it() -> None:
    shipper = impatient(Shipper(KafkaSettings(), ORIGIN, Books()), Producer(iter(()), {0}))
    bad = EVENT._replace(predicted=float("nan"))
    shipper.take(frame(numbered([*[PLAIN] * 40, bad, *[PLAIN] * 40])))
    for _ in range(15):
        shipper.step()
    assert shipper.books.refused == {"malformed": 1} and shipper.books.sent == 80


def test_what_is_no_frame_is_counted_and_ends_nothing() -> None:
    shipper = impatient(Shipper(KafkaSettings(), ORIGIN, Books()), Producer(iter(()), {0}))
    shipper.take(Frame(frames.EVENTS, 3, b"no MessagePack"))
    shipper.take(frame([PLAIN]))
    shipper.step()
    shipper.step()
    assert shipper.books.dropped == {"unreadable": 3} and shipper.books.sent == 1


def test_a_record_of_a_partition_that_is_gone_is_dropped_and_counted() -> None:
    producer = Producer(iter(["away"]), {0, 1})
    shipper = impatient(Shipper(KafkaSettings(), ORIGIN, Books()), producer)
    shipper.take(frame([PLAIN._replace(request=f"{n:024x}") for n in range(9)]))
    shipper.step()
    producer._partitions = {0}
    for _ in range(4):
        shipper.step()
    assert balanced(shipper.books) and not shipper.books.waiting
    lost = shipper.books.dropped.get("partition", 0) + shipper.books.in_doubt
    assert lost and shipper.books.sent + lost == 9


def test_the_books_are_told_before_a_record_that_they_know_is_sent() -> None:
    told: list[int] = []
    sent: list[int] = []

    class Watching(Producer):
        def send(self, topic: str, *, partition: int, value: bytes, **rest: Any) -> Future:
            sent.append(told[-1])
            return super().send(topic, partition=partition, value=value, **rest)

    def report(books: Books) -> None:
        told.append(books.sequences.get(0, 0))

    producer = Watching(iter(()), {0})
    shipper = impatient(Shipper(KafkaSettings(), ORIGIN, Books(), report), producer)
    for number in range(4):
        shipper.take(frame([PLAIN._replace(number=number)]))
        shipper.step()
    shipper.step()
    assert sent == [1, 2, 3, 4]


def test_rounds_that_the_broker_does_not_take_keep_no_event_waiting(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = replace(TRIALS, name="no such topic!")  # a name that no broker takes
    monkeypatch.setattr("decoder.telemetry.shipper.TRIALS", nowhere)
    shipper = Shipper(kafka, ORIGIN, Books())
    for number in range(3):
        shipper.take(Frame(frames.ROUND, 0, b"{}"))
        shipper.take(frame(numbered([PLAIN] * 5, 5 * number)))
        ship(shipper, lambda sent=5 * number + 5: shipper.books.sent == sent)  # type: ignore[misc]
    shipper.close()
    assert shipper.books.rounds_dropped == 3 and not shipper.books.rounds_sent
