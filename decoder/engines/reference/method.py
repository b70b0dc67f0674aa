"""Decoding methods: each is a policy for the same router, and options of its arms."""

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
from decoder.core.router import DraftRouter
from decoder.drafting.suffix import SuffixCache
from decoder.settings import WorkerSettings

NEVER, ALWAYS = inf, 0.0

PAPER_FACTOR: Final = 1.0
"""Draft tokens for each matched token, of the baselines (paper, Table 7)."""


@dataclass(frozen=True)
class Method:
    """How a session decodes.

    A policy with threshold ``NEVER`` never verifies a cache draft; one with ``ALWAYS`` verifies
    every one. ``model``: whether there is a model arm; without it, the arm ``none`` takes its
    place. Without ``cache`` there is no suffix cache, so a baseline pays only for what it uses, and
    nothing is labelled. ``model_limit`` truncates model drafts to that many tokens.
    ``draft_factor`` replaces the worker's ``suffix_max_factor``. ``rule`` makes a
    decision rule, which the caller passes to the router instead of :func:`choose`.
    """

    name: str
    policy: Policy
    model: bool = True
    cache: bool = True
    draft_factor: float | None = None
    model_limit: int | None = None
    rule: Callable[[], Any] | None = None

    def drafting(self, settings: WorkerSettings) -> WorkerSettings:
        """``settings`` with the method's own values."""
        own = {} if self.draft_factor is None else {"suffix_max_factor": self.draft_factor}
        return settings.model_copy(update=own)

    def longest(self, settings: WorkerSettings) -> int:
        """Longest model draft, in tokens."""
        return min(settings.model_draft_tokens, self.model_limit or MAX_DRAFT)

    def router(
        self,
        settings: WorkerSettings,
        cache: SuffixCache | None,
        token_classes: FloatArray,
        costs: LiveCosts | None,
        guarded: bool,
        sink: Sink | None = None,
        rule: Callable[[Policy, Step], Chosen] = choose,
    ) -> DraftRouter:
        """A router for the method; its events go to ``sink``.

        Raises:
            EngineError: the method has its own rule, and ``rule`` was not passed.
        """
        if self.rule is not None and rule is choose:
            raise EngineError(f"method {self.name!r} decides by a rule: pass it.")
        router = DraftRouter(
            cache, self.policy, token_classes, sink or Sink(None),
            model_len=self.longest(settings) * self.model, guarded=guarded,
        )  # fmt: skip
        router.costs, router.rule = costs or router.costs, rule
        return router


def _counting(threshold: float) -> Policy:
    return frequency_policy("", threshold)


def _learned(policy: Policy | None) -> Policy:
    if policy is None:
        raise EngineError("method 'hybrid' decides by a learned policy: give it one.")
    return policy


def _matched(least: int) -> Policy:
    """Choose the cache draft where at least ``least`` tokens of context matched."""
    weight = np.zeros((NUM_FEATURES, 1), np.float32)
    weight[FEATURES.index("match_len")] = 2.0  # steep enough for every draft to reach 0.5
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
least four tokens matched); ``hybrid`` is the learned policy. The baselines draft with the options
of the paper's Table 7, ``hybrid`` with the worker's."""


def method(
    name: str,
    *,
    policy: Policy | None = None,
    threshold: float | None = None,
    k: int = 4,
    makers: Mapping[str, Maker] = METHODS,
) -> Method:
    """The method called ``name``.

    Args:
        policy: for ``hybrid``, which needs one.
        threshold: for ``frequency``, tokens of counted score; 2 by default.
        k: for ``arctic``, the required score.

    Raises:
        EngineError: there is no such method, or the learned policy is missing.
    """
    try:
        maker = makers[name]
    except KeyError:
        raise EngineError(f"no method {name!r}: there are {', '.join(makers)}.") from None
    return maker(policy, threshold, k)
