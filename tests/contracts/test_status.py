"""A status or a round of a trial is read or refused, and says where every event is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.contracts.bundle import CHAMPION
from decoder.contracts.errors import ContractError
from decoder.contracts.status import LearnerStatus, WorkerStatus, decode_status
from decoder.contracts.trials import PLAIN, Block, Group, Round, decode_round

WORKER = WorkerStatus(
    process="w", scope="s", time=1.0, events_made=21, events_sent=10, queue_depth=5,
    events_dropped=3, events_refused={"InvalidRecord": 1, "malformed": 1}, events_failed=0,
    events_in_doubt=0, events_spilled=0,
)  # fmt: skip
LEARNER = LearnerStatus(process="l", scope="s", time=1.0, lag=3)
DEEP = 20_000


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


BOMBS = (
    b"", b"{", b"null", b"[]", b"[" * DEEP + b"]" * DEEP, b'{"role":' * DEEP + b"1" + b"}" * DEEP,
    b'{"contract": "other"}',
)  # fmt: skip


@pytest.mark.parametrize("read", [decode_status, decode_round])
@given(data=st.binary(max_size=200))
def test_what_is_no_record_is_refused(read: Callable[[bytes], object], data: bytes) -> None:
    for each in (data, *BOMBS):
        with pytest.raises(ContractError):
            read(each)


ROUND = Round(
    scope="scope", worker="worker", life="ab", number=3, time=1.7e9,
    blocks=(
        Block(side=PLAIN, steps=32, requests=1, tokens=32, us=1e6, cost_us=9e5),
        Block(
            side=CHAMPION, version=4, publication=9, steps=32, requests=1, tokens=60, us=1.2e6,
            cost_us=1.1e6, late_us=2e4, groups=(Group(tokens=60, cost_us=1.1e6),),
        ),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", -1), ("steps", 2**60), ("us", float("nan")), ("us", float("inf")),
        ("tokens", "12"), ("side", "x" * 65), ("cost_us", -1.0), ("us", 1e13), ("tokens", 1e10),
        ("groups", [{}] * 3),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(field: str, value: object) -> None:
    record = json.loads(ROUND.model_dump_json())
    record["blocks"][0][field] = value
    with pytest.raises(ContractError, match="trial round refused"):
        decode_round(json.dumps(record).encode())


def test_what_is_added_later_is_ignored() -> None:
    record = json.loads(ROUND.model_dump_json())
    record["added"] = record["blocks"][0]["added"] = 1
    assert decode_round(json.dumps(record).encode()) == ROUND
    assert ROUND.block(CHAMPION) is ROUND.blocks[1] and ROUND.block("trial") is None
