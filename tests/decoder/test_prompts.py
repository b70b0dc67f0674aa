"""Under load a prompt can be copied from while its answer is written, and costs no step its whole.

The load is that of ``hvd bench decide --whole``: texts that copy from themselves and from others.
Prompts are read as vLLM reads them, a step's share at a time; no clock is looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from decoder.contracts.bundle import ANY_SCOPE
from decoder.core.requests import Committed, Decision, RequestOptions
from decoder.core.router import DraftRouter
from decoder.drafting.drafts import Limits, common_prefix
from decoder.policy.first import first_policy
from pipelines.lab.bench.step_cost import CHANCE, LONGEST, Writer, make_router
from tests.decoder.simulated import fixed
from tests.decoder.simulated import make_router as bare_router

READ = 4096
"""Tokens of prompts that a step reads at most."""
FIND = Limits(32, 4, (4.0, 0.0, 0.0))
PLACES = 20


class Target:
    """Requests whose continuations are known; verifies what the router chooses."""

    def __init__(self, router: DraftRouter, writer: Writer, seed: int) -> None:
        self.router, self._writer = router, writer
        self._rng = np.random.default_rng(seed)
        self._texts: dict[str, list[int]] = {}
        self._done: dict[str, int] = {}
        self.tokens = self.cycles = 0

    def begin(self, name: str, prompt: int, output: int) -> Callable[[], None]:
        """A request with so many tokens; what starts it in the router."""
        text = self._writer.text(prompt + output)
        self._texts[name], self._done[name] = text, prompt
        ids, options = np.array(text[:prompt], np.int32), RequestOptions(output, 1 << 20)
        return lambda: self.router.start(name, ids, options)

    def first(self, names: Sequence[str]) -> list[Committed]:
        """Prompts read: one token each."""
        return [Committed(n, self._commit(n, 1), 0, self._done[n]) for n in names]

    def verify(self, names: Sequence[str], decisions: Sequence[Decision]) -> list[Committed]:
        """What a step commits."""
        outcomes = []
        for name, decision in zip(names, decisions, strict=True):
            text, done = self._texts[name], self._done[name]
            verified = accepted = 0
            if decision.arm == "cache":
                verified = len(decision.tokens)
                accepted = common_prefix(decision.tokens, text[done:])
            elif decision.arm == "model":
                verified = decision.room
                held = self._rng.random(verified) < CHANCE
                accepted = verified if held.all() else int(held.argmin())
            committed = self._commit(name, accepted + 1)
            outcomes.append(Committed(name, committed, verified, self._done[name]))
        self.tokens += sum(len(o.tokens) for o in outcomes)
        self.cycles += len(outcomes)
        return outcomes

    def left(self, name: str) -> int:
        """Tokens of its text still to come."""
        return len(self._texts[name]) - self._done[name]

    def _commit(self, name: str, tokens: int) -> list[int]:
        done = self._done[name]
        self._done[name] = done + tokens
        return self._texts[name][done : done + tokens]


@dataclass
class Load:
    """``together`` requests at a time, the next one begun as soon as one has ended."""

    together: int
    prompt: int
    answer: int
    cached: bool = False  # whether the engine finds the prompts in its prefix cache: nobody reads
    unbounded: bool = False  # whether every step indexes all there is
    copied: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.router = make_router(first_policy(ANY_SCOPE))
        self.target = Target(self.router, Writer(0), 0)
        self.made = 0
        if self.unbounded:
            index = self.router.cache.index
            self.router.cache.index = lambda _=None: index(None)  # type: ignore[method-assign]

    def serve(self, steps: int) -> float:
        """Tokens a cycle, once the first requests have ended."""
        names: list[str] = []
        reading: deque[list] = deque()  # name and tokens still to be read
        outcomes: list[Committed] = []
        for step in range(steps):
            while len(names) + len(reading) < self.together:
                reading.append([self._begin(), 0 if self.cached else self.prompt])
            room, read = READ, 0
            while reading and (part := min(reading[0][1], room)) == reading[0][1]:
                room, read = room - part, read + part
                names.append(reading.popleft()[0])
                outcomes += self.target.first(names[-1:])
            if reading:
                reading[0][1] -= part
                read += part
            if step == steps // 3:
                self.target.tokens = self.target.cycles = 0
            self.router.observe(outcomes, read + sum(1 + o.verified_len for o in outcomes))
            decisions = self.router.choose(names)
            self.router.drafted(
                names,
                [
                    len(d.tokens) if d.arm == "cache" else d.room * (d.arm == "model")
                    for d in decisions
                ],
                max((d.room for d in decisions if d.arm == "model"), default=0),
            )
            self.router.settle(exposed=False)
            outcomes = self.target.verify(names, decisions)
            for name in [n for n in names if self.target.left(n) <= LONGEST]:
                place = names.index(name)
                names.pop(place), outcomes.pop(place)
                self.copied.append(self._found(name))
                self.router.stop(name, "length")
        return self.target.tokens / self.target.cycles

    def _begin(self) -> str:
        name = f"request-{self.made}"
        # The first ones are under way already, or all would end in one step.
        share = 0.3 + 0.7 * self.made / self.together if self.made < self.together else 1.0
        self.target.begin(name, self.prompt, int(self.answer * share) + LONGEST + 1)()
        self.made += 1
        return name

    def _found(self, name: str) -> float:
        """The share of places in its prompt whose text a lookup finds."""
        text = np.array(self.target._texts[name][: self.prompt], np.int32)
        found = [
            self.router.cache.propose(name, text[:end], 4, FIND)
            for end in range(self.prompt // PLACES, self.prompt, self.prompt // PLACES)
        ]
        return float(np.mean([f is not None and f.match_len >= 24 for f in found]))


@pytest.mark.parametrize(
    ("together", "prompt", "answer", "steps", "cached"),
    [
        (1, 16_000, 200, 330, False),
        (16, 2_000, 64, 120, False),
        (64, 2_000, 64, 60, False),
        (1, 16_000, 200, 330, True),
        (16, 2_000, 64, 120, True),
    ],
)
def test_prompts_are_copied_from_before_their_answers_end(
    together: int, prompt: int, answer: int, steps: int, cached: bool
) -> None:
    load = Load(together, prompt, answer, cached)
    best = Load(together, prompt, answer, cached, unbounded=True)
    tokens, possible = load.serve(steps), best.serve(steps)
    assert tokens > 0.9 * possible > 1.5
    assert len(load.copied) > together
    assert np.mean(load.copied[together:]) > 0.9 * np.mean(best.copied[together:]) > 0.8


def following(prompt: np.ndarray, options: RequestOptions) -> tuple[DraftRouter, int]:
    """A router that has begun a request, and the bytes of what it holds for drafts by then."""
    policy, has_model = fixed("cache")
    router = bare_router(policy, has_model, floor=False)
    router.start("r", prompt, options)
    return router, router.cache.held_bytes


def test_beginning_a_request_indexes_nothing_of_it() -> None:
    long = np.arange(128_000, dtype=np.int32)
    options = RequestOptions(100, 1 << 20)
    router, held = following(long, options)
    assert held == following(long[:3], options)[1]
    assert router.cache.waiting == 1


@pytest.mark.parametrize(
    "options",
    [RequestOptions(1, 1 << 20), RequestOptions(100, 1 << 20, speculate=False),
     RequestOptions(100, 8_001)],
)  # fmt: skip
def test_the_prompt_of_a_request_that_can_have_no_draft_is_not_indexed(
    options: RequestOptions,
) -> None:
    router, held = following(np.arange(8_000, dtype=np.int32), options)
    router.choose(["r"])
    assert not router.cache.waiting and router.cache.held_bytes == held


def test_the_prompt_of_a_request_that_may_have_drafts_later_is_indexed() -> None:
    router, _ = following(
        np.arange(8_000, dtype=np.int32), RequestOptions(9, 1 << 20, min_tokens=1)
    )
    assert router.cache.waiting


def test_text_that_an_engine_writes_over_later_stays_what_it_was() -> None:
    row = np.tile(np.arange(2, 30, dtype=np.int32), 3)
    router, _ = following(row, RequestOptions(100, 1 << 20))
    row[:] = 1
    router.observe([Committed("r", [2], 0)], len(row))
    router.choose(["r"])
    router.observe([Committed("r", [3], 0)], 1)
    (decision,) = router.choose(["r"])
    assert list(decision.tokens)[:4] == [4, 5, 6, 7]
