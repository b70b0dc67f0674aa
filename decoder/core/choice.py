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
from decoder.policy.estimate import estimate
from decoder.policy.loops import by_survival, yields_of_places
from decoder.policy.pricing import CostTable
from decoder.policy.rule import CACHE, MODEL, NONE, STEP_INPUTS

_UNBOUNDED: Final = 1 << 40


class Step(NamedTuple):
    """Inputs of a step's choice: candidates, their cache drafts, costs and model arm."""

    candidates: NDArray[Any]  # CANDIDATE [n]: a rule fills policy_arm, length, expected and model
    drafts: NDArray[Any]  # FEATURE_ROW [m], features of their cache drafts
    inputs: NDArray[Any]  # STEP_INPUTS [1]
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


class Chosen(NamedTuple):
    """``model_len`` is the length of every model draft of the step. ``model_gain``, in time,
    is what model drafts gain if all requests can have one; infinite if the policy does not estimate
    it."""

    model_len: int
    model_gain: float = np.inf


def inputs_of(
    batch_size: int,
    rate: float,
    model_len: int,
    costs: CostTable,
    budget: int | None = None,
    prefill_tokens: int = 0,
) -> NDArray[Any]:
    """:data:`~decoder.policy.rule.STEP_INPUTS` [1]; ``budget`` None means unbounded."""
    inputs = np.empty(1, STEP_INPUTS)
    limit = _UNBOUNDED if budget is None else max(budget, 0)
    inputs[0] = batch_size, prefill_tokens, limit, model_len, 0, 0, rate, costs.prices
    return inputs


def choose(policy: Policy, step: Step) -> Chosen:
    """Decide a step by ``policy``. Mutates ``step``.

    A survival policy may shorten model drafts.
    """
    if policy.kind != "survival":
        chosen, budget = _threshold(policy, step), int(step.inputs["budget"][0])
        if budget < _UNBOUNDED:
            _fit(step.candidates, budget)
        return chosen
    longest = int(step.inputs["model_len"][0])
    if not policy.use_model:
        step.inputs["model_len"] = 0
    k, gain = by_survival(
        policy.flat, step.drafts, step.candidates, step.inputs,
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
    candidates, longest = step.candidates, int(step.inputs["model_len"][0])
    k, owners, estimated = longest * policy.use_model, step.owners, estimate(policy, step.features)
    for name in ("policy_arm", "length", "expected", "model"):
        candidates[name] = 0
    if k:
        able = candidates["unable"] == 0
        candidates["policy_arm"], candidates["length"] = able * MODEL, able * k
        candidates["model"] = able * yields_of_places(step.odds, k)[-1]
    candidates["expected"][owners] = estimated.expected
    verified = (estimated.expected >= policy.threshold) & (estimated.lengths > 0)
    candidates["policy_arm"][owners[verified]] = CACHE
    candidates["length"][owners[verified]] = estimated.lengths[verified]
    return Chosen(longest)
