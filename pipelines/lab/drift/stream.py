"""The recorded engine as a service: requests one after another, on a machine whose costs may
change, decoded by a policy that may be replaced between two of them.

Drafts, features, decisions, labels, live costs, rate and floor are those of a worker. A step takes
the time that the scenario's machine says, and the worker is told that time and no other: nothing
depends on the machine that replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.contracts.events import EventBatch
from decoder.contracts.features import FloatArray
from decoder.core.costs import LiveCosts
from decoder.core.router import DraftRouter
from decoder.drafting.suffix import SuffixCache
from decoder.policy.pricing import CostTable, step_time
from decoder.policy.rule import ARMS
from decoder.settings import WorkerSettings
from learner.scope import Scope
from learner.settings import LearnerSettings
from learner.training.rows import Rows, from_batch
from pipelines.lab.drift.traffic import PLAIN_US, Request
from pipelines.replay.engine import Cycle, Engine
from pipelines.replay.events import EventLog

Told = Callable[[int, Rows], Policy | None]
"""Told the number of a request that is done and its drafts; a policy to put in force, or None."""


@dataclass
class Learning:
    """The learner's own scope without broker, registry or waiting, and when it said what; numbers
    are of requests."""

    scope: Scope
    alarms: list[int] = field(default_factory=list)
    promotions: list[int] = field(default_factory=list)

    @classmethod
    def begun(cls, champion: Policy) -> Learning:
        """A new scope that begins with ``champion``."""
        settings = LearnerSettings(rows_per_second=1e9)  # all: recordings outrun a clock
        return cls(Scope("drift", settings, replace(champion, scope="drift", version=1)))

    def told(self, index: int, rows: Rows) -> Policy | None:
        """Take in the drafts of request ``index``; a policy that won. Mutates."""
        if self.scope.feed(rows):
            self.alarms.append(index)
        won = self.scope.candidate()
        if won is None:
            return None
        policy = replace(won.policy, version=self.scope.version + 1)
        self.scope.crown(policy)
        self.promotions.append(index)
        return policy


@dataclass(frozen=True)
class Worker:
    """How a policy is served. Without ``adapts`` neither costs, rate nor floor follow anything."""

    settings: WorkerSettings
    adapts: bool = True


@dataclass(frozen=True)
class Run:
    """What became of n requests, in their order: tokens [n] committed by cycles (all but the first
    of each output), microseconds [n], cycles [arms] in all; and the numbers of the requests at
    which a learner raised an alarm or promoted a policy."""

    tokens: NDArray[np.int64]
    us: NDArray[np.float64]
    cycles: NDArray[np.int64]
    alarms: list[int] = field(default_factory=list)
    promotions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, n: int) -> Run:
        """Nothing yet, of ``n`` requests."""
        return cls(np.zeros(n, np.int64), np.zeros(n), np.zeros(len(ARMS), np.int64))

    def add(self, cycle: Cycle, us: float) -> None:
        """Count a cycle that took so long. Mutates."""
        self.tokens[cycle.trace] += cycle.committed
        self.us[cycle.trace] += us
        self.cycles[cycle.arm] += 1

    def rate(self, mask: NDArray[np.bool_]) -> float:
        """Tokens in the time of a plain step, over the requests of ``mask`` [n]."""
        us = self.us[mask].sum()
        return float(PLAIN_US * self.tokens[mask].sum() / us) if us else 0.0


def decode(
    requests: Sequence[Request],
    costs: Sequence[CostTable],
    policy: Policy,
    worker: Worker,
    token_classes: FloatArray,
    told: Told | None = None,
) -> Run:
    """Serve ``requests``, whose traces have a model arm.

    Args:
        costs: of each segment, the truth; the first is the profile that the worker has.
        told: called when a request is done. Its policy is in force from the next one on.
    """
    clock, cache = _Clock(), SuffixCache(worker.settings)
    k = worker.settings.model_draft_tokens
    router = DraftRouter(cache, policy, token_classes, clock, model_len=k, guarded=worker.adapts)
    router.costs = _RecordedCosts(costs[0], live=worker.adapts)
    made = Run.of(len(requests))
    engine = Engine(router, cache, [r.trace for r in requests], usual=False)
    for index, request in enumerate(requests):
        for cycle in engine.decode(index, request.tenant):
            us = step_time(costs[request.segment], 1, cycle.verified, cycle.drafted)
            clock.steps[cycle.position] = clock.now_us, us
            made.add(cycle, us)
            clock.now_us += us
            router.costs.observe(1 + cycle.verified, 1, cycle.drafted, us)
        events = clock.dated()
        won = told(index, from_batch(events)) if told is not None else None
        if won is not None:
            router.policy = won
    return made


class _RecordedCosts(LiveCosts):
    """Costs that learn from recorded time: what proposing takes on this machine is not it."""

    def proposed(self, rows: int, us: float) -> None:
        """Take in nothing."""


class _Clock(EventLog):
    """Time of the recorded service, by which events are dated: the router's sink."""

    def __init__(self) -> None:
        super().__init__()
        self.now_us = 0.0
        self.steps: dict[int, tuple[float, float]] = {}  # when and how long, by position

    def dated(self) -> EventBatch:
        """The events of a request that is done. Mutates."""
        batch = self.batch()
        steps = [
            self.steps.get(position, (self.now_us, 0.0))
            for position in batch.numbers["position"].tolist()
        ]
        at, us = np.array(steps, np.float64).reshape(-1, 2).T
        times = {"time": at * 1e-6, "step_us": us, "draft_us": np.zeros(len(batch))}
        self.clear()
        self.steps.clear()
        return replace(batch, numbers={**batch.numbers, **times})
