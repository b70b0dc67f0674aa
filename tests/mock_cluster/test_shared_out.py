"""Two intakes and two learners, as processes, share topics out by groups; each is killed once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from kafka.partitioner.default import murmur2

from decoder.contracts.bundle import unpack
from decoder.contracts.events import Origin, decode_batch
from decoder.contracts.status import LearnerStatus, WorkerStatus, decode_status
from decoder.contracts.topics import DRAFTS, LESSONS, POLICY, STATUS
from decoder.kafka.clients import close, fetch, open_consumer, open_producer, partitions_of
from learner import intake
from learner.ingest import group
from tests import raw_batches as raw
from tests.conftest import until
from tests.decoder.telemetry.broker import lying, send
from tests.events import encode_events
from tests.learner.stage import WARNINGS
from tests.learner.stream import batches
from tests.learner.traffic import Traffic
from tests.mock_cluster.cluster import PRODUCE, MockCluster, running

pytestmark = WARNINGS
NOT_AUTHORISED: Final = 29
PARTITIONS: Final = 4
RECORD: Final = 40
PATIENCE_S: Final = 600.0


def scope_on(partition: int) -> str:
    """A scope whose lessons lie there."""
    names = (f"s{n}" for n in range(1_000))
    return next(n for n in names if (murmur2(n.encode()) & 0x7FFFFFFF) % PARTITIONS == partition)


SCOPES: Final = [scope_on(partition) for partition in range(PARTITIONS)]


@dataclass
class Fleet:
    """Its processes by name, what was sent to it, and what it says."""

    cluster: MockCluster
    folder: Path
    store: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)  # drafts by scope
    said: dict[str, dict[str, LearnerStatus]] = field(default_factory=lambda: defaultdict(dict))
    held: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    waves: int = 0

    def __post_init__(self) -> None:
        self.producer = open_producer(self.cluster.kafka, "test")
        self.statuses = open_consumer(self.cluster.kafka, "test")
        self.statuses.assign(partitions_of(self.statuses, STATUS.name))
        self.statuses.seek_to_beginning()
        for scope in SCOPES:
            told = WorkerStatus(process="w", scope=scope, time=time.time())
            self.producer.send(STATUS.name, value=told.model_dump_json().encode())

    def start(self, name: str) -> None:
        """``name`` begins with what it is: intake or learner."""
        environment = {
            **os.environ,
            "HVD_KAFKA_BOOTSTRAP_SERVERS": self.cluster.kafka.bootstrap_servers,
            "HVD_LEARNER_STATE_DIR": str(self.folder / name),
            "HVD_LEARNER_MLFLOW_TRACKING_URI": f"sqlite:///{self.store}",
            "HVD_LEARNER_INTAKE": "lessons",
            "HVD_LEARNER_ROLLOUT": "off",
            "HVD_LEARNER_CANDIDATE_EVERY": "200",
            "HVD_LEARNER_ROWS_PER_SECOND": "1000000",
        }
        module = "learner.intake" if name.startswith("intake") else "tests.learner.killed"
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", module]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.processes[name] = process

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait(300)

    def send(self, records: int = 5) -> None:
        """Some records of each scope, with what is none between them."""
        for at, scope in enumerate(SCOPES):
            events = Traffic(seed=at, prefix=f"w{self.waves}").events(records * RECORD // 20)
            for n in range(records):
                number = self.sent[scope] // RECORD + n
                origin = Origin(scope, "w", f"{at + 1:08x}")
                part = events[n * RECORD : (n + 1) * RECORD]
                self.producer.send(
                    DRAFTS.name, partition=number % PARTITIONS,
                    value=encode_events(part, origin, number // PARTITIONS),
                )  # fmt: skip
            self.sent[scope] += records * RECORD
        self.producer.send(DRAFTS.name, value=b"poison")
        self.producer.send(LESSONS.name, value=b"poison", partition=self.waves % PARTITIONS)
        self.producer.flush()
        self.waves += 1

    def look(self) -> None:
        """Take in what was said."""
        for name, process in self.processes.items():
            assert process.poll() is None, (self.folder / f"{name}.log").read_text()[-3_000:]
        for record in fetch(self.statuses, 50):
            status = decode_status(record.value)
            if isinstance(status, LearnerStatus):
                self.said[status.process][status.scope] = status
                if status.holds_lease:
                    self.held[status.scope].append(status.time)

    def holding(self) -> list[LearnerStatus]:
        """The newest status of each scope by whom it holds, as far as that is still said."""
        told = [status for said in self.said.values() for status in said.values()]
        newest = max((status.time for status in told), default=0.0)
        return [each for each in told if each.holds_lease and each.time > newest - 5.0]

    def learned(self) -> dict[str, int]:
        """Drafts that whoever holds a scope has learned from, by scope."""
        return {status.scope: status.drafts_consumed for status in self.holding()}

    def is_shared(self) -> bool:
        """Whether each of two learners has a part of the scopes, and all is learned."""
        return len({status.process for status in self.holding()}) == 2 and self.all_learned()

    def wait(self, done: Callable[[], bool], what: str) -> None:
        until(done, f"{what}: {self.learned()} of {self.sent}", PATIENCE_S, self.look)

    def all_learned(self) -> bool:
        return self.learned() == dict(self.sent)

    def busy(self, seconds: float) -> None:
        """Send for so long."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.send(2)
            self.look()
            time.sleep(0.3)

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)
        close(self.producer)
        close(self.statuses)


def test_refused_training_rows_are_sent_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"SESSION_MS": 3_000, "HEARTBEAT_MS": 500}.items():
        monkeypatch.setattr(group, name, value)  # the mock cluster waits so long for who has left
    for name in ("RETRY", "COMMIT"):
        monkeypatch.setattr(intake, f"{name}_SECONDS", 0.1)
    values = batches(Traffic(seed=1).events(10))
    with running() as cluster:
        send(cluster.kafka, DRAFTS.name, *values)
        relay = intake.Intake(cluster.kafka)
        monkeypatch.setattr("learner.status.RETRY_SECONDS", PATIENCE_S)
        cluster.answer(PRODUCE, *[NOT_AUTHORISED] * 5)  # of which a status takes one
        consumer = open_consumer(cluster.kafka, "test")
        consumer.assign(partitions_of(consumer, LESSONS.name))
        came: set[int] = set()

        def read() -> bool:
            relay.step()
            came.update(decode_batch(record.value).sequence for record in fetch(consumer))
            return came == set(range(len(values)))

        until(read, "all lessons", PATIENCE_S)
        assert "sending them again" in caplog.text
        relay.close()
        again = intake.Intake(cluster.kafka)  # begins where the other ended
        until(lambda: again.step() or again.source.caught_up, "its part", PATIENCE_S)
        assert not again.reader.records and not again.faults
        again.close()
        close(consumer)


def test_a_member_rejoins_after_a_client_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "RETRY_SECONDS", 0.1)

    def fails(**_: object) -> None:
        raise ValueError("an answer that the client cannot read")

    with running() as cluster:
        member = group.GroupMember(cluster.kafka, DRAFTS, "test", commits=True)
        until(lambda: member.update() or member.assignment.owned, "its part")
        client = member._consumer
        monkeypatch.setattr(client, "poll", fails)
        until(lambda: member.update() or member._consumer not in (client, None), "another client")
        member.commit({0: 0})
        until(lambda: not member._to_commit, "its offset is kept")
        member.close()


@pytest.fixture
def fleet(tmp_path: Path, empty_store: Path) -> Iterator[Fleet]:
    store = tmp_path / "mlflow.db"
    shutil.copy(empty_store, store)
    with running(more={DRAFTS.name: PARTITIONS, LESSONS.name: PARTITIONS}) as cluster:
        made = Fleet(cluster, tmp_path, store)
        yield made
        made.close()


@pytest.mark.long
def test_kills_lose_and_repeat_no_training_row_and_a_scope_has_one_publisher(
    fleet: Fleet, record_property: Callable[[str, object], None]
) -> None:
    fleet.start("intake-a")
    fleet.start("learner-a")
    fleet.send()
    fleet.wait(fleet.all_learned, "one of each")
    for name in ("intake-b", "learner-b"):  # which has the others give some up in mid-stream
        fleet.start(name)
        fleet.busy(8.0)
    fleet.wait(fleet.is_shared, "two of each")
    for topic in (DRAFTS, LESSONS):  # what cannot be unpacked
        raw.put(fleet.cluster.kafka, topic.name, raw.batch(b"\xff\x07" * 40, 3, 1))
    for name in ("intake-a", "intake-b", "learner-a", "learner-b"):
        fleet.busy(3.0)
        fleet.kill(name)
        fleet.busy(3.0)
        fleet.wait(fleet.all_learned, f"without {name}")
        fleet.start(name)
        fleet.busy(3.0)
        fleet.wait(fleet.is_shared, f"with {name} again")

    sent, twice = dict[tuple[int, int], int](), 0
    for record in lying(fleet.cluster.kafka, LESSONS.name):
        if record.value != b"poison":
            batch = decode_batch(record.value)
            assert batch.source is not None and record.key == batch.origin.scope.encode()
            place = batch.source.partition, batch.source.offset
            twice += place in sent
            sent[place] = len(batch)
    assert sum(sent.values()) == fleet.sent.total()
    numbers = defaultdict[bytes, list[int]](list)
    for record in lying(fleet.cluster.kafka, POLICY.name):
        numbers[record.key].append(unpack(record.value)[0].publication)
    assert len(numbers) >= len(SCOPES)
    assert all(each == sorted(set(each)) for each in numbers.values())
    away = {s: max(b - a for a, b in pairwise(at)) for s, at in fleet.held.items()}
    record_property("seconds without an owner", away)
    print(f"without an owner: {away}; sent twice: {twice}; numbers: {dict(numbers)}")
