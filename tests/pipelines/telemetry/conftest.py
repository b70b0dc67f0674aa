"""A broker with records of every topic, written by what writes them in a service."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import NewTopic

from decoder.contracts.errors import EventRefused
from decoder.contracts.events import Origin
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.topics import DRAFTS, TOPICS
from decoder.experiment.block import BlockTotals
from decoder.experiment.interleaver import FinishedRound, Interleaver
from decoder.experiment.variants import Variant
from decoder.kafka.clients import close, open_admin, open_producer
from decoder.policy.first import first_policy
from decoder.telemetry.supervisor import Supervisor
from learner.ingest.dead_letters import DeadLetters
from learner.ingest.source import Fetched
from learner.intake import Intake
from learner.lease import Lease
from learner.release.publisher import PolicyPublisher
from learner.status import StatusProducer
from learner.topics import ensure_topics
from tests.conftest import until
from tests.contracts.test_events import EVENT, ORIGIN, PLAIN
from tests.decoder.telemetry import broker
from tests.decoder.telemetry.broker import running
from tests.decoder.telemetry.telling import ring_of
from tests.events import DraftEvent, encode_events
from tests.pipelines.watch.records import event


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    """A broker with our topics and nothing on them."""
    with running(tmp_path_factory.mktemp("broker")) as reached:
        yield reached


@pytest.fixture(scope="module")
def written(empty: KafkaSettings) -> KafkaSettings:
    """The same with records of every kind."""
    of_worker(empty)
    of_intake(empty)
    of_learner(empty)
    return empty


@pytest.fixture
def filled(empty: KafkaSettings) -> KafkaSettings:
    """Only the draft records of :func:`mixed`."""
    spread(empty)
    produce(empty, mixed())
    return empty


def of_worker(kafka: KafkaSettings) -> None:
    """Events, a round of a trial, and statuses."""
    ring = ring_of(*[EVENT, PLAIN] * 50)
    policy = first_policy(ORIGIN.scope)
    interleaver = Interleaver((), 0.0, {}, policy, seed=1)
    account = BlockTotals(Variant("first", policy), groups={("", "edits"): [3.0, 1.0]})
    interleaver.rounds.append(FinishedRound(0, time.time(), (account,)))

    def status() -> WorkerStatus:
        made: dict[str, Any] = {"cycles": {"cache": 50, "model": 50}, "step_us": {"8": 30_000}}
        sums: Any = {"first": {"steps": 3, "tokens": 4.5, "us": 9.0, "cost_us": 8.0}}
        return WorkerStatus(
            process="w", scope="scope", time=time.time(), sides=sums, events_made=100, **made
        )

    supervisor = Supervisor(kafka, ring, ORIGIN, status, interleaver.rounds)
    supervisor.start()
    until(lambda: supervisor.report().sent == 100 and supervisor.report().rounds_sent == 1)
    supervisor.close()


def of_intake(kafka: KafkaSettings) -> None:
    """Lessons, out of what a worker has sent, and a status."""
    relay = Intake(kafka)
    until(lambda: relay.step() or relay.reader.records)
    relay.close()


def of_learner(kafka: KafkaSettings) -> None:
    """A lease, a policy and the end of another, a dead letter, and a status."""
    lease = Lease(kafka, "learner")
    until(lambda: lease.renew({"scope": 0}) or lease.holds("scope"))
    lease.close()
    publisher = PolicyPublisher(kafka)
    publisher.publish(first_policy("scope"), 1)
    publisher.withdraw("scope", "trial")
    publisher.close()
    dead = DeadLetters(kafka)
    dead.send(Fetched(0, 7, 0, b"w", b"{}"), EventRefused("no event"))
    until(dead._background.idle)
    dead.close()
    statuses = StatusProducer(kafka)
    statuses.send(LearnerStatus(process="learner", scope="scope", time=time.time()))
    until(statuses._background.idle)
    statuses.close()
    assert dead.failed == statuses.failed == 0


def lying(kafka: KafkaSettings) -> dict[str, list[Any]]:
    """Every record that lies there, by topic."""
    return {topic.name: broker.lying(kafka, topic.name) for topic in TOPICS}


def folder_of(name: str) -> Path:
    """Of the checkout."""
    return Path(__file__).parents[3] / name


ONE, OTHER = Origin("scope", "one", "1a" * 8), Origin("scope", "other", "2b" * 8)
NOW = float(round(time.time()))
HOSTILE = (b"", b"no record", b"[" * 5_000, b'{"contract": "hvd.drafts.v9"}')


def spread(kafka: KafkaSettings, partitions: int = 3) -> None:
    """Our topics, that of drafts on so many partitions, and nothing on it."""
    admin = open_admin(kafka, "test", 60_000)
    if DRAFTS.name in admin.list_topics():
        admin.delete_topics([DRAFTS.name])
    admin.create_topics([NewTopic(DRAFTS.name, partitions, 1)])
    close(admin)
    ensure_topics(kafka)


def events(first: int, count: int, ago: float = 60.0) -> list[DraftEvent]:
    """Of the numbers from ``first`` on, a tenth of a second apart."""
    return [
        event(
            number, NOW - ago + number / 10, accepted=number % 8, batch_size=1 + number % 4,
            workload=("edits", "chat")[number % 2], arm=("cache", "none")[number % 3 == 2],
        )
        for number in range(first, first + count)
    ]  # fmt: skip


def record(origin: Origin, sequence: int, first: int, count: int = 10) -> bytes:
    return encode_events(events(first, count), origin, sequence)


def produce(kafka: KafkaSettings, sent: Sequence[tuple[int, bytes]]) -> None:
    """Records by partition, as they are sent."""
    producer = open_producer(kafka, "test", compression_type="zstd")
    for partition, value in sent:
        producer.send(DRAFTS.name, partition=partition, value=value, headers=DRAFTS.headers)
    producer.flush()
    close(producer)


def mixed() -> list[tuple[int, bytes]]:
    """Fifteen records of two lives: a record and some events come twice, two records are lost, and
    four are none. 100 distinct events: 70 of the one worker and 30 of the other."""
    return [
        (0, record(ONE, 0, 0)),
        (0, record(ONE, 1, 10)),
        (1, record(ONE, 0, 20)),
        (2, record(OTHER, 0, 0)),
        *((1, value) for value in HOSTILE),
        (0, record(ONE, 1, 10)),  # again
        (0, record(ONE, 4, 30)),  # two lost
        (1, record(ONE, 1, 35, 15)),  # of which five came above, on another partition
        (2, record(OTHER, 1, 20)),
        (2, record(OTHER, 2, 10)),
        (1, record(ONE, 2, 50)),
        (0, record(ONE, 5, 60)),
    ]
