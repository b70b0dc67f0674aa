"""``hvd bench decide --whole``: all that the router does in a step of 64 requests.

Real suffix trees, the shipped network, and every verb an engine calls: observe, choose, drafted,
settle. The text is made up, but copies as agents' text does: a stretch in three comes from the
request's own prompt or from what others of its tenant wrote. Times are of the deciding thread:
processor time, which other programs on the machine do not enter, and beside it the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, TypeVar

import numpy as np
from rich.table import Table

from decoder.contracts.bundle import ANY_SCOPE, Policy
from decoder.contracts.features import TOKEN_CLASSES
from decoder.costs import LiveCosts
from decoder.drafting.suffix import SuffixCache
from decoder.floor import Floor
from decoder.labels import common_prefix
from decoder.policy.first import first_policy
from decoder.policy.pricing import CostTable
from decoder.requests import Committed, Decision, RequestOptions
from decoder.router import DraftRouter
from decoder.settings import WorkerSettings
from decoder.telemetry.queue import EventQueue

T = TypeVar("T")

BATCH: Final = 64
VOCABULARY: Final = 49_152
LONGEST: Final = 64
PROMPTS: Final = (1_000, 32_000)
"""Tokens of the prompts; the longer ones come while the others decode."""
COPIED: Final = 0.35
SHARED: Final = 0.15
"""Chance that a stretch is copied from the request's own text, or from the tenant's pool."""
STRETCH: Final = (20.0, 8.0)
"""Mean tokens of a copied stretch, and of a new one."""
CHANCE: Final = 0.5
"""That a token of a model draft is accepted, given those before it."""
STEPS: Final = 400
SETTLED: Final = 40
"""Steps before the first that counts."""
OUTPUT: Final = 1_200
"""Tokens of an answer; one that is done makes room for another request."""
LONG_PROMPTS: Final = 7
LONG_STEPS: Final = 140
"""Long prompts, one after the other, and steps beside each: it must be indexed by then."""


@dataclass(frozen=True)
class Whole:
    """Microseconds a request of a step of ``BATCH``, of the deciding thread's processor time.

    ``exposed`` is what a GPU would wait for: all but :meth:`DraftRouter.settle`.
    ``longest_wait_for_a_prompt_ms`` is the longest that a step waited while a prompt of 32k tokens
    was begun and indexed beside it, the median over such prompts.
    """

    step_us_per_request_batch64: float
    p99: float
    exposed_us_per_request: float
    exposed_share: float
    clock_us_per_request: float
    us_by_verb: dict[str, float]
    longest_wait_for_a_prompt_ms: float
    prompt_us_per_token: float
    tokens_per_cycle: float
    steps: int

    def as_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return asdict(self)


_WEIGHTS: Final = np.cumsum(1.0 / (np.arange(VOCABULARY) + 2.7))
_SHARES: Final = _WEIGHTS / _WEIGHTS[-1]
"""Up to and including each token, as words fall in text (Zipf and Mandelbrot)."""


class Writer:
    """Makes up texts of one tenant."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._pool = self._new(20_000)

    def text(self, tokens: int) -> list[int]:
        """A text of so many tokens that copies from itself and from the tenant's pool."""
        rng, text = self._rng, self._new(200)
        while len(text) < tokens:
            draw = rng.random()
            copied, new = (1 + int(rng.geometric(1.0 / mean)) for mean in STRETCH)
            if draw < COPIED + SHARED:
                source = text if draw < COPIED else self._pool
                begin = int(rng.integers(0, max(len(source) - copied, 1)))
                text += source[begin : begin + copied]
            else:
                text += self._new(new)
        return text[:tokens]

    def _new(self, tokens: int) -> list[int]:
        found: list[int] = np.searchsorted(_SHARES, self._rng.random(tokens)).tolist()
        return found


class _Target:
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


def _router(policy: Policy) -> DraftRouter:
    rng = np.random.default_rng(1)
    classes = (rng.random((VOCABULARY, len(TOKEN_CLASSES))) < 0.2).astype(np.float32)
    # Flat to some 250 tokens, then steep: a GPU's step, where drafting for 64 requests still pays.
    costs = CostTable("bench", (1, 256, 4096), (5e3, 5.5e3, 9e4), 200.0, 300.0)
    return DraftRouter(
        SuffixCache(WorkerSettings.load()), policy, classes, EventQueue(0), True,
        longest=LONGEST, costs=LiveCosts(costs, live=False), floor=Floor(True),
    )  # fmt: skip


class _Clock:
    """Microseconds of each verb of a step, of this thread's processor time and of the clock."""

    def __init__(self) -> None:
        self.verbs: dict[str, float] = {}
        self.wall = 0.0

    def took(self, verb: str, call: Callable[[], T]) -> T:
        """Run ``call`` and book its time."""
        wall, own = time.perf_counter(), time.thread_time()
        made = call()
        self.verbs[verb] = self.verbs.get(verb, 0.0) + (time.thread_time() - own) * 1e6
        self.wall += (time.perf_counter() - wall) * 1e6
        return made


def _step(
    target: _Target, names: list[str], outcomes: list[Committed]
) -> tuple[_Clock, list[Committed]]:
    """One step of ``names``, with what the one before committed."""
    clock, router = _Clock(), target.router
    tokens = sum(1 + o.verified_len for o in outcomes)
    clock.took("observe", lambda: router.observe(outcomes, tokens))
    decisions = clock.took("choose", lambda: router.choose(names))
    drafts = [len(d.tokens) if d.arm == "cache" else d.room * (d.arm == "model") for d in decisions]
    k = max((d.room for d in decisions if d.arm == "model"), default=0)
    clock.took("drafted", lambda: router.drafted(names, drafts, k))
    clock.took("settle", lambda: router.settle(exposed=False))
    return clock, target.verify(names, decisions)


def measure(steps: int = STEPS, seed: int = 0) -> Whole:
    """Decode for ``steps`` steps; then let long prompts come, one after the other."""
    short, long = PROMPTS
    target = _Target(_router(first_policy(ANY_SCOPE)), Writer(seed), seed)
    names = [f"request-{i}" for i in range(BATCH)]
    for name in names:
        target.begin(name, short, OUTPUT)()
    outcomes, clocks, fresh = target.first(names), [], BATCH
    for step in range(SETTLED + steps):
        clock, outcomes = _step(target, names, outcomes)
        if step >= SETTLED:
            clocks.append(clock)
        fresh = _renewed(target, names, outcomes, fresh)
    whole = np.array([sum(c.verbs.values()) for c in clocks])
    settled = np.array([c.verbs["settle"] for c in clocks])
    waits, per_token = _long_prompts(target, names, outcomes, long)
    middle = {v: float(np.median([c.verbs[v] for c in clocks])) / BATCH for v in clocks[0].verbs}
    return Whole(
        float(np.median(whole)) / BATCH,
        float(np.percentile(whole, 99)) / BATCH,
        float(np.median(whole - settled)) / BATCH,
        float(1.0 - settled.sum() / whole.sum()),
        float(np.median([c.wall for c in clocks])) / BATCH,
        middle,
        waits,
        per_token,
        target.tokens / target.cycles,
        steps,
    )


def _renewed(target: _Target, names: list[str], outcomes: list[Committed], fresh: int) -> int:
    """Put new requests in the places of those that are done. Mutates both lists."""
    for i, name in enumerate(names):
        if target.left(name) <= LONGEST:
            target.router.stop(name, "length")
            names[i] = f"request-{fresh}"
            target.begin(names[i], PROMPTS[0], OUTPUT)()
            outcomes[i] = target.first([names[i]])[0]
            fresh += 1
    return fresh


def _long_prompts(
    target: _Target, names: list[str], outcomes: list[Committed], tokens: int
) -> tuple[float, float]:
    """Longest that a step waits for a prompt's sake, ms, median over prompts; and us a token.

    What is timed is beginning the request and the slices in which its prompt is indexed.
    """
    cache, own, longest, spent, fresh = target.router.cache, time.thread_time, [], [], 1_000_000
    index, slices = cache.index, [0.0]

    def timed(most: int | None = None) -> int:
        began = own()
        done = index(most)
        slices.append(own() - began)
        return done

    cache.index = timed  # type: ignore[method-assign]
    for i in range(LONG_PROMPTS):
        target.router.stop(names[i], "abort")
        names[i] = f"long-{i}"
        start = target.begin(names[i], tokens, LONG_STEPS * LONGEST)
        began = own()
        start()
        slices[:] = [own() - began]
        outcomes[i] = target.first([names[i]])[0]
        for _ in range(LONG_STEPS):
            _, outcomes = _step(target, names, outcomes)
            fresh = _renewed(target, names, outcomes, fresh)
        longest.append(max(slices))
        spent.append(sum(slices))
    cache.index = index  # type: ignore[method-assign]
    return float(np.median(longest)) * 1e3, float(np.median(spent)) / tokens * 1e6


def table(whole: Whole) -> Table:
    """For a terminal."""
    shown = Table("what", "us a request", title=f"a step of {BATCH} requests, all that is ours")
    shown.add_row("whole, median", f"{whole.step_us_per_request_batch64:.1f}")
    shown.add_row("whole, p99", f"{whole.p99:.1f}")
    shown.add_row("exposed (all but settle)", f"{whole.exposed_us_per_request:.1f}")
    for verb, us in whole.us_by_verb.items():
        shown.add_row(f"  {verb}", f"{us:.1f}")
    shown.add_row(
        "longest wait for a prompt of 32k, ms", f"{whole.longest_wait_for_a_prompt_ms:.2f}"
    )
    return shown
