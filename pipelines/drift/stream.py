"""The recorded engine as a service: requests that come and go, several at a time, on a machine
whose costs may change, decoded by a policy that may be replaced between two of them.

Drafts, features, decisions, labels, live costs, rate and floor are those of a worker. A step takes
the time that the scenario's machine says, and the worker is told that time and no other: nothing
depends on the machine that replays. Sleeping (``decoder.doze``) is off for that reason: it weighs
what proposing takes here.
"""

from __future__ import annotations

from collections import Counter, deque
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
from decoder.policy.rule import ARMS, NONE
from decoder.router import Committed, DraftRouter, RequestOptions
from decoder.settings import WorkerSettings
from pipelines.drift.traffic import Request
from pipelines.replay.dialogue import DialogueCache, Turn
from pipelines.replay.states import UNLIMITED
from pipelines.replay.verified import verified

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


@dataclass(frozen=True)
class Decoded:
    """What became of n requests, in their order; times in microseconds."""

    tokens: NDArray[np.int64]  # [n] committed by cycles: all but the first of each output
    us: NDArray[np.float64]  # [n] the request's share of the steps it was in
    arms: NDArray[np.int64]  # [n, arms] cycles


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
    return _Service(requests, conditions, policy, worker, token_classes).run(told)


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


@dataclass
class _Running:
    index: int
    turn: Turn
    model: list[int]
    done: int = 1
    us: float = 0.0
    arms: list[int] = field(default_factory=lambda: [0] * len(ARMS))


class _Service:
    def __init__(
        self,
        requests: Sequence[Request],
        conditions: Sequence[Conditions],
        policy: Policy,
        worker: Worker,
        token_classes: FloatArray,
    ) -> None:
        self._requests, self._conditions = requests, conditions
        self._waiting = deque(range(len(requests)))
        self._left = Counter(request.trace.session for request in requests)
        self._running: dict[str, _Running] = {}
        self._sessions: set[str] = set()
        self._clock = _Clock()
        self._cache = DialogueCache(worker.settings)
        self._router = DraftRouter(
            self._cache,
            policy,
            token_classes,
            self._clock,
            True,
            model_draft_tokens=worker.settings.model_draft_tokens,
            costs=_RecordedCosts(conditions[0].costs, live=worker.adapts),
            floor=Floor(True) if worker.adapts else None,
        )
        self._router.doze = None

    def run(self, told: Told | None) -> Decoded:
        n = len(self._requests)
        made = Decoded(np.zeros(n, np.int64), np.zeros(n), np.zeros((n, len(ARMS)), np.int64))
        while self._waiting or self._running:
            self._admit()
            for one in self._step():
                made.tokens[one.index] = len(one.turn.output) - 1
                made.us[one.index], made.arms[one.index] = one.us, one.arms
                self._end(one, told)
        return made

    def _admit(self) -> None:
        """Start requests while there is room for them. A dialogue's turns wait for each other."""
        while self._waiting:
            segment = self._requests[self._waiting[0]].segment
            if len(self._running) >= self._conditions[segment].concurrency:
                return
            place = self._startable()
            if place is None:
                return
            index = self._waiting[place]
            del self._waiting[place]
            self._start(index)

    def _startable(self) -> int | None:
        """Place among the waiting of the next that may start: none of another segment's time."""
        segment = self._requests[self._waiting[0]].segment
        for place in range(min(len(self._waiting), AHEAD)):
            request = self._requests[self._waiting[place]]
            if request.segment != segment:
                return None
            if request.trace.session not in self._sessions:
                return place
        return None

    def _start(self, index: int) -> None:
        trace, tenant = self._requests[index].trace, self._requests[index].tenant
        prompt = np.asarray(trace.prompt, np.int32)
        output = np.asarray(trace.output, np.int32)
        text = np.concatenate([prompt, output])
        turn = Turn(index, str(index), trace, prompt, output.tolist(), text)
        self._cache.trees.expect(trace.session, text)
        options = RequestOptions(
            trace.allowed, UNLIMITED, session=trace.session, workload=trace.workload, tenant=tenant
        )
        self._router.start(turn.name, prompt, options)
        self._router.observe([Committed(turn.name, turn.output[:1], 0)], 0)
        self._sessions.add(trace.session)
        running = _Running(index, turn, np.asarray(trace.model_accepted).tolist())
        if len(turn.output) > 1:
            self._running[turn.name] = running
        else:
            self._end(running, None)

    def _step(self) -> list[_Running]:
        """One step of all that run; those it ended."""
        running = list(self._running.values())
        names = list(self._running)
        if not names:
            return []
        decisions = self._router.choose(names)
        drafts = [
            verified(decision, one.turn.output, one.model, one.done)
            for one, decision in zip(running, decisions, strict=True)
        ]
        lengths = [length for length, _ in drafts]
        # The drafter makes as many tokens for each request of the step that asked.
        k = max((v for v, d in zip(lengths, decisions, strict=True) if d.arm == "model"), default=0)
        self._router.drafted(names, lengths, k)
        # What is in force is that of the newest request.
        costs = self._conditions[max(self._requests[one.index].segment for one in running)].costs
        us = step_time(costs, len(names), sum(lengths), k)
        outcomes, ended = [], []
        for one, decision, (drafted, accepted) in zip(running, decisions, drafts, strict=True):
            self._clock.steps[one.turn.name, one.done] = self._clock.now_us, us
            tokens = one.turn.output[one.done : one.done + accepted + 1]
            outcomes.append(Committed(one.turn.name, tokens, drafted))
            one.arms[ARMS.index(decision.arm) if drafted else NONE] += 1
            one.us += us / len(names)
            one.done += len(tokens)
            if one.done >= len(one.turn.output):
                ended.append(one)
        self._clock.now_us += us
        tokens_run = len(names) + sum(lengths)
        self._router.costs.observe(tokens_run, len(names), k, us)
        # Not a usual step: this machine's clock, which the router would read, tells nothing.
        self._router.observe(outcomes, tokens_run, usual=False)
        self._router.settle()
        return ended

    def _end(self, one: _Running, told: Told | None) -> None:
        name, session = one.turn.name, one.turn.trace.session
        self._router.stop(name, "stop")
        self._router.settle()
        self._running.pop(name, None)
        self._sessions.discard(session)
        self._left[session] -= 1
        if not self._left[session]:
            self._cache.trees.forget(session)
        events, self._clock.events = self._clock.events, []
        for key in [key for key in self._clock.steps if key[0] == name]:
            del self._clock.steps[key]
        policy = told(one.index, events) if told is not None else None
        if policy is not None:
            self._router.policy = policy
