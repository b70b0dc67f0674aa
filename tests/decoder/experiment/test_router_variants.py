"""Sides by interleaver in a real router: outputs do not change, and the books are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL, Policy, frequency_policy
from decoder.contracts.trials import MODEL, PLAIN, SUFFIX
from decoder.core.choice import Chosen, Step, choose
from decoder.core.router import RequestOptions
from decoder.drafting.matches import STOCK
from decoder.drafting.suffix import SuffixCache
from decoder.experiment.interleaver import Interleaver
from decoder.policy.first import first_policy
from decoder.settings import WorkerSettings
from pipelines.replay.cache_drafts import propose
from tests.conftest import random_policy
from tests.decoder.simulated import Committed, Router, decode_all

EVERYBODY = (PLAIN, SUFFIX, MODEL, FIRST)


def playing(
    names: tuple[str, ...] = EVERYBODY,
    holdout: float = 0.9,
    held: dict[str, Policy] | None = None,
    rule: Callable[[Policy, Step], Chosen] = choose,
) -> Router:
    interleaver = Interleaver(names, holdout, held or {}, first_policy("s"), seed=1)
    router = Router(frequency_policy("s"), True, guarded=True)
    router.interleaver, router.rule = interleaver, rule
    return router


def decode(router: Router, requests: int, tokens: int = 150) -> int:
    """Decode loops with a stretch of news in between; tokens committed by cycles."""
    for number in range(requests):
        text = [1, 2, 3, 4, 5, 6, 7, 8] * 5 + list(range(9, 30)) + [3, 1, 4, 1, 5, 9] * 15
        options = RequestOptions(tokens, 4096, tenant=f"t{number % 3}", workload="loops")
        decode_all(router, f"r{number}", [1, 2, 3, 4, 5, 6, 7, 8], text, options)
    return router.counters.tokens - requests


def test_the_books_hold_every_token_that_a_cycle_committed() -> None:
    held = {TRIAL: replace(random_policy(), role=TRIAL, share=0.3)}
    router = playing(held=held)
    committed = decode(router, 60)
    assert router.interleaver is not None
    router.policy = frequency_policy("s")
    router.interleaver.next_variant(router.policy)  # gives up what is open
    sums = router.interleaver.totals
    assert set(sums) == {"outside", CHAMPION, TRIAL, *EVERYBODY}
    assert sum(s.tokens for s in sums.values()) == pytest.approx(committed)
    assert all(s.us > 0 and s.cost_us > 0 and s.steps > 0 for s in sums.values())
    for played in router.interleaver.rounds:
        for account in played.blocks:
            block = account.block()
            assert sum(g.tokens for g in block.groups) == pytest.approx(block.tokens)
            assert sum(g.cost_us for g in block.groups) == pytest.approx(block.cost_us)
            assert {g.workload for g in block.groups} == {"loops"}
    for side in (PLAIN, SUFFIX, MODEL, CHAMPION):
        blocks = [a for p in router.interleaver.rounds for a in p.blocks if a.variant.name == side]
        foretold, tokens = (sum(getattr(a, of) for a in blocks) for of in ("predictable", "tokens"))
        assert 0.5 * tokens < foretold < tokens, "the text loops, whoever decides"


def test_each_side_does_what_it_is_there_for() -> None:
    router = playing()
    decode(router, 60)
    by_side = {
        name: [e for e in router.kept.every if e.side == name]
        for name in (*EVERYBODY, CHAMPION, "")
    }
    assert all(by_side[name] for name in (*EVERYBODY, CHAMPION))
    assert all(e.arm == "none" and not e.draft_len for e in by_side[PLAIN])
    assert all(e.arm in ("model", "none") and not e.draft_len for e in by_side[MODEL])
    assert sum(e.drafted_len == 4 for e in by_side[MODEL]) > 0.8 * len(by_side[MODEL])
    for event in by_side[SUFFIX]:
        assert event.verified_len == event.draft_len <= 24, "whole, or nothing"
        assert event.arm == ("cache" if event.draft_len else "none")
    assert {e.role for e in by_side[FIRST]} == {FIRST}
    assert {e.role for e in by_side[CHAMPION]} == {CHAMPION}
    assert any(e.draft_len > 24 for e in by_side[CHAMPION] + by_side[FIRST])


def test_a_stock_lookup_leaves_no_trace_in_later_ones() -> None:
    phrase = list(range(1, 60)) * 2
    context = np.array([*range(1, 31)], np.int32)
    mixed, alone = SuffixCache(WorkerSettings()), SuffixCache(WorkerSettings())
    for cache in (mixed, alone):
        row = cache.start("r", np.array(phrase, np.int32), "")
        cache.index()
    for end in range(4, 31):
        stock = propose(mixed, row, context[:end], 64, STOCK)
        assert stock is not None and len(stock.tokens) <= min(end, 24)
        assert stock.match_len <= 24
    assert propose(mixed, row, context, 64) == propose(alone, row, context, 64)


def test_the_worker_learns_to_serve_from_the_champion_alone() -> None:
    router = playing(names=(PLAIN,))
    rates, naps = [], []
    assert router.interleaver is not None
    observe, doze = router.rate.observe, router.controller.observe
    router.rate.observe = lambda *a: (rates.append(router.interleaver.active), observe(*a))  # type: ignore
    router.controller.observe = lambda *a: (naps.append(router.interleaver.active), doze(*a))  # type: ignore
    decode(router, 20)
    assert len(router.kept.every) > len(rates) > 0
    told = sum(e.side in ("", CHAMPION) for e in router.kept.every)
    assert abs(told - len(rates)) <= 20  # what ends a request has no cycle of its own
    assert router.rate.value > 1.5, "plain decoding, most of the steps, would have it near 1"


def test_a_side_that_raises_costs_its_block_and_plays_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rule(policy: Policy, step: Step) -> Chosen:
        chosen = choose(policy, step)
        if policy.role == TRIAL:
            raise RuntimeError("spoilt")
        return chosen

    held = {TRIAL: replace(random_policy(), role=TRIAL, share=0.5)}
    router = playing((), 0.0, held, rule=rule)
    assert decode(router, 10) == 10 * 149 and router.interleaver is not None
    assert not [e for e in router.kept.every if e.side == TRIAL]
    assert "variant 'trial' is disabled" in caplog.text
    interleaver = router.interleaver
    assert (interleaver.failures, interleaver.active, {*interleaver.totals}) == (
        {TRIAL: 1},
        "",
        {"outside"},
    )


def test_a_step_that_is_chosen_again_is_counted_once() -> None:
    def rule(policy: Policy, step: Step) -> Chosen:
        if policy.role == TRIAL:
            raise RuntimeError("spoilt")
        return choose(policy, step)

    held = {TRIAL: replace(random_policy(), role=TRIAL, share=0.5)}
    router = playing((), 0.0, held, rule=rule)
    router.start("r", np.array([1, 2, 3], np.int32), RequestOptions(500, 4096))
    router.observe([Committed("r", [4], 0)], 3)
    assert router.interleaver is not None
    steps = 0
    while not router.interleaver.failures:
        router.controller.proposes = False
        router.choose(["r"])
        router.observe([Committed("r", [4], 0)], 1)
        steps += 1
    router.close()
    counted = router.controller.num_paused, len(router.kept.every), len(router.counters.choose_us)
    assert counted == (steps, steps, steps)


def test_a_pause_is_in_nobody_s_time() -> None:
    router = playing(names=(PLAIN,))
    router.start("r", np.array([1, 2, 3], np.int32), RequestOptions(50, 100))
    router.observe([Committed("r", [4], 0)], 3)
    router.choose(["r"])
    router.stop("r", "abort")  # the client has gone, and nobody else is there
    router.start("s", np.array([1, 2, 3], np.int32), RequestOptions(50, 100))
    router.observe([Committed("s", [4], 0)], 1)
    assert router.interleaver is not None
    assert not sum(s.tokens for s in router.interleaver.totals.values())
