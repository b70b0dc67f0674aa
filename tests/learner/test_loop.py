"""The whole learner against a real broker and a real registry."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from decoder.contracts.errors import BrokerError
from decoder.contracts.events import DraftEvent, Origin, encode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, decode_status
from decoder.contracts.topics import DRAFTS, POLICY, STATUS, Topic
from decoder.policy.probes import from_bytes
from learner.loop import Learner, run
from learner.publish import PolicyPublisher, StatusProducer
from learner.registry import Registry
from learner.settings import LearnerSettings
from learner.source import EventSource
from tests.conftest import random_policy
from tests.learner.conftest import Broker, free_port
from tests.learner.traffic import Traffic

# mlflow uses parts of sqlalchemy that are to go, and a kafka client that found no broker leaves its
# sockets to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SCOPE = "scope01"
ORIGIN = Origin(SCOPE, "w1", "1f" * 8)
EVENTS = Traffic(seed=9).events(120)


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Sockets left behind are collected here, not in somebody else's test."""
    yield
    gc.collect()


def settings_in(folder: Path, registry: Registry) -> LearnerSettings:
    return LearnerSettings(
        mlflow_tracking_uri=registry.tracking_uri,
        state_dir=folder / "learner",
        buffer_events=4000,
        min_events=200,
        candidate_every=128,
    )


def batches(events: Sequence[DraftEvent], size: int = 50, first: int = 0) -> list[bytes]:
    cuts = range(0, len(events), size)
    return [encode_batch(events[cut : cut + size], ORIGIN, i) for i, cut in enumerate(cuts, first)]


def produce(kafka: KafkaSettings, values: Sequence[bytes]) -> None:
    producer = KafkaProducer(**kafka.client_options(), compression_type="gzip")
    for value in values:
        producer.send(DRAFTS.name, value=value)
    producer.flush()
    producer.close()


def consume(kafka: KafkaSettings, topic: Topic) -> list[Any]:
    consumer = KafkaConsumer(**kafka.client_options(), group_id=None, enable_auto_commit=False)
    place = TopicPartition(topic.name, 0)
    consumer.assign([place])
    consumer.seek_to_beginning()
    found: list[Any] = []
    end = consumer.end_offsets([place])[place]
    while consumer.position(place) < end:  # a fetch that took too long is empty, and not the end
        for records in consumer.poll(timeout_ms=400).values():
            found += records
    consumer.close()
    return found


def step_until(learner: Learner, done: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "the learner did not get there"
        learner.step()


def connected(settings: LearnerSettings, kafka: KafkaSettings) -> Learner:
    learner = Learner(settings, kafka)
    assert learner.source.connect(threading.Event())
    return learner


def test_learns_promotes_publishes_and_resumes(
    broker: Broker, registry: Registry, tmp_path: Path
) -> None:
    settings = settings_in(tmp_path, registry)
    good = batches(EVENTS)
    poison = [b"not json", b"", json.dumps({"contract": "hvd.drafts.v1"}).encode()]
    produce(broker.kafka, [*good[:7], *poison, good[3], *good[7:]])
    learner = connected(settings, broker.kafka)
    step_until(learner, lambda: learner.published.get(SCOPE, 0) > 0)
    step_until(learner, lambda: learner.scopes[SCOPE].total == len(EVENTS))
    learner._report()
    learner.close()
    scope = learner.scopes[SCOPE]
    assert scope.total == len(EVENTS)
    assert learner.source.refused == 3 and learner.source.lag() == 0
    assert (learner.source.sequences.missing, learner.source.sequences.duplicates) == (0, 1)
    listed = [json.loads(line) for line in settings.refused_path.read_text().splitlines()]
    assert [(line["partition"], line["offset"]) for line in listed] == [(0, 7), (0, 8), (0, 9)]
    champion = registry.champion(SCOPE)
    published = consume(broker.kafka, POLICY)
    assert champion is not None and published[-1].key == f"{SCOPE}/champion".encode()
    policy = from_bytes(published[-1].value, SCOPE)
    assert policy.version == scope.version <= champion.version and policy.kind == "survival"
    assert policy.provenance["costs"]["measured"] and len(policy.probe_inputs)
    statuses = [decode_status(record.value) for record in consume(broker.kafka, STATUS)]
    last = statuses[-1]
    assert isinstance(last, LearnerStatus) and last.champion_version == policy.version
    assert last.events_consumed == len(EVENTS) and last.records_refused == 3
    assert (last.records_missing, last.records_duplicate) == (0, 1)
    assert last.publication == policy.publication

    again = connected(settings, broker.kafka)
    assert again.source.offsets == learner.source.offsets
    assert again.source.sequences.known() == learner.source.sequences.known()
    assert again.publisher.publications == learner.publisher.publications
    produce(broker.kafka, [good[0], *batches(Traffic(seed=10).events(2), first=len(good))])
    step_until(again, lambda: again.scopes[SCOPE].total == len(EVENTS) + 40)
    again._follow()
    assert again.scopes[SCOPE].version >= policy.version
    again.close()


def test_a_person_moves_the_alias(broker: Broker, registry: Registry, tmp_path: Path) -> None:
    for seed in (1, 2):
        registry.register(random_policy(seed=seed, scope=SCOPE))
    learner = connected(settings_in(tmp_path, registry), broker.kafka)
    for version in (2, 1):
        registry.promote(SCOPE, version)
        learner._follow()
        learner._follow()
    learner.close()
    # One that has lost its state goes on from what the topic holds.
    other = connected(settings_in(tmp_path / "elsewhere", registry), broker.kafka)
    other._follow()
    other.close()
    read = [from_bytes(r.value, SCOPE) for r in consume(broker.kafka, POLICY)]
    assert [p.version for p in read] == [2, 1, 1]
    assert [p.publication for p in read] == [1, 2, 3] and {p.role for p in read} == {"champion"}


def test_each_scope_and_role_is_numbered_by_itself(broker: Broker) -> None:
    publisher = PolicyPublisher(broker.kafka)
    for scope, role in (("a", "champion"), ("a", "trial"), ("b", "champion"), ("a", "champion")):
        publisher.publish(random_policy(scope=scope), role)
    publisher.close()
    assert publisher.publications == {"a/champion": 2, "a/trial": 1, "b/champion": 1}
    producer = KafkaProducer(**broker.kafka.client_options())
    for key, value in ((b"a/champion", b"poison"), (b"a/trial", None), (b"\xff", b"?")):
        producer.send(POLICY.name, key=key, value=value).get(10)
    producer.close()
    assert PolicyPublisher(broker.kafka).publish(random_policy(scope="a")).publication == 3


def test_gaps_and_events_without_a_draft_are_counted(
    broker: Broker, registry: Registry, tmp_path: Path
) -> None:
    plain = EVENTS[0]._replace(draft_len=0, accepted=0, label="", features=None, number=2**40)
    values = batches([*EVENTS[:100], plain], size=20)
    produce(broker.kafka, [*values[:2], *values[4:]])
    learner = connected(settings_in(tmp_path, registry), broker.kafka)
    step_until(learner, lambda: learner.consumed.get(SCOPE) == 61)
    assert learner.scopes[SCOPE].total == 60 and learner.source.sequences.missing == 2
    learner._report()
    learner.close()
    last = [decode_status(record.value) for record in consume(broker.kafka, STATUS)][-1]
    assert isinstance(last, LearnerStatus)
    assert (last.events_consumed, last.drafts_consumed, last.records_missing) == (61, 60, 2)


def test_a_crash_after_publishing_counts_nothing_twice(
    broker: Broker, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(tmp_path, registry)
    produce(broker.kafka, batches(EVENTS[:300]))
    learner = connected(settings, broker.kafka)
    step_until(learner, lambda: sum(s.total for s in learner.scopes.values()) == 300)
    learner.checkpoint()
    produce(broker.kafka, batches(EVENTS[300:], first=6))
    monkeypatch.setattr(learner, "checkpoint", lambda: None)
    step_until(learner, lambda: learner.published.get(SCOPE, 0) > 0)
    learner.source.close()  # dies here, with a policy published and no checkpoint

    again = connected(settings, broker.kafka)
    assert again.scopes[SCOPE].total == 300
    step_until(again, lambda: again.scopes[SCOPE].total == len(EVENTS))
    again._follow()
    assert again.scopes[SCOPE].version >= learner.scopes[SCOPE].version > 0
    again.close()


def test_mlflow_away_is_no_reason_to_stop(
    broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_in(tmp_path, Registry("http://127.0.0.1:9"))
    produce(broker.kafka, batches(EVENTS))
    learner = connected(settings, broker.kafka)
    step_until(learner, lambda: bool(learner.scopes) and learner.scopes[SCOPE].updates > 50)
    assert not learner.published and "127.0.0.1:9" in caplog.text
    learner.close()


def test_run_waits_for_the_broker_and_stops_when_told(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}")
    stop = threading.Event()
    settings = settings_in(tmp_path, registry)
    thread = threading.Thread(target=run, args=(settings, kafka, stop))
    thread.start()
    deadline = time.monotonic() + 60
    while "no broker at" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.set()
    thread.join(60)
    assert not thread.is_alive() and "no broker at" in caplog.text
    assert settings.checkpoint_path.exists()


def test_publishing_without_a_broker(tmp_path: Path) -> None:
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}")
    with pytest.raises(BrokerError, match="not acknowledged"):
        PolicyPublisher(kafka).publish(random_policy(scope=SCOPE))
    status = StatusProducer(kafka)
    for _ in range(2):
        status.send(LearnerStatus(process="p", scope=SCOPE, time=1.0))
    assert status.failed == 2


def test_a_new_source_reads_from_stored_offsets(broker: Broker, tmp_path: Path) -> None:
    produce(broker.kafka, batches(EVENTS[:200]))
    source = EventSource(broker.kafka, {0: 2}, tmp_path / "refused.jsonl")
    assert source.connect(threading.Event())
    received = [record for _ in range(4) for record in source.poll(0.3)]
    assert [record.offset for record in received] == [2, 3] and source.offsets == {0: 4}
    source.close()


def test_a_source_that_finds_nothing_rests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rests: list[float] = []
    source = EventSource(KafkaSettings(), {}, tmp_path / "refused.jsonl")
    monkeypatch.setattr(source, "_assign", lambda: True)
    monkeypatch.setattr(
        source, "_consumer", SimpleNamespace(poll=lambda timeout_ms: {}, close=lambda: None)
    )
    monkeypatch.setattr("learner.source.time.sleep", rests.append)
    assert source.poll(0.25) == [] and 0.25 in rests
