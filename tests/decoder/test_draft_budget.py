"""A step's drafts fit into memory, and do not keep prompts waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decoder.core.guards.draft_budget import (
    COPIES,
    DRAFTS_SHARE,
    NEWCOMERS_SHARE,
    room,
    tokens_of_logits,
)


def test_logits_bound_a_step_of_many_requests() -> None:
    assert tokens_of_logits(128_256, 1000 * 4 * COPIES * 128_256) == 1000
    assert room(64, 128_256, 8192) == tokens_of_logits(128_256) - 64


def test_a_gibibyte_holds_what_the_page_on_vllm_says() -> None:
    assert [tokens_of_logits(vocabulary) for vocabulary in (128_256, 151_936, 262_144)] == [
        523, 441, 256,
    ]  # fmt: skip


def test_waiting_prompts_go_first_and_leave_drafts_a_share() -> None:
    assert room(64, 1000, 2048, waiting=1500) == 484
    assert room(64, 1000, 2048, waiting=100_000) == 1984 // DRAFTS_SHARE


def test_a_prompt_that_nobody_knows_of_yet_finds_room_and_then_nearly_all_of_it() -> None:
    assert room(64, 1000, 2048) == 1984 - 1984 // NEWCOMERS_SHARE
    assert room(64, 1000, 2048, full=True) == 1984 // DRAFTS_SHARE


@given(*[st.integers(-5, 100_000)] * 4, st.booleans())
def test_there_is_never_less_than_no_room(
    rows: int, vocabulary: int, batched: int, waiting: int, full: bool
) -> None:
    found = room(rows, vocabulary, batched, waiting, full=full)
    assert 0 <= found <= max(batched - rows, 0)
