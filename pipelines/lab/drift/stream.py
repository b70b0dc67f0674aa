"""The recorded engine as a service: requests one after another, on a machine whose costs may
change, decoded by a policy that may be replaced between two of them.

Drafts, features, decisions, labels, live costs, rate and floor are those of a worker. A step takes
the time that the scenario's machine says, and the worker is told that time and no other: nothing
depends on the machine that replays. What the learner finds better is tried on live traffic first,
by the interleaver of a worker, and watched after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL, Policy
from decoder.contracts.events import EventBatch
from decoder.contracts.features import FloatArray
from decoder.contracts.trials import Round
from decoder.core.choice import choose
from decoder.core.costs import LiveCosts
from decoder.core.router import DraftRouter
from decoder.drafting.suffix import SuffixCache
from decoder.experiment.block import StepOutcome
from decoder.experiment.interleaver import FinishedRound, Interleaver
from decoder.experiment.variants import Variant
from decoder.policy.pricing import CostTable, step_time
from decoder.policy.rule import ARMS
from decoder.settings import WorkerSettings
from learner.evaluation.contest import TRIED
from learner.evaluation.effect import UNKNOWN
from learner.release.comparison import Comparison, Kind
from learner.scope import Scope
from learner.settings import LearnerSettings
from learner.training.rows import Rows, from_batch
from pipelines.lab.drift.traffic import PLAIN_US, Request
from pipelines.replay.engine import Cycle, Engine
from pipelines.replay.events import EventLog

Told = Callable[[int, Rows], Policy | None]
"""Told the number of a request that is done and its drafts; a policy to put in force, or None."""


REST_SECONDS: Final = 3_600.0
"""After a rollback nothing is tried, as in a deployment."""


class VirtualInterleaver(Interleaver):
    """An interleaver by the time of the recorded service: ``step_us`` is set before each step."""

    step_us = 0.0

    def record_step(self, variant: Variant | None, step: StepOutcome, counts: bool) -> None:
        """As there, with recorded time in the place of this machine's."""
        step = step._replace(us=self.step_us, prefill_us=0.0)
        super().record_step(variant, step, counts)


class Learning:
    """The learner's own scope, and the rollout of what wins, without broker, registry or waiting.

    ``interleaver`` is the worker's. ``alarms``, ``promotions`` and ``returns`` hold the numbers of
    the requests after which the learner raised an alarm, promoted a policy, or went back to one;
    ``ended`` those after which a comparison ended, with its outcome.
    """

    def __init__(
        self, champion: Policy, rollout: Literal["auto", "off"] = "auto",
        kind: Literal["survival", "payoff"] = "survival",
    ) -> None:  # fmt: skip
        """A new scope that begins with ``champion`` and trains networks of ``kind``; with ``off``
        what wins is served at once."""
        # all is learned from: recordings outrun a clock
        self.settings = LearnerSettings(rows_per_second=1e9, rollout=rollout, kind=kind)
        first = replace(champion, scope="drift", version=1)
        self.scope = Scope("drift", self.settings, first)
        self.policies: dict[str, Policy] = {}
        self.interleaver = VirtualInterleaver((), 0.0, self.policies, first, 0)
        self.alarms: list[int] = []
        self.promotions: list[int] = []
        self.returns: list[int] = []
        self.ended: list[tuple[int, str]] = []
        self._one: Comparison | None = None
        self._waiting: Policy | None = None
        self._version = 1
        self._now = self._rests_until = 0.0

    def told(self, index: int, rows: Rows) -> Policy | None:
        """Take in the drafts and rounds of request ``index``; a policy to put in force. Mutates."""
        if self.scope.feed(rows):
            self.alarms.append(index)
        self._now = float(rows.time[-1]) if len(rows) else self._now
        won = self.scope.candidate()
        if won is not None and (won.origin == FIRST or self.settings.rollout == "off"):
            self._end(index, "first policy back" if won.origin == FIRST else "")
            return self._serve(index, won.policy)
        self._waiting = won.policy if won is not None else self._waiting
        served = self._compare(index)
        free = self._one is None or self._one.kind == "watch"
        if free and self._waiting is not None and self._now >= self._rests_until:
            self._end(index, "gives way")
            self._begin("trial", self._waiting, self.scope.version)
            self._waiting = None
        return served

    def _compare(self, index: int) -> Policy | None:
        """Take in the rounds that were played, and do what they come to."""
        rounds, one = list(self.interleaver.rounds), self._one
        self.interleaver.rounds.clear()
        if one is None:
            return None
        tried = self.policies[TRIAL]
        for each in rounds:
            one.take(_round_of(each, self._now), self._now)
        one.hear(self._now)
        judged = self.scope.contest.seats[TRIED]
        one.labels = UNKNOWN if judged is None else judged.gain()
        outcome = one.outcome(self.settings)
        if outcome is None:
            if (share := one.wider(self.settings)) != one.share:
                one.share = share
                self.policies[TRIAL] = replace(tried, share=one.share)
            return None
        self._end(index, outcome.word)
        if outcome.word == "promote":
            former = self.scope.champion
            served = self._serve(index, tried)
            self._begin("watch", former, served.version)
            return served
        if outcome.word == "roll back":
            self._rests_until = self._now + REST_SECONDS
            return self._serve(index, self.scope.contest.first if outcome.to_first else tried)
        return None

    def _begin(self, kind: Kind, policy: Policy, over: int) -> None:
        self._version += kind == "trial"
        version = self._version if kind == "trial" else policy.version
        self._one = one = Comparison(kind, version, over, at=self._now)
        one.published(1, self._now)
        tried = replace(policy, version=version, role=TRIAL, publication=1, share=one.share)
        self.policies[TRIAL] = tried
        self.scope.put_on_trial(tried if kind == "trial" else None)

    def _end(self, index: int, word: str) -> None:
        if self._one is not None:
            self.ended.append((index, f"{self._one.kind}: {word}"))
        self._one = None
        self.policies.pop(TRIAL, None)
        self.scope.put_on_trial(None)

    def _serve(self, index: int, policy: Policy) -> Policy:
        """Put ``policy`` in force: forward, or back to one that was served before."""
        back = policy.digest == self.scope.contest.first.digest or policy.version == 1
        newer = policy.version > self.scope.version or not policy.version
        if not policy.version:
            self._version += 1
            policy = replace(policy, version=self._version)
        policy = replace(policy, role=CHAMPION, share=0.0)
        self.scope.crown(policy)
        self._waiting = None  # it won over another champion
        (self.promotions if newer and not back else self.returns).append(index)
        return policy


def _round_of(finished: FinishedRound, now: float) -> Round:
    blocks = tuple(block.block() for block in finished.blocks)
    return Round(
        scope="drift", worker="w", life="0", number=finished.number, time=now,
        unit=finished.cluster, blocks=blocks,
    )  # fmt: skip


@dataclass(frozen=True)
class Worker:
    """How a policy is served. Without ``adapts`` neither costs, rate nor floor follow anything. A
    ``rule`` decides in the policy's place, and learns as it goes."""

    settings: WorkerSettings
    adapts: bool = True
    rule: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Run:
    """What became of n requests, in their order: tokens [n] committed by cycles (all but the first
    of each output), microseconds [n], cycles [arms] in all; and the numbers of the requests at
    which a learner raised an alarm, promoted a policy, or went back to one."""

    tokens: NDArray[np.int64]
    us: NDArray[np.float64]
    cycles: NDArray[np.int64]
    alarms: list[int] = field(default_factory=list)
    promotions: list[int] = field(default_factory=list)
    returns: list[int] = field(default_factory=list)
    comparisons: list[tuple[int, str]] = field(default_factory=list)

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
    interleaver: VirtualInterleaver | None = None,
) -> Run:
    """Serve ``requests``, whose traces have a model arm.

    Args:
        costs: of each segment, the truth; the first is the profile that the worker has.
        told: called when a request is done. Its policy is in force from the next one on.
        interleaver: of the worker.
    """
    rule = worker.rule() if worker.rule is not None else None
    clock, cache = _Clock(rule.update if rule else None), SuffixCache(worker.settings)
    k = worker.settings.model_draft_tokens
    router = DraftRouter(cache, policy, token_classes, clock, model_len=k, guarded=worker.adapts)
    router.costs = _RecordedCosts(costs[0], live=worker.adapts)
    router.rule, router.interleaver = rule or choose, interleaver
    made = Run.of(len(requests))
    engine = Engine(router, cache, [r.trace for r in requests], usual=False)
    for index, request in enumerate(requests):
        for cycle in engine.decode(index, request.tenant):
            us = step_time(costs[request.segment], 1, cycle.verified, cycle.drafted)
            clock.steps[cycle.position] = clock.now_us, us
            if interleaver is not None:
                interleaver.step_us = us
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

    def __init__(self, update: Callable[[NDArray[Any]], None] | None) -> None:
        super().__init__(update)
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
