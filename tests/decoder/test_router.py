"""The router against a target that is a list of tokens: what is chosen, committed and labelled."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from decoder.core.costs import LiveCosts
from decoder.core.router import Committed, RequestOptions
from tests.conftest import random_policy
from tests.decoder.simulated import Router, decode_all

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
    router.settle()
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
