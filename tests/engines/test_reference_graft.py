"""The reference engine with tails behind its model drafts: what it writes is the target's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from decoder.drafting.tree import DraftTree, chain
from decoder.engines.reference.engine import ReferenceEngine
from decoder.engines.reference.generation import Sampling
from decoder.engines.reference.method import Method, method
from decoder.engines.reference.session import Session
from decoder.policy.first import first_policy
from decoder.settings import WorkerSettings
from tests.decoder.simulated import model_alone, trusting_policy
from tests.engines.chi_square import goodness_of_fit
from tests.engines.test_reference_sampling import (
    DRAWS,
    FALSE_ALARM,
    LENGTH,
    PROMPT,
    TEMPERATURE,
    enumerated,
)
from tests.engines.test_reference_sampling import engine as enumerable
from tests.engines.tiny import tiny_engine, tiny_prompt

POLICY = trusting_policy(hazard=0.1, chance=0.8)
K = 2


class Knowing:
    """Drafts what the target will write, but for one token in five."""

    def __init__(self, text: list[int], prompt: list[int]) -> None:
        self._text, self._known = prompt[:1], [*prompt, *text]

    def follow(self, tokens: list[int], aux: Tensor) -> None:
        self._text = [*self._text, *tokens]

    def catch_up(self) -> None:
        """Nothing waits."""

    def draft(self, room: int) -> DraftTree:
        at = len(self._text)
        assert self._text == self._known[:at]
        following = self._known[at : at + min(K, room)]
        return chain([0 if (at + i) % 5 == 0 else t for i, t in enumerate(following)])


def grafting(name: str = "hybrid", policy: Any = POLICY, **changes: Any) -> Method:
    return Method(name, policy, "chain", graft=True, **changes)


def session_of(engine: ReferenceEngine, k: int, by: Method) -> Session:
    session = Session(engine, by)
    session.router._choice = model_alone(k)
    return session


@pytest.mark.parametrize("seed", range(4))
def test_greedy_output_is_the_targets_own_with_tails_really_accepted(seed: int) -> None:
    engine = tiny_engine(seed, model_draft_tokens=K)
    greedy = Session(engine, method("greedy"))
    session = session_of(engine, K, grafting())
    cycles = 0
    for number in range(4):
        prompt = tiny_prompt(seed + number)
        known = greedy.generate(prompt, 60).tokens
        engine.drafter = lambda _, p=prompt, t=known: Knowing(t, p)  # type: ignore[method-assign,misc,assignment]
        made = session.generate(prompt, 60)
        del engine.drafter
        assert made.tokens == known and made.finish == "length"
        assert sum(1 + c.accepted for c in made.cycles) + 1 == 60
        cycles += len(made.cycles)
    counters = session.router.counters
    assert counters.accepted["graft"] > 10
    assert cycles - 4 <= sum(counters.cycles.values()) <= cycles, "a last token is no cycle"
    told = [event for event in session.sink if event.arm == "graft"]
    assert len(told) > 5


@pytest.mark.parametrize("seed", range(3))
def test_greedy_output_is_the_same_whoever_chooses_the_arm(seed: int) -> None:
    engine = tiny_engine(seed, model_draft_tokens=K)
    session = Session(engine, grafting(policy=first_policy("test")))
    for number in range(3):
        prompt = tiny_prompt(seed + number)
        known = Session(engine, method("greedy")).generate(prompt, 60).tokens
        assert session.generate(prompt, 60).tokens == known


def test_sampled_output_has_the_targets_distribution_with_tails_really_accepted() -> None:
    session = session_of(enumerable(), 1, grafting(model_limit=1))
    outputs = [
        session.generate(PROMPT, LENGTH, sampling=Sampling(TEMPERATURE, 77_000 + i)).tokens
        for i in range(2 * DRAWS)
    ]
    counts = Counter(tuple(tokens) for tokens in outputs)
    assert goodness_of_fit(counts, enumerated()) > FALSE_ALARM
    assert session.router.counters.accepted["graft"] > 5


def test_the_setting_switches_it_on_and_it_is_off_by_default() -> None:
    by = method("hybrid", policy=POLICY)
    assert not Session(tiny_engine(0), by).router.grafts
    assert not WorkerSettings().graft
    on = tiny_engine(0, graft=True)
    assert Session(on, by).router.grafts
    for name in ("suffix", "eagle3", "greedy"):
        assert not Session(on, method(name)).router.grafts
    assert not Session(on, method("hybrid-tree", policy=POLICY)).router.grafts
