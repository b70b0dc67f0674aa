"""The recorded engine as a service: requests that come and go, several at a time, on a machine
whose costs may change, decoded by a policy that may be replaced between two of them.

Drafts, features, decisions, labels, live costs, rate and floor are those of a worker. A step takes
the time that the scenario's machine says, and the worker is told that time and no other: nothing
depends on the machine that replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.contracts.events import DraftEvent
from decoder.contracts.features import FloatArray
from decoder.costs import LiveCosts
from decoder.floor import Floor
from decoder.hindsight import Resolved, event_of
from decoder.policy.pricing import CostTable, step_time
from decoder.policy.rule import ARMS
from decoder.router import DraftRouter
from decoder.settings import WorkerSettings
from pipelines.drift.traffic import Request
from pipelines.replay.cycles import Cycle
from pipelines.replay.dialogue import DialogueCache, turns
from pipelines.replay.engine import Engine
from pipelines.replay.hindsight import Prices, oracle, walk

Told = Callable[[int, list[DraftEvent]], Policy | None]
"""Told the number of a request that is done and its events; a policy to put in force, or None."""
AHEAD: Final = 128
"""Requests looked through for one whose session is not under way."""


@dataclass(frozen=True)
class Conditions:
    """What a segment's requests meet: the machine's true costs, and how many run at a time."""

    costs: CostTable
    concurrency: int = 1


@dataclass(frozen=True)
class Worker:
    """How a policy is served. Without ``adapts`` neither costs, rate nor floor follow anything."""

    settings: WorkerSettings
    adapts: bool = True


class Decoded:
    """What became of n requests, in their order; times in microseconds."""

    def __init__(self, requests: Sequence[Request]) -> None:
        n = len(requests)
        self.tokens: NDArray[np.int64] = np.zeros(n, np.int64)
        """[n] committed by cycles: all but the first of each output."""
        self.us = np.zeros(n)
        """[n] the request's share of the steps it was in."""
        self.arms: NDArray[np.int64] = np.zeros((n, len(ARMS)), np.int64)
        """[n, arms] cycles."""

    def add(self, cycle: Cycle, us: float) -> None:
        """Count a cycle that took so long. Mutates."""
        self.tokens[cycle.trace] += cycle.committed
        self.us[cycle.trace] += us
        self.arms[cycle.trace, cycle.arm] += 1


def foresee(
    requests: Sequence[Request], conditions: Sequence[Conditions], settings: WorkerSettings
) -> Decoded:
    """Each request decoded in hindsight, one after another: the bound that rates are shares of.

    A request of several that run at a time pays its part of a step whose requests all choose as it
    does.
    """
    prices = [Prices(c.costs, settings, c.concurrency) for c in conditions]
    made, cache = Decoded(requests), DialogueCache(settings)
    for turn in turns([r.trace for r in requests], cache):
        price = prices[requests[turn.index].segment]
        for cycle in walk(turn, cache, oracle(price, shorter=True), None):
            made.add(cycle, price.of(cycle.arm, cycle.verified))
    return made


def decode(
    requests: Sequence[Request],
    conditions: Sequence[Conditions],
    policy: Policy,
    worker: Worker,
    token_classes: FloatArray,
    told: Told | None = None,
) -> Decoded:
    """Serve ``requests``, whose traces have a model arm.

    Args:
        conditions: of each segment; the first one's costs are the profile that the worker has.
        told: called when a request is done. Its policy is in force from the next step on.
    """
    clock, cache = _Clock(), DialogueCache(worker.settings)
    router = DraftRouter(
        cache,
        policy,
        token_classes,
        clock,
        True,
        model_draft_tokens=worker.settings.model_draft_tokens,
        costs=_RecordedCosts(conditions[0].costs, live=worker.adapts),
        floor=Floor(True) if worker.adapts else None,
    )
    made, engine = Decoded(requests), Engine(router, cache, [r.trace for r in requests])
    waiting = list(range(len(requests)))
    while waiting or engine.running:
        _admit(waiting, requests, conditions, engine)
        if not engine.running:
            continue
        cycles = engine.decide()
        rows, drafts = len(cycles), sum(c.verified for c in cycles)
        k = max(c.drafted for c in cycles)
        # What is in force is that of the newest request.
        costs = conditions[max(requests[c.trace].segment for c in cycles)].costs
        us = step_time(costs, rows, drafts, k)
        for cycle in cycles:
            clock.steps[str(cycle.trace), cycle.position] = clock.now_us, us
            made.add(cycle, us / rows)
        clock.now_us += us
        router.costs.observe(rows + drafts, rows, k, us)
        # Not a usual step: this machine's clock, which the router would read, tells nothing.
        for index in engine.commit(usual=False):
            events, clock.events = clock.events, []
            clock.steps = {of: took for of, took in clock.steps.items() if of[0] != str(index)}
            won = told(index, events) if told is not None else None
            if won is not None:
                router.policy = won
    return made


def _admit(
    waiting: list[int],
    requests: Sequence[Request],
    conditions: Sequence[Conditions],
    engine: Engine,
) -> None:
    """Start requests while there is room for them, none before its segment's time. A dialogue's
    turns wait for each other. Mutates ``waiting`` and ``engine``."""
    while waiting:
        segment = requests[waiting[0]].segment
        if len(engine.running) >= conditions[segment].concurrency:
            return
        busy = {one.turn.trace.session for one in engine.running.values()}
        for index in waiting[:AHEAD]:
            if requests[index].segment != segment:
                return
            if requests[index].trace.session not in busy:
                break
        else:
            return
        waiting.remove(index)
        engine.start(index, requests[index].tenant)


class _RecordedCosts(LiveCosts):
    """Costs that learn from recorded time: what proposing takes on this machine is not it."""

    def proposed(self, rows: int, us: float) -> None:
        """Take in nothing."""


@dataclass
class _Clock:
    """Time of the recorded service, and the steps that open events still have to be dated by."""

    now_us: float = 0.0
    steps: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    events: list[DraftEvent] = field(default_factory=list)

    def put(self, resolved: Resolved) -> None:
        """Take one event, dated by the recorded clock: the router's sink. Mutates its step."""
        _, name, _, (cycle, _, _), _ = resolved
        at, us = self.steps.pop((name, cycle.position), (self.now_us, 0.0))
        cycle.step.wall, cycle.step.us, cycle.step.draft_us = at * 1e-6, us, 0.0
        if cycle.draft_len:
            self.events.append(event_of(resolved))
