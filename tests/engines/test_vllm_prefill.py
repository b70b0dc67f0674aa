"""The drafter reads what begins where its drafts pay for that, and finds out when they do again."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from decoder.contracts.bundle import Policy
from decoder.core.choice import Chosen, Step
from decoder.core.guards.prefill_budget import LIMIT, PrefillBudget
from decoder.engines.vllm.v1.drafter import Piece
from decoder.policy.rule import NONE
from tests.decoder.simulated import model_alone
from tests.engines.configs import config
from tests.engines.scheduled import VOCABULARY, WIDTH, Scheduled
from tests.engines.test_vllm_adapter import engine, is_whole, serve

PLAIN_US = 30_000.0


def after(budget: PrefillBudget, steps: int, tokens: int, worth_us: float) -> bool:
    for _ in range(steps):
        budget.observe(tokens, 1_000.0, worth_us, PLAIN_US)
    return budget.allows


def test_prefill_is_allowed_while_drafts_save_more_than_it_costs() -> None:
    budget = PrefillBudget(28, 1)
    assert after(budget, 1, 2_000, 0.0), "a prompt is paid for at once, its drafts come after it"
    assert after(budget, 500, 100, 5_500.0)
    assert not after(budget, 500, 100, 4_500.0)
    assert after(budget, 500, 100, 5_500.0), "not overdrawn for ever"


def test_the_balance_is_bounded_by_a_few_steps() -> None:
    budget = PrefillBudget(28, 1)
    after(budget, 1_000, 1, 5_000.0)
    steps = math.ceil(LIMIT * PLAIN_US / 5_000.0)
    assert after(budget, steps - 1, 100, 0.0) and not after(budget, 2, 100, 0.0)
    after(budget, 1_000, 100, 0.0)
    assert not after(budget, steps - 1, 0, 5_000.0) and after(budget, 2, 0, 5_000.0)


def test_prefill_is_allowed_where_the_policy_does_not_price_model_drafts() -> None:
    budget = PrefillBudget(28, 1)
    assert not after(budget, 1_000, 100, 0.0)
    assert after(budget, 1, 100_000, math.inf) and after(budget, 3, 100, math.inf)


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.parametrize("blocks", [400, 110])
def test_while_prefill_does_not_pay_most_new_requests_are_skipped(blocks: int) -> None:
    """With as few blocks requests are preempted, and begin anew."""
    e = engine(config(), budget=PrefillBudget(1, 70), blocks=blocks)
    deferred, choose = e.adapter.deferred, e.worker.router.choose
    assert deferred is not None
    drafted, skipped = set[str](), set[str]()

    def noting(report: Any) -> Any:
        decisions = choose(report)
        asking = {n for n, d in zip(report.names, decisions, strict=True) if d.arm == "model"}
        assert not asking & report.unable
        drafted.update(asking)
        skipped.update(deferred.coverage.skipped)
        return decisions

    e.worker.router.choose = noting  # type: ignore[method-assign,assignment]
    serve(e, requests=30)
    is_whole(e)
    assert len(skipped) > 15 and drafted and e.drafter.passes
    assert bool(e.preemptions) == (blocks == 110)
    assert not deferred.deferred and not deferred._pieces
    assert len(deferred.coverage._admitted) <= 4


class Late(PrefillBudget):
    """An account that is overdrawn until it is ``open``."""

    open = False

    @property
    def allows(self) -> bool:
        return self.open


SYSTEM = np.random.default_rng(7).integers(3, VOCABULARY, 80).tolist()


@functools.lru_cache
def alike(name: str) -> Sequence[int]:
    """Texts that begin alike, but for those with an odd hundred, which have nothing in common."""
    own = np.random.default_rng(int(name)).integers(3, VOCABULARY, 480).tolist()
    return tuple(own if int(name) // 100 % 2 else SYSTEM + own[:400])


def wherever_it_can(policy: Policy, step: Step) -> Chosen:
    """A model draft of each request that can have one."""
    chosen = model_alone(3)(policy, step)
    for name, value in (("policy_arm", NONE), ("length", 0)):
        step.candidates[name][step.candidates["unable"] > 0] = value
    return chosen


class Serves:
    """An engine that serves requests one after the other, and looks at what is drafted over what.

    ``drafted`` has those with a model draft; ``blind`` those of them that the drafter had not read
    rightly, whatever it was told to read.
    """

    def __init__(self, blocks: int = 2_000, tokens: int = 16) -> None:
        self.account = Late(14, 1)
        self.e = Scheduled(config(tokens=tokens), alike, budget=self.account, blocks=blocks)
        self.e.worker.router.rule = wherever_it_can
        self.e.worker.router.interleaver = None
        self.drafted, self.blind = list[str](), set[str]()
        drafted = self.e.worker.router.drafted

        def noting(report: Any, lengths: Sequence[int], k: int) -> None:
            asked = zip(report.names, lengths, strict=True)
            for name in (n for n, length in asked if k and length):
                self.drafted += [name] * (name not in self.drafted)
                if not self.was_read(name):
                    self.blind.add(name)
            drafted(report, lengths, k)

        self.e.worker.router.drafted = noting  # type: ignore[method-assign]

    def was_read(self, name: str) -> bool:
        """Whether the drafter has read what stands in the blocks of a request, all of it; what
        comes behind may be another's, at the end of a block that both begin with."""
        e, state = self.e, self.e.runner.requests[name]
        text = [*state.prompt_token_ids, *state.output_token_ids]
        read = [e.drafter.cache.get(e._slot(state, p), (0, -1.0))[1] for p in range(e.read[name])]
        return read == pytest.approx([e._hidden(text[p], p) for p in range(len(read))], rel=1e-4)

    def serve(self, first: int, last: int, at_once: int = 1, most: int = 12) -> int:
        """Requests ``first`` to ``last``; how many of them had a model draft."""
        for name in range(first, last):
            self.e.ask(str(name), 84, most)
            if (name + 1 - first) % at_once == 0:
                self.e.run()
        self.e.run()
        assert self.e.worker.faults == 0
        return sum(first <= int(name) < last for name in self.drafted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("at_once", [1, 4])
def test_a_shared_prefix_is_prefilled_though_prefill_does_not_pay(at_once: int) -> None:
    s = Serves()
    assert 0 < s.serve(0, 40, at_once) < 20
    s.account.open = True
    assert s.serve(40, 80, at_once) == 40 and not s.blind


@pytest.mark.filterwarnings("ignore")
def test_no_model_draft_follows_blocks_without_prefill() -> None:
    """A start that nobody had in common before is not read; those that have it later know."""
    s = Serves()
    s.serve(100, 140)
    s.serve(0, 8)  # one of them is read by its turn, but for how it begins
    s.account.open = True
    s.serve(8, 16)
    assert s.serve(300, 340) == 40, "blocks that are written anew are read anew"
    assert not s.blind


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wanted", [True, False])
def test_resumed_requests_draft_only_after_prefilled_blocks(wanted: bool) -> None:
    s = Serves(blocks=100)
    s.account.open = wanted
    s.serve(0, 30, at_once=6, most=100)
    assert s.e.preemptions and s.drafted and not s.blind


@pytest.mark.filterwarnings("ignore")
def test_requests_that_a_failing_drafter_missed_get_no_model_drafts() -> None:
    s = Serves()
    s.account.open = True
    s.serve(0, 4)
    deferred, broken = s.e.adapter.deferred, [True]
    assert deferred is not None
    propose = deferred._propose

    def failing(**arguments: Any) -> Any:
        if broken[0]:
            raise RuntimeError("a kernel that is not there")
        return propose(**arguments)

    deferred._propose = failing
    for name in range(300, 304):
        s.e.ask(str(name), 84, 100)
    s.e.run(10)
    broken[0], s.e.worker.faults = False, 0
    s.e.run(20)
    assert not {"300", "301", "302", "303"} & set(s.drafted)
    assert s.serve(4, 8) == 4 and not s.blind, "what others said before counts as read"


@pytest.mark.filterwarnings("ignore")
def test_a_failing_prefill_of_an_ended_request_loses_no_blocks_of_the_step() -> None:
    """Else the next request with the same prefix would count as prefilled."""
    s = Serves()
    s.e.ask("1", 84, 100)
    s.e.run(3)
    deferred = s.e.adapter.deferred
    assert deferred is not None and "1" in deferred.coverage._blocks

    def failing(**arguments: Any) -> Any:
        raise RuntimeError("a kernel that is not there")

    deferred._propose = failing
    deferred._pieces = {"1": [Piece(torch.zeros(1), torch.zeros(1, WIDTH), 0, 1, 90)]}
    deferred._rows = {"1": (torch.zeros(512, dtype=torch.int32), torch.tensor(0))}
    s.e.abort("1")
    s.e.ask("2", 84, 100)
    s.e.run(1)
    assert s.e.worker.faults and set(deferred.coverage._blocks) == {"2"}
