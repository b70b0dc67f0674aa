"""Topics that get more partitions, or are made anew with others, while everything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pytest
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import KafkaError, TopicAlreadyExistsError

from decoder.admission import Admission
from decoder.contracts.bundle import Policy
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.topics import DRAFTS, LEASE, POLICY, STATUS, TRIALS, Topic, policy_key
from decoder.feed import PolicyFeed
from decoder.kafka import clients, compacted
from decoder.policy.probes import to_bytes
from learner.ingest import group, source
from learner.ingest.source import EventSource
from learner.ingest.statuses import StatusReader
from learner.lease import Lease
from learner.release import publisher as publishing
from learner.release.policy_topic import PolicyTopic
from learner.release.publisher import PolicyPublisher
from pipelines.watch.ledger import Ledger, Observer
from tests.conftest import random_policy, until
from tests.decoder.telemetry.broker import lying, send
from tests.learner.conftest import Broker, Clock
from tests.learner.stage import WARNINGS, Stage
from tests.learner.stream import SCOPE

pytestmark = WARNINGS

CHAMPION, TRIAL = policy_key("scope", "champion"), policy_key("scope", "trial")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "METADATA_MS", 200)
    monkeypatch.setattr(compacted, "REVIEW_SECONDS", 0.2)
    monkeypatch.setattr(source, "PARTITIONS_SECONDS", 0.2)


def add_partitions(broker: Broker, topic: Topic, count: int) -> None:
    with closing(KafkaAdminClient(**broker.kafka.client_options())) as admin:
        admin.create_partitions({topic.name: count})


def make_anew(broker: Broker, topic: Topic, partitions: int) -> None:
    """As this broker allows: a client that asks for a topic that is gone has it made again."""
    with closing(KafkaAdminClient(**broker.kafka.client_options())) as admin:
        admin.delete_topics([topic.name])
        try:
            admin.create_topics([NewTopic(topic.name, partitions, -1)])
        except TopicAlreadyExistsError:
            if partitions > 1:
                admin.create_partitions({topic.name: partitions})


def bundle(version: int, publication: int, role: str = "champion") -> bytes:
    policy = random_policy(version=version, scope="scope")
    return to_bytes(replace(policy, publication=publication, role=role))


class Worker:
    """A feed and what it has put in force."""

    def __init__(self, broker: Broker) -> None:
        self.applied: list[Policy] = []
        self.desk = Admission("scope", self.applied.append)
        self._feed = PolicyFeed(broker.kafka, "scope", self.desk)
        self._feed.start()

    @property
    def version(self) -> int:
        return self.applied[-1].version if self.applied else 0

    @property
    def trial(self) -> int:
        return self.desk.held["trial"].version if "trial" in self.desk.held else 0

    def close(self) -> None:
        self._feed.close()


@pytest.fixture
def worker(broker: Broker) -> Iterator[Worker]:
    with closing(Worker(broker)) as made:
        yield made


@pytest.fixture
def publisher(broker: Broker) -> Iterator[PolicyPublisher]:
    with closing(PolicyPublisher(broker.kafka)) as made:
        yield made


def test_a_worker_receives_promotions_after_partitions_are_added(
    broker: Broker, worker: Worker, publisher: PolicyPublisher
) -> None:
    publisher.publish(random_policy(version=1, scope="scope"), 1)
    until(lambda: worker.version == 1)
    add_partitions(broker, POLICY, 7)
    with closing(PolicyPublisher(broker.kafka)) as other:  # which knows of all seven
        for version in range(2, 6):
            made = random_policy(version=version, scope="scope")
            sent = (publisher, other)[version % 2].publish(made, 1)
            until(lambda: worker.version == version)  # noqa: B023 -- called within the turn
            for each in (publisher, other):
                assert each.topic.read(60.0)
                last = each.topic.last("scope")
                assert last is not None and last.number == sent.publication
    assert {r.partition for r in lying(broker.kafka, POLICY.name) if r.key == CHAMPION} == {0}


def test_the_newest_publication_counts_on_any_partition(broker: Broker, worker: Worker) -> None:
    """Releases before this one published by the hash of the key."""
    with closing(PolicyTopic(broker.kafka)) as seen:

        def last() -> int:
            seen.read()
            found = seen.last("scope")
            return 0 if found is None else found.number

        send(broker.kafka, POLICY.name, bundle(1, 1), key=CHAMPION)
        until(lambda: worker.version == 1 and last() == 1)
        add_partitions(broker, POLICY, 3)
        send(broker.kafka, POLICY.name, bundle(3, 3), key=CHAMPION, partition=2)
        until(lambda: worker.version == 3 and last() == 3)
        send(broker.kafka, POLICY.name, bundle(2, 2), b"poison", None, key=CHAMPION, partition=1)
        until(lambda: worker.desk.ignored["older"] or worker.desk.refusals["malformed"])
        assert worker.version == 3 and seen.read(60.0) and last() == 3
        with closing(Worker(broker)) as late:
            until(lambda: late.version == 3)
        with closing(PolicyTopic(broker.kafka)) as anew:
            assert anew.read(60.0)
            found = anew.last("scope")
            assert found is not None and found.number == 3


def test_a_trial_is_withdrawn_from_every_partition(
    broker: Broker, worker: Worker, publisher: PolicyPublisher
) -> None:
    add_partitions(broker, POLICY, 3)
    send(broker.kafka, POLICY.name, bundle(1, 1, "trial"), key=TRIAL, partition=2)
    until(lambda: worker.trial == 1)
    publisher.publish(random_policy(version=2, scope="scope"), 1, "trial")
    until(lambda: worker.trial == 2)
    send(broker.kafka, POLICY.name, None, key=TRIAL, partition=2)
    send(broker.kafka, POLICY.name, bundle(5, 5), key=CHAMPION, partition=2)
    until(lambda: worker.version == 5)
    assert worker.trial == 2, "partitions have no order among them: the tombstone may be older"
    publisher.withdraw("scope", "trial")
    until(lambda: not worker.trial)
    tombs = [r for r in lying(broker.kafka, POLICY.name) if r.key == TRIAL and r.value is None]
    assert {record.partition for record in tombs} == {0, 1, 2}
    with closing(Worker(broker)) as late:
        until(lambda: late.version == 5)
        assert not late.trial


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 3)])
def test_a_recreated_policy_topic_is_read_from_its_beginning(
    broker: Broker,
    worker: Worker,
    publisher: PolicyPublisher,
    before: int,
    after: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compacted, "REQUEST_MS", 2_000)  # for a partition that is gone
    if before > 1:
        add_partitions(broker, POLICY, before)
    publisher.publish(random_policy(version=1, scope="scope"), 1)
    for partition in range(before):
        send(broker.kafka, POLICY.name, b"", b"", b"", key=b"other", partition=partition)
    until(lambda: worker.version == 1)
    assert publisher.topic.read(60.0)
    make_anew(broker, POLICY, after)

    def lacks() -> bool:
        with suppress(KafkaError):  # of a partition that is gone the broker says nothing
            publisher.topic.read()
        return publisher.topic.last("scope") is None

    until(lacks)
    publisher.publish(random_policy(version=2, scope="scope"), 1)
    until(lambda: worker.version == 2)


def test_a_status_on_an_added_partition_is_read(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compacted, "REQUEST_MS", 2_000)  # for a partition that is gone

    def status(scope: str) -> bytes:
        return WorkerStatus(process=scope, scope=scope, time=1.0).model_dump_json().encode()

    with closing(StatusReader(broker.kafka)) as workers:
        send(broker.kafka, STATUS.name, *[status("one")] * 3, partition=0)
        until(lambda: workers.is_known("one"))
        add_partitions(broker, STATUS, 3)
        send(broker.kafka, STATUS.name, status("two"), partition=2)
        until(lambda: workers.is_known("two"))
        make_anew(broker, STATUS, 1)
        send(broker.kafka, STATUS.name, status("three"), partition=0)
        until(lambda: workers.is_known("three"))


def test_a_lease_survives_added_partitions_and_a_recreated_topic(
    broker: Broker, clock: Any
) -> None:
    with closing(Lease(broker.kafka, "one")) as lease:

        def renewed() -> bool:
            lease.renew({"scope": 0})
            return lease.holds("scope", 19.0)

        for change in (None, add_partitions, make_anew):
            if change is not None:
                change(broker, LEASE, 3)
                clock.now += 10.0
            until(renewed)
        assert lease.holder_of("scope") == "one"


@pytest.mark.parametrize("topic", [DRAFTS, TRIALS])
def test_records_of_added_partitions_and_of_a_recreated_topic_are_read(
    broker: Broker, topic: Topic
) -> None:
    with closing(EventSource(broker.kafka, {}, topic=topic)) as reader:

        def reads(value: bytes) -> Callable[[], bool]:
            found: list[bytes] = []

            def look() -> bool:
                records = reader.poll(0.05)
                reader.acknowledge(records)
                found.extend(record.value for record in records)
                return value in found

            return look

        send(broker.kafka, topic.name, *[b"first"] * 3, partition=0)
        until(reads(b"first"))
        add_partitions(broker, topic, 3)
        send(broker.kafka, topic.name, b"second", partition=2)
        until(reads(b"second"))
        make_anew(broker, topic, 1)
        send(broker.kafka, topic.name, b"third", partition=0)
        until(reads(b"third"))


def test_a_group_member_is_assigned_added_partitions(broker: Broker) -> None:
    with closing(group.GroupMember(broker.kafka, DRAFTS, "test", commits=True)) as member:
        until(lambda: member.update() or member.assignment.owned == {0}, "its first partition")
        add_partitions(broker, DRAFTS, 3)
        until(
            lambda: member.update() or member.assignment.owned == {0, 1, 2}, "the partitions added"
        )
        assert member.assignment.count == 3, "keys are looked for on all of them"


def test_the_watch_reads_added_partitions(broker: Broker) -> None:
    def status(number: int) -> bytes:
        return LearnerStatus(process="p", scope="", time=float(number)).model_dump_json().encode()

    ledger = Ledger()
    send(broker.kafka, STATUS.name, b"", b"", status(1), partition=0)
    with Observer(broker.kafka, ledger, since_s=3600.0):
        until(lambda: [s.time for s in ledger.learner] == [1.0])
        add_partitions(broker, STATUS, 3)
        send(broker.kafka, STATUS.name, status(2), partition=2)
        until(lambda: [s.time for s in ledger.learner] == [1.0, 2.0])
        make_anew(broker, STATUS, 1)
        send(broker.kafka, STATUS.name, status(3), partition=0)
        until(lambda: [s.time for s in ledger.learner] == [1.0, 2.0, 3.0])


def test_unretained_publications_are_logged_with_backoff(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the cause: here somebody deletes each champion as it comes."""
    monkeypatch.setattr(publishing, "time", Clock())  # by which no pause ends
    learner = stage.learner("off")

    def published() -> int:
        mine = (
            r for r in lying(stage.kafka, POLICY.name) if r.key == policy_key(SCOPE, "champion")
        )
        return sum(record.value is not None for record in mine)

    def delete() -> None:
        learner.step()
        if learner.publisher.topic.last(SCOPE) is not None:
            send(stage.kafka, POLICY.name, None, key=policy_key(SCOPE, "champion"), partition=0)

    until(lambda: "does not retain policies" in caplog.text or published() > 9, turn=delete)
    for _ in range(20):
        delete()
    assert published() == 3


def test_unread_claims_are_logged(
    broker: Broker, clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Lease(broker.kafka, "one")) as lease:
        until(lambda: lease.renew({"scope": 0}) or lease.holds("scope"))  # type: ignore[func-returns-value]
        assert "does not retain" not in caplog.text
        monkeypatch.setattr(lease._topic, "read", lambda: True)
        until(lambda: lease.renew({"scope": 0}) or "does not retain records" in caplog.text)  # type: ignore[func-returns-value]
