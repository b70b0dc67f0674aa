"""Apply a policy to one step: arm and draft length of each request.

The ``survival`` kind spends the step's verification budget where it gains most, picks the best
length of model drafts, and runs the drafter only if that pays for the batch. ``policy.pricing``
defines cost and gain.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.contracts.features import NUM_FEATURES, FloatArray
from decoder.policy.estimate import Estimate, decide_each, estimate
from decoder.policy.loops import by_survival, yields_of_places
from decoder.policy.pricing import CostTable
from decoder.policy.rule import CACHE, MODEL, NONE, SITUATION, Situation

_UNBOUNDED: Final = 1 << 40


class Step(NamedTuple):
    """Inputs of a step's choice: candidates, their cache drafts, costs and model arm."""

    candidates: NDArray[Any]  # CANDIDATE [n]: a rule fills policy_arm, length, expected and model
    drafts: NDArray[Any]  # FEATURE_ROW [m], features of their cache drafts
    situation: NDArray[Any]  # SITUATION [1]
    costs: CostTable
    odds: NDArray[np.float64]  # log-odds that a model draft's token is accepted, by position

    @property
    def features(self) -> FloatArray:
        """Features of the cache drafts, float32 [m, features]: a view."""
        return self.drafts.view(np.float32).reshape(len(self.drafts), NUM_FEATURES)

    @property
    def owners(self) -> NDArray[np.int64]:
        """Candidate index of each cache draft [m]."""
        return np.flatnonzero(self.candidates["draft"] >= 0)

    @property
    def batch_size(self) -> int:
        """Requests in the step, including those without speculation."""
        return int(self.situation["batch_size"][0])

    @property
    def rate(self) -> float:
        """Tokens a request commits per plain step."""
        return float(self.situation["rate"][0])

    @property
    def budget(self) -> int:
        """Draft tokens of all requests together."""
        return int(self.situation["budget"][0])

    @property
    def model_len(self) -> int:
        """Maximum length of a model draft; 0 without a model drafter."""
        return int(self.situation["model_len"][0])


class Chosen(NamedTuple):
    """``model_len`` is the length of every model draft of the step. ``model_gain``, in time,
    is what model drafts gain if all requests can have one; infinite if the policy does not estimate
    it."""

    model_len: int
    model_gain: float = np.inf


def situation_of(
    batch_size: int,
    rate: float,
    model_len: int,
    costs: CostTable,
    budget: int | None = None,
    prefill_tokens: int = 0,
) -> NDArray[Any]:
    """:data:`~decoder.policy.rule.SITUATION` [1]; ``budget`` None means unbounded."""
    situation = np.empty(1, SITUATION)
    limit = _UNBOUNDED if budget is None else max(budget, 0)
    situation[0] = batch_size, prefill_tokens, limit, model_len, 0, 0, rate, costs.prices
    return situation


def choose(policy: Policy, step: Step) -> Chosen:
    """Decide a step by ``policy``. Mutates ``step``.

    A survival policy may shorten model drafts.
    """
    if policy.kind != "survival":
        chosen = _threshold(policy, step)
        if step.budget < _UNBOUNDED:
            _fit(step.candidates, step.budget)
        return chosen
    longest = step.model_len
    if not policy.use_model:
        step.situation["model_len"] = 0
    k, gain = by_survival(
        policy.flat, step.drafts, step.candidates, step.situation,
        step.odds, step.costs.dense,
    )  # fmt: skip
    return Chosen(k or longest, gain)


def _fit(candidates: NDArray[Any], budget: int) -> None:
    """Fit drafts into ``budget`` in order: cut the cache draft that exceeds it, drop the rest.
    Mutates."""
    for candidate in candidates:
        if candidate["length"] > budget:
            candidate["length"] = budget if candidate["policy_arm"] == CACHE else 0
            candidate["policy_arm"] = candidate["policy_arm"] if candidate["length"] else NONE
        budget -= int(candidate["length"])


def _threshold(policy: Policy, step: Step) -> Chosen:
    estimated, owners, n = estimate(policy, step.features), step.owners, len(step.candidates)
    k, unable = step.model_len * policy.use_model, np.flatnonzero(step.candidates["unable"])
    expected, lengths = np.zeros(n, np.float32), np.zeros(n, np.int32)
    expected[owners], lengths[owners] = estimated.expected, estimated.lengths
    model = np.full(n, yields_of_places(step.odds, k)[-1] if k else 0.0, np.float32)
    model[unable] = 0.0
    estimates, situation = Estimate(expected, lengths), Situation(step.costs, step.model_len)
    chosen = decide_each(policy, estimates, model, situation, owners, 0.0)
    without = unable[chosen.arms[unable] == MODEL]
    chosen.arms[without], chosen.lengths[without] = NONE, 0
    candidates = step.candidates
    candidates["policy_arm"], candidates["length"] = chosen.arms, chosen.lengths
    candidates["expected"], candidates["model"] = expected, model
    return Chosen(step.model_len)
