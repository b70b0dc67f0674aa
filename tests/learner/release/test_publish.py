"""Publications are numbered by scope, role and term; a topic may go, come back, or not be there."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import pairwise

import pytest
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import TopicAlreadyExistsError

from decoder.contracts.bundle import LAST_PUBLICATION
from decoder.contracts.errors import BrokerError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus
from decoder.contracts.topics import POLICY
from decoder.kafka import compacted
from decoder.limited_log import LimitedLog
from decoder.policy.probes import to_bytes
from learner.release import publisher as publishing
from learner.release.policy_topic import PolicyTopic
from learner.release.publisher import PolicyPublisher
from learner.status import StatusProducer
from pipelines.machine import free_port
from tests.conftest import random_policy, swept, until
from tests.decoder.telemetry.broker import send
from tests.learner.conftest import Broker, Clock


def put(broker: Broker, *records: tuple[bytes, bytes | None]) -> None:
    """What others write onto the topic."""
    for key, value in records:
        send(broker.kafka, POLICY.name, value, key=key)


def test_each_scope_and_role_has_its_own_numbers(broker: Broker) -> None:
    publisher = PolicyPublisher(broker.kafka)
    for scope, role, term in (("a", "champion", 1), ("a", "trial", 1), ("b", "champion", 3)):
        publisher.publish(random_policy(scope=scope), term, role)
    publisher.publish(random_policy(scope="a"), 1)
    publisher.close()
    assert publisher.topic.numbers == {
        b"a/champion": 1_000_002, b"a/trial": 1_000_001, b"b/champion": 3_000_001,
    }  # fmt: skip
    put(broker, (b"a/champion", b"poison"), (b"a/trial", None), (b"\xff", b"?"))
    other = PolicyPublisher(broker.kafka)
    assert other.publish(random_policy(scope="a"), 1).publication == 1_000_003
    assert other.publish(random_policy(scope="b"), 4).publication == 4_000_001
    assert other.topic.term("b") == 4 and other.topic.last("a", "trial") is None
    with pytest.raises(BrokerError, match="later term"):
        other.publish(random_policy(scope="b"), 3)
    other.close()


def test_a_reader_knows_the_first_publication_of_a_version(
    broker: Broker,
) -> None:
    """A trial whose share grows is published anew; rounds of both publications are its own."""
    publisher, reader = PolicyPublisher(broker.kafka), PolicyTopic(broker.kafka)
    trial, found = replace(random_policy(scope="a"), version=7), []
    for version, share, reads in ((7, 0.1, False), (7, 0.5, True), (8, 0.1, True), (0, 0.0, True)):
        if version:
            publisher.publish(replace(trial, version=version, share=share), 1, "trial")
        else:
            publisher.withdraw("a", "trial")
            publisher.publish(replace(trial, version=8), 1, "trial")
        if reads:
            until(lambda: reader.read(5.0))
            last = reader.last("a", "trial")
            assert last is not None
            found.append((last.version, last.number, last.since))
    publisher.close()
    reader.close()
    assert found == [
        (7, 1_000_002, 1_000_001),
        (8, 1_000_003, 1_000_003),
        (8, 1_000_004, 1_000_004),
    ]


def test_a_skipped_number_leaves_room_for_the_next(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = PolicyPublisher(broker.kafka)
    publisher.publish(random_policy(scope="a"), 1)
    leapt = replace(random_policy(scope="a"), publication=LAST_PUBLICATION)
    put(broker, *[(b"a/champion", to_bytes(leapt))] * 3)
    assert publisher.topic.read(60.0) and publisher.topic.last("a") is None
    assert caplog.text.count("far above the last one") == 1
    assert publisher.topic.term("a") == 1
    assert publisher.publish(random_policy(scope="a"), 2).publication == 2_000_001
    publisher.close()


def test_numbers_continue_above_the_highest_known(broker: Broker) -> None:
    publisher = PolicyPublisher(broker.kafka, {b"a/champion": 7_000_003, b"b/champion": 12})
    term = publisher.topic.term
    assert (term("a"), term("b"), term("c")) == (7, 0, 0)
    assert publisher.publish(random_policy(scope="a"), 8).publication == 8_000_001
    assert publisher.publish(random_policy(scope="b"), 1).publication == 1_000_001
    publisher.close()


def test_a_champion_missing_on_the_topic_is_noticed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compacted, "REVIEW_SECONDS", 0.0)
    publisher = PolicyPublisher(broker.kafka)
    publisher.publish(random_policy(scope="a"), 1)
    seen = PolicyTopic(broker.kafka)
    assert seen.read(60.0) and seen.last("a") is not None
    admin = KafkaAdminClient(**broker.kafka.client_options())
    admin.delete_topics([POLICY.name])
    # a client that still asks for it may have it made again before we do
    with contextlib.suppress(TopicAlreadyExistsError):
        admin.create_topics([NewTopic(POLICY.name, 1, -1)])
    admin.close()
    until(lambda: seen.last("a") is None, turn=lambda: seen.read(1.0))
    assert seen.term("a") == 1
    seen.close()
    publisher.close()


def test_a_publication_sent_twice_counts_once(broker: Broker) -> None:
    """Which a client does that had no answer in time: the producer is no idempotent one."""
    publisher = PolicyPublisher(broker.kafka)
    made = publisher.publish(random_policy(scope="a"), 1)
    put(broker, (b"a/champion", to_bytes(made)))
    seen = PolicyTopic(broker.kafka)
    assert seen.read(60.0) and publisher.topic.read(60.0)
    for each in (seen, publisher.topic):
        last = each.last("a")
        assert last is not None and (last.number, last.version) == (made.publication, made.version)
    assert publisher.publish(random_policy(scope="a"), 1).publication == made.publication + 1
    seen.close()
    publisher.close()


def test_unretained_policies_are_republished_with_backoff_and_logged_once(
    broker: Broker, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publishing, "time", clock)
    publisher = PolicyPublisher(broker.kafka)
    publisher._limited_log = LimitedLog(lambda: 0.0)
    made, sent_at = random_policy(version=4, scope="a"), list[float]()
    while len(sent_at) < 10:
        publisher.publish(made, 1)
        sent_at.append(clock.now)
        assert not publisher.must_wait("a", "champion", 5), "another is published at once"
        assert not publisher.must_wait("a", "trial", 4) and not publisher.must_wait(
            "b", "champion", 4
        )
        while publisher.must_wait("a", "champion", 4):
            clock.now += 1.0
    pauses = [round(b - a) for a, b in pairwise(sent_at)]
    assert pauses == [0, 0, 2, 4, 8, 16, 32, 60, 60]
    assert caplog.text.count("does not retain policies") == 1
    assert "version 4 for a/champion was sent 3 times" in caplog.text
    clock.now += 200.0  # it was kept, and lost much later: the topic was made anew
    publisher.publish(made, 1)
    assert not publisher.must_wait("a", "champion", 4)
    for vain in (False, False, True):
        publisher.withdraw("a", "trial")
        assert publisher.must_wait("a", "trial") == vain
    assert not publisher.must_wait("a", "trial", 4)
    publisher.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a client that found no broker leaves some
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_status_without_a_broker_counts_as_failed() -> None:
    status = StatusProducer(KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}"))
    for _ in range(2):
        status.send(LearnerStatus(process="p", scope="s", time=1.0))
    until(lambda: status.failed == 2)
    swept()


def test_forged_numbers_are_skipped_and_a_forged_champion_is_replaced(
    broker: Broker,
) -> None:
    """Else one record with the highest number there is would silence every learner for ever."""
    kafka = broker.kafka.model_copy(update={"policy_key": "0123456789abcdef"})
    publisher = PolicyPublisher(kafka)
    made = publisher.publish(random_policy(scope="a"), 1)
    seen = PolicyTopic(kafka)
    assert seen.read(60.0) and seen.last("a") is not None
    forged = to_bytes(replace(random_policy(scope="a"), publication=2**53))
    put(broker, (b"a/champion", forged))
    # which is what makes a learner publish again
    until(lambda: seen.last("a") is None, turn=lambda: seen.read(1.0))
    assert seen.numbers == {b"a/champion": made.publication}
    assert publisher.publish(random_policy(scope="a"), 1).publication == made.publication + 1
    until(lambda: seen.last("a") is not None, turn=lambda: seen.read(1.0))
    seen.close()
    publisher.close()
