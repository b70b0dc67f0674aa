"""What must never be seen on the topics is seen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from decoder.contracts.events import Origin, encode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.topics import DRAFTS, POLICY, STATUS
from decoder.policy.probes import to_bytes
from pipelines.chaos.heard import Account, Heard
from tests.conftest import random_policy
from tests.learner.traffic import Traffic

LIFE = "0123abcd"


def heard(*records: tuple[str, bytes | None]) -> Heard:
    made = Heard(KafkaSettings())
    for topic, value in records:
        made._take(SimpleNamespace(topic=topic, key=b"scope/champion", value=value))
    return made


def published(number: int, version: int = 1) -> tuple[str, bytes]:
    policy = replace(random_policy(version=version), publication=number)
    return POLICY.name, to_bytes(policy)


def told(life: str, publication: int, time: float, made: int = 0) -> tuple[str, bytes]:
    status = WorkerStatus(process="w", scope="s", life=life, time=time, publication=publication,
                          policy_role="champion", events_made=made)  # fmt: skip
    return STATUS.name, status.model_dump_json().encode()


def test_a_topic_that_is_read_again_is_no_fault() -> None:
    order = [published(1), published(2), published(5)]
    assert heard(*order, *order, (POLICY.name, None)).faults == []


def test_numbers_that_go_back_or_come_twice_are_faults() -> None:
    assert len(heard(published(2), published(1)).faults) == 1
    assert len(heard(published(2), published(2, version=9)).faults) == 1


def test_a_worker_that_goes_back_is_one_and_a_new_life_is_none() -> None:
    assert heard(told("a", 3, 1.0), told("b", 0, 2.0)).faults == []
    assert len(heard(told("a", 3, 1.0), told("a", 2, 2.0)).faults) == 1


def test_events_are_counted_once_however_often_they_come() -> None:
    events = Traffic(seed=1).events(3)
    record = DRAFTS.name, encode_batch(events, Origin("s", "w", LIFE), 0)
    found = heard(record, record, told(LIFE, 0, 1.0, made=4))
    numbers = {event.number for event in events}
    assert found.faults == [] and found.distinct == len(numbers)
    assert found.made == max(numbers) + 1
    counted = LearnerStatus(process="l", scope="s", time=1.0, events_consumed=2)
    found._take(SimpleNamespace(topic=STATUS.name, key=b"", value=counted.model_dump_json()))
    assert found.counted == 2 and found.since(-1.0, "l") and not found.since(-1.0, "x")


def test_a_record_that_keeps_no_contract_is_a_fault() -> None:
    assert len(heard((DRAFTS.name, b"?"), (STATUS.name, b"?"), (POLICY.name, b"?")).faults) == 3


def test_what_is_missing_is_what_was_counted_or_is_in_doubt() -> None:
    events = Traffic(seed=1).events(3)[:40]
    status = WorkerStatus(
        process="w", scope="s", life=LIFE, time=1.0, events_made=60, events_sent=40,
        events_in_doubt=4, events_dropped=9, events_refused={"No": 3}, queue_depth=3,
        events_spilled=1,
    )  # fmt: skip
    found = heard(
        (DRAFTS.name, encode_batch(events, Origin("s", "w", LIFE), 0)),
        (STATUS.name, status.model_dump_json().encode()),
    )
    assert found.account(LIFE) == Account(60, 12, 4, 4, 60 - len(events), 0)
    assert found.account("another") == Account()


def test_an_account_adds_up_or_not() -> None:
    assert Account(lost=12, in_doubt=4, missing=14).adds_up
    assert Account(lost=12, missing=12).adds_up
    assert not Account(lost=12, missing=11).adds_up, "counted as lost, and on the topic"
    assert not Account(lost=12, in_doubt=4, missing=17).adds_up
    before = Account(made=50, lost=10, in_doubt=1, waiting=5, missing=12)
    after = Account(made=80, lost=12, in_doubt=1, waiting=0, missing=14)
    assert after.since(before) == Account(made=30, lost=2, in_doubt=0, waiting=0, missing=2)


def test_who_holds_the_lease_is_what_it_said_last() -> None:
    told = [
        LearnerStatus(process=f"l-{pid}", scope="s", time=time, holds_lease=holds)
        for pid, time, holds in ((7, 1.0, True), (8, 1.5, False), (7, 2.0, False))
    ]
    found = heard(*[(STATUS.name, status.model_dump_json().encode()) for status in told])
    last = found.last("-7")
    assert last is not None and last.time == 2.0 and not last.holds_lease
    assert found.last("-9") is None
