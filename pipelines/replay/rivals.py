"""Decoding methods by name, for the reference engine and the replay.

``buckets`` counts acceptances of cache drafts by source (own text, or others'), match length and
draft position, as vLLM's suffix decoding does after 0.33, and drafts with the model where that does
not draft. The acceptance probability at a position is (accepted + 1) / (observed + 2); counts are
halved every :data:`HALVES` steps. Its arms are chosen as a survival policy's are (:func:`priced`),
so only the estimate differs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.contracts.errors import EngineError
from decoder.contracts.features import FEATURES, NUM_FEATURES, FloatArray
from decoder.core.choice import Chosen, Step, choose
from decoder.policy.loops import Terms, draft_length, share_out, yields_of_places
from decoder.policy.pricing import token_value
from pipelines.replay.events import EventLog
from pipelines.replay.method import Method

NEVER, ALWAYS = inf, 0.0  # thresholds of policies that verify no cache draft, and all of them
PAPER_FACTOR: Final = 1.0  # draft tokens for each matched token, of the baselines (paper, Table 7)
HALVES: Final = 1024  # steps after which counts are halved
MATCHES: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Longest match of each bucket; a ninth bucket holds longer ones."""
POSITIONS: Final = 64  # positions with counts of their own; later ones share the last
_LOCAL, _MATCH, LENGTH = (FEATURES.index(n) for n in ("local", "match_len", "draft_len"))


class Buckets:
    """The counts of one worker; used instead of :func:`decoder.core.choice.choose`."""

    def __init__(self) -> None:
        shape = 2, len(MATCHES) + 1, POSITIONS
        self._accepted, self._observed = np.zeros(shape), np.zeros(shape)
        self._steps = 0

    def update(self, rows: NDArray[Any]) -> None:
        """Count the labels of cache drafts; censored ones up to where they are known. Mutates.

        Args:
            rows: [n] of :data:`decoder.contracts.fields.ROW`.
        """
        rows = rows[rows["draft_len"] > 0]
        sources, matches = _places(rows["features"])
        broke = (rows["censored"] == 0) & (rows["accepted"] < rows["draft_len"])
        for row, (source, match) in enumerate(zip(sources, matches, strict=True)):
            accepted = min(int(rows["accepted"][row]), POSITIONS)
            self._accepted[source, match, :accepted] += 1
            self._observed[source, match, : accepted + broke[row]] += 1

    def curves(self, features: FloatArray) -> FloatArray:
        """Survival of each draft by position: float32 [m, POSITIONS]."""
        chances = (self._accepted + 1.0) / (self._observed + 2.0)
        survival: FloatArray = np.cumprod(chances[_places(features)], axis=1, dtype=np.float32)
        survival[np.arange(POSITIONS) >= features[:, LENGTH, None]] = 0.0
        return survival

    def __call__(self, policy: Policy, step: Step) -> Chosen:
        """See :func:`decoder.core.choice.choose`."""
        self._steps += 1
        if self._steps % HALVES == 0:
            self._accepted /= 2.0
            self._observed /= 2.0
        return priced(self.curves(step.features), step)


def priced(drafts: FloatArray, step: Step) -> Chosen:
    """The best arms and lengths for survival curves [m, POSITIONS] of the step's cache drafts;
    model drafts yield their recent mean."""
    n, costs, inputs = len(step.candidates), step.costs, step.inputs[0]
    rows, longest = int(inputs["batch_size"]), int(inputs["model_len"])
    curves = np.zeros((n, POSITIONS), np.float32)
    curves[step.owners] = drafts
    value = float(token_value(rows, float(inputs["rate"]), costs.dense))
    terms = Terms(value, rows, int(inputs["budget"]), costs.prices)
    yields = np.empty((n, max(longest, 1)), np.float32)
    yields[:] = yields_of_places(step.odds, longest) if longest else 0.0
    k = draft_length(yields, terms, costs.dense) if longest else 0
    model = np.ascontiguousarray(yields[:, k - 1]) if k else np.zeros(n, np.float32)
    arms, lengths, _ = share_out(curves, model, k, terms, costs.dense)
    candidates = step.candidates
    candidates["policy_arm"], candidates["length"] = arms, lengths
    candidates["expected"], candidates["model"] = curves.sum(axis=1), model
    return Chosen(k or longest)


def _counting(threshold: float) -> Policy:
    return frequency_policy("", threshold)


def _learned(policy: Policy | None) -> Policy:
    if policy is None:
        raise EngineError("method 'hybrid' decides by a learned policy: give it one.")
    return policy


def _matched(least: int) -> Policy:
    """Choose the cache draft if at least ``least`` tokens of context matched."""
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
    "buckets": lambda p, t, k: Method("buckets", _counting(ALWAYS), rule=Buckets),
}
"""Constructors by name. ``frequency`` is the paper's rule (counted score against a threshold),
``arctic`` ArcticInference's (score against the length ``k`` of a model draft), ``match4``
TensorRT-LLM's (at least four matched tokens); ``hybrid`` is the learned policy. Baselines draft as
in the paper's Table 7, ``hybrid`` and ``buckets`` as the worker is set to."""


def method(
    name: str,
    *,
    policy: Policy | None = None,
    threshold: float | None = None,
    k: int = 4,
) -> Method:
    """The method named ``name``.

    Args:
        policy: for ``hybrid``, which requires one.
        threshold: for ``frequency``, tokens of counted score; 2 by default.
        k: for ``arctic``, the required score.

    Raises:
        EngineError: there is no such method, or the learned policy is missing.
    """
    try:
        maker = METHODS[name]
    except KeyError:
        raise EngineError(f"no method {name!r}: there are {', '.join(METHODS)}.") from None
    return maker(policy, threshold, k)


def deciding(method: Method) -> tuple[EventLog, Callable[..., Chosen]]:
    """The event log and the choice function for one run of ``method``."""
    if method.rule is None:
        return EventLog(), choose
    rule = method.rule()
    return EventLog(rule.update), rule


def _places(features: FloatArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Source and match bucket [m] of drafts with ``features`` [m, features]."""
    source = (features[:, _LOCAL] > 0.5).astype(np.int64)
    return source, np.searchsorted(MATCHES, features[:, _MATCH]).astype(np.int64)
