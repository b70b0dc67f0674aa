"""A status is read or refused, and says where every event is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.errors import ContractError
from decoder.contracts.status import LearnerStatus, WorkerStatus, decode_status

WORKER = WorkerStatus(
    process="w", scope="s", time=1.0, events_made=21, events_sent=10, queue_depth=5,
    events_dropped=3, events_refused={"InvalidRecord": 1, "malformed": 1}, events_failed=0,
    events_in_doubt=0, events_spilled=0,
)  # fmt: skip
LEARNER = LearnerStatus(process="l", scope="s", time=1.0, lag=3)
DEEP = 100_000


def test_both_roles_come_back() -> None:
    for status in (WORKER, LEARNER):
        assert decode_status(status.model_dump_json().encode()) == status


def test_events_on_their_way_are_what_is_in_no_other_place() -> None:
    assert WORKER.events_unaccounted == 1
    for place in ("events_sent", "events_in_doubt", "queue_depth", "events_spilled",
                  "events_dropped", "events_failed"):  # fmt: skip
        more = WORKER.model_copy(update={place: getattr(WORKER, place) + 1})
        assert more.events_unaccounted == 0, place


@pytest.mark.parametrize(
    "changes",
    [
        {"contract": "hvd.status.v1"}, {"role": "jester"}, {"tokens": -1}, {"tokens": 2**80},
        {"cycles": {"cache": -1}}, {"cycles": {"cache": "many"}}, {"process": None},
        {"time": -1.0}, {"time": 1e300}, {"time": float("inf")}, {"time": float("nan")},
        {"policy_applied_at": 1e300}, {"step_us": {"many": 1}}, {"step_us": {"1": 10**400}},
    ],
)  # fmt: skip
def test_what_keeps_no_contract_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        decode_status(json.dumps({**json.loads(WORKER.model_dump_json()), **changes}).encode())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"[" * DEEP + b"]" * DEEP, b'{"role":' * DEEP + b"1" + b"}" * DEEP]
)
def test_bombs_are_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        decode_status(data)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        decode_status(data)
