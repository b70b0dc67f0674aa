"""The drafter reads what begins where its drafts pay for that, and finds out when they do again."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from decoder.engines.vllm.reading import DEPTH, Reading, share_of
from tests.engines.test_vllm_adapter import config, engine, is_whole, serve

PLAIN_US = 30_000.0


def after(reading: Reading, steps: int, tokens: int, worth_us: float) -> bool:
    for _ in range(steps):
        reading.observe(tokens, 1_000.0, worth_us, PLAIN_US)
    return reading.wanted


def test_it_reads_while_its_drafts_are_worth_more_than_that_takes() -> None:
    reading = Reading(0.05)
    assert after(reading, 1, 2_000, 0.0), "a prompt is paid for at once, its drafts come after it"
    assert after(reading, 500, 100, 5_500.0)
    assert not after(reading, 500, 100, 4_500.0)
    assert after(reading, 500, 100, 5_500.0), "not overdrawn for ever"


def test_no_more_is_saved_or_owed_than_a_few_steps() -> None:
    reading = Reading(0.05)
    after(reading, 1_000, 1, 5_000.0)
    steps = math.ceil(DEPTH * PLAIN_US / 5_000.0)
    assert after(reading, steps - 1, 100, 0.0) and not after(reading, 2, 100, 0.0)
    after(reading, 1_000, 100, 0.0)
    assert not after(reading, steps - 1, 0, 5_000.0) and after(reading, 2, 0, 5_000.0)


def test_a_policy_that_weighs_no_model_drafts_has_them_read() -> None:
    reading = Reading(0.05)
    assert not after(reading, 1_000, 100, 0.0)
    assert after(reading, 1, 100_000, math.inf) and after(reading, 3, 100, math.inf)


def test_a_drafter_is_a_share_of_its_target() -> None:
    assert 0.04 < share_of(30, 1) < 0.05
    assert share_of(0, 1) > 1.0


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.parametrize("blocks", [400, 110])
def test_while_reading_does_not_pay_most_that_begins_has_cache_drafts_alone(blocks: int) -> None:
    """With as few blocks requests are preempted, and begin anew."""
    e = engine(config(), reading=Reading(100.0), blocks=blocks)
    late, choose = e.adapter.late, e.worker.router.choose
    assert late is not None
    drafted, skipped = set[str](), set[str]()

    def noting(
        names: Sequence[str], most: int | None, unread: Collection[str], **rest: Any
    ) -> Any:
        decisions = choose(names, most, unread, **rest)
        asking = {n for n, d in zip(names, decisions, strict=True) if d.arm == "model"}
        assert not asking & unread
        drafted.update(asking)
        skipped.update(late.skipped)
        return decisions

    e.worker.router.choose = noting  # type: ignore[method-assign,assignment]
    serve(e, requests=30)
    is_whole(e)
    assert len(skipped) > 15 and drafted and e.drafter.passes
    assert bool(e.preemptions) == (blocks == 110)
    assert not late.unread and not late._pieces and len(late._met) <= 4
