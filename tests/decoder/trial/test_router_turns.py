"""Sides by turns in a real router: outputs do not change, and the books are exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL, Policy, frequency_policy
from decoder.contracts.trials import MODEL, PLAIN, SUFFIX
from decoder.core.choice import Chosen, choose
from decoder.core.guards.floor import Floor
from decoder.core.router import Committed, DraftRouter, RequestOptions
from decoder.drafting.suffix import SuffixCache
from decoder.policy.first import first_policy
from decoder.settings import WorkerSettings
from decoder.trial.turns import Turns
from tests.conftest import KeepingSink, random_policy
from tests.decoder.test_router import Target

EVERYBODY = (PLAIN, SUFFIX, MODEL, FIRST)


def playing(
    sink: KeepingSink,
    classes: np.ndarray,
    names: tuple[str, ...] = EVERYBODY,
    holdout: float = 0.9,
    held: dict[str, Policy] | None = None,
    champion: Policy | None = None,
) -> DraftRouter:
    turns = Turns(names, holdout, held or {}, first_policy("s"), seed=1)
    return DraftRouter(
        SuffixCache(WorkerSettings()), champion or frequency_policy("s"), classes, sink, True,
        floor=Floor(True), turns=turns,
    )  # fmt: skip


def decode(router: DraftRouter, requests: int, tokens: int = 150) -> int:
    """Decode loops with a stretch of news in between; tokens committed by cycles."""
    for number in range(requests):
        text = [1, 2, 3, 4, 5, 6, 7, 8] * 5 + list(range(9, 30)) + [3, 1, 4, 1, 5, 9] * 15
        options = RequestOptions(tokens, 4096, tenant=f"t{number % 3}", workload="loops")
        Target(router, text).run(f"r{number}", [1, 2, 3, 4, 5, 6, 7, 8], options)
    return router.counters.tokens - requests


def test_the_books_hold_every_token_that_a_cycle_committed(
    sink: KeepingSink, token_classes: np.ndarray
) -> None:
    held = {TRIAL: replace(random_policy(), role=TRIAL, share=0.3)}
    router = playing(sink, token_classes, held=held)
    committed = decode(router, 60)
    assert router.turns is not None
    router.policy = frequency_policy("s")
    router.turns.next(router.policy)  # gives up what is open
    sums = router.turns.sums
    assert set(sums) == {"outside", CHAMPION, TRIAL, *EVERYBODY}
    assert sum(s.tokens for s in sums.values()) == pytest.approx(committed)
    assert all(s.us > 0 and s.cost_us > 0 and s.steps > 0 for s in sums.values())
    for played in router.turns.rounds:
        for account in played.accounts:
            block = account.block()
            assert sum(g.tokens for g in block.groups) == pytest.approx(block.tokens)
            assert sum(g.cost_us for g in block.groups) == pytest.approx(block.cost_us)
            assert {g.workload for g in block.groups} == {"loops"}


def test_each_side_does_what_it_is_there_for(sink: KeepingSink, token_classes: np.ndarray) -> None:
    router = playing(sink, token_classes)
    decode(router, 60)
    by_side = {
        name: [e for e in sink.every if e.side == name] for name in (*EVERYBODY, CHAMPION, "")
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


def test_a_stock_lookup_leaves_no_trace_in_later_ones(token_classes: np.ndarray) -> None:
    phrase = list(range(1, 60)) * 2
    context = np.array([*range(1, 31)], np.int32)
    mixed, alone = SuffixCache(WorkerSettings()), SuffixCache(WorkerSettings())
    from decoder.drafting.drafts import STOCK

    for cache in (mixed, alone):
        cache.start("r", np.array(phrase, np.int32), "")
        cache.index()
    for end in range(4, 31):
        stock = mixed.propose("r", context[:end], 64, STOCK)
        assert stock is not None and len(stock.tokens) <= min(end, 24)
        assert stock.match_len <= 24
    assert mixed.propose("r", context, 64) == alone.propose("r", context, 64)


def test_the_worker_learns_to_serve_from_the_champion_alone(
    sink: KeepingSink, token_classes: np.ndarray
) -> None:
    router = playing(sink, token_classes, names=(PLAIN,))
    rates, naps = [], []
    assert router.turns is not None and router.pause is not None
    observe, doze = router.rate.observe, router.pause.observe
    router.rate.observe = lambda *a: (rates.append(router.turns.playing), observe(*a))  # type: ignore
    router.pause.observe = lambda *a: (naps.append(router.turns.playing), doze(*a))  # type: ignore
    decode(router, 20)
    assert len(sink.every) > len(rates) > 0
    told = sum(e.side in ("", CHAMPION) for e in sink.every)
    assert abs(told - len(rates)) <= 20  # what ends a request has no cycle of its own
    assert router.rate.value > 1.5, "plain decoding, most of the steps, would have it near 1"


class Faulty(Policy):
    """A policy that no choice can be made by."""

    @property
    def flat(self) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[override]
        raise RuntimeError("spoilt")


def test_a_side_that_raises_costs_its_block_and_plays_no_more(
    sink: KeepingSink, token_classes: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    trial = Faulty("s", 5, 2.0, "survival", role=TRIAL, share=0.5, publication=4)
    router = playing(sink, token_classes, names=(), holdout=0.0, held={TRIAL: trial})
    committed = decode(router, 10)
    assert router.turns is not None and router.turns.failed == {TRIAL: 1}
    assert committed == 10 * 149 and not [e for e in sink.every if e.side == TRIAL]
    assert "'trial' plays no more" in caplog.text
    assert set(router.turns.sums) == {"outside"}


def test_a_step_that_is_chosen_again_is_counted_once(
    sink: KeepingSink, token_classes: np.ndarray
) -> None:
    trial = Faulty("s", 5, 2.0, "survival", role=TRIAL, share=0.5, publication=4)
    router = playing(sink, token_classes, names=(), holdout=0.0, held={TRIAL: trial})
    router.start("r", np.array([1, 2, 3], np.int32), RequestOptions(500, 4096))
    router.observe([Committed("r", [4], 0)], 3)
    assert router.turns is not None and router.pause is not None
    steps = 0
    while not router.turns.failed:
        router.pause.awake = False
        router.choose(["r"])
        router.observe([Committed("r", [4], 0)], 1)
        steps += 1
    router.close()
    assert router.counters.asleep == steps == len(sink.every) == len(router.counters.choose_us)


def test_a_side_whose_choice_cannot_be_carried_out_plays_no_more(
    sink: KeepingSink, token_classes: np.ndarray
) -> None:
    def rule(policy: Policy, *arguments: Any, **more: Any) -> Chosen:
        chosen = choose(policy, *arguments, **more)
        return chosen._replace(arms=chosen.arms[:0]) if policy.role == TRIAL else chosen

    trial = replace(random_policy(), role=TRIAL, share=0.5)
    turns = Turns((), 0.0, {TRIAL: trial}, first_policy("s"), seed=1)
    router = DraftRouter(
        SuffixCache(WorkerSettings()), frequency_policy("s"), token_classes, sink, True,
        turns=turns, choice=rule,
    )  # fmt: skip
    assert decode(router, 10) == 10 * 149
    assert (turns.failed, turns.playing) == ({TRIAL: 1}, "")


def test_a_pause_is_in_nobody_s_time(sink: KeepingSink, token_classes: np.ndarray) -> None:
    router = playing(sink, token_classes, names=(PLAIN,))
    router.start("r", np.array([1, 2, 3], np.int32), RequestOptions(50, 100))
    router.observe([Committed("r", [4], 0)], 3)
    router.choose(["r"])
    router.stop("r", "abort")  # the client has gone, and nobody else is there
    router.start("s", np.array([1, 2, 3], np.int32), RequestOptions(50, 100))
    router.observe([Committed("s", [4], 0)], 1)
    assert router.turns is not None
    assert not sum(s.tokens for s in router.turns.sums.values())
