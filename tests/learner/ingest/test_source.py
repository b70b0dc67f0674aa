"""Reading goes on from the checkpoint's offsets, and says what it could not read."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from decoder.kafka import clients
from decoder.kafka.clients import ANSWER_MS
from decoder.limited_log import LimitedLog
from learner.ingest import source as sources
from learner.ingest.source import GLANCE_MS, EventSource, Fetched
from tests.conftest import until
from tests.learner.conftest import Broker
from tests.learner.stream import batches, produce, produce_unreadable
from tests.learner.traffic import Traffic

EVENTS = Traffic(seed=9).events(10)


def at(partition: int, offset: int) -> Fetched:
    return Fetched(partition, offset, 0, None, b"")


def reading(broker: Broker, *offsets: dict[int, int], **rest: Any) -> EventSource:
    """A source of what lies there."""
    return EventSource(broker.kafka, *(offsets or [{}]), **rest)


def read_all(source: EventSource, count: int) -> list[bytes]:
    """Values of what comes until ``count`` records have, as a learner reads them."""
    found: list[bytes] = []

    def read() -> None:
        records = source.poll(0.05)
        found.extend(record.value for record in records)
        source.done(records)

    until(lambda: len(found) >= count, f"{count} records", turn=read, pause=0.0)
    return found


def test_what_cannot_be_unpacked_is_passed_over_counted_and_said(
    broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_limited_log", LimitedLog())
    whole = batches(EVENTS)
    produce(broker.kafka, whole[:2])
    produce_unreadable(broker.kafka)
    produce_unreadable(broker.kafka)
    produce(broker.kafka, whole[2:])
    source = reading(broker)
    assert read_all(source, len(whole)) == whole and source.skipped == 2 and source.lag() == 0
    assert "partition 0, offset 2" in caplog.text and "removed" not in caplog.text
    source.close()


def test_a_clock_that_is_ahead_does_not_hide_how_old_the_next_records_are() -> None:
    source = EventSource(KafkaSettings(), {})
    source.done([Fetched(0, 0, 4_000_000_000_000, None, b"")])
    assert 0.0 < source.read_at <= time.time()
    source.done([Fetched(0, 1, 1_000_000, None, b""), Fetched(0, 2, 3_000_000, None, b"")])
    assert source.read_at == 3_000.0


def test_an_offset_that_is_not_there_any_more_is_read_from_the_earliest(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    produce(broker.kafka, batches(EVENTS))
    source = reading(broker, {0: 100})
    read_all(source, 4)
    assert source.offsets == {0: 4} and "was made anew" in caplog.text
    source.close()


def made_anew(broker: Broker, values: list[bytes]) -> None:
    admin = KafkaAdminClient(**broker.kafka.client_options())
    admin.delete_topics([DRAFTS.name])
    admin.create_topics([NewTopic(DRAFTS.name, 1, 1)])
    admin.close()
    produce(broker.kafka, values)


def numbered(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix} {number}".encode() for number in range(count)]


def test_a_topic_made_anew_while_nobody_read_is_read_whole_however_far_it_has_grown(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    produce(broker.kafka, numbered("old", 20))
    before = reading(broker)
    assert read_all(before, 20) == numbered("old", 20)
    before.close()
    made_anew(broker, numbered("new", 50))
    after = reading(broker, before.offsets, marks=before.marks)
    assert read_all(after, 50) == numbered("new", 50)
    assert after.offsets == {0: 50} and after.skipped == after.lag() == 0
    assert "was made anew" in caplog.text
    after.close()


def test_a_topic_made_anew_under_a_reader_is_read_whole(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PARTITIONS_SECONDS", 0.3)
    produce(broker.kafka, numbered("old", 5))
    source = reading(broker)
    read_all(source, 5)
    made_anew(broker, numbered("new", 50))
    found: set[bytes] = set()
    until(lambda: found.update(read_all(source, 1)) or found >= {*numbered("new", 50)})
    until(lambda: source.offsets == {0: 50}, turn=lambda: source.done(source.poll(0.05)))
    assert source.skipped == 0
    source.close()


def test_a_reader_that_looks_back_reads_nothing_twice_and_misses_nothing(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PARTITIONS_SECONDS", 0.2)
    source = reading(broker)
    for turn in range(4):
        values = numbered(f"turn {turn}", 70)
        produce(broker.kafka, values)
        if turn == 2:
            produce_unreadable(broker.kafka)
        assert read_all(source, 70) == values
    source.done(source.poll(0.1))
    source.close()
    again = reading(broker, source.offsets, marks=source.marks)
    produce(broker.kafka, numbered("last", 3))
    assert read_all(again, 3) == numbered("last", 3)
    assert (source.skipped, again.skipped, again.offsets) == (1, 0, {0: 284})
    again.close()


def test_what_was_removed_before_it_was_read_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    source = EventSource(KafkaSettings(), {0: 5}, skipped=1)
    source.done([at(0, 9), at(1, 700), at(0, 10), at(1, 701)])
    assert source.offsets == {0: 11, 1: 702} and source.skipped == 5
    assert "4 records of partition 0 were removed" in caplog.text


def test_a_source_that_finds_nothing_gives_the_next_fetch_little_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a broker answers empty fetches at once, the client asks as often as it is let."""
    came: list[list[SimpleNamespace]] = []
    patience: list[int] = []
    rests: list[float] = []

    def poll(timeout_ms: int) -> dict[int, list[SimpleNamespace]]:
        patience.append(timeout_ms)
        return {0: came.pop()} if came else {}

    source = EventSource(KafkaSettings(), {})
    monkeypatch.setattr("learner.ingest.source.time.sleep", rests.append)
    monkeypatch.setattr(source, "_assign", lambda: None)
    monkeypatch.setattr(source, "_consumer", SimpleNamespace(poll=poll))
    record = SimpleNamespace(partition=0, offset=0, timestamp=0, key=None, value=b"")
    for records in ([], [record], [record], [], []):
        came.append(records)
        source.poll(0.25)
    assert 0.25 in rests, "and rests"
    assert patience == [GLANCE_MS, GLANCE_MS, ANSWER_MS, ANSWER_MS, GLANCE_MS]


def test_what_retention_has_emptied_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [TopicPartition(DRAFTS.name, partition) for partition in (0, 1)]
    answers = SimpleNamespace(
        partitions_for_topic=lambda topic: {0, 1},
        assignment=lambda: set(places),
        beginning_offsets=lambda asked, timeout_ms: dict.fromkeys(asked, 900),
        highwater=lambda place: 900,
    )
    source = EventSource(KafkaSettings(), {0: 5})
    monkeypatch.setattr(source, "_consumer", answers)
    source.done([])
    assert source.lag() == 1795 and not source.caught_up
    source._assign()
    source.done([])
    assert source.lag() == 0 and source.caught_up


def test_what_retention_removes_while_it_is_looked_at_ends_no_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, begins = TopicPartition(DRAFTS.name, 0), [3, 9]
    record = SimpleNamespace(partition=0, offset=9, timestamp=0, key=None, value=b"next")
    answers = SimpleNamespace(
        partitions_for_topic=lambda topic: {0},
        assignment=lambda: {place},
        beginning_offsets=lambda asked, timeout_ms: {place: begins.pop(0)},
        seek=lambda place, offset: None,
        position=lambda place: 10,
        poll=lambda timeout_ms: {place: [record]},
    )
    source = EventSource(KafkaSettings(), {0: 8}, marks={0: (5, 0, 0)})
    monkeypatch.setattr(source, "_consumer", answers)
    for _ in range(2):
        source._assign()
    assert [each.value for each in source.poll(0.0)] == [b"next"]


def test_a_broker_that_is_away_is_heard_to_be_silent(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PARTITIONS_SECONDS", 0.5)
    monkeypatch.setattr(sources, "ENDS_MS", 200)
    source = reading(broker)
    for _ in range(3):
        source.poll(0.4)
    until(lambda: source.silent_seconds() == 0.0, "its word", turn=lambda: source.poll(0.1))
    broker.stop()
    until(lambda: source.silent_seconds() > 0.0, "its silence", turn=lambda: source.poll(0.1))
    broker.child = Broker(tmp_path, broker.port).child  # heard again when it is back
    until(lambda: source.silent_seconds() == 0.0, "its word", turn=lambda: source.poll(0.1))
    source.close()
