"""What must never be seen on the topics is seen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from decoder.contracts.events import Origin, encode_batch
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.topics import DRAFTS, POLICY, STATUS
from decoder.policy.probes import to_bytes
from pipelines.lab.chaos.topic_audit import TopicAudit, adds_up
from pipelines.watch.observer import ingest
from tests.conftest import random_policy
from tests.learner.traffic import Traffic

EVENTS = Traffic(seed=1).events(3)[:40]
BATCH = DRAFTS.name, encode_batch(EVENTS, Origin("s", "w", "a"), 0)
ALL = max(event.number for event in EVENTS) + 1
Record = tuple[str, bytes | None]


def audit(*records: Record) -> TopicAudit:
    made = TopicAudit()
    for topic, value in records:
        ingest(made, topic, b"scope/champion", value, 0.0)
    return made


def published(number: int, version: int = 1) -> Record:
    policy = replace(random_policy(version=version), publication=number)
    return POLICY.name, to_bytes(policy)


def status(kind: Any, process: str, time: float, **said: Any) -> Record:
    made = kind(process=process, scope="s", time=time, **said)
    return STATUS.name, made.model_dump_json().encode()


told, learned = partial(status, WorkerStatus, "w"), partial(status, LearnerStatus)
ORDER = [published(1), published(2), published(5)]
FORTH = [
    told(1.0, life="a", publication=2),
    told(2.0, life="b"),
    told(3.0, life="a", publication=3),
]


@pytest.mark.parametrize(
    ("records", "faults"),
    [
        ([*ORDER, *ORDER, (POLICY.name, None)], 0),  # read again
        ([published(2), published(1)], 1),
        ([published(2), published(2, version=9)], 1),
        ([*FORTH, *FORTH], 0),
        ([*FORTH, told(4.0, life="a", publication=2)], 1),
        ([BATCH, BATCH, learned("l-7", 1.0, events_consumed=ALL)], 0),
        ([BATCH, BATCH, learned("l-7", 1.0, events_consumed=ALL + 1)], 1),
        ([BATCH, told(1.0, life="a", events_made=80, events_sent=40)], 0),
        ([BATCH, told(1.0, life="a", events_made=80, events_sent=41)], 1),
        ([(DRAFTS.name, b"?"), (STATUS.name, b"?"), (POLICY.name, b"?")], 1),
    ],
)
def test_what_must_never_be_is_a_fault_and_what_is_read_again_is_none(
    records: list[Record], faults: int
) -> None:
    found = audit(*records)
    assert len(found.faults + found.contradictions()) == faults
    found.excused.add("a")  # its broker may have forgotten what it acknowledged
    assert "not on the topic" not in "".join(found.contradictions())


def test_an_account_adds_up_or_not() -> None:
    said = {"events_made": 60, "events_sent": 40, "events_in_doubt": 4, "events_dropped": 9,
            "events_refused": {"No": 3}, "queue_depth": 4}  # fmt: skip
    account = {"made": 60, "delivered": 40, "in doubt": 4, "waiting": 4, "lost": 12}
    found = audit(BATCH, BATCH, told(1.0, life="a", **said))
    assert found.account("a") == account and adds_up(account)
    assert set(found.account("another").values()) == {0}
    assert found.account("a", before=account | {"made": 50})["made"] == 10
    assert adds_up(account | {"delivered": 44}) and adds_up(account | {"lost": 16})
    assert not adds_up(account | {"delivered": 39}), "one is nowhere"
    assert not adds_up(account | {"delivered": 45}), "one counted as lost is on the topic"


def test_of_a_process_what_it_said_last_counts() -> None:
    found = audit(learned("l-7", 1.0, holds_lease=True), learned("l-8", 1.5), learned("l-7", 2.0))
    last = found.learner_of(7)
    assert last is not None and last.time == 2.0 and found.learner_of(9) is None
    assert found.has_spoken(-1.0, "-7") and not found.has_spoken(-1.0, "-9")
