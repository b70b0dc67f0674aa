"""What must never be seen on the topics is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoder.contracts.events import Origin, encode_batch
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.topics import DRAFTS, POLICY, STATUS
from decoder.policy.probes import to_bytes
from pipelines.chaos.topic_audit import Account, TopicAudit
from pipelines.watch.observer import take
from tests.conftest import random_policy
from tests.learner.traffic import Traffic

LIFE = "0123abcd"
EVENTS = Traffic(seed=1).events(3)[:40]
BATCH = DRAFTS.name, encode_batch(EVENTS, Origin("s", "w", LIFE), 0)
Record = tuple[str, bytes | None]


def audit(*records: Record) -> TopicAudit:
    made = TopicAudit()
    for topic, value in records:
        take(made, topic, b"scope/champion", value, 0.0)
    return made


def published(number: int, version: int = 1) -> Record:
    policy = replace(random_policy(version=version), publication=number)
    return POLICY.name, to_bytes(policy)


def told(life: str, time: float, **said: object) -> Record:
    status = WorkerStatus(process="w", scope="s", life=life, time=time, **said)  # type: ignore[arg-type]
    return STATUS.name, status.model_dump_json().encode()


def learned(pid: int, time: float, holds: bool, consumed: int = 0) -> Record:
    status = LearnerStatus(process=f"l-{pid}", scope="s", time=time, holds_lease=holds,
                           events_consumed=consumed)  # fmt: skip
    return STATUS.name, status.model_dump_json().encode()


ORDER = [published(1), published(2), published(5)]
FORTH = [told("a", 1.0, publication=2), told("b", 2.0), told("a", 3.0, publication=3)]


@pytest.mark.parametrize(
    ("records", "faults"),
    [
        ([*ORDER, *ORDER, (POLICY.name, None)], 0),  # read again
        ([published(2), published(1)], 1),
        ([published(2), published(2, version=9)], 1),
        ([*FORTH, *FORTH], 0),
        ([*FORTH, told("a", 4.0, publication=2)], 1),
        ([BATCH, BATCH, learned(7, 1.0, True, 2)], 0),
        ([learned(7, 1.0, True, 2)], 1),  # counted, and nobody made them
        ([BATCH, told(LIFE, 1.0, events_made=80, events_sent=40)], 0),
        ([BATCH, told(LIFE, 1.0, events_made=80, events_sent=41)], 1),
        ([(DRAFTS.name, b"?"), (STATUS.name, b"?"), (POLICY.name, b"?")], 1),
    ],
)
def test_what_must_never_be_is_a_fault_and_what_is_read_again_is_none(
    records: list[Record], faults: int
) -> None:
    found = audit(*records)
    assert len(found.faults + found.contradictions()) == faults


def test_a_broker_that_may_have_forgotten_is_not_held_to_what_it_acknowledged() -> None:
    found = audit(told(LIFE, 1.0, events_sent=1))
    found.excused.add(LIFE)
    assert found.contradictions() == []


def test_events_are_counted_once_however_often_they_come() -> None:
    numbers = {event.number for event in EVENTS}
    found = audit(BATCH, BATCH, told(LIFE, 1.0, events_made=4), learned(7, 1.0, True, 2))
    assert found.counts == {"made": max(numbers) + 1, "delivered": len(numbers), "counted": 2}


def test_an_account_adds_up_or_not() -> None:
    said = {"events_made": 60, "events_sent": 40, "events_in_doubt": 4, "events_dropped": 9,
            "events_refused": {"No": 3}, "queue_depth": 3, "events_spilled": 1}  # fmt: skip
    found = audit(BATCH, told(LIFE, 1.0, **said))
    assert found.account(LIFE) == Account(60, 40, 4, 4, 12) and found.account(LIFE).adds_up
    assert found.account("another") == Account()
    assert Account(made=50, delivered=36, in_doubt=4, lost=12).adds_up, "two in doubt are missing"
    assert not Account(made=50, delivered=33, in_doubt=4, lost=12).adds_up
    assert not Account(made=50, delivered=39, lost=12).adds_up, "counted as lost, and on the topic"
    before = Account(made=50, delivered=38, in_doubt=1, waiting=5, lost=7)
    assert Account(80, 66, 1, 0, 9).since(before) == Account(30, 28, 0, -5, 2)


def test_of_a_process_what_it_said_last_counts_and_when() -> None:
    found = audit(learned(7, 1.0, True), learned(8, 1.5, False), learned(7, 2.0, False))
    last = found.learner_of(7)
    assert last is not None and last.time == 2.0 and not last.holds_lease
    assert found.learner_of(9) is None
    assert found.has_spoken(-1.0, "-7") and not found.has_spoken(-1.0, "-9")
