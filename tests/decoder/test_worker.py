"""A worker with a real broker: what it made is on the topics, and all of it accounted for."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kafka import KafkaConsumer, TopicPartition

from decoder.contracts.events import EventBatch, decode_batch
from decoder.contracts.identity import Pseudonyms, is_pseudonym
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from decoder.router import RequestOptions
from decoder.settings import WorkerSettings
from decoder.worker import Worker, make_worker
from learner.publish import PolicyPublisher
from pipelines import machine
from pipelines.stack import broker, processes
from tests.conftest import random_policy
from tests.decoder.test_router import Target

NAMES = Pseudonyms(b"of these tests")


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[KafkaSettings]:
    port = machine.free_port()
    child = broker.start_broker(port, tmp_path / "data", tmp_path / "broker.log")
    reached = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
    broker.ensure_topics(reached)
    yield reached
    processes.stop([child])
    gc.collect()


def batches(kafka: KafkaSettings) -> list[EventBatch]:
    consumer = KafkaConsumer(group_id=None, **kafka.client_options())
    place = TopicPartition(DRAFTS.name, 0)
    consumer.assign([place])
    consumer.seek_to_beginning(place)
    end, found = consumer.end_offsets([place])[place], []
    while consumer.position(place) < end:
        found += [decode_batch(r.value) for rs in consumer.poll(200).values() for r in rs]
    consumer.close()
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def decode(worker: Worker, name: str, secret: str = "") -> None:
    options = RequestOptions(
        60, 4096, opaque=NAMES.of("request", name), tenant=secret, session=secret, workload="loops"
    )
    Target(worker.router, [1, 2, 3] * 15 + list(range(4, 19))).run(name, [1, 2, 3], options)


def test_every_cycle_is_on_the_topic_and_accounted_for(
    kafka: KafkaSettings, token_classes: np.ndarray
) -> None:
    settings = WorkerSettings(name="w", metrics=False, floor=False)
    worker = make_worker(settings, kafka, "scope", token_classes, has_model=False)
    decode(worker, "first", secret="a client's own word")
    publisher = PolicyPublisher(kafka)
    champion = replace(random_policy(version=7), threshold=0.0)
    champion = publisher.publish(champion, term=1)
    until(lambda: worker.status().policy_version == 7)
    publisher.close()
    decode(worker, "second")
    worker.close()
    status = worker.status()
    assert status.events_unaccounted == status.queue_depth == 0
    assert status.events_made == status.events_sent == sum(status.cycles.values()) > 20
    assert (status.publication, status.policy_role) == (champion.publication, "champion")
    found = batches(kafka)
    assert [b.sequence for b in found] == list(range(len(found)))
    assert {b.origin.life for b in found} == {status.life}
    events = [e for b in found for e in b.events]
    assert sorted(e.number for e in events) == list(range(status.events_made))
    assert {e.request for e in events} == {NAMES.of("request", n) for n in ("first", "second")}
    assert all(is_pseudonym(e.tenant) for e in events if e.publication == 0)
    drafts = [e for e in events if e.draft_len]
    assert len(drafts) == status.drafts_labelled and 0 < len(drafts) < len(events)
    assert {(e.policy_version, e.publication, e.role, e.parameter_name) for e in events} == {
        (0, 0, "first", "rate"), (7, champion.publication, "champion", "threshold"),
    }  # fmt: skip
    assert all(e.verified_len <= e.drafted_len <= e.draft_len for e in drafts if e.arm == "cache")
