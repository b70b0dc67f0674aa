from __future__ import annotations

import math
import socket
from pathlib import Path

import pytest

from decoder.contracts.errors import ProcessError
from decoder.contracts.events import encode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, POLICY, STATUS, TRIALS
from learner.topics import make_right
from pipelines import machine
from pipelines.stack import processes
from pipelines.watch.ledger import Ledger
from pipelines.watch.observer import Observer, ingest
from tests.conftest import until
from tests.decoder.telemetry.broker import start_broker
from tests.pipelines.watch.records import ORIGIN, SCOPE, WORKER, event, rounds, worker_status


@pytest.fixture
def kafka(tmp_path: Path):
    port = machine.free_port()
    child = start_broker(port, tmp_path / "data", tmp_path / "broker.log")
    yield KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
    processes.stop([child])


def produce(kafka: KafkaSettings, *records: tuple[str, bytes]) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(acks="all", **kafka.client_options())
    for topic, value in records:
        producer.send(topic, key=b"key", value=value).get(10)
    producer.close()


def test_an_observer_sees_what_comes_after_it_and_counts_what_keeps_no_contract(kafka) -> None:
    make_right(kafka)
    produce(kafka, (DRAFTS.name, encode_batch([event(0, 1.0)], ORIGIN, 0)))
    ledger = Ledger(WORKER)
    observer = Observer(kafka, ledger)
    observer.start()
    until(lambda: observer._next)  # its place in the topics is fixed
    produce(
        kafka,
        (DRAFTS.name, encode_batch([event(1, 2.0), event(2, 3.0)], ORIGIN, 1)),
        (DRAFTS.name, b"not an event"),
        (STATUS.name, worker_status(3.0, 60).model_dump_json().encode()),
        (POLICY.name, b"not a bundle"),
        (TRIALS.name, rounds(1, 3.0, 1.0, {"champion": 40.0})[0].model_dump_json().encode()),
    )
    until(lambda: ledger.drafts.seen == ledger.refused == 2 and ledger.statuses and ledger.rounds)
    observer.close()
    assert ledger.statuses[0].tokens == 60
    assert ledger.rounds[0].blocks[0].side == "champion"


class _Stumbling(Ledger):
    """Cannot take the status of one second."""

    def add_status(self, status) -> None:
        if status.time == 3.0:
            raise OverflowError("out of range")
        super().add_status(status)


def test_an_observer_reads_on_behind_what_it_cannot_take(kafka) -> None:
    make_right(kafka)
    ledger = _Stumbling(WORKER)
    observer = Observer(kafka, ledger, since_s=math.inf)
    observer.start()
    for time in (3.0, 4.0):
        produce(kafka, (STATUS.name, worker_status(time, 60).model_dump_json().encode()))
    until(lambda: ledger.statuses)
    observer.close()
    assert (ledger.refused, ledger.statuses[0].time) == (1, 4.0)


def test_records_survive_a_restart_of_the_broker(tmp_path) -> None:
    from kafka import KafkaConsumer, TopicPartition

    port = machine.free_port()
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
    log = tmp_path / "broker.log"
    child = start_broker(port, tmp_path / "data", log)
    make_right(kafka)
    produce(kafka, (POLICY.name, b"kept"))
    processes.stop([child])
    child = start_broker(port, tmp_path / "data", log)
    try:
        consumer = KafkaConsumer(group_id=None, **kafka.client_options())
        place = TopicPartition(POLICY.name, 0)
        consumer.assign([place])
        consumer.seek_to_beginning(place)
        values: list[bytes] = []

        def read() -> bool:
            values.extend(r.value for records in consumer.poll(200).values() for r in records)
            return bool(values)

        until(read)
        consumer.close()
    finally:
        processes.stop([child])
    assert values == [b"kept"]


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ProcessError, match=f"port {port} is taken"):
            start_broker(port, tmp_path, tmp_path / "broker.log")


def test_a_deleted_policy_ends_its_role() -> None:
    ledger = Ledger(WORKER)
    ledger.add_status(worker_status(3.0, 60))
    ingest(ledger, POLICY.name, f"{SCOPE}/trial".encode(), None, 4.0)
    assert [(p.role, p.policy) for p in ledger.published] == [("trial", None)]
    ingest(ledger, STATUS.name, None, None, 5.0)
    assert ledger.refused == 0
