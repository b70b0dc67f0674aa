"""The router against a target that is a list of tokens: what is chosen, committed and labelled."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.core.costs import LiveCosts
from decoder.core.router import Committed, DraftRouter, RequestOptions
from decoder.drafting.suffix import SuffixCache
from decoder.settings import WorkerSettings
from tests.conftest import KeepingSink, naive_accepted_length, random_policy

EOS = 0


def make_router(
    sink: KeepingSink, classes: np.ndarray, policy: Policy, has_model: bool = False
) -> DraftRouter:
    return DraftRouter(SuffixCache(WorkerSettings()), policy, classes, sink, has_model)


class Target:
    """Verifies drafts as an engine does: accepts the agreeing prefix, then adds its own token."""

    def __init__(self, router: DraftRouter, output: list[int]) -> None:
        self.router, self.output, self.done = router, output, 0

    def verify(self, name: str, draft: list[int]) -> list[int]:
        accepted = naive_accepted_length(draft, self.output[self.done :])
        committed = self.output[self.done : self.done + accepted + 1]
        self.done += len(committed)
        return committed

    def run(self, name: str, prompt: list[int], options: RequestOptions) -> list[list[int]]:
        """Decode to the end; returns the drafts verified, cycle by cycle."""
        self.router.start(name, np.array(prompt, np.int32), options)
        self.router.observe([Committed(name, self.verify(name, []), 0)], 1)
        drafts = []
        while name in self.router and self.done < len(self.output):
            (decision,) = self.router.choose([name])
            draft = list(decision.tokens)
            drafts.append(draft)
            committed = self.verify(name, draft)
            self.router.observe([Committed(name, committed, len(draft))], 1 + len(draft))
        self.router.stop(name, "abort")
        self.router.settle()
        return drafts


def test_tokens_behind_the_limit_are_neither_counted_nor_labelled(
    sink: KeepingSink, token_classes: np.ndarray
) -> None:
    router = make_router(sink, token_classes, frequency_policy("s", 0.0))
    router.start("r", np.array([1, 2, 3, 1, 2], np.int32), RequestOptions(3, 4096))
    router.observe([Committed("r", [3], 0)], 1)
    router.choose(["r"])
    router.observe([Committed("r", [1, 2, 3, 1], 3)], 4)  # an engine reports past the limit
    assert "r" not in router
    assert router.counters.tokens == 3
    assert router.counters.accepted["cache"] == 2


def test_no_draft_reaches_the_tokens_that_must_be_written(
    sink: KeepingSink, token_classes: np.ndarray
) -> None:
    router = make_router(sink, token_classes, frequency_policy("s", 0.0))
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


def test_an_end_token_ends_the_labels_as_censored(
    sink: KeepingSink, token_classes: np.ndarray
) -> None:
    router = make_router(sink, token_classes, frequency_policy("s", 1e9))
    prompt = np.array([1, 2, EOS, 4, 5, 1], np.int32)
    router.start("r", prompt, RequestOptions(64, 4096, stop_ids=frozenset({EOS})))
    router.observe([Committed("r", [2], 0)], 1)
    router.choose(["r"])  # the cache drafts [EOS, 4, ...]
    router.observe([Committed("r", [EOS], 0)], 1)
    router.settle()
    (event,) = sink.events
    assert (event.accepted, event.censored) == (1, "stop")
    assert router.counters.stopped == 1


def test_switched_off_requests_get_no_draft_of_any_arm(
    sink: KeepingSink, token_classes: np.ndarray
) -> None:
    router = make_router(sink, token_classes, frequency_policy("s", 0.0), has_model=True)
    router.start("r", np.array([1, 2, 3] * 4, np.int32), RequestOptions(64, 4096, speculate=False))
    router.observe([Committed("r", [1], 0)], 1)
    assert [d.arm for d in router.choose(["r"])] == ["none"]
    assert not sink.events


def test_a_second_start_is_an_error(sink: KeepingSink, token_classes: np.ndarray) -> None:
    router = make_router(sink, token_classes, random_policy())
    router.start("r", np.array([1], np.int32), RequestOptions(8, 64))
    with pytest.raises(ValueError, match="active already"):
        router.start("r", np.array([1], np.int32), RequestOptions(8, 64))


def test_policies_swap_underneath_without_a_mixed_step(
    sink: KeepingSink, token_classes: np.ndarray
) -> None:
    router = make_router(sink, token_classes, replace(random_policy(), threshold=0.0))
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
        Target(router, output).run("r", [1, 2, 3, 4, 5] * 2, RequestOptions(300, 4096))
    finally:
        stop.set()
        thread.join()
    assert router.counters.tokens == 300
    thresholds = {p.version: p.threshold for p in policies} | {1: 1.0}
    for event in sink.events:
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
    sink: KeepingSink, token_classes: np.ndarray, step_tokens: int, usual: bool, told: int
) -> None:
    router = make_router(sink, token_classes, frequency_policy("s", float("inf")))
    router.costs = LiveCosts()
    router.start("a", np.array([1, 2, 3], np.int32), RequestOptions(50, 100))
    router.choose(["a"])
    router.observe([Committed("a", [4], 0)], step_tokens, usual)
    assert router.costs.steps == told
