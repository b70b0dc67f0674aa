"""A policy applied to the requests of one step: which arm each verifies, and how long a draft.

The ``survival`` kind spends the verification budget of the step where it buys most, lets the model
drafter make as many tokens as pay, and runs it only if that pays for the whole batch. What a choice
costs and brings is ``policy.pricing``.
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
    """What a step's requests may verify, and what a choice depends on beside their drafts."""

    candidates: NDArray[Any]  # of CANDIDATE [n]: a rule fills wanted, length, expected and model
    drafts: NDArray[Any]  # of FEATURE_ROW [m], of their cache drafts
    situation: NDArray[Any]  # of SITUATION [1]
    costs: CostTable
    odds: NDArray[np.float64]  # log-odds that a model draft's token of each place is accepted
    unable: NDArray[np.int64]  # which of the n requests no model draft can be made for

    @property
    def features(self) -> FloatArray:
        """Of the cache drafts, float32 [m, features]: the same memory."""
        return self.drafts.view(np.float32).reshape(len(self.drafts), NUM_FEATURES)

    @property
    def owners(self) -> NDArray[np.int64]:
        """Which of the n requests has each draft [m]."""
        return np.flatnonzero(self.candidates["draft"] >= 0)

    @property
    def batch_size(self) -> int:
        """Requests of the step, those without speculation included."""
        return int(self.situation["batch_size"][0])

    @property
    def rate(self) -> float:
        """Tokens a request commits in the time of a step that verifies no draft."""
        return float(self.situation["rate"][0])

    @property
    def budget(self) -> int:
        """Draft tokens of all requests together."""
        return int(self.situation["budget"][0])

    @property
    def model_len(self) -> int:
        """Tokens of a model draft at most; 0 without a model drafter."""
        return int(self.situation["model_len"][0])


class Chosen(NamedTuple):
    """``model_len`` is the length of every model draft of the step, and ``worth`` the time that
    model drafts gain in it, if all requests can have one; infinite where the policy does not weigh
    them."""

    model_len: int
    worth: float = np.inf


def situation_of(
    batch_size: int,
    rate: float,
    model_len: int,
    costs: CostTable,
    budget: int | None = None,
    prefill_tokens: int = 0,
) -> NDArray[Any]:
    """Of :data:`~decoder.policy.rule.SITUATION` [1]; None is no bound."""
    made = np.empty(1, SITUATION)
    room = _UNBOUNDED if budget is None else max(budget, 0)
    made[0] = batch_size, prefill_tokens, room, model_len, 0, 0, rate, costs.prices
    return made


def choose(policy: Policy, step: Step) -> Chosen:
    """What ``policy`` wants of the requests of a step that may speculate. Mutates ``step``.

    A survival policy asks for model drafts shorter than the longest where that pays.
    """
    if policy.kind != "survival":
        chosen = _threshold(policy, step)
        if step.budget < _UNBOUNDED:
            _fit(step.candidates, step.budget)
        return chosen
    longest = step.model_len
    if not policy.use_model:
        step.situation["model_len"] = 0
    k, worth = by_survival(
        policy.flat, step.drafts, step.candidates, step.situation,
        step.odds, step.costs.dense,
    )  # fmt: skip
    return Chosen(k or longest, worth)


def _fit(candidates: NDArray[Any], budget: int) -> None:
    """Cut the last cache draft that has room, and drop what has none. Mutates."""
    for candidate in candidates:
        if candidate["length"] > budget:
            candidate["length"] = budget if candidate["wanted"] == CACHE else 0
            candidate["wanted"] = candidate["wanted"] if candidate["length"] else NONE
        budget -= int(candidate["length"])


def _threshold(policy: Policy, step: Step) -> Chosen:
    found, owners, n = estimate(policy, step.features), step.owners, len(step.candidates)
    k, unable = step.model_len if policy.use_model else 0, step.unable
    expected, lengths = np.zeros(n, np.float32), np.zeros(n, np.int32)
    expected[owners], lengths[owners] = found.expected, found.lengths
    model = np.full(n, yields_of_places(step.odds, k)[-1] if k else 0.0, np.float32)
    model[unable] = 0.0
    every, situation = Estimate(expected, lengths), Situation(step.costs, step.model_len)
    wanted = decide_each(policy, every, model, situation, owners, 0.0)
    without = unable[wanted.arms[unable] == MODEL]
    wanted.arms[without], wanted.lengths[without] = NONE, 0
    candidates = step.candidates
    candidates["wanted"], candidates["length"] = wanted.arms, wanted.lengths
    candidates["expected"], candidates["model"] = expected, model
    return Chosen(step.model_len)
