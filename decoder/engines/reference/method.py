"""Decoding methods: each is a policy of the one router, and what its model arm is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import MAX_DRAFT, Policy, frequency_policy
from decoder.contracts.errors import EngineError
from decoder.contracts.features import FEATURES, NUM_FEATURES, FloatArray
from decoder.core.choice import Chosen, Step, choose
from decoder.core.costs import LiveCosts
from decoder.core.events import Sink
from decoder.core.guards.floor import Floor
from decoder.core.router import DraftRouter
from decoder.drafting.suffix import SuffixCache
from decoder.settings import WorkerSettings

NEVER, ALWAYS = inf, 0.0

PAPER_FACTOR: Final = 1.0
"""Tokens of a cache draft for each one matched (paper, Table 7): what its baselines are shown."""


@dataclass(frozen=True)
class Method:
    """How a session decodes.

    A policy with threshold ``NEVER`` never verifies a cache draft, one with ``ALWAYS`` does
    whenever there is one. ``model`` says that there is a model arm; else the arm ``none`` stands in
    for it. Without ``cache`` there is no suffix cache at all, so that a baseline pays for nothing
    it does not use, and nothing is labelled. ``model_limit`` cuts every model draft to that many
    tokens. ``draft_factor`` stands in for the worker's ``suffix_max_factor``. ``rule`` makes what
    a caller has choose in the place of ``policy``.
    """

    name: str
    policy: Policy
    model: bool = True
    cache: bool = True
    draft_factor: float | None = None
    model_limit: int | None = None
    rule: Callable[[], Any] | None = None

    def drafting(self, settings: WorkerSettings) -> WorkerSettings:
        """``settings`` with what the method has of its own."""
        own = {} if self.draft_factor is None else {"suffix_max_factor": self.draft_factor}
        return settings.model_copy(update=own)

    def longest(self, settings: WorkerSettings) -> int:
        """Tokens of a model draft at most."""
        return min(settings.model_draft_tokens, self.model_limit or MAX_DRAFT)

    def router(
        self,
        settings: WorkerSettings,
        cache: SuffixCache | None,
        token_classes: FloatArray,
        costs: LiveCosts | None,
        floor: Floor | None,
        sink: Sink | None = None,
        rule: Callable[[Policy, Step], Chosen] = choose,
    ) -> DraftRouter:
        """What decides by the method; its events go to ``sink``.

        Raises:
            EngineError: the method has a rule, and ``rule`` is not made by it.
        """
        if self.rule is not None and rule is choose:
            raise EngineError(f"method {self.name!r} decides by a rule: pass it.")
        return DraftRouter(
            cache, self.policy, token_classes, sink or Sink(None), self.model,
            model_draft_tokens=self.longest(settings), costs=costs, floor=floor, rule=rule,
        )  # fmt: skip


def _counting(threshold: float) -> Policy:
    return frequency_policy("", threshold)


def _learned(policy: Policy | None) -> Policy:
    if policy is None:
        raise EngineError("method 'hybrid' decides by a learned policy: give it one.")
    return policy


def _matched(least: int) -> Policy:
    """The cache draft where at least so many tokens of context matched, whatever it counts."""
    weight = np.zeros((NUM_FEATURES, 1), np.float32)
    weight[FEATURES.index("match_len")] = 2.0  # no draft is so short that it would not reach 0.5
    bias = np.array([1.0 - 2.0 * least], np.float32)
    return Policy("", 0, 0.5, layers=((weight, bias),))


def _baseline(name: str, policy: Policy, model: bool = True) -> Method:
    return Method(name, policy, model, draft_factor=PAPER_FACTOR)


Maker = Callable[[Policy | None, float | None, int], Method]

METHODS: Final[dict[str, Maker]] = {
    "greedy": lambda p, t, k: Method("greedy", _counting(NEVER), False, cache=False),
    "eagle3": lambda p, t, k: Method("eagle3", _counting(NEVER), cache=False),
    "suffix": lambda p, t, k: _baseline("suffix", _counting(ALWAYS), False),
    "frequency": lambda p, t, k: _baseline("frequency", _counting(2.0 if t is None else t)),
    "arctic": lambda p, t, k: _baseline("arctic", _counting(k)),
    "match4": lambda p, t, k: _baseline("match4", _matched(4)),
    "hybrid": lambda p, t, k: Method("hybrid", _learned(p)),
}
"""Makers by name. ``frequency`` is the paper's rule (counted score against a threshold), ``arctic``
ArcticInference's (score against the length ``k`` of a model draft), ``match4`` TensorRT-LLM's (at
least four tokens matched); ``hybrid`` is the learned policy. The baselines draft as the paper's
Table 7 says, ``hybrid`` as the worker does."""


def method(
    name: str,
    *,
    policy: Policy | None = None,
    threshold: float | None = None,
    k: int = 4,
    makers: Mapping[str, Maker] = METHODS,
) -> Method:
    """The method called ``name``, of ``makers``.

    Args:
        policy: of ``hybrid``, which needs one.
        threshold: of ``frequency``, tokens of counted score; 2 unless given.
        k: the score ``arctic`` asks for.

    Raises:
        EngineError: no such method, or a learned policy is missing.
    """
    try:
        maker = makers[name]
    except KeyError:
        raise EngineError(f"no method {name!r}: there are {', '.join(makers)}.") from None
    return maker(policy, threshold, k)
