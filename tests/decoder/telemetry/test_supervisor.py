"""Exporter and parent: what one or the other loses is counted, and nobody is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from kafka.admin import NewTopic

from decoder.contracts.events import decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus, decode_status
from decoder.contracts.topics import DRAFTS, STATUS, TRIALS
from decoder.contracts.trials import decode_round
from decoder.experiment.block import BlockTotals
from decoder.experiment.interleaver import FinishedRound, Interleaver
from decoder.experiment.variants import Variant
from decoder.kafka.clients import open_admin
from decoder.policy.first import first_policy
from decoder.telemetry.ring import BEAT, DeliveryReport, Ring
from decoder.telemetry.supervisor import Supervisor
from learner.ingest.dead_letters import DeadLetters
from learner.ingest.lessons import Intake
from learner.ingest.source import EventSource
from learner.topics import make_right
from pipelines import machine
from tests.conftest import until
from tests.contracts.test_events import EVENT, ORIGIN, PLAIN
from tests.decoder.telemetry.broker import batches, consumed, running
from tests.decoder.telemetry.telling import put, ring_of
from tests.events import events_of


def supervisor_of(kafka: KafkaSettings, ring: Ring, **changes: Any) -> Supervisor:
    def status() -> WorkerStatus:
        accounts = supervisor.report()
        return WorkerStatus(process="w", scope="s", time=time.time(), events_sent=accounts.sent)

    supervisor = Supervisor(kafka, ring, **{"origin": ORIGIN, "status": status, **changes})
    supervisor.start()
    return supervisor


def balanced(a: DeliveryReport) -> bool:
    lost = sum(a.dropped.values()) + sum(a.refused.values()) + a.failed
    least = min(a.sent, a.in_doubt, a.waiting, a.failed, *a.dropped.values(), *a.refused.values())
    return least >= 0 and a.made == a.sent + a.in_doubt + a.waiting + lost


def distinct(kafka: KafkaSettings) -> list[int]:
    """Numbers of events as readers count them: of each record the first that came."""
    known = {(b.origin.life, b.sequence): b for b in reversed(batches(kafka))}
    return sorted(e.number for batch in known.values() for e in events_of(batch))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoder.telemetry.supervisor.EVERY_S", 0.1)
    monkeypatch.setattr("decoder.telemetry.supervisor.MAX_SILENT_CHECKS", 600)


def test_an_exporter_that_dies_loses_nothing_and_gives_no_number_to_two_records(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, killed again, and one that hangs; and one that is killed while the worker closes."""
    monkeypatch.setattr("decoder.telemetry.supervisor.RESTART_S", (0.1, 0.1))
    ring = Ring(100_000)
    supervisor = supervisor_of(kafka, ring)
    for deaths, by in enumerate((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP), start=1):
        put(ring, *[PLAIN] * 300)
        until(lambda: supervisor.report().sent > 0 and supervisor.pid is not None)
        sent = supervisor.report().sent
        put(ring, *[PLAIN] * 3_000)
        until(lambda sent=sent: supervisor.report().sent > sent)  # type: ignore[misc]
        assert supervisor.pid is not None
        os.kill(supervisor.pid, by)
        with monkeypatch.context() as short:
            if by is signal.SIGSTOP:
                short.setattr("decoder.telemetry.supervisor.MAX_SILENT_CHECKS", 10)
            until(lambda d=deaths: supervisor.report().deaths == d)  # type: ignore[misc]
        assert balanced(supervisor.report())
    until(lambda: not supervisor.report().waiting)
    supervisor._start_at = time.monotonic() + 600.0
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    put(ring, *[PLAIN] * 300)
    until(lambda: supervisor.report().deaths == 4)
    supervisor.close()
    assert supervisor.report() == DeliveryReport(made=10_200, sent=10_200, deaths=4)
    assert distinct(kafka) == list(range(10_200))
    known: dict[int, bytes] = {}
    for value in consumed(kafka, DRAFTS.name):
        assert known.setdefault(decode_batch(value).sequence, value) == value
    assert sorted(known) == list(range(len(known))), "nobody misses a record"


def test_a_broker_may_come_late_and_an_outage_beyond_the_memory_drops_the_newest(
    tmp_path: Path,
) -> None:
    port = machine.free_port()
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
    ring = Ring(1_000)
    supervisor = supervisor_of(kafka, ring)
    put(ring, *[EVENT, PLAIN] * 50)
    until(lambda: ring.control[BEAT] > 0)
    assert supervisor.report() == DeliveryReport(made=100, waiting=100), "no broker yet"
    with running(tmp_path, port):
        until(lambda: supervisor.report().sent == 100)
    put(ring, *[PLAIN] * 1_500)
    assert supervisor.report().dropped == {"queue": 500} and balanced(supervisor.report())
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)  # and the one that held them
    with running(tmp_path, port):
        until(lambda: supervisor.report().sent == 1_100)
        put(ring, *[PLAIN] * 10)
        supervisor.close()
        found = supervisor.report()
        assert found == DeliveryReport(made=1_610, sent=1_110, dropped={"queue": 500}, deaths=1)
        assert distinct(kafka) == [*range(1_100), *range(1_600, 1_610)]


def test_a_worker_that_closes_without_a_broker_says_what_it_lost(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    nobody = f"127.0.0.1:{machine.free_port()}"
    monkeypatch.setattr("decoder.telemetry.supervisor.CLOSE_TIMEOUT_S", 0.5)
    ring = Ring(3)
    put(ring, *[EVENT] * 5)
    supervisor = supervisor_of(KafkaSettings(bootstrap_servers=nobody), ring)
    logged = ""

    def warned() -> bool:
        nonlocal logged
        logged += capfd.readouterr().err  # the exporter's
        return f"WARNING decoder.limited_log: Kafka at {nobody} does not accept" in logged

    until(warned)
    supervisor.close()
    found = supervisor.report()
    assert balanced(found) and (found.failed, found.dropped) == (3, {"queue": 2})
    assert "3 draft events were not sent to Kafka before the worker closed" in caplog.text


PARENT = """
import os, sys, time
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus
from decoder.telemetry import supervisor
from decoder.telemetry.supervisor import Supervisor
from decoder.telemetry.ring import BEAT, Ring
from tests.contracts.test_events import EVENT, ORIGIN
from tests.decoder.telemetry.telling import put
supervisor.GRACE_S = float(sys.argv[3])
ring = Ring(10_000)
kafka = KafkaSettings(bootstrap_servers=sys.argv[1])
supervisor = Supervisor(kafka, ring, ORIGIN, lambda: WorkerStatus(process="w", scope="s", time=1.0))
supervisor.start()
put(ring, EVENT)
while supervisor.report().sent < int(sys.argv[2]) or not ring.control[BEAT]:
    time.sleep(0.01)
put(ring, *[EVENT] * 600)
child = os.fork()  # which holds the ring and the parent's end of the socket
if not child:
    os.closerange(1, 3)
    time.sleep(600)
print(supervisor.pid, child, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("there", [True, False])
def test_no_exporter_outlives_its_parent_and_what_waits_is_sent_or_said(
    kafka: KafkaSettings, there: bool
) -> None:
    """A parent that is killed, and one that a terminal or a service manager ends with its group."""
    nobody = f"127.0.0.1:{machine.free_port()}"
    servers = kafka.bootstrap_servers if there else nobody
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, servers, str(int(there)), "300" if there else "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None and parent.stderr is not None
        exporter, child = map(psutil.Process, map(int, parent.stdout.readline().split()))
        if there:
            parent.kill()
        else:
            os.killpg(parent.pid, signal.SIGINT)
            os.killpg(parent.pid, signal.SIGTERM)
        parent.wait(300)
        exporter.wait(300)
        said = parent.stderr.read()
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    if there:
        assert distinct(kafka) == list(range(601))
    else:
        assert "601 draft events were not sent to Kafka before the worker closed" in said


def test_a_status_or_a_round_that_cannot_be_made_holds_up_no_event_and_no_later_round(
    kafka: KafkaSettings,
) -> None:
    def status() -> WorkerStatus:
        raise RuntimeError("not now")

    policy = first_policy("s")
    interleaver = Interleaver((), 0.0, {}, policy, seed=1)
    whole, broken = (BlockTotals(Variant("first", policy)),), (None,)
    interleaver.rounds.extend([FinishedRound(0, 1.0, broken), FinishedRound(1, 2.0, whole)])  # type: ignore[arg-type]
    supervisor = supervisor_of(kafka, ring_of(PLAIN), status=status, rounds=interleaver.rounds)
    until(lambda: supervisor.report().rounds_sent > 0)
    supervisor.close()
    found = supervisor.report()
    assert (found.sent, found.rounds_sent, found.rounds_dropped) == (1, 1, 1)
    assert [decode_round(value).number for value in consumed(kafka, TRIALS.name)] == [1]


def test_with_several_partitions_readers_miss_nothing_and_hear_of_all_at_the_end(
    tmp_path: Path,
) -> None:
    with running(tmp_path, topics=False) as kafka:
        admin = open_admin(kafka, "test", 60_000)
        until(lambda: bool(admin.create_topics([NewTopic(DRAFTS.name, 3, 1)])))
        admin.close()
        make_right(kafka)
        ring = Ring(10_000)
        supervisor = supervisor_of(kafka, ring)
        put(ring, *[EVENT, PLAIN] * 999)
        until(lambda: supervisor.report().sent == 1_998)
        put(ring, EVENT, PLAIN)
        supervisor.close()
        assert supervisor.report() == DeliveryReport(made=2_000, sent=2_000)
        status = decode_status(consumed(kafka, STATUS.name)[-1])
        assert isinstance(status, WorkerStatus) and status.events_sent == 2_000
        source = EventSource(kafka, {})
        intake = Intake(DeadLetters(kafka))
        came: list[int] = []
        places: set[int] = set()
        while len(came) < 2_000:
            for record in source.poll(0.1):
                assert intake.admit(record) is not None
                came += [event.number for event in events_of(decode_batch(record.value))]
                places.add(record.partition)
        source.close()
        assert intake.sequences.missing == intake.sequences.duplicates == 0
        assert came == list(range(2_000)) and len(places) == 1
