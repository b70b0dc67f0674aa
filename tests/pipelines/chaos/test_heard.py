"""What must never be seen on the topics is seen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from decoder.contracts.events import Origin, encode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.topics import DRAFTS, POLICY, STATUS
from decoder.policy.probes import to_bytes
from pipelines.chaos.heard import Heard
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
