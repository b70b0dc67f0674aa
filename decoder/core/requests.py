"""A request as the router follows it: what it asked for, its tokens, and its cycles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from decoder.contracts.bundle import CHAMPION, Policy
from decoder.contracts.events import Arm
from decoder.contracts.features import FloatArray
from decoder.core.floor import Stretch
from decoder.core.labels import LabelTracker
from decoder.core.payoff.featurize import DraftState
from decoder.core.payoff.memory import History, Keys, TenantMemory, memory_keys
from decoder.drafting.drafts import CacheDraft, Tokens


def _empty() -> FloatArray:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request asks for. ``stop_ids`` are the token ids that end it, from ``min_tokens`` on.

    ``opaque``, ``tenant`` and ``session`` are pseudonyms, and the only names of it that leave the
    worker; ``choice`` counts the choices of one client request. ``cache_key`` is what it has in
    common with the requests that it may draft from: its tenant, unless it says more.
    """

    max_tokens: int
    max_model_len: int
    stop_ids: frozenset[int] = frozenset()
    tenant: str = ""
    workload: str = ""
    speculate: bool = True
    opaque: str = ""
    session: str = ""
    choice: int = 0
    cache_key: str | None = None
    min_tokens: int = 0

    @property
    def key(self) -> str:
        """What it shares its text under."""
        return self.tenant if self.cache_key is None else self.cache_key


class Decision(NamedTuple):
    """What one request verifies in the coming cycle: ``tokens`` when the arm is ``cache``."""

    arm: Arm
    tokens: Sequence[int] = ()
    room: int = 0  # draft tokens of any arm that the request may still use


class Committed(NamedTuple):
    """One cycle's outcome: tokens committed, and how many draft tokens were really verified.

    ``length`` is what the engine holds for the request after the step, prompt and output tokens
    together; 0 where it does not say.
    """

    request: str
    tokens: Sequence[int]
    verified_len: int
    length: int = 0


@dataclass(slots=True)
class Step:
    """What the requests of a step share, and by row what was chosen of each.

    ``wanted`` and ``cached`` are draft tokens, had the policy its way and if every cache draft were
    verified whole: the price of one hangs on how many there are. ``drafting`` counts the requests
    for which the policy wants a model draft, ``batch`` all of the step, followed or not. ``arms``
    is what the floor made of its choice. ``tokens`` and ``us`` are the engine's word, once it has
    run.
    """

    wanted: int
    cached: int
    drafting: int
    batch: int
    wall: float = 0.0  # seconds since the epoch
    parameter: float = 0.0
    model_len: int = 0  # tokens of a model draft
    arms: Sequence[int] = ()
    chosen: Sequence[int] = ()
    lengths: Sequence[int] = ()
    expected: FloatArray = field(default_factory=_empty)
    model: FloatArray = field(default_factory=_empty)
    features: FloatArray = field(default_factory=_empty)  # [m, features], by cache draft
    draft_us: float = 0.0
    tokens: int = 0
    us: float = 0.0
    policy: Policy | None = None  # that chose
    side: str = ""  # of a trial
    beside: int = 0  # tokens of prompts that it was expected to read

    @property
    def serves(self) -> bool:
        """Whether the champion decided, in a block of a trial or outside: what a worker serves by
        learns from no other."""
        return self.side in ("", CHAMPION)


@dataclass(slots=True)
class Cycle:
    """One request's part in a step, and what became of it; completed when the step is observed.

    ``row`` is its place among the requests of the step, ``draft`` among their cache drafts, -1
    without one. What was really drafted and verified is the engine's word.
    """

    step: Step
    row: int
    draft: int
    index: int
    position: int
    draft_len: int
    keys: Keys
    drafted_len: int = 0  # as the engine made it
    committed: int = 0
    verified_len: int = 0
    model_accepted: int | None = None
    made: bool = False  # whether the engine has said what it drafted

    @property
    def arm(self) -> int:
        """The arm in force."""
        return self.step.arms[self.row]

    @property
    def wanted(self) -> int:
        """The policy's own choice of an arm."""
        return self.step.chosen[self.row]

    @property
    def wanted_len(self) -> int:
        """Draft tokens of the policy's own choice."""
        return self.step.lengths[self.row]


@dataclass(slots=True)
class Request:
    """Mutable state of one request; ``cycle`` is the one under way."""

    name: str
    options: RequestOptions
    tokens: Tokens  # prompt and output, int32, with room to grow
    prompt_len: int
    length: int
    memory: TenantMemory
    tail: tuple[int, ...]  # its last two tokens
    history: History = field(default_factory=History)
    labels: LabelTracker[Cycle] = field(default_factory=LabelTracker)
    stretch: Stretch = field(default_factory=Stretch)
    cycle: Cycle | None = None
    cycles: int = 0
    drafted_at: int = 0  # tokens there were when it last had a model draft
    ended: str = ""

    @property
    def generated(self) -> int:
        """Output tokens committed."""
        return self.length - self.prompt_len

    @property
    def left(self) -> int:
        """Tokens of drafts that it may still have; none if it may have none.

        One place is kept for the target's own token.
        """
        options = self.options
        if not options.speculate or self.ended:
            return 0
        return min(options.max_tokens - self.generated, options.max_model_len - self.length) - 1

    def room(self, longest: int) -> int:
        """Tokens of a draft for it, at most ``longest``.

        While fewer than ``min_tokens`` are written a draft does not reach them: vLLM forbids the
        end in that place, too, by the length before it.
        """
        least = self.options.min_tokens - self.generated
        return min(self.left, longest, least - 1 if least > 0 else longest)

    def append(self, committed: Sequence[int]) -> None:
        """Add committed tokens. Mutates the request."""
        end = self.length + len(committed)
        if end > len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
        self.tokens[self.length : end] = committed
        self.length = end
        self.tail = (*self.tail, *committed)[-2:]

    def until_end(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens the client will see: an engine may report more than the request may have.

        Counting what lies behind the end would overstate acceptance in every last cycle. Mutates
        ``ended``.
        """
        left = self.options.max_tokens - self.generated
        stops = self.options.stop_ids
        if not stops.isdisjoint(tokens):
            for index, token in enumerate(tokens[:left]):
                if token in stops:
                    self.ended = "stop"
                    return tokens[: index + 1]
        if len(tokens) >= left:
            self.ended = "length"
            return tokens[:left]
        return tokens


def state_of(request: Request, draft: CacheDraft) -> DraftState:
    """What a cache draft of ``request`` is judged by."""
    return DraftState(
        draft, request.prompt_len, request.generated, request.options.max_tokens,
        request.labels.streak, request.history, request.memory,
        memory_keys(request.tail, draft.tokens),
    )  # fmt: skip
