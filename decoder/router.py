"""The draft router: what each request verifies next, and what became of what it was offered.

The heart of the decoder; it knows no engine. An engine calls, for each request,

    start(request, prompt, options)
    loop:  observe(requests and what was committed)   labels resolve, events leave
           choose(requests)                           the next draft of each
    stop(request, reason)

Everything a choice depends on is the prefix, the deterministic cache draft, and labels resolved
before it, never a sampled draft token: so rejection sampling stays lossless.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.events import Arm, DraftEvent
from decoder.contracts.policy import ARMS, CACHE, MODEL, NONE, Policy, decide, predict
from decoder.drafting.suffix import CacheDraft, SuffixCache, Tokens
from decoder.labels import Label, LabelTracker
from decoder.payoff.featurize import DraftState, FloatArray, History, featurize


class EventSink(Protocol):
    """Where finished events go. ``put`` never blocks and never raises."""

    def put(self, event: DraftEvent) -> None:
        """Take one event."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request asks for. ``stop_ids`` are the token ids that end it."""

    max_tokens: int
    max_model_len: int
    stop_ids: frozenset[int] = frozenset()
    tenant: str = ""
    workload: str = ""
    speculate: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """What one request verifies in the coming cycle: ``tokens`` when the arm is ``cache``."""

    arm: Arm
    tokens: Sequence[int] = ()
    room: int = 0  # draft tokens of any arm that the request may still use


@dataclass(frozen=True, slots=True)
class Committed:
    """One cycle's outcome: tokens committed, and how many draft tokens were really verified."""

    request: str
    tokens: Sequence[int]
    verified_len: int


@dataclass(slots=True)
class _Cycle:
    """A cycle under way; completed by ``observe``."""

    index: int
    wall: float  # seconds since the epoch
    decided: float  # seconds of the performance counter
    arm: int
    policy_version: int
    threshold: float
    predicted: float
    predicted_model: float
    position: int
    draft_len: int
    features: FloatArray | None
    batch_size: int
    draft_us: float
    verified_len: int = 0
    model_accepted: int | None = None
    step_tokens: int = 0
    step_us: float = 0.0


@dataclass(slots=True)
class _Request:
    name: str
    options: RequestOptions
    tokens: Tokens  # prompt and output, int32, with room to grow
    prompt_len: int
    length: int
    history: History = field(default_factory=History)
    labels: LabelTracker[_Cycle] = field(default_factory=LabelTracker)
    cycle: _Cycle | None = None
    cycles: int = 0
    ended: str = ""

    @property
    def generated(self) -> int:
        return self.length - self.prompt_len

    @property
    def room(self) -> int:
        """Draft tokens that could still be committed: one place is kept for the target's own."""
        left = self.options.max_tokens - self.generated
        return max(0, min(left, self.options.max_model_len - self.length) - 1)

    def append(self, committed: Sequence[int]) -> None:
        end = self.length + len(committed)
        if end > len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
        self.tokens[self.length : end] = committed
        self.length = end


@dataclass
class Counters:
    """Cumulative counts since the router was made."""

    started: int = 0
    stopped: int = 0
    tokens: int = 0
    labelled: int = 0
    cycles: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)
    choose_us: deque[float] = field(default_factory=lambda: deque(maxlen=512))


INITIAL_ROOM: Final = 1024
"""Tokens of growth reserved at start, so that most requests never copy their prefix."""


class DraftRouter:
    """Chooses drafts for the requests of one worker and labels every cache draft it saw.

    ``policy`` may be replaced by another thread at any time: it is read once a step, so a step
    never mixes two policies and a swap waits for nothing.
    """

    def __init__(
        self,
        cache: SuffixCache,
        policy: Policy,
        token_classes: NDArray[np.float32],
        sink: EventSink,
        has_model: bool,
        worker: str,
    ) -> None:
        self.policy = policy
        self.counters = Counters()
        self._cache = cache
        self._classes = token_classes
        self._sink = sink
        self._has_model = has_model
        # Ids of two lives of a worker must differ, or their events would be taken for duplicates.
        self._event_prefix = f"{worker}/{time.time_ns():x}/"
        self._events = 0
        self._requests: dict[str, _Request] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def start(self, request: str, prompt: Tokens, options: RequestOptions) -> None:
        """Begin to follow a request whose prompt is int32 [n].

        Raises:
            ValueError: the request is followed already.
        """
        prompt = np.ascontiguousarray(prompt, dtype=np.int32)
        self._cache.start(request, prompt, options.tenant)
        grown = np.empty(len(prompt) + INITIAL_ROOM, np.int32)
        grown[: len(prompt)] = prompt
        self._requests[request] = _Request(request, options, grown, len(prompt), len(prompt))
        self.counters.started += 1

    def observe(self, outcomes: Sequence[Committed], step_tokens: int) -> None:
        """Take in what the last step committed; resolve labels and emit their events.

        Args:
            outcomes: one entry for each request the step advanced.
            step_tokens: tokens the step ran through the target, prefill included.
        """
        now = time.perf_counter()
        for outcome in outcomes:
            request = self._requests.get(outcome.request)
            if request is None or request.ended:
                continue
            committed = self._until_end(request, outcome.tokens)
            cycle = request.cycle
            if cycle is not None:
                cycle.verified_len = outcome.verified_len
                cycle.step_tokens = step_tokens
                cycle.step_us = (now - cycle.decided) * 1e6
                self._count(cycle, outcome, len(committed))
                request.cycle = None
            self.counters.tokens += len(committed)
            request.append(committed)
            self._cache.extend(request.name, committed)
            for label in request.labels.commit(committed):
                self._resolve(request, label, censored="")
            if request.ended:
                self.stop(request.name, request.ended)

    def choose(self, names: Sequence[str]) -> list[Decision]:
        """The next draft of each request; one featurize and one predict for all of them.

        A request that is unknown, has ended, or switched speculation off verifies nothing.
        """
        began = time.perf_counter()
        policy, wall = self.policy, time.time()
        requests = [self._requests.get(name) for name in names]
        drafts = [self._propose(r) if r is not None else None for r in requests]
        states = [
            DraftState(
                d, r.prompt_len, r.generated, r.options.max_tokens, r.labels.streak, r.history
            )
            for r, d in zip(requests, drafts, strict=True)
            if r is not None and d is not None
        ]
        features = featurize(states, self._classes)
        predicted = predict(policy, features)
        arms = decide(policy, predicted, self._has_model)
        otherwise = MODEL if self._has_model and policy.use_model else NONE
        finished = time.perf_counter()
        decisions, row = [], 0
        for request, draft in zip(requests, drafts, strict=True):
            if request is None or not _may_speculate(request):
                decisions.append(Decision("none"))
                continue
            arm, mine, value = otherwise, None, 0.0
            if draft is not None:
                arm, mine, value = int(arms[row]), features[row], float(predicted[row])
                row += 1
            cycle = _Cycle(
                request.cycles, wall, finished, arm, policy.version, policy.threshold, value,
                policy.model_payoff, request.generated, len(draft.tokens) if draft else 0,
                mine, len(names), (finished - began) * 1e6,
            )  # fmt: skip
            request.cycle = cycle
            request.cycles += 1
            request.history.cache_cycles.append(arm == CACHE)
            if draft is not None:
                request.labels.propose(draft.tokens, cycle)
            tokens = draft.tokens if draft is not None and arm == CACHE else ()
            decisions.append(Decision(ARMS[arm], tokens, request.room))
        self.counters.choose_us.append((finished - began) * 1e6)
        return decisions

    def stop(self, name: str, reason: str) -> None:
        """Stop following a request: its open labels leave censored. Unknown names are ignored."""
        request = self._requests.pop(name, None)
        if request is None:
            return
        for label in request.labels.close():
            self._resolve(request, label, censored=reason)
        self._cache.stop(name)
        self.counters.stopped += 1

    def close(self) -> None:
        """Stop every request: the worker is going down."""
        for name in list(self._requests):
            self.stop(name, "abort")

    def _propose(self, request: _Request) -> CacheDraft | None:
        if not _may_speculate(request):
            return None
        context = request.tokens[: request.length]
        return self._cache.propose(request.name, context, request.room)

    def _until_end(self, request: _Request, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens the client will see: an engine may report more than the request may have.

        Counting what lies behind the end would overstate acceptance in every last cycle. Marks
        the request as ended.
        """
        left = request.options.max_tokens - request.generated
        for index, token in enumerate(tokens[:left]):
            if token in request.options.stop_ids:
                request.ended = "stop"
                return tokens[: index + 1]
        if len(tokens) >= left:
            request.ended = "length"
        return tokens[:left]

    def _count(self, cycle: _Cycle, outcome: Committed, committed: int) -> None:
        # Nothing verified (a draft the scheduler had no room for) is a cycle of the arm "none".
        arm = ARMS[cycle.arm if outcome.verified_len else NONE]
        accepted = min(len(outcome.tokens) - 1, committed)
        self.counters.cycles[arm] += 1
        self.counters.drafted[arm] += outcome.verified_len
        self.counters.accepted[arm] += accepted
        if arm == "model" and committed == len(outcome.tokens):
            cycle.model_accepted = accepted

    def _resolve(self, request: _Request, label: Label[_Cycle], censored: str) -> None:
        cycle = label.subject
        assert cycle.features is not None
        if not label.censored:
            request.history.payoffs.append(label.accepted)
        seen = cycle.arm == CACHE and (
            label.accepted < cycle.verified_len or cycle.verified_len >= cycle.draft_len
        )
        self._events += 1
        self.counters.labelled += 1
        self._sink.put(
            DraftEvent(
                event_id=f"{self._event_prefix}{self._events}",
                time=cycle.wall,
                request=request.name,
                workload=request.options.workload,
                cycle=cycle.index,
                position=cycle.position,
                policy_version=cycle.policy_version,
                threshold=cycle.threshold,
                predicted=cycle.predicted,
                predicted_model=cycle.predicted_model,
                arm=ARMS[cycle.arm if cycle.verified_len else NONE],
                draft_len=cycle.draft_len,
                verified_len=cycle.verified_len,
                accepted=label.accepted,
                label="verified" if seen else "hindsight",
                censored=censored,
                model_accepted=cycle.model_accepted,
                batch_size=cycle.batch_size,
                step_tokens=cycle.step_tokens,
                draft_us=cycle.draft_us,
                step_us=cycle.step_us,
                features=cycle.features,
            )
        )


def _may_speculate(request: _Request) -> bool:
    return request.options.speculate and not request.ended and request.room > 0
