"""A request as the router follows it: what it asked for, its tokens, and its cycles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from decoder.contracts.events import Arm
from decoder.contracts.features import FloatArray
from decoder.drafting.suffix import Tokens
from decoder.floor import Stretch
from decoder.labels import LabelTracker
from decoder.payoff.memory import History, Keys, TenantMemory


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request asks for. ``stop_ids`` are the token ids that end it.

    ``opaque``, ``tenant`` and ``session`` are pseudonyms, and the only names of it that leave the
    worker; ``choice`` counts the choices of one client request.
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


@dataclass(frozen=True, slots=True)
class Decision:
    """What one request verifies in the coming cycle: ``tokens`` when the arm is ``cache``."""

    arm: Arm
    tokens: Sequence[int] = ()
    room: int = 0  # draft tokens of any arm that the request may still use


@dataclass(frozen=True, slots=True)
class Committed:
    """One cycle's outcome: tokens committed, and how many draft tokens were really verified.

    ``length`` is what the engine holds for the request after the step, prompt and output tokens
    together; 0 where it does not say.
    """

    request: str
    tokens: Sequence[int]
    verified_len: int
    length: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What the requests of a step share: the price of a draft token hangs on how many there are.

    ``wanted`` and ``cached`` are draft tokens, had the policy its way and if every cache draft were
    verified whole; ``drafting`` counts the requests for which the policy wants a model draft.
    """

    wanted: int
    cached: int
    drafting: int


@dataclass(slots=True)
class Cycle:
    """One decision and what became of it; completed when the step is observed.

    ``wanted`` and ``wanted_len`` are the policy's own choice, ``arm`` what the floor made of it.
    What was really drafted and verified is the engine's word.
    """

    index: int
    wall: float  # seconds since the epoch
    arm: int
    wanted: int
    wanted_len: int
    policy_version: int
    parameter: float
    predicted: float
    predicted_model: float
    foreseen: float | None  # the network's estimate of the model draft, before correction
    position: int
    draft_len: int
    model_len: int  # tokens of a model draft in this step
    features: FloatArray | None
    keys: Keys
    batch_size: int
    step: Step
    draft_us: float
    drafted_len: int = 0  # of the arm's draft, as the engine made it
    committed: int = 0
    verified_len: int = 0
    model_accepted: int | None = None
    step_tokens: int = 0
    step_us: float = 0.0


@dataclass(slots=True)
class Request:
    """Mutable state of one request; ``cycle`` is the one under way."""

    name: str
    options: RequestOptions
    tokens: Tokens  # prompt and output, int32, with room to grow
    prompt_len: int
    length: int
    memory: TenantMemory
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
    def room(self) -> int:
        """Draft tokens that could still be committed: one place is kept for the target's own."""
        left = self.options.max_tokens - self.generated
        return max(0, min(left, self.options.max_model_len - self.length) - 1)

    @property
    def may_speculate(self) -> bool:
        """Whether any draft may be verified for it."""
        return self.options.speculate and not self.ended and self.room > 0

    def append(self, committed: Sequence[int]) -> None:
        """Add committed tokens. Mutates the request."""
        end = self.length + len(committed)
        if end > len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
        self.tokens[self.length : end] = committed
        self.length = end

    def until_end(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens the client will see: an engine may report more than the request may have.

        Counting what lies behind the end would overstate acceptance in every last cycle. Mutates
        ``ended``.
        """
        left = self.options.max_tokens - self.generated
        for index, token in enumerate(tokens[:left]):
            if token in self.options.stop_ids:
                self.ended = "stop"
                return tokens[: index + 1]
        if len(tokens) >= left:
            self.ended = "length"
        return tokens[:left]
