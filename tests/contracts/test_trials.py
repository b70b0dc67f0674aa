"""Rounds of a trial on the wire."""

import json

import pytest

from decoder.contracts.bundle import CHAMPION
from decoder.contracts.errors import ContractError
from decoder.contracts.trials import PLAIN, Block, Group, Round, decode_round

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


def test_a_round_survives_its_way() -> None:
    assert decode_round(ROUND.model_dump_json().encode()) == ROUND
    assert ROUND.block(CHAMPION) is ROUND.blocks[1]
    assert ROUND.block("trial") is None


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


@pytest.mark.parametrize("value", [b"", b"{", b"null", b"[" * 100_000, b'{"contract": "other"}'])
def test_what_is_no_round_is_refused(value: bytes) -> None:
    with pytest.raises(ContractError):
        decode_round(value)


def test_what_is_added_later_is_ignored() -> None:
    record = json.loads(ROUND.model_dump_json())
    record["added"] = record["blocks"][0]["added"] = 1
    assert decode_round(json.dumps(record).encode()) == ROUND
