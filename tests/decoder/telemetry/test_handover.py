"""The carrier and its parent: what one or the other loses is counted, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from kafka.admin import NewTopic

from decoder.contracts.events import DraftEvent, Origin, decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus, decode_status
from decoder.contracts.topics import DRAFTS, STATUS, TRIALS
from decoder.contracts.trials import decode_round
from decoder.kafka.clients import open_admin
from decoder.policy.first import first_policy
from decoder.telemetry.books import Accounts, Books
from decoder.telemetry.handover import Handover
from decoder.telemetry.queue import EventQueue
from decoder.telemetry.told import Told
from decoder.trial.block import Account
from decoder.trial.sides import Side
from decoder.trial.turns import Played, Turns
from learner.dead_letters import DeadLetters
from learner.intake import Intake
from learner.source import EventSource
from learner.topics import make_right
from pipelines import machine
from pipelines.stack import processes
from tests.conftest import until
from tests.contracts.test_events import EVENT, NAMES, ORIGIN, PLAIN
from tests.decoder.telemetry.broker import batches, consumed, start_broker
from tests.decoder.telemetry.telling import tell

MOST = 1 << 30


def handover_of(
    kafka: KafkaSettings,
    queue: EventQueue,
    folder: Path | None = None,
    most: int = MOST,
    **changes: Any,
) -> Handover:
    def status() -> WorkerStatus:
        accounts = handover.accounts()
        return WorkerStatus(process="w", scope="s", time=time.time(), events_sent=accounts.sent)

    options: dict[str, Any] = {"tell": tell, "origin": ORIGIN, "status": status, **changes}
    handover = Handover(kafka, queue, folder=folder, most=most if folder else 0, **options)
    handover.start()
    return handover


def put(queue: EventQueue, *events: DraftEvent) -> None:
    for event in events:
        queue.put(event._replace(number=queue.made))


def balanced(a: Accounts) -> bool:
    lost = a.dropped.total() + a.refused.total() + a.failed
    counts = (a.sent, a.in_doubt, a.waiting, a.spilled, a.failed)
    least = min(*counts, *a.dropped.values(), *a.refused.values())
    return least >= 0 and a.made == a.sent + a.in_doubt + a.waiting + a.spilled + lost


def numbers(kafka: KafkaSettings) -> list[int]:
    return [e.number for batch in batches(kafka) for e in batch.events]


def test_everything_arrives_in_order_with_a_last_status(kafka: KafkaSettings) -> None:
    queue = EventQueue(10_000)
    handover = handover_of(kafka, queue)
    put(queue, *[EVENT, PLAIN] * 700)
    until(lambda: handover.accounts().sent == 1_400)
    put(queue, EVENT)
    handover.close()
    assert handover.accounts() == Accounts(made=1_401, sent=1_401)
    assert numbers(kafka) == list(range(1_401))
    status = decode_status(consumed(kafka, STATUS.name)[-1])
    assert isinstance(status, WorkerStatus) and status.events_sent == 1_401


def test_a_carrier_that_is_killed_is_started_again_and_what_it_held_is_counted(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    queue = EventQueue(100_000)
    handover = handover_of(kafka, queue, tmp_path / "spill")
    for deaths in (1, 2):
        put(queue, *[PLAIN] * 300)
        until(lambda: handover.accounts().sent > 0 and handover.pid is not None)
        put(queue, *[PLAIN] * 3_000)
        assert handover.pid is not None
        os.kill(handover.pid, signal.SIGKILL)
        until(lambda d=deaths: handover.accounts().deaths == d)  # type: ignore[misc]
        assert balanced(handover.accounts())
    put(queue, *[PLAIN] * 300)
    until(lambda: not handover.accounts().waiting)
    handover.close()
    found = handover.accounts()
    assert balanced(found) and found.made == 6_900 and not found.spilled
    came = batches(kafka)
    lying = {e.number for batch in came for e in batch.events}
    assert found.sent <= len(lying) <= found.sent + found.in_doubt
    assert len({b.sequence for b in came}) == len(came), "no number is given twice"
    assert [b.sequence for b in came] == sorted(b.sequence for b in came)
    assert set(range(6_600, 6_900)) <= lying, "the last one works"


def test_a_broker_that_comes_late_finds_everything_in_order(tmp_path: Path) -> None:
    port = machine.free_port()
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
    queue = EventQueue(100_000)
    handover = handover_of(kafka, queue, tmp_path / "spill")
    put(queue, *[EVENT, PLAIN] * 5_000)
    until(lambda: handover.accounts().spilled > 0)
    assert balanced(handover.accounts())
    child = start_broker(port, tmp_path / "data", tmp_path / "broker.log")
    make_right(kafka)
    until(lambda: handover.accounts().sent == 10_000)
    put(queue, EVENT)
    handover.close()
    assert numbers(kafka) == list(range(10_001))
    assert handover.accounts() == Accounts(made=10_001, sent=10_001)
    assert not (tmp_path / "spill").exists(), "nothing is left behind"
    processes.stop([child])


def test_what_a_life_could_not_send_the_next_one_delivers(tmp_path: Path) -> None:
    port = machine.free_port()
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
    first = EventQueue(1_000)
    handover = handover_of(kafka, first, tmp_path / "spill")
    put(first, *[EVENT] * 400)
    until(lambda: handover.accounts().spilled == 400)
    put(first, *[PLAIN] * 100)
    handover.close()
    assert handover.accounts() == Accounts(made=500, spilled=500)
    child = start_broker(port, tmp_path / "data", tmp_path / "broker.log")
    make_right(kafka)
    second = EventQueue(1_000)
    other = handover_of(kafka, second, tmp_path / "spill", origin=of("ab"))
    put(second, *[PLAIN] * 10)
    until(lambda: other.accounts().former == 500 and other.accounts().sent == 10)
    other.close()
    by_life: dict[str, list[int]] = {}
    for batch in batches(kafka):
        by_life.setdefault(batch.origin.life, []).extend(e.number for e in batch.events)
    assert by_life == {ORIGIN.life: list(range(500)), "ab": list(range(10))}
    assert not (tmp_path / "spill").exists()
    processes.stop([child])


@pytest.mark.parametrize("more", [0, 100])
def test_what_lies_in_the_file_has_not_failed_where_no_carrier_is_left_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    monkeypatch.setattr("decoder.telemetry.handover.RESTART_S", (600.0, 600.0))
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{machine.free_port()}")
    queue = EventQueue(1_000)
    handover = handover_of(kafka, queue, tmp_path / "spill")
    put(queue, *[EVENT] * 400)
    until(lambda: handover.accounts().spilled == 400)
    assert handover.pid is not None
    os.kill(handover.pid, signal.SIGKILL)
    until(lambda: handover.accounts().deaths == 1)
    put(queue, *[PLAIN] * more)
    handover.close()
    assert handover.accounts() == Accounts(made=400 + more, spilled=400 + more, deaths=1)


def of(life: str) -> Origin:
    return replace(ORIGIN, life=life)


def test_a_worker_that_closes_without_broker_and_file_says_what_it_lost() -> None:
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{machine.free_port()}")
    queue = EventQueue(3)
    put(queue, *[EVENT] * 5)
    handover = handover_of(kafka, queue)
    handover.close()
    found = handover.accounts()
    assert balanced(found) and (found.failed, found.dropped) == (3, {"queue": 2})


PARENT = """
import sys, time
from pathlib import Path
from decoder.contracts.settings import KafkaSettings
from decoder.telemetry.queue import EventQueue
from tests.decoder.telemetry.test_handover import EVENT, handover_of, put
queue = EventQueue(10_000)
handover = handover_of(KafkaSettings(bootstrap_servers=sys.argv[1]), queue, Path(sys.argv[2]))
put(queue, *[EVENT] * 600)
while handover.accounts().spilled < 600:
    time.sleep(0.01)
print(handover.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_carrier_outlives_its_parent_and_what_it_held_is_delivered(
    tmp_path: Path, by: signal.Signals
) -> None:
    port = machine.free_port()
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
    folder = tmp_path / "spill"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, kafka.bootstrap_servers, str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        carrier = psutil.Process(int(parent.stdout.readline()))
        if by is signal.SIGKILL:
            parent.kill()
        else:
            os.killpg(parent.pid, by)  # as a terminal or a service manager does
        parent.wait(30)
        carrier.wait(30)
    child = start_broker(port, tmp_path / "data", tmp_path / "broker.log")
    make_right(kafka)
    other = handover_of(kafka, EventQueue(10), folder, origin=of("cd"))
    until(lambda: other.accounts().former == 600)
    other.close()
    assert sorted(numbers(kafka)) == list(range(600))
    processes.stop([child])


def test_a_cycle_that_cannot_be_told_is_counted_and_takes_no_other_with_it(
    kafka: KafkaSettings,
) -> None:
    def picky(events: Sequence[DraftEvent]) -> Told:
        if any(event.number % 5 == 2 for event in events):
            raise RuntimeError("not this one")
        return tell(events)

    queue = EventQueue(100)
    put(queue, *[PLAIN] * 10)
    handover = handover_of(kafka, queue, tell=picky)
    handover.close()
    assert handover.accounts().dropped == {"unreadable": 2}
    assert numbers(kafka) == [0, 1, 3, 4, 5, 6, 8, 9] and balanced(handover.accounts())


def test_what_cannot_be_told_together_is_counted_and_the_next_comes(kafka: KafkaSettings) -> None:
    def picky(events: Sequence[DraftEvent]) -> Told:
        if 1 < len(events) < 5:
            raise RuntimeError("not these")
        return tell(events)

    queue = EventQueue(100)
    put(queue, *[PLAIN] * 3)
    handover = handover_of(kafka, queue, tell=picky)
    until(lambda: handover.accounts().dropped.total() == 3)
    put(queue, PLAIN)
    until(lambda: handover.accounts().sent == 1)
    handover.close()
    assert handover.accounts().dropped == {"unreadable": 3} and numbers(kafka) == [3]
    assert balanced(handover.accounts())


def test_a_carrier_that_hangs_is_ended_and_another_goes_on(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = EventQueue(1_000)
    handover = handover_of(kafka, queue)
    put(queue, PLAIN)
    until(lambda: handover.accounts().sent == 1)
    assert handover.pid is not None
    os.kill(handover.pid, signal.SIGSTOP)
    put(queue, *[PLAIN] * 10)
    with monkeypatch.context() as impatient:
        impatient.setattr("decoder.telemetry.handover.SILENT_TURNS", 5)
        until(lambda: handover.accounts().deaths > 0)
    put(queue, PLAIN)
    until(lambda: handover.accounts().sent == 2)
    handover.close()
    found = handover.accounts()
    assert balanced(found) and found.dropped == {"carrier": 10} and 11 in numbers(kafka)


def test_what_was_in_doubt_and_is_found_in_the_file_is_in_doubt_no_more() -> None:
    kafka = KafkaSettings(bootstrap_servers="127.0.0.1:1")
    queue = EventQueue(100)
    handover = Handover(kafka, queue, tell, ORIGIN, lambda: None)  # type: ignore[arg-type,return-value]
    put(queue, *[PLAIN] * 10)
    queue.take(10)
    handover._entrusted = handover._inherited = 4
    handover._past.in_doubt = 6  # under way when it died
    handover._take_books(Books(taken=10, spilled=10, found=10, ready=True))
    found = handover.accounts()
    assert balanced(found) and (found.in_doubt, found.spilled, found.waiting) == (0, 10, 0)


def test_a_status_that_cannot_be_made_holds_up_no_event(
    kafka: KafkaSettings, caplog: pytest.LogCaptureFixture
) -> None:
    def status() -> WorkerStatus:
        raise RuntimeError("not now")

    queue = EventQueue(100)
    put(queue, PLAIN)
    handover = handover_of(kafka, queue, status=status)
    handover.close()
    assert handover.accounts().sent == 1 and "not now" in caplog.text


def test_what_the_carrier_has_to_say_is_in_the_log_of_its_parent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nobody = f"127.0.0.1:{machine.free_port()}"
    handover = handover_of(KafkaSettings(bootstrap_servers=nobody), EventQueue(10))
    until(lambda: f"Kafka at {nobody} does not take" in caplog.text)
    handover.close()


def test_a_round_that_cannot_be_written_holds_up_no_later_one(kafka: KafkaSettings) -> None:
    queue, policy = EventQueue(10), first_policy("s")
    turns = Turns((), 0.0, {}, policy, seed=1)
    whole, broken = (Account(Side("first", policy)),), (None,)
    turns.rounds.extend([Played(0, 1.0, broken), Played(1, 2.0, whole)])  # type: ignore[arg-type]
    handover = handover_of(kafka, queue, turns=turns)
    until(lambda: handover.accounts().rounds_sent > 0)
    handover.close()
    found = handover.accounts()
    assert (found.rounds_sent, found.rounds_dropped) == (1, 1)
    assert [decode_round(value).number for value in consumed(kafka, TRIALS.name)] == [1]


def test_with_several_partitions_readers_miss_nothing_and_requests_keep_their_order(
    tmp_path: Path,
) -> None:
    port = machine.free_port()
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
    child = start_broker(port, tmp_path / "data", tmp_path / "broker.log")
    admin = open_admin(kafka, "test", 5_000)
    until(lambda: bool(admin.create_topics([NewTopic(DRAFTS.name, 3, 1)])))
    admin.close()
    make_right(kafka)
    queue = EventQueue(10_000)
    handover = handover_of(kafka, queue, tmp_path / "spill")
    requests = [NAMES.of("request", str(number)) for number in range(40)]
    put(queue, *[PLAIN._replace(request=name, cycle=n) for n in range(50) for name in requests])
    until(lambda: handover.accounts().sent == 2_000)
    handover.close()
    source = EventSource(kafka, {})
    assert source.connect(threading.Event())
    intake = Intake(DeadLetters(kafka))
    cycles: dict[str, list[int]] = {}
    places: dict[str, set[int]] = {}
    read = 0
    while read < 2_000:
        for record in source.poll(0.1):
            admitted = intake.admit(record)
            assert admitted is not None
            read += admitted.events
            for event in decode_batch(record.value).events:
                cycles.setdefault(event.request, []).append(event.cycle)
                places.setdefault(event.request, set()).add(record.partition)
    source.close()
    assert intake.sequences.missing == intake.sequences.duplicates == 0
    assert all(told == list(range(50)) for told in cycles.values()) and len(cycles) == 40
    assert {len(place) for place in places.values()} == {1}
    assert set.union(*places.values()) == {0, 1, 2}
    processes.stop([child])


def test_a_broker_that_hangs_under_load_costs_no_event_and_no_order(tmp_path: Path) -> None:
    port = machine.free_port()
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
    child = start_broker(port, tmp_path / "data", tmp_path / "broker.log")
    make_right(kafka)
    queue, stop = EventQueue(100_000), threading.Event()
    handover = handover_of(kafka, queue, tmp_path / "spill")

    def decode() -> None:
        while not stop.is_set():
            put(queue, *[EVENT, PLAIN] * 10)
            stop.wait(0.02)

    thread = threading.Thread(target=decode)
    thread.start()
    until(lambda: handover.accounts().sent > 300)
    # Not stopped, for this broker then forgets what it acknowledged last.
    child.process.send_signal(signal.SIGSTOP)
    until(lambda: handover.accounts().spilled > 300)
    assert balanced(handover.accounts())
    child.process.send_signal(signal.SIGCONT)
    sent = handover.accounts().sent
    until(lambda: handover.accounts().sent > sent + 300)
    stop.set()
    thread.join()
    until(lambda: not handover.accounts().waiting + handover.accounts().spilled)
    handover.close()
    found = handover.accounts()
    assert found == Accounts(made=found.made, sent=found.made)
    assert list(dict.fromkeys(numbers(kafka))) == list(range(found.made))
    processes.stop([child])
