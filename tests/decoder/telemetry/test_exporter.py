"""What the exporter makes of events, with a broker and with one that refuses: all are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.events import EventBatch, decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, TRIALS
from decoder.kafka.sender import open_sender
from decoder.telemetry.exporter import BATCH, Exporter
from decoder.telemetry.head_sampling import HeadSampler
from decoder.telemetry.ring import HEAD, Ring
from tests.conftest import until
from tests.contracts.test_events import EVENT, ORIGIN, PLAIN
from tests.decoder.telemetry.broker import batches, numbers
from tests.decoder.telemetry.telling import put, ring_of
from tests.events import encode_events, events_of

RECORD_OVERHEAD = 300
"""Bytes, at most, that the client adds to a record's value before it compares with its limit."""


def ship(exporter: Exporter, done: Callable[[], bool]) -> None:
    """Turn until it comes true, without the pauses after a failure; counts add up each time."""

    def turn() -> None:
        exporter._retry_at = 0.0
        exporter.turn()
        assert balanced(exporter._ring)

    until(done, "it to be shipped", turn=turn, pause=0.0)


def balanced(ring: Ring) -> bool:
    """Whether what was said is of one moment: whole slices, each event in one place."""
    progress = ring.progress()
    under_way = max(progress.end - progress.settled, 0)
    return 0 <= progress.settled <= progress.settled + under_way <= ring.control[HEAD]


def test_a_batch_above_the_limit_is_cut(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client refuses here, as a broker would, whatever is larger than a few events."""
    most = len(encode_events([EVENT] * 3, ORIGIN, 10**6)) + RECORD_OVERHEAD
    monkeypatch.setattr(
        "decoder.telemetry.exporter.open_sender",
        lambda *told: open_sender(*told, {"message.max.bytes": most}),
    )
    ring = ring_of(*[EVENT] * 50, *[PLAIN] * 3)
    exporter = Exporter(kafka, ORIGIN, ring)
    ship(exporter, lambda: exporter.progress.sent == 53)
    put(ring, *[EVENT] * 30)
    ship(exporter, lambda: exporter.progress.sent == 83)
    exporter.close()
    found = batches(kafka)
    assert numbers(found) == list(range(83)) and len(found) > 20
    assert [batch.sequence for batch in found] == list(range(len(found)))


class Producer:
    """In the place of librdkafka's, of a broker that answers what it is told to answer.

    ``lost`` answers say that it cannot be known: the record lies there all the same.
    """

    def __init__(self, answers: Iterator[str], partitions: int = 1) -> None:
        self.records: list[tuple[int, EventBatch]] = []
        self.answers, self.partitions = answers, partitions
        self._due: list[tuple[Any, Any]] = []

    def list_topics(self, topic: str, timeout: float) -> Any:
        told = SimpleNamespace(error=None, partitions=dict.fromkeys(range(self.partitions)))
        return SimpleNamespace(topics={topic: told})

    def produce(
        self, topic: str, *, value: bytes, on_delivery: Any, partition: int = 0, **rest: Any
    ) -> None:
        answer = next(self.answers, "")
        if answer == "full":
            raise BufferError("Local: Queue full")
        if partition >= self.partitions:
            answer = "gone"
        elif topic == DRAFTS.name and answer in ("", "lost"):
            self.records.append((partition, decode_batch(value)))
        self._due.append((on_delivery, KafkaError(ERRORS[answer]) if answer else None))

    def poll(self, timeout: float) -> None:
        due, self._due = self._due, []
        for landed, error in due:
            landed(error, None)


ERRORS = {
    "lost": KafkaError._TIMED_OUT,
    "away": KafkaError._TRANSPORT,
    "unknown": KafkaError.UNKNOWN_TOPIC_OR_PART,
    "gone": KafkaError._UNKNOWN_PARTITION,
    "large": KafkaError.MSG_SIZE_TOO_LARGE,
    "invalid": KafkaError.INVALID_RECORD if hasattr(KafkaError, "INVALID_RECORD") else 87,
    "forbidden": KafkaError.TOPIC_AUTHORIZATION_FAILED,
}
FINAL = {"MsgSizeTooLarge", "InvalidRecord", "TopicAuthorizationFailed"}


def beside(ring: Ring, producer: Any, sampler: HeadSampler | None = None) -> Exporter:
    """An exporter with that producer."""
    exporter = Exporter(KafkaSettings(), ORIGIN, ring, sampler)
    exporter._producer = producer
    return exporter


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["", "", "full", *(set(ERRORS) - {"gone"})]), max_size=40),
    st.lists(st.integers(1, 600), min_size=1, max_size=4),
    st.integers(1, 4),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_whatever_the_broker_answers_and_whoever_dies_every_event_is_counted_once(
    answers: list[str], sizes: list[int], partitions: int, deaths: list[int]
) -> None:
    """An exporter that dies after so many turns leaves the ring as it is, and another begins."""
    ring, producer = Ring(4096), Producer(iter(answers), partitions)
    exporter, left, life = beside(ring, producer), iter(deaths), 10**9
    life = next(left, life)
    made = 0
    for turn in range(2_000):
        if turn % 3 == 0 and turn // 3 < len(sizes):
            size = sizes[turn // 3]
            put(ring, *[PLAIN] * size)
            made += size
        if not life:
            producer._due.clear()  # whoever was to hear of it is no more
            exporter, life = beside(ring, producer), next(left, 10**9)
        life -= 1
        exporter._retry_at = 0.0
        exporter.turn()
        assert balanced(ring)
        if turn // 3 >= len(sizes) and exporter.idle:
            break
    progress = ring.progress()
    assert (
        progress.settled == made == ring.control[HEAD]
        and not progress.dropped
        and not progress.in_doubt
    )
    assert progress.refused.keys() <= FINAL
    records: dict[int, list[int]] = {}
    delivered: set[int] = set()
    for _, batch in producer.records:
        here = [event.number for event in events_of(batch)]
        known = records.setdefault(batch.sequence, here)
        # nor does a broker take a record, let nobody know, and then find it too large
        changes = {"lost", "large"} <= set(answers)
        # A death makes a refusal undone, which the one who comes after may not get.
        undone = bool(deaths and set(answers) & {"large", "invalid", "forbidden"})
        assert known == here or undone or changes, "one number for two records"
        new = [number for number in here if number not in delivered]
        assert undone or not delivered or not new or min(new) > max(delivered), "out of order"
        delivered.update(here)
    assert progress.sent <= len(delivered)
    assert len(delivered) == progress.sent or deaths or "lost" in answers
    assert len({partition for partition, _ in producer.records}) <= 1


def test_who_comes_after_a_cut_sends_the_same_records_under_the_same_numbers() -> None:
    """One that is killed while the second half of a record that was too large is under way."""
    ring = ring_of(*[PLAIN] * 50)
    away = Producer(iter(["large", "", "away"]))
    exporter = beside(ring, away)
    for _ in range(4):
        exporter.turn()
    assert [len(batch) for _, batch in away.records] == [25]
    back = Producer(iter(["large"]))
    after = beside(ring, back)
    ship(after, lambda: after.idle)
    put(ring, *[PLAIN] * 3)
    ship(after, lambda: after.idle)
    found = [batch for _, batch in away.records + back.records]
    assert [batch.sequence for batch in found] == [0, 1, 2, 3]
    assert numbers(found) == list(range(53)) and ring.progress().sent == 53


def test_a_topic_that_is_made_anew_with_fewer_partitions_loses_no_event() -> None:
    producer = Producer(iter(["", "away"]), 8)
    ring = ring_of(*[PLAIN] * 9)
    exporter = beside(ring, producer)
    ship(exporter, lambda: exporter.idle)
    assert exporter.progress.partition > 0
    put(ring, *[PLAIN] * 9)
    producer.partitions = 1
    ship(exporter, lambda: exporter.idle)
    assert numbers([batch for _, batch in producer.records]) == list(range(18))
    assert (exporter.progress.partition, exporter.progress.sent) == (0, 18)


def test_memory_that_somebody_wrote_over_costs_the_rows_it_hits() -> None:
    """Whatever lies there: it is counted, and holds up nothing."""
    ring, random = ring_of(*[EVENT, PLAIN] * 60), np.random.default_rng(0)
    hit = [3, 50, 51, 119]
    width = ring.rows.itemsize
    for row in hit:
        ring.rows[row : row + 1].view(f"V{width}")[:] = random.bytes(width)
        ring.rows["share"][row] = 1.0  # else it was shed
    put(ring, *[PLAIN] * 7, EVENT._replace(predicted=float("nan")), PLAIN)
    ring.rows["arm"][125] = 255  # a word that nobody said
    ring.rows["arm"][126] = 1 << 20
    exporter = beside(ring, (producer := Producer(iter(()))))
    ship(exporter, lambda: exporter.idle)
    assert exporter.progress.refused == {"malformed": len(hit) + 2}
    came = {number for _, batch in producer.records for number in batch.numbers["number"]}
    assert came == {*range(129)} - {*hit, 126, 127} and exporter.progress.sent == len(came)


def test_while_a_broker_is_away_nobody_asks_without_a_pause() -> None:
    class Away(Producer):
        def list_topics(self, topic: str, timeout: float) -> Any:
            raise KafkaException(KafkaError(ERRORS["away"]))

    ring = ring_of(*[PLAIN] * 3 * BATCH)
    exporter = beside(ring, Away(iter(())))
    exporter.turn()
    assert not exporter.busy and not exporter.idle
    exporter._producer = Producer(iter(()))
    ship(exporter, lambda: exporter.idle)
    assert exporter.progress.sent == 3 * BATCH


def test_what_is_shed_is_counted_and_what_is_kept_says_with_which_chance() -> None:
    clock = SimpleNamespace(now=0.0)
    sampler = HeadSampler(20.0, lambda: clock.now)
    ring, producer = Ring(1_000), Producer(iter(()))
    exporter = beside(ring, producer, sampler)
    made = 0
    for _ in range(6):
        put(ring, *[PLAIN._replace(request=f"{made + n:024x}") for n in range(600)])
        made += 600
        clock.now += 5.0
        ship(exporter, lambda: exporter.idle)
    progress = ring.progress()
    shares = {event.share for _, batch in producer.records for event in events_of(batch)}
    assert shares > {1.0} and shares <= {0.5**n for n in range(9)}
    assert progress.dropped.keys() == {"shed"} and progress.sent + progress.dropped["shed"] == made
    assert progress.sent == sum(len(batch) for _, batch in producer.records)


def test_rounds_that_the_broker_does_not_take_keep_no_event_waiting(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = replace(TRIALS, name="no such topic!")  # a name that no broker takes
    monkeypatch.setattr("decoder.telemetry.exporter.TRIALS", nowhere)
    ring = Ring(100)
    exporter = Exporter(kafka, ORIGIN, ring)
    for number in range(3):
        exporter.enqueue(b"R", b"{}")
        put(ring, *[PLAIN] * 5)
        ship(exporter, lambda sent=5 * number + 5: exporter.progress.sent == sent)  # type: ignore[misc]
    exporter.close()
    assert ring.progress().rounds_dropped == 3 and not ring.progress().rounds_sent
