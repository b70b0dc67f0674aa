"""The router believes what the engine says it did, and leaves out a request it cannot follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decoder.contracts.bundle import frequency_policy
from decoder.core.costs import LiveCosts
from decoder.core.guards.controller import PROBE_EVERY
from decoder.core.router import RequestOptions
from decoder.core.step_timer import StepTimer
from decoder.drafting.suffix import SuffixCache
from decoder.drafting.windows import PAGE
from decoder.policy.pricing import NOMINAL
from decoder.settings import WorkerSettings
from pipelines.replay.cache_drafts import propose
from tests.decoder.simulated import Committed, Router, trusting_policy

OPTIONS = RequestOptions(400, 4096)


class FailingCache(SuffixCache):
    """A suffix cache that fails for one request, in one verb."""

    def __init__(self, verb: str, name: str) -> None:
        super().__init__(WorkerSettings())
        setattr(self, verb, self._failing(getattr(self, verb), name))

    def _failing(self, verb: Any, name: str) -> Any:
        def called(request: str, *rest: Any) -> Any:
            if name == request:
                raise RuntimeError("the text is lost")
            return verb(request, *rest)

        return called


def test_a_model_draft_that_was_not_made_costs_and_brings_nothing() -> None:
    router = Router(trusting_policy(chance=0.9), True, guarded=True)
    router.begin(["r"], [1, 2, 3])
    before = router.model_arm.odds.copy()
    for token in range(12):
        (decision,) = router.choose(["r"])
        assert decision.arm == "model"
        router.drafted(["r"], [0], 0)
        router.observe([Committed("r", [4 + token], 0)], 1)
        assert router.timer.drafted == 0
    router.flush()
    assert router.counters.undrafted == 12
    assert router.counters.cycles == {"none": 12}
    assert (router.model_arm.odds == before).all()
    # A policy that asks for what is not there has made nothing: it is no better than drafting none.
    assert router.controller.floor.advantage <= 1.0


def test_a_request_that_missed_its_step_takes_nothing_from_those_that_ran() -> None:
    router = Router()
    router.begin(["a", "b"], [1, 2, 3, 1, 2])
    router.choose(["a", "b"])
    router.observe([Committed("a", [3], 1, 7)], 5)  # b was preempted
    router.choose(["a"])
    router.observe([Committed("a", [1], 0, 8), Committed("b", [3], 0, 7)], 9)
    router.close()
    took = {(e.request, e.position): e.step_tokens for e in router.kept.every}
    assert took == {("a", 1): 5, ("a", 2): 9, ("b", 1): 9}


def test_what_was_drafted_for_a_request_that_waits_is_told_once() -> None:
    router = Router(trusting_policy(chance=0.9), True)
    router.begin(["a", "b"], [1, 2, 3])
    router.choose(["a", "b"])
    router.drafted(["a", "b"], [2, 2], 2)
    router.observe([Committed("a", [4], 2, 5)], 5)
    router.choose(["a"])
    router.drafted(["a", "b"], [2, 0], 2)  # a part of b's text is read again
    assert router.counters.undrafted == 0
    router.observe([Committed("a", [5], 2, 6), Committed("b", [4], 0, 5)], 5)
    router.close()
    assert [e.drafted_len for e in router.kept.every if e.request == "b"] == [2]


def test_a_look_at_a_drafter_that_cannot_draft_is_not_repeated_at_every_step() -> None:
    never = replace(frequency_policy("s", float("inf")), use_model=False)
    router = Router(never, True, guarded=True)
    router.begin(["r"], [1, 2, 3])
    steps = 3 * PROBE_EVERY
    for _ in range(steps):
        router.choose(["r"])
        router.drafted(["r"], [0], 0)
        router.observe([Committed("r", [9], 0)], 1)
    assert 1 <= router.controller.num_probes <= steps // PROBE_EVERY


def test_no_draft_exceeds_num_speculative_tokens() -> None:
    router = Router(longest=3)
    router.begin(["r"], list(range(1, 25)) * 3)
    (decision,) = router.choose(["r"])
    assert decision.arm == "cache" and len(decision.tokens) == 3
    assert decision.room <= 3
    router = Router(trusting_policy(hazard=0.9, chance=0.9), True, longest=3)
    router.begin(["m"], [1, 2, 3])
    assert router.choose(["m"])[0].arm == "model" and router.timer.drafted == 3


def test_a_request_whose_length_is_not_the_engines_is_left_out_alone() -> None:
    router = Router()
    router.begin(["a", "b"], [1, 2, 3, 1, 2])
    router.choose(["a", "b"])
    router.observe([Committed("a", [2], 0, 99), Committed("b", [2], 0, 7)], 2)
    assert "a" not in router and "b" in router
    assert router.counters.left_out == {"length": 1}
    router.start("a", np.array([1, 2, 3, 1, 2], np.int32), OPTIONS, output=[1, 2])
    router.observe([Committed("a", [3], 0, 8)], 1)
    assert "a" in router
    decision = router.choose(["a"])[0]
    assert list(decision.tokens)[:2] == [1, 2]
    # Its output is in its own tree once, as the text it is: nothing of it was ever repeated.
    late = list(range(40, 80))
    router.start("late", np.array(late, np.int32), OPTIONS, output=list(range(80, 100)))
    router.observe([Committed("late", [7], 0, 61)], 1)
    router.cache.index(None)
    row, text = router.cache._active["late"], np.array([*late, *range(80, 100), 7], np.int32)
    assert propose(router.cache, row, text, 30) is None


def test_a_choice_stands_for_the_step_that_follows_it_and_for_no_later_one() -> None:
    router = Router(float("inf"))
    router.costs = LiveCosts()
    router.begin(["r"], [1, 2, 3])
    router.choose(["r"])
    router.observe([Committed("r", [4], 0)], 1)
    known = router.costs.steps
    router.observe([Committed("r", [5], 0)], 1)  # the choice before it failed
    router.choose([])  # nobody is left: what follows is a pause
    router.observe([Committed("r", [6], 0)], 1)
    assert known == 1 and router.costs.steps == known


def test_caches_stay_within_their_bytes_while_the_router_sleeps() -> None:
    settings = WorkerSettings(cache_gib=2**-11)
    router = Router(cache=SuffixCache(settings), guarded=True)
    router.controller.proposes = False
    rng = np.random.default_rng(0)
    names = [f"r{i}" for i in range(8)]
    for name in names:
        router.start(name, rng.integers(0, 9999, 50).astype(np.int32), OPTIONS)
    worst = 0.0
    for step in range(900):
        router.choose(names)
        tokens = [rng.integers(0, 9999, 4).tolist() for _ in names]
        router.observe([Committed(n, t, 0) for n, t in zip(names, tokens, strict=True)], 0)
        worst = max(worst, router.cache.held_bytes / (settings.cache_gib * 2**30))
        for i, name in enumerate(names):
            if name not in router:
                names[i] = f"r{8 * step + i}-again"
                router.start(names[i], rng.integers(0, 9999, 50).astype(np.int32), OPTIONS)
    assert router.cache.evicted > 20 and worst <= 1.0, worst


@pytest.mark.parametrize("verb", ["grow", "stop"])
def test_a_fault_leaves_out_its_own_request_and_no_other(verb: str) -> None:
    cache = FailingCache(verb, "a")
    router = Router(cache=cache)
    names, prompt = ["a", "b", "c"], np.resize(np.array([1, 2, 3], np.int32), PAGE - 1)
    for name in names:
        router.start(name, prompt, OPTIONS)
    router.observe([Committed(n, [2], 0) for n in names], 15)
    router.choose(names)
    router.observe([Committed(n, [3], 0) for n in names], 3)
    router.stop("a", "abort")
    _, *others = router.choose(names)
    assert [d.arm for d in others] == ["cache", "cache"]
    assert router.counters.left_out == {"fault": 1}
    slot = router.requests.slots["c"]
    assert "a" not in router and router.requests.table.requests["length"][slot] == PAGE + 1


def test_a_request_asked_for_twice_in_a_step_harms_nobody() -> None:
    router = Router()
    router.begin(["a", "b"], [1, 2, 3, 1, 2])
    for _ in range(20):
        router.choose(["a", "b", "a", "a"])
    router.stop("nobody", "stop")  # nor does one that the router does not know
    assert [d.arm for d in router.choose(["nobody", "b"])] == ["none", "cache"]
    router.drafted(["nobody", "b"], [1, 0], 0)
    router.observe([Committed(name, [3], 0) for name in ("nobody", "a", "b")], 3)
    assert router.choose(["b"])[0].arm == "cache"
    router.close()
    assert 20 < len(router.kept.events) == router.counters.labelled
    assert sum(event.request == "b" for event in router.kept.events) == 22


def test_a_request_that_cannot_be_begun_is_not_followed() -> None:
    router = Router(cache=FailingCache("start", "a"))
    with pytest.raises(RuntimeError, match="the text is lost"):
        router.start("a", np.array([1, 2], np.int32), OPTIONS)
    endless = replace(OPTIONS, stop_ids=frozenset({2**40}))
    with pytest.raises(OverflowError):
        router.start("c", np.array([1, 2], np.int32), endless)
    router.start("d", np.array([1, 2], np.int32), OPTIONS)
    with pytest.raises(ValueError, match="active already"):
        router.start("d", np.array([1, 2], np.int32), OPTIONS)
    router.begin(["b"], [1, 2, 3, 1, 2])
    assert "a" not in router and "c" not in router and router.choose(["b"])[0].arm == "cache"


def test_events_and_accounts_wait_for_flush_and_none_is_lost() -> None:
    router = Router()
    router.begin(["r"], [1, 2, 3, 1, 2])
    router.choose(["r"])
    router.observe([Committed("r", [7], 2)], 3)
    assert not router.kept.events
    router.flush()
    assert [e.accepted for e in router.kept.events] == [0]
    router.choose(["r"])
    router.close()
    assert len(router.kept.events) == router.counters.labelled


def test_time_of_a_settlement_is_no_time_of_the_step() -> None:
    router = Router()
    router.begin(["r"], [1, 2, 3])
    for _ in range(5):
        router.choose(["r"])
        router.flush(exposed=False)
        router.observe([Committed("r", [4], 0)], 1)
    own, exposed = list(router.counters.own_us), list(router.counters.exposed_us)
    assert len(own) == 5 and all(a >= b for a, b in zip(own, exposed, strict=True))
    assert router.costs.table is NOMINAL


def test_time_that_is_entered_twice_is_counted_from_its_begin() -> None:
    """An adapter admits requests, then decides: it enters for both, and leaves once."""
    timer = StepTimer()
    timer.enter()
    began = timer.since
    timer.enter()
    assert timer.since == began
    timer.leave()
    assert timer.own_us == timer.exposed_us > 0.0 and not timer.since
