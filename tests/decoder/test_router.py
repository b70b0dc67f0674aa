"""The router against a target that is a list of tokens: what is chosen, committed and labelled.

A prompt is indexed in steps, and only where it can be copied from. A draft's label is its longest
common prefix with what was committed behind it, and no more.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.features import FEATURES
from decoder.core.costs import LiveCosts
from decoder.core.router import RequestOptions
from decoder.drafting.suffix import STEP_TOKENS
from tests.conftest import naive_accepted_length, random_policy
from tests.decoder.simulated import Committed, Router, decode_all, waiting
from tests.engines.trials import drafts_in

EOS = 0


def test_tokens_behind_the_limit_are_neither_counted_nor_labelled() -> None:
    router = Router()
    router.start("r", np.array([1, 2, 3, 1, 2], np.int32), RequestOptions(3, 4096))
    router.observe([Committed("r", [3], 0)], 1)
    router.choose(["r"])
    router.observe([Committed("r", [1, 2, 3, 1], 3)], 4)  # an engine reports past the limit
    assert "r" not in router
    assert router.counters.tokens == 3
    assert router.counters.accepted["cache"] == 2


def test_no_draft_reaches_the_tokens_that_must_be_written() -> None:
    router = Router()
    text, seen = [1, 2, 3, 4, 5, 6, 7, 8] * 4, []
    router.start("r", np.array(text, np.int32), RequestOptions(24, 4096, min_tokens=9))
    written, drafted = 0, 0
    while "r" in router:
        committed = text[written : written + drafted + 1]
        router.observe([Committed("r", committed, drafted)], 1)
        written += len(committed)
        if "r" in router:
            (decision,) = router.choose(["r"])
            drafted = len(decision.tokens)
            seen.append((written, drafted, decision.room))
    assert any(drafted for _, drafted, _ in seen) and seen[-1][0] >= 9
    for written, drafted, room in seen:
        assert drafted <= room <= (9 if written < 9 else 24) - written - 1


def test_an_end_token_ends_the_labels_as_censored() -> None:
    router = Router(1e9)
    prompt = np.array([1, 2, EOS, 4, 5, 1], np.int32)
    router.start("r", prompt, RequestOptions(64, 4096, stop_ids=frozenset({EOS})))
    router.observe([Committed("r", [2], 0)], 1)
    router.choose(["r"])  # the cache drafts [EOS, 4, ...]
    router.observe([Committed("r", [EOS], 0)], 1)
    router.flush()
    (event,) = router.kept.events
    assert (event.accepted, event.censored) == (1, "stop")
    assert router.counters.stopped == 1


def test_policies_swap_underneath_without_a_mixed_step() -> None:
    router = Router(replace(random_policy(), threshold=0.0))
    policies = [replace(random_policy(seed=i, version=i), threshold=float(i)) for i in range(4)]
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for policy in policies:
                router.policy = policy

    thread = threading.Thread(target=swap)
    thread.start()
    output = [1, 2, 3, 4, 5] * 60
    try:
        decode_all(router, "r", [1, 2, 3, 4, 5] * 2, output, RequestOptions(300, 4096))
    finally:
        stop.set()
        thread.join()
    assert router.counters.tokens == 300
    thresholds = {p.version: p.threshold for p in policies} | {1: 1.0}
    for event in router.kept.events:
        assert event.parameter in (0.0, thresholds[event.policy_version])
        assert (event.arm == "cache") == (
            event.predicted >= event.parameter
        ) or not event.verified_len


@pytest.mark.parametrize(
    ("step_tokens", "usual", "told"),
    [(1, True, 1), (1, False, 0), (30, True, 0), (0, True, 0)],
    ids=["decoding alone", "the drafter caught up", "beside a prompt", "made by no step"],
)
def test_costs_are_learned_from_steps_like_any_other(
    step_tokens: int, usual: bool, told: int
) -> None:
    router = Router(float("inf"))
    router.costs = LiveCosts()
    router.start("a", np.array([1, 2, 3], np.int32), RequestOptions(50, 100))
    router.choose(["a"])
    router.observe([Committed("a", [4], 0)], step_tokens, usual)
    assert router.costs.steps == told


def following(prompt: np.ndarray, options: RequestOptions) -> tuple[Router, int]:
    """A router that has begun a request, and the bytes of what it holds for drafts by then."""
    router = Router()
    router.start("r", prompt, options)
    return router, router.cache.held_bytes


def test_beginning_a_request_indexes_nothing_of_it() -> None:
    long = np.arange(128_000, dtype=np.int32)
    options = RequestOptions(100, 1 << 20)
    router, _ = following(long, options)
    assert not router.cache.pool.windows["linked"].any() and not router.cache.pool.heads.any()
    steps = 0
    while waiting(router.cache):
        router.choose(["r"])
        steps += 1
    assert steps == -(-len(long) // STEP_TOKENS)


@pytest.mark.parametrize(
    "options",
    [RequestOptions(1, 1 << 20), RequestOptions(100, 1 << 20, speculate=False),
     RequestOptions(100, 8_001)],
)  # fmt: skip
def test_the_prompt_of_a_request_that_can_have_no_draft_is_not_indexed(
    options: RequestOptions,
) -> None:
    router, held = following(np.tile(np.arange(400, dtype=np.int32), 20), options)
    assert [d.arm for d in router.choose(["r"])] == ["none"] and not router.kept.events
    assert not waiting(router.cache) and router.cache.held_bytes == held
    later = RequestOptions(9, 1 << 20, min_tokens=1)
    assert waiting(following(np.arange(8_000, dtype=np.int32), later)[0].cache)


def test_text_that_an_engine_writes_over_later_stays_what_it_was() -> None:
    row = np.tile(np.arange(2, 30, dtype=np.int32), 3)
    router, _ = following(row, RequestOptions(100, 1 << 20))
    row[:] = 1
    router.observe([Committed("r", [2], 0)], len(row))
    router.choose(["r"])
    router.observe([Committed("r", [3], 0)], 1)
    (decision,) = router.choose(["r"])
    assert list(decision.tokens)[:4] == [4, 5, 6, 7]


few = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@settings(max_examples=60)
@given(few, st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=60))
def test_every_draft_keeps_its_own_place_however_many_wait(
    prompt: list[int], commits: list[list[int]]
) -> None:
    router = Router(1e9)
    router.start("r", np.array(prompt, np.int32), RequestOptions(1 << 20, 1 << 21))
    drafts: dict[int, list[int]] = {}  # by output tokens before it
    text: list[int] = []
    streaks = {}
    for committed in commits:
        waiting = [
            at for at, draft in drafts.items()
            if naive_accepted_length(draft, text[at:]) == len(text) - at < len(draft)
        ]  # fmt: skip
        table = router.requests.table
        assert table.requests["num_open"][router.requests.slots["r"]] == len(waiting)
        router.choose(["r"])
        for *_, tokens in drafts_in(router, ["r"]):
            drafts[len(text)] = tokens
            streaks[len(text)] = max((len(text) - at for at in waiting), default=0)
        text += committed
        router.observe([Committed("r", committed, 0)], 1)
    router.close()
    assert sorted(event.position for event in router.kept.events) == sorted(drafts)
    for event in router.kept.events:
        draft, behind = drafts[event.position], text[event.position :]
        assert event.accepted == naive_accepted_length(draft, behind)
        assert event.features[FEATURES.index("streak")] == streaks[event.position]
        censored = event.accepted == len(behind) < len(draft)
        assert event.censored == ("abort" if censored else "")
